"""Preparation as a whole: idempotent, resumable at every file, deterministic, and careful with what is not its own."""

import dataclasses
import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline import files
from data_pipeline.api import DataConfig, TokenizerConfig
from data_pipeline.errors import InputError, RunError
from data_pipeline.prepare import check_prepared, is_prepared, prepare
from data_pipeline.prepared import open_prepared
from data_pipeline.sources import read_pairs, resolve
from data_pipeline.validation import read_texts

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = TokenizerConfig(vocab_size=700)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain text files: 800 real training pairs, some of them spoilt, and 40 held-out ones, two of them blank."""
    folder = tmp_path_factory.mktemp("corpus")
    for split, count in (("train", 800), ("valid", 40)):
        pairs = list(
            read_pairs(resolve(f"embedded:swmsg_ende/{split}.en.xz"), resolve(f"embedded:swmsg_ende/{split}.de.xz"))
        )
        chosen = pairs[:count]
        chosen[3] = ("", chosen[3][1])
        chosen[4] = (chosen[4][0], "\u00a0\t")
        chosen[5] = ("one", "zwei " * 30)
        chosen[6] = ("word " * 400, "Wort " * 400)
        for side, name in enumerate(("source", "target")):
            (folder / f"{split}.{name}").write_text("".join(f"{p[side]}\n" for p in chosen), encoding="utf-8")
    return folder


def config(corpus: Path, shards: Path, **changes: object) -> DataConfig:
    names = {
        f"{split}_{side}": str(corpus / f"{split}.{side}")
        for split in ("train", "valid")
        for side in ("source", "target")
    }
    values = {"shards": str(shards), "pairs_per_block": 64, "pairs_per_shard": 200, **names, **changes}
    return DataConfig(**values)  # type: ignore[arg-type]


def run(data: DataConfig, tokenizer: TokenizerConfig = TOKENIZER) -> list[str]:
    lines: list[str] = []
    prepare(data, tokenizer, lines.append)
    return lines


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def times(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_ino) for p in [folder, *folder.rglob("*")]}


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("reference") / "shards"
    run(config(corpus, folder))
    return folder


def test_what_is_written_is_the_corpus_cleaned_and_shuffled(corpus: Path, reference: Path) -> None:
    prepared = open_prepared(reference)
    report = json.loads((reference / "report.json").read_bytes())
    assert report["train"]["read"] == 800
    assert report["train"]["rejected"] == {"blank": 2, "ratio": 1, "too_long": 1}
    assert report["train"]["kept"] == 796 == prepared.train.index.pairs
    assert report["valid"] == {
        "read": 40, "kept": 38, "rejected": {"blank": 2}, "changed": {"controls": 3},
        "source_tokens": prepared.valid.index.tokens[0], "target_tokens": prepared.valid.index.tokens[1],
        "longer_than_max_length": {"pairs": 1, "longest": int(prepared.valid.lengths.max()), "lines": [7]},
    }  # fmt: skip
    assert [len(shard.blocks) for shard in prepared.train.index.shards] == [4, 4, 4, 4]
    decoded = {
        split: [
            (prepared.tokenizer.decode(source), prepared.tokenizer.decode(target))
            for source, target in pairs_of(getattr(prepared, split))
        ]
        for split in ("train", "valid")
    }
    raw = {
        split: [tuple(" ".join(side.split()) for side in pair) for pair in read_pairs(*files_of(corpus, split))]
        for split in ("train", "valid")
    }
    kept = [pair for number, pair in enumerate(raw["train"]) if number not in (3, 4, 5, 6)]
    assert sorted(decoded["train"]) == sorted(kept)
    assert decoded["train"] != kept
    held_out = [pair for number, pair in enumerate(raw["valid"]) if number not in (3, 4)]
    assert decoded["valid"] == held_out, "in its own order, whatever length or ratio"
    assert list(zip(*read_texts(reference / "valid", prepared.valid.index), strict=True)) == held_out


def test_held_out_pairs_that_are_very_long_are_named_and_kept(corpus: Path, tmp_path: Path) -> None:
    lines = (corpus / "valid.source").read_text(encoding="utf-8").split("\n")
    for number in (10, 12, 20, 21, 22, 30):
        lines[number - 1] = "word " * (300 + number)
    (tmp_path / "valid.source").write_text("\n".join(lines), encoding="utf-8")
    data = config(corpus, tmp_path / "shards", valid_source=str(tmp_path / "valid.source"))
    said = [line for line in run(data) if "held-out" in line]
    lengths = open_prepared(tmp_path / "shards").valid.lengths
    longest = int(lengths.max())
    assert longest > 300
    assert len(lengths) == 38, "none is left out"
    report = json.loads((tmp_path / "shards" / "report.json").read_bytes())["valid"]["longer_than_max_length"]
    assert report == {"pairs": 7, "longest": longest, "lines": [7, 30, 22, 21, 20]}
    (line,) = said
    assert "7 of 38 held-out pairs are longer than data.max_length = 250 tokens" in line
    assert f"the longest has {longest}; lines 7, 30, 22, 21, 20, ... of {tmp_path / 'valid.source'}" in line


def test_a_corpus_that_is_a_pipe_is_refused_at_once(corpus: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe cannot be read: expected a regular file, found a named pipe"):
        run(config(corpus, tmp_path / "shards", train_source=str(tmp_path / "pipe")))
    assert not (tmp_path / "shards").exists()


def files_of(corpus: Path, split: str) -> tuple[Path, Path]:
    return corpus / f"{split}.source", corpus / f"{split}.target"


def pairs_of(reader: object) -> list[tuple[list[int], list[int]]]:
    found = []
    for number in range(reader.blocks):  # type: ignore[attr-defined]
        block = reader.block(number)  # type: ignore[attr-defined]
        source, target = block.source.tolist(), block.target.tolist()
        for s, t in zip(block.source_lengths.tolist(), block.target_lengths.tolist(), strict=True):
            found.append((source[:s], target[:t]))
            source, target = source[s:], target[t:]
    return found


def test_a_second_run_touches_nothing(corpus: Path, reference: Path) -> None:
    before = times(reference)
    data = config(corpus, reference)
    assert is_prepared(data, TOKENIZER)
    (line,) = run(data)
    assert line.startswith("already prepared")
    assert times(reference) == before


def test_what_does_not_decide_the_shards_does_not_matter(corpus: Path, reference: Path) -> None:
    data = config(corpus, reference, batch_tokens=99, micro_batches=3, workers=7, prepare_workers=2, window_pairs=5)
    assert is_prepared(data, TOKENIZER)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_processes_writes_the_same_bytes(
    corpus: Path, reference: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.preparation.PAIRS_PER_PIECE", 300)
    shards = tmp_path / "shards"
    run(config(corpus, shards, prepare_workers=workers))
    assert contents(shards) == contents(reference)


DIFFERENT: dict[str, tuple[dict[str, object], TokenizerConfig, str]] = {
    "cleaning": ({"max_length": 60}, TOKENIZER, r"data\.max_length was 250 there and is 60 here"),
    "shuffle": ({"shuffle_seed": 2}, TOKENIZER, r"data\.shuffle_seed was 1 there and is 2 here"),
    "blocks": ({"pairs_per_block": 65}, TOKENIZER, r"data\.pairs_per_block was 64"),
    "tokenizer": ({}, TokenizerConfig(vocab_size=650), r"tokenizer\.vocab_size was 700 there and is 650"),
    "text": (
        {"valid_source": "train.source", "valid_target": "train.source"},
        TOKENIZER,
        r"data\.valid_source differs",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_shards_of_something_else_are_refused_and_kept(corpus: Path, reference: Path, difference: str) -> None:
    changes, tokenizer, sentence = DIFFERENT[difference]
    changes = {key: str(corpus / value) if isinstance(value, str) else value for key, value in changes.items()}
    before = times(reference)
    data = config(corpus, reference, **changes)
    assert not is_prepared(data, tokenizer)
    with pytest.raises(InputError, match=sentence):
        run(data, tokenizer)
    assert times(reference) == before


def test_foreign_folders_are_refused_and_kept(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"holds something else \(thesis\.txt\)"):
        run(config(corpus, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / "thesis.txt").rename(tmp_path / "DATA.json")
    with pytest.raises(InputError, match="is not the record of a preparation"):
        run(config(corpus, tmp_path))
    with pytest.raises(InputError, match="is not a folder"):
        run(config(corpus, tmp_path / "DATA.json"))


def test_shards_are_enough_without_their_corpus(corpus: Path, tmp_path: Path) -> None:
    copy = tmp_path / "corpus"
    copy.mkdir()
    for path in corpus.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    data = config(copy, tmp_path / "shards")
    run(data)
    (copy / "train.source").rename(copy / "away")
    check_prepared(data, TOKENIZER)
    assert run(data)[0].startswith("already prepared")
    with pytest.raises(InputError, match=r"max_ratio"):
        check_prepared(dataclasses.replace(data, max_ratio=9.0), TOKENIZER)
    (copy / "train.source").write_text((copy / "away").read_text(encoding="utf-8").replace("a", "o"), encoding="utf-8")
    with pytest.raises(InputError, match=r"the text of data\.train_source differs"):
        check_prepared(data, TOKENIZER)
    # The same text again, at another time: it is read, and found to be the same.
    (copy / "train.source").write_bytes((copy / "away").read_bytes())
    check_prepared(data, TOKENIZER)


def spoil_tokenizer(folder: Path, other: Path) -> None:
    (folder / "tokenizer.model").write_bytes((other / "tokenizer.model").read_bytes())


def test_a_tokenizer_that_does_not_match_stops_with_a_sentence(corpus: Path, tmp_path: Path) -> None:
    run(config(corpus, tmp_path / "a"))
    run(config(corpus, tmp_path / "b"), TokenizerConfig(vocab_size=650))
    spoil_tokenizer(tmp_path / "a", tmp_path / "b")
    with pytest.raises(InputError, match="were encoded with tokenizer"):
        run(config(corpus, tmp_path / "a"))
    assert not is_prepared(config(corpus, tmp_path / "a"), TOKENIZER)


BAD: dict[str, tuple[Callable[[Path], object], TokenizerConfig, str]] = {
    "a vocabulary too large": (lambda c: None, TokenizerConfig(vocab_size=60_000), "allows [0-9]+ at most"),
    "blank validation": (
        lambda c: (c / "valid.source").write_text("\n" * 40), TOKENIZER, "all 40 validation pairs are blank",
    ),
    "blank training": (
        lambda c: (c / "train.target").write_text(" \n" * 800), TOKENIZER, "is left to train a tokenizer on",
    ),
    "sides of different length": (
        lambda c: (c / "train.target").write_text("x\n"), TOKENIZER, r"train\.source has 800 lines but .* has 1",
    ),
    "empty": (lambda c: (c / "train.source").write_text(""), TOKENIZER, r"train\.source is empty"),
    "missing": (lambda c: (c / "valid.target").unlink(), TOKENIZER, r"valid\.target not found"),
    "encoding": (
        lambda c: (c / "train.source").write_bytes(b"ok\n" * 99 + b"\xe4\n" + b"ok\n" * 700),
        TOKENIZER,
        r"line 100, byte 1 of the line: expected UTF-8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_leaves_nothing_in_the_way_of_a_corrected_run(corpus: Path, tmp_path: Path, case: str) -> None:
    spoil, tokenizer, sentence = BAD[case]
    copy = tmp_path / "corpus"
    copy.mkdir()
    for path in corpus.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    spoil(copy)
    shards = tmp_path / "shards"
    with pytest.raises(InputError, match=sentence) as caught:
        run(config(copy, shards), tokenizer)
    assert "\n" not in str(caught.value)
    assert not shards.exists() or [p.name for p in shards.iterdir()] == [".lock"]
    assert run(config(corpus, shards))[-1].startswith("prepared")


class PowerCut(BaseException):
    """Stands for the end of the process at this point."""


def test_an_end_at_any_file_is_finished_by_the_same_command(
    corpus: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.preparation.PAIRS_PER_PIECE", 300)
    rename, expected = os.replace, contents(reference)
    for cut_at in range(1, 100):
        shards = tmp_path / str(cut_at)
        renames = 0

        def replace(source: Path, target: Path, cut_at: int = cut_at) -> None:
            nonlocal renames
            renames += 1
            if renames == cut_at:
                raise PowerCut
            rename(source, target)

        monkeypatch.setattr(files.os, "replace", replace)
        data = config(corpus, shards)
        try:
            run(data)
        except PowerCut:
            assert not is_prepared(data, TOKENIZER), "incomplete shards must not count"
        else:
            break
        monkeypatch.setattr(files.os, "replace", rename)
        assert run(data)[-1].startswith("prepared")
        assert contents(shards) == expected, f"end at file {cut_at}"
    assert cut_at > 15, "every file's end was tried"


def test_finished_work_is_not_done_again(
    corpus: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, rename = tmp_path / "shards", os.replace

    def replace(source: Path, target: Path) -> None:
        if target.name == "train-000002.tar":
            raise PowerCut
        rename(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(PowerCut):
        run(config(corpus, shards))
    monkeypatch.setattr(files.os, "replace", rename)
    kept = {name: times(shards)[str(shards / name)] for name in ("tokenizer.model", "train/train-000001.tar")}

    def never(*_: object) -> None:
        raise AssertionError("every piece was encoded before the interruption")

    monkeypatch.setattr("data_pipeline.encode.Encoder.write", never)
    run(config(corpus, shards))
    assert {name: times(shards)[str(shards / name)] for name in kept} == kept
    assert contents(shards) == contents(reference)


def test_no_space_left_is_one_sentence_and_the_next_run_finishes(
    corpus: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = tmp_path / "shards"
    sync, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(RunError, match=r"no space left while preparing shards in .*: free some space and run"):
        run(config(corpus, shards))
    assert run(config(corpus, shards))[-1].startswith("prepared")
    assert contents(shards) == contents(reference)


def command(corpus: Path, shards: Path, *more: str) -> list[str]:
    data = config(corpus, shards)
    keys = (
        "train_source",
        "train_target",
        "valid_source",
        "valid_target",
        "shards",
        "pairs_per_block",
        "pairs_per_shard",
    )
    settings = [f"--data.{key}={getattr(data, key)}" for key in keys]
    script = str(ROOT / "data_pipeline" / "prepare.py")
    return [sys.executable, script, *settings, f"--tokenizer.vocab_size={TOKENIZER.vocab_size}", *more]


def test_killed_at_random_moments_the_same_command_finishes_it(corpus: Path, reference: Path, tmp_path: Path) -> None:
    chance = random.Random(4)
    shards = tmp_path / "shards"
    killed = 0
    for _ in range(12):
        delay = chance.uniform(0.3, 1.6)
        # A session of its own, so that the kill reaches encoding processes too, as a batch system's does.
        process = subprocess.Popen(
            command(corpus, shards, "--data.prepare_workers=2"),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd=tmp_path,
        )
        time.sleep(delay)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.wait()
    assert killed, "at least one kill must hit"
    last = subprocess.run(command(corpus, shards), capture_output=True, text=True, cwd=tmp_path, check=False)
    assert last.returncode == 0, last.stderr
    assert contents(shards) == contents(reference)


def test_two_at_once_do_not_disturb_each_other(corpus: Path, reference: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    both = [
        subprocess.Popen(command(corpus, shards), stdout=subprocess.PIPE, text=True, cwd=tmp_path) for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert contents(shards) == contents(reference)


def test_the_script_shows_sentences_and_complete_help(corpus: Path, reference: Path, tmp_path: Path) -> None:
    wrong = subprocess.run(
        command(corpus, reference, "--data.max_length=50"), capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")
    assert wrong.stderr.count("\n") == 1
    assert "data.max_length was 250 there and is 50 here" in wrong.stderr
    misspelt = subprocess.run(
        command(corpus, reference, "--dat.max_length=50"), capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert misspelt.returncode == 2
    assert "dat.max_length: unknown key" in misspelt.stderr
    assert "the nearest known key is data.max_length" in misspelt.stderr
    shown = subprocess.run(
        command(corpus, reference, "--help"), capture_output=True, text=True, cwd=tmp_path, check=True
    )
    for key in ("--config", "--print-config", "--data.shuffle_seed", "--tokenizer.vocab_size"):
        assert key in shown.stdout
    same = subprocess.run(
        command(corpus, reference, "--train.steps=3"), capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert same.stdout.startswith("already prepared")
    assert not same.stderr
