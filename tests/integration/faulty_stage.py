"""train.py with a fault on one rank: faulty_stage.py FAULT RANK [arguments of train.py]. Not a test itself.

FAULT: forward or backward (which raises in the second step's first micro-batch), or sleep (its forward never ends).
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import Tensor

from data_pipeline.settings import run_main
from dist_tfm.parallel.attempt import recorded
from dist_tfm.parallel.environment import speaks_for_all
from dist_tfm.parallel.stages import Stage
from dist_tfm.train import main

FAULT_AT = 3  # calls of Stage.forward: two micro-batches a step


def install(fault: str) -> None:
    right = Stage.forward
    calls = 0

    def refuse(gradient: Tensor) -> None:
        raise ValueError("a deliberate fault in the backward pass")

    def forward(self: Stage, *inputs: Any) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        if calls == FAULT_AT and fault == "forward":
            raise ValueError("a deliberate fault in the forward pass")
        if calls == FAULT_AT and fault == "sleep":
            time.sleep(600)
        outputs = right(self, *inputs)
        if calls == FAULT_AT and fault == "backward":
            outputs[0].register_hook(refuse)
        return outputs

    Stage.forward = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    fault, rank, *arguments = sys.argv[1:]
    if os.environ["RANK"] == rank:
        install(fault)
    run_main(recorded(lambda: main(arguments)), speaks_for_all)
