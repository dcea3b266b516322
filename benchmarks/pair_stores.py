"""The same pairs in the formats of other loaders, one pair a sample, and what each loader makes of them: batches.

Every loader gives pairs in the order in which they are stored; they are planned together, as our loader plans a window,
so that all of them give the same batches, cell for cell. Planning takes the others no longer than us; what is left to
them is reading and collating, pair by pair.

B sentences in a micro-batch, S padded source length, T padded target length.
"""

import io
import itertools
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.api import BOS, EOS, PAD, DataConfig
from data_pipeline.index import read_index
from data_pipeline.loader import BlockLoader
from data_pipeline.plan import plan_window
from data_pipeline.ragged import starts_of
from data_pipeline.shards import ShardReader

SEED = 1
PAIRS_PER_TAR = 10_000
ROWS_AT_ONCE = 1000

Pair = tuple[NDArray[Any], NDArray[Any]]
Arrays = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""source [B, S], target_in [B, T], labels [B, T]."""


def pairs_of(reader: ShardReader) -> Iterator[Pair]:
    """Every pair of our shards, in order."""
    for number in range(reader.blocks):
        block = reader.block(number)
        sides = ((block.source, block.source_lengths), (block.target, block.target_lengths))
        starts = [starts_of(lengths).tolist() for _, lengths in sides]
        for i in range(block.pairs):
            yield (block.source[starts[0][i] : starts[0][i + 1]], block.target[starts[1][i] : starts[1][i + 1]])


def write_webdataset(reader: ShardReader, folder: Path) -> None:
    """Stock WebDataset: tars of samples with a .npy for each side."""
    import webdataset

    folder.mkdir()
    pairs = enumerate(pairs_of(reader))
    number = 0
    while chunk := list(itertools.islice(pairs, PAIRS_PER_TAR)):
        with webdataset.TarWriter(str(folder / f"{number:06d}.tar")) as tar:
            for key, (source, target) in chunk:
                tar.write({"__key__": f"{key:09d}", "source.npy": _npy(source), "target.npy": _npy(target)})
        number += 1


def read_webdataset(folder: Path) -> Iterator[Pair]:
    """Through webdataset's own loader, in this process."""
    import webdataset

    def decode(sample: dict[str, Any]) -> Pair:
        return _array(sample["source.npy"]), _array(sample["target.npy"])

    tars = [str(path) for path in sorted(folder.glob("*.tar"))]
    data_set = webdataset.WebDataset(tars, shardshuffle=False).map(decode)
    yield from webdataset.WebLoader(data_set, batch_size=None, num_workers=0)


def write_data_set(reader: ShardReader, folder: Path) -> None:
    """Hugging Face `datasets` on the disk: a list of uint16 for each side."""
    import datasets

    columns: dict[str, list[Any]] = {"source": [], "target": []}
    for source, target in pairs_of(reader):
        columns["source"].append(source)
        columns["target"].append(target)
    features = datasets.Features({name: datasets.List(datasets.Value("uint16")) for name in columns})
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(folder))


def read_data_set(folder: Path) -> Iterator[Pair]:
    """As an iterable data set, as its documentation shows for PyTorch: tensors, behind torch's DataLoader."""
    import datasets
    from torch.utils.data import DataLoader

    rows = datasets.load_from_disk(str(folder)).to_iterable_dataset().with_format("torch")
    for batch in DataLoader(rows, batch_size=ROWS_AT_ONCE, collate_fn=list):  # type: ignore[arg-type]
        yield from ((row["source"].numpy(), row["target"].numpy()) for row in batch)


def read_arrow(folder: Path) -> Iterator[Pair]:
    """As an iterable data set in Arrow batches, which are cut up here: the fastest way that was found."""
    import datasets

    rows = datasets.load_from_disk(str(folder)).to_iterable_dataset().with_format("arrow")
    for batch in rows.iter(batch_size=ROWS_AT_ONCE):
        sides = []
        for name in ("source", "target"):
            column = batch.column(name).combine_chunks()
            ends = np.cumsum(np.asarray(column.value_lengths()))
            sides.append(np.split(np.asarray(column.flatten()), ends[:-1]))
        yield from zip(*sides, strict=True)


class Rows:
    """A map-style data set of rows that are asked for one by one: what a data set of one's own around another is."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __getitem__(self, row: int) -> Any:
        return self._rows[row]


def map_data_set(
    folder: Path, lengths: NDArray[Any], data: DataConfig, form: str | None, one_by_one: bool = False
) -> Iterator[Arrays]:
    """As a map-style data set behind torch's DataLoader, whose batches are planned from known lengths [N, 2].

    form: of the rows; "torch" is what the documentation shows for PyTorch, None (Python's lists) the fastest here.
    one_by_one: not a batch's rows in one request, which DataLoader makes to data sets that know how (`__getitems__`).
    """
    import datasets
    from torch.utils.data import DataLoader

    rows = datasets.load_from_disk(str(folder)).with_format(form)
    asked: Any = Rows(rows) if one_by_one else rows
    loader = DataLoader(asked, batch_sampler=_planned(lengths, data), collate_fn=_collate_rows)
    yield from loader


def read_blocks(folder: Path) -> Iterator[Pair]:
    """Our own shards, opened and then taken apart pair by pair: what is left of their speed under a loop in Python."""
    yield from pairs_of(ShardReader(folder, read_index(folder)))


def planned_batches(pairs: Iterable[Pair], data: DataConfig) -> Iterator[Arrays]:
    """Batches of pairs that come one by one."""
    known = list(pairs)
    lengths = np.array([(len(source), len(target)) for source, target in known])
    for rows in _planned(lengths, data):
        yield collate([known[row] for row in rows])


def _planned(lengths: NDArray[Any], data: DataConfig) -> list[list[int]]:
    """The pairs of every micro-batch of the first epoch, as our loader plans them; lengths [N, 2] are without EOS."""
    budget = data.batch_tokens // data.micro_batches
    source, target = (lengths[:, side].astype(np.int64) + 1 for side in (0, 1))
    plan = plan_window(source, target, budget, data.micro_batches, (SEED, 0, 0))
    return [plan.piece(number).tolist() for number in range(len(plan.source_widths)) if len(plan.piece(number))]


def collate(pairs: list[Pair]) -> Arrays:
    """Pads pairs to a micro-batch."""
    source = np.full((len(pairs), 1 + max(len(s) for s, _ in pairs)), PAD, dtype=np.int64)
    target_in = np.full((len(pairs), 1 + max(len(t) for _, t in pairs)), PAD, dtype=np.int64)
    labels = target_in.copy()
    target_in[:, 0] = BOS
    for row, (one, other) in enumerate(pairs):
        source[row, : len(one)], source[row, len(one)] = one, EOS
        labels[row, : len(other)], labels[row, len(other)] = other, EOS
        target_in[row, 1 : 1 + len(other)] = other
    return source, target_in, labels


def _collate_rows(rows: list[dict[str, NDArray[Any]]]) -> Arrays:
    return collate([(row["source"], row["target"]) for row in rows])


def our_epochs(folder: Path, data: DataConfig, epochs: int) -> Iterator[Arrays]:
    """Batches of our own loader, over whole epochs of the shards in `folder`."""
    with BlockLoader(ShardReader(folder, read_index(folder)), data, SEED, rank=0, dp=1) as loader:
        while loader.position.epoch < epochs:
            for batch in loader.next_step().micro_batches:
                if batch.index >= 0:
                    yield batch.source, batch.target_in, batch.labels


def seconds_of(batches: Iterable[Arrays]) -> float:
    """How long it takes until all batches are ready."""
    started = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - started


def digest(batches: Iterable[Arrays]) -> int:
    """Stands for the content, the shapes and the order of batches."""
    found = 0
    for arrays in batches:
        for array in arrays:
            found = zlib.crc32(repr(array.shape).encode(), zlib.crc32(np.ascontiguousarray(array), found))
    return found


def stored_bytes(folder: Path) -> int:
    """Bytes of all files of a store."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _array(content: bytes) -> NDArray[Any]:
    array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    return array
