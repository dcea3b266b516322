"""Preparation by an array of tasks: the same bytes as in one process, whatever is killed, and in bounded memory."""

import hashlib
import itertools
import json
import os
from pathlib import Path

import pytest

from data_pipeline import files, slices
from data_pipeline.api import DataConfig, TokenizerConfig
from data_pipeline.errors import InputError
from data_pipeline.prepare import Stage, is_prepared, main, prepare
from data_pipeline.prepared import open_prepared
from data_pipeline.ragged import starts_of
from data_pipeline.settings import load_sections
from data_pipeline.slices import Slice
from data_pipeline.sources import read_pairs, resolve

TOKENIZER = TokenizerConfig(vocab_size=700)
PAIRS_PER_PIECE = 120


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """900 real training pairs, among them copies of others (spelt alike once cleaned) and of held-out pairs."""
    folder = tmp_path_factory.mktemp("corpus")
    names = ("embedded:swmsg_ende/train.en.xz", "embedded:swmsg_ende/train.de.xz")
    pairs = list(read_pairs(*map(resolve, names)))
    train, valid, test = pairs[:860], pairs[1000:1030], pairs[2000:2020]
    train += [("  " + source, target.replace(" ", "\u00a0")) for source, target in pairs[100:120]]
    train += [(pairs[7][0], "eine andere Uebersetzung 7"), *valid[:9], *test[:5], ("Same 1", "same 1"), ("1 a", "2 b")]
    train += [("word " * 300, "Wort " * 300), ("", "leer"), ("x", "y" * 200)]
    for name, content in (("train", train), ("valid", valid), ("test", test)):
        for side, language in enumerate(("en", "de")):
            (folder / f"{name}.{language}").write_text("".join(f"{p[side]}\n" for p in content), encoding="utf-8")
    return folder


def config(corpus: Path, shards: Path, **changes: str) -> DataConfig:
    steps = (
        "[nfc, controls, blank, ratio, identical, digits, "
        f"{{step: held_out, test: [{{source: {corpus}/test.en, target: {corpus}/test.de}}]}}, length, duplicates]"
    )
    overrides = {
        **{f"{split}_{side}": f"{corpus}/{split}.{language}" for split in ("train", "valid")
           for side, language in (("source", "en"), ("target", "de"))},
        "shards": str(shards), "pairs_per_block": "64", "pairs_per_shard": "200", "clean": steps, **changes,
    }  # fmt: skip
    data = load_sections("tiny", [(f"data.{k}", v) for k, v in overrides.items()], {"data": DataConfig}, lambda _: True)
    assert isinstance(data["data"], DataConfig)
    return data["data"]


def run(data: DataConfig, stage: Stage = "all") -> list[str]:
    lines: list[str] = []
    prepare(data, TOKENIZER, lines.append, stage)
    return lines


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards that one process made of the corpus in one slice."""
    folder = tmp_path_factory.mktemp("reference") / "shards"
    run(config(corpus, folder))
    return folder


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("reference")
    monkeypatch.setattr("data_pipeline.preparation.PAIRS_PER_PIECE", PAIRS_PER_PIECE)
    monkeypatch.setattr(slices, "PAIRS_COMPARED_AT_ONCE", 100)


def test_cleaning_leaves_what_it_says_and_counts_it(corpus: Path, reference: Path) -> None:
    report = json.loads((reference / "report.json").read_bytes())
    train = report["train"]
    assert train["read"] == train["kept"] + sum(train["rejected"].values()) == 900
    assert train["rejected"]["held_out"] == 14
    assert train["rejected"]["too_long"] == train["rejected"]["blank"] == train["rejected"]["ratio"] == 1
    assert train["changed"]["controls"] >= 20
    assert train["rejected"]["duplicates"] >= 20
    assert [step["step"] for step in report["steps"]][-3:] == ["held_out", "length", "duplicates"]
    prepared = open_prepared(reference)
    found = []
    for number in range(prepared.train.blocks):
        block = prepared.train.block(number)
        sides = []
        for flat, lengths in ((block.source, block.source_lengths), (block.target, block.target_lengths)):
            starts = starts_of(lengths).tolist()
            sides.append([prepared.tokenizer.decode(flat[a:b].tolist()) for a, b in itertools.pairwise(starts)])
        found += list(zip(*sides, strict=True))
    assert len(found) == len(set(found)) == train["kept"] == prepared.train.index.pairs
    held_out = {p for name in ("valid", "test") for p in read_pairs(corpus / f"{name}.en", corpus / f"{name}.de")}
    assert not held_out & set(found)
    again = list(read_pairs(corpus / "train.en", corpus / "train.de"))[100:120]
    assert {(s, t) for s, t in again} & set(found), "one of each pair that was there twice stays"


@pytest.mark.parametrize("tasks", [1, 3, 7])
def test_any_number_of_tasks_writes_the_same_bytes(corpus: Path, reference: Path, tmp_path: Path, tasks: int) -> None:
    data = config(corpus, tmp_path / "shards")
    run(data, "tokenizer")
    for number in reversed(range(tasks)):
        assert not is_prepared(data, TOKENIZER)
        run(data, Slice(number, tasks))
    assert run(data, "finish")[-1].startswith("prepared")
    assert contents(tmp_path / "shards") == contents(reference)
    for stage in ("tokenizer", "finish", Slice(0, tasks)):
        assert run(data, stage)[-1].startswith("already prepared")  # type: ignore[arg-type]


class PowerCut(BaseException):
    """Stands for the end of the process at this point."""


def test_a_stage_that_ends_at_any_file_is_finished_by_the_same_command(
    corpus: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[Stage] = ["tokenizer", Slice(0, 2), Slice(1, 2), "finish"]
    rename, cuts = os.replace, 0
    data = config(corpus, tmp_path / "shards", prepare_workers="1")
    for stage in stages:
        # Cut at the first file that this run of the stage would finish, then at the second one it has left, ...
        for cut_at in (1, 2, 2, 3, 3, 1, 0):
            renames = 0

            def replace(source: Path, target: Path, cut_at: int = cut_at) -> None:
                nonlocal renames
                renames += 1
                if renames == cut_at:
                    raise PowerCut
                rename(source, target)

            monkeypatch.setattr(files.os, "replace", replace)
            try:
                run(data, stage)
                break
            except PowerCut:
                cuts += 1
            finally:
                monkeypatch.setattr(files.os, "replace", rename)
    assert cuts >= 16
    assert contents(tmp_path / "shards") == contents(reference)


def test_a_killed_task_is_redone_alone(
    corpus: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = config(corpus, tmp_path / "shards")
    run(data, "tokenizer")
    run(data, Slice(0, 2))
    work = tmp_path / "shards" / ".work"
    before = contents(work / "slice-0-of-2")
    rename = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target).name == "part-000002":
            raise PowerCut
        rename(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(PowerCut):
        run(data, Slice(1, 2))
    monkeypatch.setattr(files.os, "replace", rename)
    with pytest.raises(InputError, match=r"1 of 2 tasks have not ended in .*: run prepare\.py --task 1/2 first"):
        run(data, "finish")
    kept = (work / "slice-1-of-2" / "part-000001").stat().st_ino
    run(data, Slice(1, 2))
    assert (work / "slice-1-of-2" / "part-000001").stat().st_ino == kept, "its whole pieces are kept"
    assert contents(work / "slice-0-of-2") == before
    run(data, "finish")
    assert contents(tmp_path / "shards") == contents(reference)


def test_stages_out_of_order_and_damaged_files_are_named(corpus: Path, tmp_path: Path, reference: Path) -> None:
    shards = tmp_path / "shards"
    data = config(corpus, shards)
    for stage in (Slice(0, 2), "finish"):
        with pytest.raises(InputError, match=r"holds no tokenizer yet: run prepare\.py --stage tokenizer first"):
            run(data, stage)  # type: ignore[arg-type]
    run(data, "tokenizer")
    with pytest.raises(InputError, match=r"no task has begun"):
        run(data, "finish")
    with pytest.raises(InputError, match=r"data\.max_length was 250 there and is 9 here"):
        run(config(corpus, shards, max_length="9"), Slice(0, 2))
    with pytest.raises(InputError, match=r"data\.clean was .* there and is .* here"):
        run(config(corpus, shards, clean="[nfc, controls, blank, length]"), Slice(0, 2))
    for number in (0, 1):
        run(data, Slice(number, 2))
    for name in ("part-000001", "dropped"):
        damaged = shards / ".work" / "slice-1-of-2" / name
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-8] + bytes(8))
        with pytest.raises(InputError, match=rf"{name} is damaged .*run prepare\.py --task 1/2 again") as caught:
            run(data, "finish")
        assert "\n" not in str(caught.value)
        damaged.write_bytes(whole)
    run(config(corpus, shards))
    assert contents(shards) == contents(reference), "one process may finish what an array began"


def test_the_program_takes_stages_and_tasks(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], reference: Path
) -> None:
    names = {
        f"{s}_{t}": f"{corpus}/{s}.{e}" for s in ("train", "valid") for t, e in (("source", "en"), ("target", "de"))
    }
    keys = [f"--data.{key}={value}" for key, value in {**names, "shards": tmp_path / "shards"}.items()]
    keys.append("--tokenizer.vocab_size=700")
    for stage in (["--stage", "tokenizer"], ["--task", "1/2"], ["--task", "0/2"], ["--stage=finish"]):
        assert main([*keys, *stage]) == 0
    said = capsys.readouterr().out
    assert "next, prepare.py --task i/n for every i from 0 to n - 1" in said
    assert "task 1/2 of" in said
    assert said.splitlines()[-1].startswith("prepared: ")
    for wrong in (["--task", "2/2"], ["--task", "x"], ["--task", "0/2", "--stage", "finish"], ["--stage", "encode"]):
        with pytest.raises(SystemExit) as caught:
            main([*keys, *wrong])
        assert caught.value.code == 2
    assert "expected i/n with i from 0 to n - 1, found 'x'" in capsys.readouterr().err


def test_another_number_of_pairs_than_expected_is_warned_of(corpus: Path, tmp_path: Path) -> None:
    said = run(config(corpus, tmp_path / "shards", expected_pairs="901"))
    (warning,) = [line for line in said if line.startswith("warning")]
    assert "has 900 pairs, data.expected_pairs says 901" in warning
    assert run(config(corpus, tmp_path / "shards", expected_pairs="900"))[0].startswith("already prepared")
