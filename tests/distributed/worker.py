"""One rank of a test world: runs the world's cases one after another and writes each one's result."""

import gc
import json
import os
import traceback
from pathlib import Path

import torch

from dist_tfm.config.schema import LaunchConfig
from dist_tfm.parallel import topology
from dist_tfm.parallel.environment import read_ranks
from tests.distributed.plan import PLAN


def run_rank(world: str, folder: Path) -> None:
    """In a process that has RANK, WORLD_SIZE, ... set."""
    torch.set_num_threads(1)
    here = topology.start(read_ranks(os.environ), LaunchConfig(device="cpu", hang_timeout=60), report=lambda line: None)
    for name, case in PLAN[world].items():
        try:
            result = case(here, folder)
        except BaseException:  # SystemExit too, which would end a rank without a word
            (folder / world / f"error.{here.ranks.rank}").write_text(f"case {name}:\n{traceback.format_exc()}")
            raise
        (folder / world / f"{name}.{here.ranks.rank}.json").write_text(json.dumps(result))
        # DeepSpeed keeps the engines of earlier cases, and collects garbage by hand at every turn: it need not look
        # through them again.
        gc.freeze()
    topology.shutdown()
