"""The canonical format: what any layout writes, any other layout reads; and what does not fit together is refused."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dist_tfm.checkpoint.canonical import (
    Entry,
    Index,
    Part,
    StateReader,
    box_shape,
    build_index,
    check_coverage,
    index_from_json,
    index_to_json,
    list_parts,
    write_state,
)
from dist_tfm.checkpoint.files import FileRecord, find_fault, seal, unseal, write_file
from dist_tfm.engine.base import STATE_KINDS, Fragment
from dist_tfm.errors import InputError
from dist_tfm.parallel.tags import Tag

SHAPES = {"a.weight": (12, 10), "b.weight": (6, 4), "c.bias": (7,)}


def whole_state(seed: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {name: {k: torch.randn(s, generator=generator) for k in STATE_KINDS} for name, s in SHAPES.items()}


def cuts(generator: np.random.Generator, length: int, parts: int) -> list[tuple[int, int]]:
    """`length` cut at random into at most `parts` ranges, none of them empty."""
    inner = sorted({int(n) for n in generator.integers(1, max(2, length), parts - 1) if n < length})
    edges = [0, *inner, length]
    return list(itertools.pairwise(edges))


def layout(seed: int, dims: dict[str, int], shards: int, ranks: int) -> Iterator[tuple[Tag, int, int]]:
    """(tag, start, numel): every parameter cut along its dimension into shards, each shard flat into ranges."""
    generator = np.random.default_rng(seed)
    for name, shape in SHAPES.items():
        dim = min(dims[name], len(shape) - 1)
        size = shape[dim]
        edges = [size * i // shards for i in range(shards + 1)]
        for low, high in itertools.pairwise(edges):
            if low < high:
                tag = Tag(name, shape, dim, low, high, True)
                for start, end in cuts(generator, math.prod(box_shape(shape, dim, low, high)), ranks):
                    yield tag, start, end - start


def local(whole: Tensor, tag: Tag) -> Tensor:
    return whole.narrow(tag.dim, tag.low, tag.high - tag.low).reshape(-1)


def written(folder: Path, state: dict[str, dict[str, Tensor]], places: list[tuple[Tag, int, int]]) -> Index:
    """Writes one file for each place (a rank never has two fragments of one parameter)."""
    records = []
    for number, (tag, start, numel) in enumerate(places):
        views = {kind: local(t, tag)[start : start + numel] for kind, t in state[tag.name].items()}
        fragments = [Fragment(tag, start, numel, views)]
        write_state(folder / f"{number}.safetensors", fragments)
        records += list_parts(f"{number}.safetensors", fragments)
    return index_from_json(json.loads(json.dumps(index_to_json(build_index(records)))))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("written_shards", "read_shards"), [(1, 1), (1, 3), (2, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_any_layout_reads_what_any_other_wrote(
    tmp_path: Path, seed: int, written_shards: int, read_shards: int, dims: tuple[int, int]
) -> None:
    state = whole_state(seed)
    written_dims, read_dims = (dict.fromkeys(SHAPES, dim) for dim in dims)
    index = written(tmp_path, state, list(layout(seed, written_dims, written_shards, ranks=3)))
    with StateReader(tmp_path, index) as reader:
        for tag, start, numel in layout(seed + 100, read_dims, read_shards, ranks=4):
            for kind in STATE_KINDS:
                expected = local(state[tag.name][kind], tag)[start : start + numel]
                assert torch.equal(reader.read(kind, tag, start, numel), expected)
        for name, kinds in state.items():
            assert all(torch.equal(reader.read_whole(kind, name), tensor) for kind, tensor in kinds.items())


def test_file_is_plain_safetensors_with_known_checksum(tmp_path: Path) -> None:
    tag = Tag("layer.weight", (2, 3), 0, 0, 2, True)
    views = {kind: torch.arange(4.0) + i for i, kind in enumerate(STATE_KINDS)}
    replica = Fragment(tag._replace(name="replica", writer=False), 0, 4, views)
    record = write_state(tmp_path / "x.safetensors", [Fragment(tag, 1, 4, views), replica])
    stored = load_file(tmp_path / "x.safetensors")
    assert sorted(stored) == sorted(f"{kind}/layer.weight" for kind in STATE_KINDS)  # replicas are not written
    assert all(torch.equal(stored[f"{kind}/layer.weight"], views[kind]) for kind in STATE_KINDS)
    assert find_fault(tmp_path / "x.safetensors", record) is None
    assert len(list_parts("x", [replica])) == 0


def test_views_into_other_memory_are_written_as_they_stand(tmp_path: Path) -> None:
    memory = torch.arange(10.0)
    tag = Tag("w", (4,), 0, 0, 4, True)
    write_state(tmp_path / "x", [Fragment(tag, 0, 4, {kind: memory.narrow(0, 3, 4) for kind in STATE_KINDS})])
    assert load_file(tmp_path / "x")["fp32/w"].tolist() == [3.0, 4.0, 5.0, 6.0]


def test_writer_refuses_two_fragments_of_one_name_and_other_types(tmp_path: Path) -> None:
    tag = Tag("w", (4,), 0, 0, 4, True)
    fragment = Fragment(tag, 0, 2, {"fp32": torch.zeros(2)})
    with pytest.raises(ValueError, match="two fragments of fp32/w"):
        write_state(tmp_path / "x", [fragment, fragment])
    with pytest.raises(ValueError, match="expected fp32 state"):
        write_state(tmp_path / "y", [Fragment(tag, 0, 2, {"fp32": torch.zeros(2, dtype=torch.bfloat16)})])


@pytest.mark.parametrize(
    ("dim", "parts", "said"),
    [
        (0, [(0, 4, 0, 5), (0, 4, 6, 6)], "gap or overlap at element 5"),
        (0, [(0, 4, 0, 7), (0, 4, 6, 6)], "gap or overlap at element 7"),
        (0, [(0, 4, 0, 11)], "not complete"),
        (0, [(0, 4, 0, 13)], "not complete"),
        (0, [(0, 2, 0, 6), (3, 4, 0, 3)], "gap or overlap at row 2"),
        (0, [(0, 2, 0, 6), (1, 4, 0, 9)], "gap or overlap at row 2"),
        (1, [(0, 2, 0, 8)], "rows from 2 on are missing"),
        (0, [(0, 4, 0, 12), (0, 4, 0, 12)], "gap or overlap at element 12"),
        (0, [], "rows from 0 on are missing"),
    ],
)
def test_index_must_cover_every_element_once(dim: int, parts: list[tuple[int, ...]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_coverage("w", Entry((4, 3), dim, tuple(Part("f", *p) for p in parts)))


def test_complete_index_is_accepted() -> None:
    check_coverage("w", Entry((4, 3), 1, (Part("f", 2, 3, 0, 4), Part("g", 0, 2, 3, 5), Part("h", 0, 2, 0, 3))))


def test_ranks_must_agree_about_shapes() -> None:
    first, second = (list_parts("f", [Fragment(Tag("w", (n,), 0, 0, n, True), 0, n, {})]) for n in (3, 4))
    with pytest.raises(ValueError, match="ranks disagree"):
        build_index([*first, *second])


def test_another_format_is_refused() -> None:
    with pytest.raises(InputError, match="format 1, found 2"):
        index_from_json({"format": 2, "parameters": {}})


def test_reader_refuses_what_the_index_does_not_describe(tmp_path: Path) -> None:
    tag = Tag("w", (4,), 0, 0, 4, True)
    write_state(tmp_path / "x", [Fragment(tag, 0, 4, {"fp32": torch.zeros(4)})])
    wrong_size = {"w": Entry((5,), 0, (Part("x", 0, 5, 0, 5),))}
    with (
        StateReader(tmp_path, wrong_size) as reader,
        pytest.raises(InputError, match="not what the checkpoint's index"),
    ):
        reader.read_whole("fp32", "w")
    outside = {"w": Entry((4,), 0, (Part("../x", 0, 4, 0, 4),))}
    with StateReader(tmp_path, outside) as reader, pytest.raises(InputError, match="plain file name"):
        reader.read_whole("fp32", "w")


def test_files_are_never_overwritten_and_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "f"
    record = write_file(path, [b"ab", memoryview(b"cd")])
    assert record == FileRecord(4, "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589")
    with pytest.raises(FileExistsError):
        write_file(path, [b"new"])
    assert path.read_bytes() == b"abcd"
    path.write_bytes(b"abce")
    assert find_fault(path, record) == "f: its checksum differs"
    path.write_bytes(b"abc")
    assert find_fault(path, record) == "f: expected 4 bytes, found 3"
    path.unlink()
    assert find_fault(path, record) == "f is missing"


def test_seal_notices_every_changed_byte() -> None:
    data = seal({"step": 3, "files": {"a": {"size": 1.5}}})
    assert unseal(data) == {"step": 3, "files": {"a": {"size": 1.5}}}
    for place in range(len(data) - 1):  # the last byte is the newline
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(ValueError, match=r".+"):
            unseal(bytes(changed))
