"""make quickstart: the copying baseline, what is printed, what is scored, and how a training job is looked after."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.errors import ConfigError, RunError
from data_pipeline.sources import read_lines, read_pairs, resolve
from dist_tfm.config.schema import CheckpointConfig, Config
from dist_tfm.inference.scoring import TestSet, corpus_scores
from launch import quickstart
from launch.copy_baseline import NearestCopy
from launch.quickstart import Outcome, choose_weights, last_line, show_translations, supervise
from tests.jobs import ROOT, clean_environment
from tests.saved_models import save_model, small_tokenizer, talkative_model

PAIRS = [
    ("the file is open", "A"),
    ("the file", "B"),
    ("file file file", "C"),
    ("Save", "D"),
    ("save", "E"),
    ("two equal sources", "F"),
    ("two equal sources", "G"),
]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("the file is closed", "A"),
        ("the file", "B"),  # A shares as many words, but has two more
        ("file", "B"),  # 2/3; C has the word three times: 2/4
        ("file file", "C"),  # repetitions count: 4/5
        ("save", "E"),  # words as they are written
        ("equal two sources", "F"),  # the first of equals, in any order of words
        ("unheard", "A"),  # nothing shared: the first pair
        ("", "A"),
    ],
)
def test_the_nearest_training_source_is_the_one_that_shares_the_most_words(source: str, target: str) -> None:
    assert NearestCopy(PAIRS).translate([source]) == [target]


def test_copies_come_in_the_order_of_the_sources() -> None:
    assert NearestCopy(PAIRS).translate(["save", "the file", "Save"]) == ["E", "B", "D"]
    with pytest.raises(ValueError, match="training pair"):
        NearestCopy([])


def test_copying_scores_what_the_documentation_says_on_the_embedded_corpus() -> None:
    train = [resolve(f"embedded:swmsg_ende/train.{language}.xz") for language in ("en", "de")]
    sources, references = (list(read_lines(resolve(n))) for n in (quickstart.TEST_SOURCE, quickstart.TEST_REFERENCE))
    assert len(sources) == len(references) == 700
    bleu = corpus_scores(NearestCopy(read_pairs(*train)).translate(sources), TestSet([references], "de"))[0]
    assert bleu.name == "BLEU"
    assert bleu.value == pytest.approx(18.3, abs=0.05)


@pytest.mark.parametrize(("bleu", "line"), [(27.994, "27.99"), (5.0, "5.00"), (0.0, "0.00"), (100.0, "100.00")])
def test_the_last_line_has_two_decimals(bleu: float, line: str) -> None:
    assert last_line(bleu) == f"test BLEU = {line}"


@pytest.mark.parametrize(("segments", "shown"), [(700, range(0, 700, 70)), (4, range(4))])
def test_ten_translations_stand_beside_their_references(
    segments: int, shown: range, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = [[f"{name} {i}" for i in range(segments)] for name in ("src", "ref", "hyp")]
    show_translations(Outcome(*columns, scores={}))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    expected = ((f"source      src {i}", f"translation hyp {i}", f"reference   ref {i}") for i in shown)
    assert lines == [line for triple in expected for line in triple]
    assert len(shown) == min(10, segments)


def snapshots(every: int) -> Config:
    return Config(checkpoint=CheckpointConfig(snapshot_every=every))


def test_the_last_snapshots_are_averaged_where_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(quickstart.average, "main", lambda argv: asked.append(list(argv)) or 0)
    for count, wanted in ((2, "2"), (5, "5"), (11, "5")):
        for step in range(1, count + 1):
            (tmp_path / "snapshots" / f"step_{step}").mkdir(parents=True, exist_ok=True)
        assert choose_weights(tmp_path, snapshots(1)) == tmp_path / "averaged"
        assert asked.pop() == [str(tmp_path), "--last", wanted]


def test_without_snapshots_the_newest_checkpoint_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, tokenizer = tmp_path / "run", small_tokenizer()
    for step in (3, 12):
        save_model(run, step, talkative_model(snapshots(0), tokenizer), tokenizer, snapshots(0))
    newest = run / "checkpoints" / "step_12"
    assert choose_weights(run, snapshots(5)) == newest, "the interval was longer than the run"
    assert f"the newest checkpoint is scored, {newest}" in capsys.readouterr().out
    (run / "snapshots" / "step_2").mkdir(parents=True)
    assert choose_weights(run, snapshots(0)) == newest, "left over from another configuration"
    monkeypatch.setattr(quickstart, "AVERAGED_SNAPSHOTS", 0)
    assert choose_weights(run, snapshots(2)) == newest


@pytest.mark.parametrize(("code", "done", "result"), [(3, True, 3), (0, False, 0)])
def test_nothing_is_scored_unless_training_has_reached_its_end(
    code: int,
    done: bool,
    result: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(quickstart.prepare, "main", lambda argv: commands.append(list(argv)) or 0)
    monkeypatch.setattr(quickstart, "supervise", lambda command: commands.append(list(command)) or code)
    monkeypatch.setattr(quickstart, "choose_weights", lambda *_: pytest.fail("scored"))
    if done:
        (tmp_path / "DONE").touch()
    overrides = [f"--train.run_dir={tmp_path}", "--data.shards=elsewhere", "--train.seed", "7"]
    assert quickstart.main(overrides) == result
    assert commands[0] == ["--config", "configs/tiny.yaml", "--data.shards=elsewhere"]
    assert commands[1][:2] == [sys.executable, str(ROOT / "dist_tfm" / "train.py")]
    given = [f"--train.run_dir={tmp_path}", "--data.shards=elsewhere", "--train.seed=7"]
    assert commands[1][2:] == ["--config", "configs/tiny.yaml", *given]
    assert ("the same command goes on from here" in capsys.readouterr().out) is not done


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data.source_language=fr"], "expected data.source_language=en"),
        (["--train.sed=2"], "nearest known key is train.seed"),
        (["--decode.n_best=5"], "at most decode.beam=4"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_begun(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        quickstart.main(arguments)
    assert list(tmp_path.iterdir()) == []


def test_it_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="one process"):
        quickstart.main([])


def test_a_training_job_that_was_killed_is_one_sentence() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    assert supervise([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    with pytest.raises(RunError, match=r"killed by SIGKILL .* goes on"):
        supervise([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert signal.getsignal(signal.SIGTERM) is handler


JOB = """
import signal, sys, time
def heard(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(7)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, heard)
print("ready", flush=True)
for _ in range(600):  # short sleeps: a signal that comes right before one is heard after it
    time.sleep(0.1)
"""
PARENT = f"import sys; from launch.quickstart import supervise; sys.exit(supervise([sys.executable, '-c', {JOB!r}]))"


def test_requests_to_stop_are_passed_on_and_waited_for() -> None:
    """Ctrl-C is not: the terminal gives it to the job as well, and a second one would end it without a checkpoint."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(signal.SIGINT)
        parent.send_signal(signal.SIGUSR1)
        assert parent.stdout.readline() == "SIGUSR1\n"
        parent.send_signal(signal.SIGTERM)
        assert parent.stdout.read() == "SIGTERM\n"
        assert parent.wait(30) == 7
