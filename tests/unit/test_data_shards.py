"""Block shards: exact round trip, stock webdataset reads them, and nothing damaged or hostile gets through."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import pickle
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import InputError
from data_pipeline.files import sha256_of
from data_pipeline.index import Index, read_index, write_index
from data_pipeline.shards import ShardReader, _plain_header, decode_block, write_shard
from tests.data_factory import CHECKSUM, make_blocks, make_reader, random_lengths, write_split

LENGTHS = random_lengths(700, seed=3)


def reader_of(folder: Path) -> ShardReader:
    return ShardReader(folder / "train", read_index(folder / "train"), CHECKSUM)


def read_all(reader: ShardReader) -> None:
    for number in range(reader.blocks):
        reader.block(number)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(500, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_blocks_come_back_as_written(tmp_path: Path, vocabulary: int, dtype: type) -> None:
    reader = make_reader(tmp_path, LENGTHS, vocabulary=vocabulary)
    assert reader.blocks == 11
    assert reader.block_pairs.tolist() == [64] * 10 + [60]
    assert np.array_equal(reader.lengths, LENGTHS)
    for number, block in enumerate(make_blocks(LENGTHS, 64, vocabulary=vocabulary)):
        found = reader.block(number)
        for field in dataclasses.fields(block):
            assert np.array_equal(getattr(found, field.name), getattr(block, field.name)), field.name
        assert found.source.dtype == found.target.dtype == dtype
        assert found.source_lengths.dtype == np.uint8


def test_long_lengths_take_a_wider_type(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, np.array([[300, 2], [1, 70_000]]), pairs_per_block=1)
    assert [reader.block(i).source_lengths.dtype for i in (0, 1)] == [np.uint16, np.uint8]
    assert [reader.block(i).target_lengths.dtype for i in (0, 1)] == [np.uint8, np.uint32]
    assert reader.lengths.tolist() == [[300, 2], [1, 70_000]]


def test_index_counts_and_size(tmp_path: Path) -> None:
    lengths = random_lengths(20_000, seed=1)
    index = write_split(tmp_path, lengths, pairs_per_block=4096, blocks_per_shard=3)
    assert index == read_index(tmp_path / "train")
    assert index.pairs == 20_000
    assert index.tokens == tuple((lengths + 1).sum(axis=0))
    raw = 2 * int(lengths.sum())
    assert sum(shard.bytes for shard in index.shards) < 1.08 * raw
    keys = set(json.loads((tmp_path / "train" / "index.json").read_bytes()))
    assert keys == {
        "format_version", "tokenizer_checksum", "vocab_size", "special_ids", "fingerprint", "split", "texts", "shards",
    }  # fmt: skip


def test_shards_are_the_same_bytes_at_any_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_split(tmp_path / name, LENGTHS)
    for path in sorted((tmp_path / "a" / "train").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / "train" / path.name).read_bytes(), path.name
    with tarfile.open(tmp_path / "a" / "train" / "train-000000.tar") as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar} == {(0, 0, 0, "", "", 0o644)}


def test_stock_webdataset_reads_the_same_arrays(tmp_path: Path) -> None:
    import webdataset

    reader = make_reader(tmp_path, LENGTHS)
    shards = [str(reader.folder / shard.file) for shard in reader.index.shards]
    samples = list(webdataset.WebDataset(shards, shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"{number:06d}" for number in range(reader.blocks)]
    for number, sample in enumerate(samples):
        block = reader.block(number)
        arrays = {
            "src.npy": block.source, "src_len.npy": block.source_lengths,
            "tgt.npy": block.target, "tgt_len.npy": block.target_lengths,
        }  # fmt: skip
        assert {key for key in sample if not key.startswith("_")} == set(arrays)
        for key, expected in arrays.items():
            assert np.array_equal(np.load(io.BytesIO(sample[key]), allow_pickle=False), expected)


def test_a_block_segment_is_a_tar_stream_of_its_own(tmp_path: Path) -> None:
    from webdataset import tariterators

    reader = make_reader(tmp_path, LENGTHS)
    shard = reader.index.shards[1]
    place = shard.blocks[2]
    data = (reader.folder / shard.file).read_bytes()[place.offset : place.offset + place.bytes]
    names = [member["fname"] for member in tariterators.tar_file_iterator(io.BytesIO(data))]
    assert names == [f"000006.{part}.npy" for part in ("src", "src_len", "tgt", "tgt_len")]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def edit_index(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "train" / "index.json"
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))


def second_block(folder: Path) -> int:
    return read_index(folder / "train").shards[0].blocks[1].offset


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda f: (f / "train/train-000001.tar").unlink(), r"train-000001\.tar is missing"),
    "truncated shard": (
        lambda f: (f / "train/train-000001.tar").write_bytes((f / "train/train-000001.tar").read_bytes()[:-700]),
        r"train-000001\.tar is truncated",
    ),
    "longer shard": (
        lambda f: (f / "train/train-000001.tar").write_bytes((f / "train/train-000001.tar").read_bytes() + b"x"),
        r"train-000001\.tar is too long",
    ),
    "flipped bit in a block": (
        lambda f: flip(f / "train/train-000000.tar", second_block(f) + 700),
        r"train-000000\.tar, block 1 at byte \d+: damaged",
    ),
    "missing lengths": (lambda f: (f / "train/train-000000.lengths.npy").unlink(), r"lengths\.npy is missing"),
    "other lengths": (lambda f: flip(f / "train/train-000000.lengths.npy", 140), r"lengths\.npy does not match"),
    "no index": (lambda f: (f / "train/index.json").unlink(), r"index\.json not found"),
    "index cut": (
        lambda f: (f / "train/index.json").write_bytes((f / "train/index.json").read_bytes()[:100]),
        r"index\.json is damaged",
    ),
    "other format": (lambda f: edit_index(f, lambda i: i.update(format_version=9)), "format version 9"),
    "unknown key": (lambda f: edit_index(f, lambda i: i.update(extra=1)), r"index\.json is damaged \(extra"),
    "other special ids": (lambda f: edit_index(f, lambda i: i["special_ids"].update(pad=3)), "special ids"),
    "path out of the folder": (
        lambda f: edit_index(f, lambda i: i["shards"][0].update(file="../x.tar")), r"shards\.0\.file",
    ),
    "pairs that do not add up": (
        lambda f: edit_index(f, lambda i: i["shards"][0].update(pairs=999)), "do not add up",
    ),
    "block that is not where it should be": (
        lambda f: edit_index(f, lambda i: i["shards"][0]["blocks"][1].__setitem__(0, 512)), "has no block at byte",
    ),
    "other tokenizer": (
        lambda f: edit_index(f, lambda i: i.update(tokenizer_checksum="d" * 64)),
        "encoded with tokenizer dddddddddddd",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_in_one_sentence(tmp_path: Path, damage: str) -> None:
    write_split(tmp_path, LENGTHS)
    read_all(reader_of(tmp_path))
    spoil, sentence = DAMAGE[damage]
    spoil(tmp_path)
    with pytest.raises(InputError, match=sentence) as caught:
        read_all(reader_of(tmp_path))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


class Boom:
    """Pickles into a call that leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.trace,))


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def segment(members: dict[str, bytes], kind: bytes = tarfile.REGTYPE, claim: int | None = None) -> bytes:
    """A tar of these members; the first is of another kind, or claims another size."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.USTAR_FORMAT) as tar:
        for number, (name, data) in enumerate(members.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if number == 0:
                info.type, info.linkname = kind, "/etc/passwd" if kind == tarfile.SYMTYPE else ""
                info.size = 0 if kind == tarfile.SYMTYPE else info.size
            tar.addfile(info, io.BytesIO(data))
    raw = bytearray(buffer.getvalue())
    if claim is not None:
        first = tarfile.TarInfo.frombuf(bytes(raw[:512]), "utf-8", "strict")
        first.size = claim
        raw[:512] = first.tobuf(tarfile.GNU_FORMAT)
    return bytes(raw)


def honest_members() -> dict[str, bytes]:
    ids, lengths = np.array([4, 5, 6], dtype=np.uint16), np.array([1, 2], dtype=np.uint8)
    return {
        "000000.src.npy": npy(ids), "000000.src_len.npy": npy(lengths),
        "000000.tgt.npy": npy(ids), "000000.tgt_len.npy": npy(lengths),
    }  # fmt: skip


def test_hostile_members_run_no_code_and_are_refused(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    bomb = Boom(trace)
    pickled = pickle.dumps(bomb)
    objects = np.empty(1, dtype=object)
    objects[0] = bomb
    members = honest_members()
    assert decode_block(segment(members), 500).pairs == 2
    attacks = {
        "array of objects": {**members, "000000.src.npy": npy(objects)},
        "a pickle in place of an array": {**members, "000000.tgt.npy": pickled},
        "a .pyd member": {**members, "000000.pyd": pickled},
        "a .pyd member first": {"000000.pyd": pickled, **members},
        "a renamed member": {**dict(list(members.items())[:3]), "000000.tgt_len.pyd": members["000000.tgt_len.npy"]},
        "a member too few": dict(list(members.items())[:3]),
    }
    for name, planted in attacks.items():
        with pytest.raises(ValueError, match=r"unexpected member|no \.npy array|holds 3 of the 4|flat array"):
            decode_block(segment(planted), 500)
        assert not trace.exists(), name
    with pytest.raises(ValueError, match="unexpected member"):
        decode_block(segment(members, kind=tarfile.SYMTYPE), 500)
    pickle.loads(pickled)
    assert trace.exists(), "the bomb must work, or this test shows nothing"


def test_headers_of_our_own_are_read_as_tarfile_reads_them(tmp_path: Path) -> None:
    write_shard(tmp_path, "train", 0, 7, make_blocks(random_lengths(300), 64))
    data = (tmp_path / "train-000000.tar").read_bytes()
    with tarfile.open(tmp_path / "train-000000.tar") as tar:
        expected = [(member.name, member.size, member.offset) for member in tar]
    assert len(expected) == 20
    for name, size, offset in expected:
        assert _plain_header(data[offset : offset + 512]) == (name, size)
    header = bytearray(data[:512])
    for place in range(512):
        header[place] ^= 1
        assert _plain_header(bytes(header)) is None, "every byte counts"
        header[place] ^= 1


def npy_claiming(descr: str, shape: tuple[int, ...], content: bytes) -> bytes:
    """A .npy file whose header says what it likes."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue() + content


def sparse_segment(size: int) -> bytes:
    """A member that is a hole of `size` bytes, in GNU's old sparse format: 512 bytes that unpack to gigabytes."""
    data = segment(honest_members(), kind=tarfile.GNUTYPE_SPARSE, claim=0)
    header = bytearray(data[:512])
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data[1024:]


def extended_segment() -> bytes:
    """A pax header that gives the member after it a size of its own."""
    members = {"pax": b"25 size=8000000000000000\n", **honest_members()}
    return segment(members, kind=tarfile.XHDTYPE)


LIES: dict[str, tuple[bytes, str]] = {
    "a zip archive in place of an array": (
        segment({**honest_members(), "000000.src.npy": b"PK\x03\x04" + bytes(60)}), r"is no \.npy array",
    ),
    "a shape of terabytes": (
        segment({**honest_members(), "000000.src.npy": npy_claiming("<u2", (10**13,), b"\4\0" * 3)}),
        "claims 20000000000000 bytes of numbers and holds 6",
    ),
    "a shape that wraps to nothing": (
        segment({**honest_members(), "000000.src.npy": npy_claiming("<u2", (2**63,), b"")}), "is not a flat array",
    ),
    "a sparse member of 8 GB": (sparse_segment(8 << 30), "unexpected member"),
    "a pax header": (extended_segment(), "unexpected member"),
    "a size past the end": (segment(honest_members(), claim=1 << 40), "claims 1099511627776 bytes"),
    "a negative size": (segment(honest_members(), claim=-512), "claims -512 bytes"),
    "lengths whose sum wraps": (
        segment({**honest_members(), "000000.src_len.npy": npy(np.array([2**64 - 1, 4], dtype=np.uint64))}),
        "is not a flat array of unsigned integers of at most 32 bits",
    ),
    "lengths beyond the ids": (
        segment({**honest_members(), "000000.src_len.npy": npy(np.array([2**32 - 1, 4], dtype=np.uint32))}),
        "source lengths do not add up",
    ),
    "a header that is code": (
        segment({**honest_members(), "000000.src.npy": npy(np.zeros(3, np.uint16)).replace(b"False", b"f(()))")}),
        "is not a flat array",
    ),
    "a header of brackets": (
        segment({**honest_members(), "000000.src.npy": b"\x93NUMPY\x01\x00\xff\x1f" + b"(" * 8191}),
        "is not a flat array",
    ),
    "no member at all": (bytes(1024), "holds 0 of the 4"),
    "noise": (bytes(range(256)) * 8, "not a tar segment"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_a_member_claims_is_never_believed(lie: str) -> None:
    data, sentence = LIES[lie]
    with memory_limit(), pytest.raises(ValueError, match=sentence) as caught:
        decode_block(data, 500)
    assert "\n" not in str(caught.value)


@contextlib.contextmanager
def memory_limit(most: int = 64 << 20) -> Iterator[None]:
    """Fails if Python code allocates more at a time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_flipped_byte_gives_anything_but_a_block_or_a_sentence(data: st.DataObject) -> None:
    raw = bytearray(segment(honest_members())[:4096])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        block = decode_block(bytes(raw), 500)
        assert block.source_lengths.sum() == len(block.source)
        assert block.target_lengths.sum() == len(block.target)


SIDECARS: dict[str, tuple[Callable[[np.ndarray], bytes], str]] = {
    "a zip archive": (lambda table: b"PK\x03\x04" + bytes(60), r"is no \.npy array"),
    "a shape of terabytes": (lambda table: npy_claiming("|u1", (10**13, 2), b"\4"), "claims 20000000000000 bytes"),
    "64 bits": (
        lambda table: npy(np.where(table == table.max(), 2**64 - 1, table.astype(np.uint64))), "of at most 32 bits",
    ),
    "objects": (lambda table: npy(table.astype(object)), "not an array of 2 dimensions"),
    "a flat array": (lambda table: npy(table.ravel()), "not an array of 2 dimensions"),
    "a pair too few": (lambda table: npy(table[1:]), r"holds \(699, 2\), expected \(700, 2\)"),
    "longer pairs": (lambda table: npy(table + table.dtype.type(1)), "source and .* target tokens, the index says"),
}  # fmt: skip


@pytest.mark.parametrize("lie", SIDECARS)
def test_a_planted_sidecar_with_a_right_checksum_is_still_refused(tmp_path: Path, lie: str) -> None:
    index = write_split(tmp_path, LENGTHS, blocks_per_shard=100)
    path = tmp_path / "train" / index.shards[0].lengths_file
    plant, sentence = SIDECARS[lie]
    path.write_bytes(plant(np.load(path, allow_pickle=False)))
    shard = dataclasses.replace(index.shards[0], lengths_checksum=sha256_of(path))
    write_index(tmp_path / "train", dataclasses.replace(index, shards=(shard,)))
    with pytest.raises(InputError, match=rf"lengths sidecar .*train-000000\.lengths\.npy .*{sentence}") as caught:
        reader_of(tmp_path)
    assert "\n" not in str(caught.value)


def test_more_pairs_than_bytes_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    write_split(tmp_path, LENGTHS)

    def claim(index: dict) -> None:
        shard = index["shards"][0]
        shard["pairs"] += 10**15
        shard["blocks"][0][2] += 10**15

    edit_index(tmp_path, claim)
    with pytest.raises(InputError, match="has no room for its pairs at byte 0"):
        reader_of(tmp_path)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_disk_that_fails_is_one_sentence_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    write_split(tmp_path, LENGTHS)
    reader = reader_of(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    def spoilt(where: str, act: Callable[[], object]) -> None:
        with pytest.raises(InputError, match=rf"{where} cannot be read \({os.strerror(code)}\)") as caught:
            act()
        assert "\n" not in str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr("os.pread", fail)
        spoilt(r"shard .*train-000000\.tar", lambda: reader.block(0))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", fail)
        spoilt(r"shard .*train-000000\.tar", lambda: ShardReader(reader.folder, reader.index))
    with monkeypatch.context() as patch:
        patch.setattr("data_pipeline.files.os.open", fail)
        spoilt(r"lengths sidecar .*train-000000\.lengths\.npy", lambda: ShardReader(reader.folder, reader.index))
        spoilt(r"shard .*train-000001\.tar", lambda: reader.checksum(reader.index.shards[1]))


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    index = write_split(tmp_path, LENGTHS)
    for name in (index.shards[0].lengths_file, "index.json"):
        (tmp_path / "train" / name).unlink()
        os.mkfifo(tmp_path / "train" / name)
        with pytest.raises(InputError, match=rf"{name} cannot be read.*expected a regular file, found a named pipe"):
            reader_of(tmp_path)


def test_a_planted_block_with_a_right_checksum_is_still_refused(tmp_path: Path) -> None:
    """An attacker who rewrites the index as well gains nothing."""
    index = write_split(tmp_path, LENGTHS, blocks_per_shard=1)
    trace = tmp_path / "ran"
    data = segment({**honest_members(), "000000.pyd": pickle.dumps(Boom(trace))})
    path = tmp_path / "train" / index.shards[0].file
    path.write_bytes(data)
    shard = dataclasses.replace(
        index.shards[0],
        bytes=len(data),
        checksum=sha256_of(path),
        blocks=((0, len(data), index.shards[0].pairs),),
        block_checksums=(zlib.crc32(data),),
    )
    write_index(tmp_path / "train", dataclasses.replace(index, shards=(shard, *index.shards[1:])))
    with pytest.raises(InputError, match=r"block 0 at byte 0: unexpected member '000000\.pyd'"):
        reader_of(tmp_path).block(0)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("000000.src.npy", np.array([4, 5, 500], dtype=np.uint16), r"source ids lie outside \[3, 500\)"),
        ("000000.tgt.npy", np.array([4, 5, 2], dtype=np.uint16), "target ids lie outside"),
        ("000000.tgt.npy", np.array([4, 5], dtype=np.uint16), "target lengths do not add up"),
        ("000000.src.npy", np.array([4.0, 5.0, 6.0]), "not a flat array of unsigned"),
        ("000000.src.npy", np.array([[4, 5, 6]], dtype=np.uint16), "not a flat array of unsigned"),
    ],
)
def test_arrays_that_are_no_block_are_refused(name: str, array: np.ndarray, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        decode_block(segment({**honest_members(), name: npy(array)}), 500)


def test_a_sidecar_that_lies_is_found_when_blocks_are_read(tmp_path: Path) -> None:
    index: Index = write_split(tmp_path, LENGTHS, blocks_per_shard=100)
    path = tmp_path / "train" / index.shards[0].lengths_file
    table = np.load(path)
    table[[70, 71]] = table[[71, 70]]
    np.save(path, table)
    shard = dataclasses.replace(index.shards[0], lengths_checksum=sha256_of(path))
    write_index(tmp_path / "train", dataclasses.replace(index, shards=(shard,)))
    reader = reader_of(tmp_path)
    reader.block(0)
    with pytest.raises(InputError, match=r"block 1 at byte \d+: its lengths differ"):
        reader.block(1)
