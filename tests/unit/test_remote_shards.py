"""Shards behind a URL: the same batches as from a folder, whatever the server does, or one sentence."""

import dataclasses
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from data_pipeline import browse
from data_pipeline.api import DataConfig, Position, TokenizerConfig
from data_pipeline.block_cache import BlockCache, cache_folder
from data_pipeline.errors import ConfigError, DamagedError, DistTfmError, InputError, RunError, StoppedError
from data_pipeline.loader import BlockLoader
from data_pipeline.prepare import prepare
from data_pipeline.prepared import (
    TOKENIZER_FILE,
    TRAIN,
    VALID,
    PreparedData,
    locate,
    location_faults,
    open_corpora,
    open_prepared,
)
from data_pipeline.remote import Remote
from data_pipeline.remote_shards import RemoteSegments, copy_small_files
from data_pipeline.validation import read_texts
from dist_tfm.config.schema import Config
from dist_tfm.parallel.collectives import SingleProcess
from dist_tfm.training.session import refuse_different
from tests.faulty_server import STALL, Served, serving

BATCHES = {"batch_tokens": 120, "micro_batches": 2, "workers": 0}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 pairs of ids in two shards of blocks of 32."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(1)
    for name, lines in (("train", 300), ("valid", 20)):
        for side in ("source", "target"):
            rows = (" ".join(map(str, rng.integers(4, 90, size=rng.integers(1, 15)))) for _ in range(lines))
            (folder / f"{name}.{side}").write_text("".join(f"{row}\n" for row in rows))
    files = {
        f"{name}_{side}": str(folder / f"{name}.{side}") for name in ("train", "valid") for side in ("source", "target")
    }
    data = DataConfig(**files, shards=str(folder / "shards"), pairs_per_block=32, pairs_per_shard=160)  # type: ignore[arg-type]
    prepare(data, TokenizerConfig(kind="ids", vocab_size=100), lambda _: None)
    return folder / "shards"


@pytest.fixture
def served(shards: Path) -> Iterator[Served]:
    with serving(shards) as server:
        yield server


def open_impatiently(url: str, cache: Path, attempts: int = 3, most_bytes: int = 0) -> PreparedData:
    """As training opens it, but with little patience."""
    remote = Remote(url, attempts, first_pause=0.001, stalled_after=STALL / 3)
    blocks = BlockCache(cache, most_bytes)
    copy = copy_small_files(remote, cache, (TRAIN, VALID), TOKENIZER_FILE)
    return open_prepared(copy, lambda split: RemoteSegments(remote, split, blocks))


def check_same_blocks(prepared: PreparedData, shards: Path) -> None:
    local = open_prepared(shards)
    for mine, theirs in ((prepared.train, local.train), (prepared.valid, local.valid)):
        assert mine.index == theirs.index
        assert np.array_equal(mine.lengths, theirs.lengths)
        for number in range(theirs.blocks):
            for one, other in zip(
                dataclasses.astuple(mine.block(number)), dataclasses.astuple(theirs.block(number)), strict=True
            ):
                assert np.array_equal(one, other)
    assert prepared.tokenizer.model == local.tokenizer.model
    assert read_texts(prepared.valid.folder, prepared.valid.index) == read_texts(local.valid.folder, local.valid.index)


def kept_blocks(cache: Path) -> list[Path]:
    return [path for path in (cache / "blocks").rglob("*") if path.is_file()]


def test_training_reads_ranges_once_and_the_same_steps(served: Served, shards: Path, tmp_path: Path) -> None:
    data = DataConfig(shards=served.url, cache=str(tmp_path), **BATCHES)  # type: ignore[arg-type]
    (remote,) = open_corpora(data)
    local = open_prepared(shards)
    with BlockLoader(remote.train, data, 1, 0, 1) as mine, BlockLoader(local.train, data, 1, 0, 1) as theirs:
        for _ in range(12):
            for one, other in zip(mine.next_step().micro_batches, theirs.next_step().micro_batches, strict=True):
                assert np.array_equal(one.source, other.source)
                assert np.array_equal(one.labels, other.labels)
    blocks = sum(place.bytes for shard in local.train.index.shards for place in shard.blocks)
    assert served.bytes_of(".tar") == blocks, "each block of the split once, and no byte more"
    served.requests.clear()
    check_same_blocks(open_prepared(*locate(served.url, data)), shards)
    paths = [path for path, _, _ in served.requests]
    assert sorted(paths) == ["/train/index.json", "/valid/index.json", "/valid/valid-000000.tar"]


TROUBLES = ("breaks off", "gives half", "damages", "stalls", "503", "429")


def test_faults_that_pass_are_tried_again(served: Served, shards: Path, tmp_path: Path) -> None:
    served.faults = [*TROUBLES, "", *TROUBLES[:3]]
    check_same_blocks(open_impatiently(served.url, tmp_path, attempts=len(TROUBLES) + 1), shards)
    assert not served.faults
    tars = [request for request in served.requests if request[0].endswith(".tar")]
    assert len(tars) == len(set(tars)) + len(TROUBLES) + 3, "each fault costs one request more"


@pytest.mark.parametrize(
    ("fault", "kind", "sentence"),
    [
        ("breaks off", RunError, r"could not be read in 3 attempts \(ClientPayloadError"),
        ("gives half", DamagedError, r"gave \d+ of \d+ bytes at byte 0, in each of 3 attempts"),
        ("ignores ranges", DamagedError, r"gave \d+ of \d+ bytes at byte 0"),
        ("damages", DamagedError, r"gave a damaged block at byte 0"),
        ("500", RunError, r"could not be read in 3 attempts \(ClientResponseError: 500"),
        ("403", InputError, r"may not be read \(ClientResponseError: 403"),
        ("416", DamagedError, r"is truncated"),
        ("404", DamagedError, r"is missing"),
    ],
)
def test_faults_that_stay_are_one_sentence_and_leave_nothing(
    served: Served, tmp_path: Path, fault: str, kind: type[DistTfmError], sentence: str
) -> None:
    reader = open_impatiently(served.url, tmp_path).train
    served.faults, served.forever = [fault], True
    with pytest.raises(kind, match=rf"{served.url}/train/train-000000\.tar.*{sentence}") as caught:
        reader.block(0)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert not kept_blocks(tmp_path), "no part of a block may stay"
    attempts = sum(path.endswith(".tar") for path, _, _ in served.requests)
    assert attempts == (1 if fault in ("403", "404", "416") else 3)


@pytest.mark.parametrize(
    ("ending", "fault", "sentence"),
    [
        ("train/index.json", "gives half", r"train/index\.json is no index"),
        ("valid/source.txt", "damages", r"valid/source\.txt has another checksum"),
        ("train-000001.lengths.npy", "gives half", r"train-000001\.lengths\.npy has another checksum"),
        ("tokenizer.model", "404", r"tokenizer\.model is missing"),
    ],
)
def test_small_files_are_checked_before_they_are_kept(
    served: Served, shards: Path, tmp_path: Path, ending: str, fault: str, sentence: str
) -> None:
    served.spoils, served.faults, served.forever = ending, [fault], True
    with pytest.raises(InputError, match=sentence):
        open_impatiently(served.url, tmp_path)
    assert not [path for path in tmp_path.rglob(ending.rpartition("/")[2]) if path.is_file()]
    served.faults = []
    check_same_blocks(open_impatiently(served.url, tmp_path), shards)


def test_a_server_that_is_gone_is_one_sentence(shards: Path, tmp_path: Path) -> None:
    with serving(shards) as server:
        prepared = open_impatiently(server.url, tmp_path)
        prepared.train.block(0)
    prepared.train.block(0)
    for act in (lambda: prepared.train.block(1), lambda: open_impatiently(server.url, tmp_path)):
        with pytest.raises(RunError, match=r"could not be read in 3 attempts .*check the address and the network") as e:
            act()
        assert e.value.exit_code == 1
        assert "\n" not in str(e.value)


def test_a_loader_that_is_closed_makes_no_further_attempt(served: Served, shards: Path, tmp_path: Path) -> None:
    remote = Remote(served.url, attempts=4, first_pause=30.0)
    segments = RemoteSegments(remote, TRAIN, BlockCache(tmp_path))
    served.faults, served.forever = ["503"], True
    started = time.monotonic()
    with pytest.raises(StoppedError):
        segments.read(open_prepared(shards).train.index.shards[0], 0, stop=lambda: bool(served.requests))
    assert time.monotonic() - started < 15.0, "the pause is 15 seconds at least"
    assert len(served.requests) == 1


def take_steps(loader: BlockLoader, count: int) -> None:
    for _ in range(count):
        loader.next_step()


def test_a_loader_that_is_asked_to_stop_gives_up_a_server_that_fails(
    served: Served, shards: Path, tmp_path: Path
) -> None:
    """As a signal does it: the next step is not made, and nothing is waited for."""
    remote = Remote(served.url, attempts=4, first_pause=30.0)
    cache = BlockCache(tmp_path)
    opened = open_prepared(shards, lambda split: RemoteSegments(remote, split, cache))
    data = DataConfig(**{**BATCHES, "workers": 1}, window_pairs=64)  # type: ignore[arg-type]
    with BlockLoader(opened.train, data, 1, 0, 1, Position()) as loader:
        served.faults, served.forever = ["503"], True
        before = len(served.requests)
        loader.stop_when(lambda: len(served.requests) > before)
        started = time.monotonic()
        with pytest.raises(StoppedError):
            take_steps(loader, 100)
        assert time.monotonic() - started < 15.0, "the pause is 15 seconds at least"


def test_other_shards_at_the_same_url_are_not_mixed_up(shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "served"
    (folder / "train").mkdir(parents=True)
    (folder / "valid").mkdir()
    for path in shards.rglob("*.*"):
        if path.is_file():
            (folder / path.relative_to(shards)).write_bytes(path.read_bytes())
    with serving(folder) as server:
        first = open_impatiently(server.url, tmp_path / "cache")
        index = (folder / "train/index.json").read_text()
        (folder / "train/index.json").write_text(index + " ")
        second = open_impatiently(server.url, tmp_path / "cache")
    assert first.folder != second.folder
    assert (first.folder / "train/index.json").read_text() == index


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_other_protocols(shards: Path, tmp_path: Path, protocol: str) -> None:
    url = f"memory://{tmp_path.name}" if protocol == "memory" else f"file://{shards}"
    if protocol == "memory":
        fsspec.filesystem("memory").put(str(shards), f"/{tmp_path.name}", recursive=True)
    check_same_blocks(open_impatiently(url, tmp_path / "cache"), shards)


@pytest.mark.parametrize("location", ["pipe:curl http://a/b", "simplecache::s3://b/c", "zip://x::http://a/b"])
def test_what_would_run_a_program_is_refused(location: str) -> None:
    with pytest.raises(ConfigError, match="would run a program or unpack an archive"):
        locate(location, DataConfig())
    assert len(location_faults(DataConfig(shards=location))) == 1


def test_addresses_that_cannot_be(tmp_path: Path) -> None:
    data = DataConfig(cache=str(tmp_path))
    for location in ("gopher://x/y", "reference://x", "http://"):
        with pytest.raises(ConfigError, match="expected a folder or a URL that begins with one of http://"):
            locate(location, data)
    with pytest.raises(InputError, match=r"s3://bucket/x cannot be opened \(.*s3fs.*\): install what it needs"):
        locate("s3://bucket/x", data)
    with pytest.raises(ConfigError, match="expected a folder to prepare in"):
        prepare(DataConfig(shards="http://127.0.0.1:9/x"), TokenizerConfig(), lambda _: None)
    assert not location_faults(DataConfig(shards="s3://bucket/x"))
    assert not location_faults(DataConfig(shards="C:/odd but a folder"))


def test_the_cache_holds_no_more_than_its_bound(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, most_bytes=1000)
    fetched: list[int] = []

    def get(number: int) -> None:
        data = bytes([number]) * 100

        def fetch() -> bytes:
            fetched.append(number)
            return data

        assert cache.get("s", number, zlib.crc32(data), fetch) == data

    for number in range(10):
        get(number)
    for path in kept_blocks(tmp_path):
        os.utime(path, ns=(int(path.name), int(path.name)))
    get(0)  # read again: now the one that was read last
    get(10)
    assert sorted(int(path.name) for path in kept_blocks(tmp_path)) == [0, 3, 4, 5, 6, 7, 8, 9, 10]
    assert int((tmp_path / "total").read_text()) == 900
    for number in (3, 0, 10):
        get(number)
    assert fetched == [*range(10), 10], "what is kept is not fetched again"
    for number in range(20, 60):
        get(number)
        assert sum(path.stat().st_size for path in kept_blocks(tmp_path)) <= 1000


def test_a_damaged_block_in_the_cache_is_fetched_again(served: Served, shards: Path, tmp_path: Path) -> None:
    check_same_blocks(open_impatiently(served.url, tmp_path), shards)
    damage: tuple[Callable[[bytes], bytes], ...] = (lambda b: b[:-1], lambda b: b"x" + b[1:], lambda b: b"")
    for path, spoil in zip(kept_blocks(tmp_path), damage, strict=False):
        path.write_bytes(spoil(path.read_bytes()))
    served.requests.clear()
    check_same_blocks(open_impatiently(served.url, tmp_path), shards)
    assert sum(path.endswith(".tar") for path, _, _ in served.requests) == len(damage)


def test_one_of_several_readers_fetches_a_block(tmp_path: Path) -> None:
    fetched: list[str] = []
    started = threading.Barrier(4)

    def fetch() -> bytes:
        fetched.append("once")
        threading.Event().wait(0.05)
        return b"block"

    def read() -> None:
        cache = BlockCache(tmp_path)  # as another process would
        started.wait()
        assert cache.get("s", 1, zlib.crc32(b"block"), fetch) == b"block"

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == ["once"]


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"keeping blocks of remote shards in .*data\.cache names another folder"):
        BlockCache(tmp_path / "file")


def test_the_users_cache_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("") == tmp_path / "dist_tfm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder("") == Path.home() / ".cache" / "dist_tfm"
    assert cache_folder("here") == Path("here")


def test_browse_shows_and_verifies_a_url(
    served: Served, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert browse.main([served.url, f"--cache={tmp_path}", "--verify"]) == 0
    pairs = open_prepared(shards).train.index.pairs
    assert f"/train/index.json: {pairs} pairs in" in capsys.readouterr().out
    served.spoils, served.faults, served.forever = "train-000001.tar", ["damages"], True
    with pytest.raises(InputError, match=r"train-000001\.tar is damaged outside its blocks .*copy the shards to http"):
        browse.main([served.url, f"--cache={tmp_path}", "--verify"])


def test_ranks_with_other_shards_are_refused() -> None:
    class Others(SingleProcess):
        def gather(self, record):  # type: ignore[no-untyped-def]
            return [record, record, "another"]

    topology = dataclasses.make_dataclass("Topology", ["world"])
    refuse_different(topology(SingleProcess()), "mine")
    with pytest.raises(InputError, match=r"rank 2 has other shards than rank 0 \(1 of 3 ranks"):
        refuse_different(topology(Others()), "mine")
    assert Config().data.cache_gigabytes == 100
