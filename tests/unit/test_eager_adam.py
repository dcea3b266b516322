"""The optimizer that is torch's own, number for number, and does not import torch's compiler."""

import subprocess
import sys

import torch

from dist_tfm.engine.eager_adam import EagerAdamW

STEPS_WITHOUT_COMPILER = """
import sys, torch
from dist_tfm.engine.eager_adam import EagerAdamW
weight = torch.ones(3, requires_grad=True)
adam = EagerAdamW([weight], lr=0.1, fused=True)
weight.grad = torch.ones(3)
adam.step()
assert not torch.equal(weight, torch.ones(3))
sys.exit("torch._dynamo" in sys.modules)
"""


def test_it_computes_what_torchs_own_computes() -> None:
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(7)]
    ours, theirs = ([value.clone().requires_grad_() for value in start] for _ in range(2))
    optimizers = [
        kind([{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.1}], lr=1e-2, fused=True)
        for kind, weights in ((EagerAdamW, ours), (torch.optim.AdamW, theirs))
    ]
    for step in range(3):
        gradients = [torch.randn(value.shape) for value in start]
        for weights, optimizer in zip((ours, theirs), optimizers, strict=True):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.clone()
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            optimizer.step()
    for ours_, theirs_, first in zip(ours, theirs, start, strict=True):
        assert torch.equal(ours_, theirs_)
        assert not torch.equal(ours_, first)
    assert optimizers[0].state_dict()["state"].keys() == optimizers[1].state_dict()["state"].keys()


def test_a_process_that_steps_does_not_import_the_compiler() -> None:
    assert subprocess.run([sys.executable, "-c", STEPS_WITHOUT_COMPILER], timeout=120).returncode == 0
