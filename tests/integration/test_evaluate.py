"""evaluate.py as users run it, on a model that train.py has trained with a moving average."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dist_tfm import evaluate
from dist_tfm.errors import ConfigError, InputError
from tests.jobs import head, read_metrics, run_job, small_project, train_command

SCORES = ("BLEU = ", "chrF2 = ", "TER = ")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 steps, validated at the last; its held-out texts stand beside it."""
    folder = tmp_path_factory.mktemp("project")
    config = small_project(folder)
    done = run_job(train_command(1, "--config", str(config), "--train.steps=10", "--train.ema=0.9"))
    assert done.returncode == 0, done.stdout
    (folder / "other.de").write_text("".join(line[: len(line) // 2] + "\n" for line in texts("de")), encoding="utf-8")
    return folder / "run"


def texts(language: str) -> list[str]:
    return head(f"valid.{language}.xz", 24).splitlines()


def files(run: Path) -> list[str]:
    return ["--source", str(run.parent / "valid.en"), "--reference", str(run.parent / "valid.de")]


def test_a_checkpoint_is_scored_as_its_output_is(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, report = tmp_path / "out.de", tmp_path / "report.json"
    script = [sys.executable, "dist_tfm/evaluate.py", "--checkpoint", str(run), *files(run), "--launch.threads=1"]
    done = run_job([*script, "--decode.max_extra=4", "--output", str(output), "--json", str(report)])
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(start) and "|version:" in line for line, start in zip(lines, SCORES, strict=True))
    assert len(output.read_text(encoding="utf-8").split("\n")) == 24 + 1
    assert evaluate.main(["--hypothesis", str(output), "--reference", str(run.parent / "valid.de")]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    written = json.loads(report.read_text(encoding="utf-8"))
    assert (written["segments"], written["system"]) == (24, str(run))
    assert [f"{s['name']} = {s['value']:.2f} ({s['signature']})" for s in written["scores"]] == lines


@pytest.mark.parametrize(("empty", "warned"), [(24, True), (13, True), (12, False), (0, False)])
def test_translations_that_are_mostly_empty_are_warned_of(
    empty: int,
    warned: bool,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the sources that say something; the scores are the same, and a file's lines are its author's business."""
    source, reference, output = (tmp_path / name for name in ("in", "ref", "out"))
    source.write_text("\n" * 9 + "".join(f"{line}\n" for line in texts("en")), encoding="utf-8")
    reference.write_text("\n" * 9 + "".join(f"{line}\n" for line in texts("de")), encoding="utf-8")
    made = [""] * (9 + empty) + ["Wort"] * (24 - empty)
    monkeypatch.setattr(evaluate, "_load", lambda settings: SimpleNamespace(translate=lambda sources: made))
    arguments = ["--source", str(source), "--reference", str(reference), "--output", str(output)]
    assert evaluate.main(["--checkpoint", str(run), *arguments]) == 0
    shown, said = capsys.readouterr()
    sentence = f"warning: {empty} of 24 translations are empty: the model has probably trained too few steps\n"
    assert said == (sentence if warned else "")
    assert evaluate.main(["--hypothesis", str(output), "--reference", str(reference)]) == 0
    assert capsys.readouterr() == (shown, "")


@pytest.mark.parametrize(("weights", "key"), [("trained", "valid"), ("ema", "valid_ema")])
def test_forced_scores_are_those_of_validation(
    weights: str, key: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "forced.json"
    arguments = ["--checkpoint", str(run), "--weights", weights, *files(run), "--forced", "--json", str(report)]
    assert evaluate.main(arguments) == 0
    *sentences, corpus = capsys.readouterr().out.splitlines()
    assert len(sentences) == 24
    validated = next(line for line in read_metrics(run) if "valid_loss" in line)
    written = json.loads(report.read_text())
    assert written["nll"] == pytest.approx(validated[f"{key}_nll"], rel=1e-6)
    assert written["tokens"] == validated["valid_tokens"]
    assert corpus.startswith(f"perplexity = {validated[f'{key}_ppl']:.3f}"[:-1])
    assert validated["valid_nll"] != pytest.approx(validated["valid_ema_nll"], rel=1e-3)
    columns = [line.split("\t") for line in sentences]
    assert sum(float(total) for total, _, _ in columns) == pytest.approx(-written["nll"] * written["tokens"], rel=1e-6)
    assert all(float(t) == pytest.approx(-float(nll) * int(n), rel=1e-5) for t, nll, n in columns)


def test_two_systems_are_compared_and_uncomparable_scores_warned_of(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference, other = str(run.parent / "valid.de"), str(run.parent / "other.de")
    arguments = ["--hypothesis", reference, "--compare", other, "--reference", reference, "--samples", "50"]
    arguments += ["--tokenized-bleu", "--compound-split-bleu", "--json", str(tmp_path / "r.json")]
    assert evaluate.main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count("warning: not comparable with sacreBLEU") == 2
    assert f"{reference} against the baseline {other}" in shown
    assert shown.count("the difference is significant") == 3
    written = json.loads((tmp_path / "r.json").read_text())
    assert [s["name"] for s in written["scores"]] == ["BLEU", "chrF2", "TER", "tokenized BLEU", "compound-split BLEU"]
    assert [m["name"] for m in written["comparison"]["metrics"]] == ["BLEU", "chrF2", "TER"]
    assert all(m["p_value"] < 0.05 for m in written["comparison"]["metrics"])


def test_input_that_does_not_fit_is_one_sentence_with_exit_code_two(run: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("eins\nzwei\n")
    (tmp_path / "pieces").write_text("".join(f"{'das Hau@@ s' if i == 4 else 'x'}\n" for i in range(24)))
    reference = str(run.parent / "valid.de")
    for arguments, said in (
        (["--hypothesis", str(tmp_path / "short"), "--reference", reference], "short has 2 lines but"),
        (["--hypothesis", reference, "--reference", reference, "--compare", str(tmp_path / "short")], "short has 2"),
        (["--hypothesis", str(tmp_path / "pieces"), "--reference", reference], "pieces, line 5: .*'@@'"),
        (["--hypothesis", str(tmp_path / "nowhere"), "--reference", reference], "nowhere not found"),
        (["--checkpoint", str(run), "--source", str(tmp_path / "short"), "--reference", reference], "short has 2"),
        (["--checkpoint", str(tmp_path), *files(run)], "expected a checkpoint or a run directory"),
    ):
        with pytest.raises(InputError, match=said) as caught:
            evaluate.main(arguments)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--reference", "r"], "either --checkpoint RUN or --hypothesis FILE"),
        (["--checkpoint", "RUN", "--hypothesis", "h", "--reference", "r"], "either --checkpoint RUN or --hypothesis"),
        (["--hypothesis", "h", "--reference", "r", "--forced"], "--forced asks a model"),
        (["--checkpoint", "RUN", "--reference", "r", "--forced", "--compare", "c"], "--forced translates nothing"),
        (["--checkpoint", "RUN", "--source", "s", "--reference", "r", "--tokenized-bleu"], "tokenise it"),
        (["--hypothesis", "h", "--reference", "r", "--output", "o"], "--output takes"),
        (["--hypothesis", "h", "--reference", "r", "--weights", "ema"], "--weights says"),
        (["--hypothesis", "h", "--reference", "r", "--decode.beams=4"], "decode.beams: unknown key"),
        (["--checkpoint", "RUN", "--reference", "r"], "needs --source"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], said: str, run: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        evaluate.main([str(run) if a == "RUN" else a for a in arguments])


def test_one_process_is_enough(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29511")
    with pytest.raises(ConfigError, match="one process"):
        evaluate.main(["--hypothesis", "h", "--reference", "r"])


def test_a_test_set_that_is_not_cached_offline_is_one_sentence(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that nobody answers at is a machine without a network."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SACREBLEU", str(tmp_path))
    command = [sys.executable, "dist_tfm/evaluate.py", "--hypothesis", str(run.parent / "valid.de")]
    done = run_job([*command, "--test-set", "wmt14", "--language-pair", "en-de"], timeout=100)
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith(f"error: test set wmt14 en-de is not in sacreBLEU's cache {tmp_path}")
    assert os.environ["SACREBLEU"] == str(tmp_path)


def test_help_names_every_option() -> None:
    for script in ("evaluate", "average"):
        shown = run_job([sys.executable, f"dist_tfm/{script}.py", "--help"])
        assert shown.returncode == 0, shown.stdout
        assert "usage" in shown.stdout
        assert "Traceback" not in shown.stdout
