"""mosaicml-streaming, asked by loader_peers.py to write and read pairs; runs in the environment of this peer."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import types
from collections.abc import Iterator
from typing import Any

# Its data sets of images and text, which take torchvision; what is measured does not know them.
for _name in ("multimodal", "text", "vision"):
    sys.modules[f"streaming.{_name}"] = types.ModuleType(f"streaming.{_name}")

import streaming
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from benchmarks.pair_stores import Pair, digest, pairs_of, planned_batches, seconds_of
from benchmarks.peers import answer_requests
from data_pipeline.api import DataConfig
from data_pipeline.index import read_index
from data_pipeline.shards import ShardReader

AT_ONCE = 256


def write(shards: str, folder: str) -> str:
    """Writes the pairs of our shards as MDS, two columns of arrays; the version of mosaicml-streaming."""
    reader = ShardReader(Path(shards), read_index(Path(shards)))
    with MDSWriter(out=folder, columns={"source": "ndarray:uint16", "target": "ndarray:uint16"}) as writer:
        for source, target in pairs_of(reader):
            writer.write({"source": source, "target": target})
    return str(streaming.__version__)


def read(folder: str, data: dict[str, Any], check: bool) -> float:
    """Seconds until all batches are ready; with `check` their digest instead."""
    batches = planned_batches(_pairs(folder), DataConfig(**data))
    return digest(batches) if check else seconds_of(batches)


def _pairs(folder: str) -> Iterator[Pair]:
    data_set = StreamingDataset(local=folder, shuffle=False, batch_size=AT_ONCE, num_canonical_nodes=1)
    for samples in StreamingDataLoader(data_set, batch_size=AT_ONCE, num_workers=0, collate_fn=list):
        yield from ((sample["source"], sample["target"]) for sample in samples)


if __name__ == "__main__":
    answer_requests({"write": write, "read": read})
