"""browse.py as users run it: pairs, counts, plans, and damage found."""

import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.api import DataConfig, TokenizerConfig
from data_pipeline.prepare import prepare
from data_pipeline.prepared import open_prepared

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    # The held-out split serves as both: it is small.
    names = {"train_source": "embedded:swmsg_ende/valid.en.xz", "train_target": "embedded:swmsg_ende/valid.de.xz"}
    prepare(
        DataConfig(shards=str(folder), pairs_per_block=100, **names), TokenizerConfig(vocab_size=800), lambda _: None
    )
    return folder


def browse(*arguments: object) -> subprocess.CompletedProcess[str]:
    script = ROOT / "data_pipeline" / "browse.py"
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)], capture_output=True, text=True, cwd="/", check=False
    )


def test_pairs_are_shown_as_text_and_ids(shards: Path) -> None:
    prepared = open_prepared(shards)
    block = prepared.valid.block(1)
    ids = block.source[: block.source_lengths[0]].tolist()
    shown = browse(shards, "--split", "valid", "--first", 100, "--count", 2)
    assert shown.returncode == 0, shown.stderr
    assert "pair 100 (block 1)" in shown.stdout
    assert "pair 101 (block 1)" in shown.stdout
    assert "pair 102" not in shown.stdout
    assert f"source  {prepared.tokenizer.decode(ids)}\n" in shown.stdout
    assert f"ids     {' '.join(map(str, ids))}\n" in shown.stdout


def test_counts_lengths_and_plan(shards: Path) -> None:
    index = open_prepared(shards).train.index
    shown = browse(shards, "--stats", "--plan", "--batch-tokens", 1600, "--micro-batches", 4)
    assert shown.returncode == 0, shown.stderr
    assert f"pairs          {index.pairs:,}\n" in shown.stdout
    assert f"target tokens  {index.tokens[1]:,} (EOS included)" in shown.stdout
    assert " of 4 micro-batches\n" in shown.stdout
    assert "at most 400 padded tokens a side" in shown.stdout
    bars = [line for line in shown.stdout.splitlines() if "longer side" in line]
    assert sum(int(line.replace(",", "").split("to")[1].split()[1]) for line in bars) == index.pairs


def test_verification_finds_every_kind_of_damage(shards: Path) -> None:
    good = browse(shards, "--verify")
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("all well") == 2
    for name, offset in (
        ("train/train-000000.tar", 700),
        ("train/train-000000.tar", -1),
        ("train/train-000000.lengths.npy", 150),
        ("valid/target.txt", 5),
        ("valid/valid-000000.tar", 9000),
        ("tokenizer.model", -100),
    ):
        path = shards / name
        whole = path.read_bytes()
        spoilt = bytearray(whole)
        spoilt[offset] ^= 4
        path.write_bytes(bytes(spoilt))
        found = browse(shards, "--verify")
        assert found.returncode == 2, name
        assert found.stderr.startswith("error: "), name
        assert found.stderr.count("\n") == 1, name
        path.write_bytes(whole)
    (shards / "train" / "train-000000.tar").unlink()
    missing = browse(shards, "--verify")
    assert missing.returncode == 2
    assert "train-000000.tar is missing" in missing.stderr


def test_help_and_wrong_folders(tmp_path: Path) -> None:
    shown = browse("--help")
    assert shown.returncode == 0
    for option in ("--split", "--first", "--count", "--verify", "--stats", "--plan", "--batch-tokens", "--seed"):
        assert option in shown.stdout
    nothing = browse(tmp_path / "nothing")
    assert nothing.returncode == 2
    assert "run prepare" in nothing.stderr
