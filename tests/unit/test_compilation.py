"""Compiled layers: the same numbers, and a number of graphs that does not grow with the number of shapes.

The backend of these tests runs the captured graphs as they are: what inductor makes of them is torch's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from dist_tfm.config.loading import SECTIONS, check_sections
from dist_tfm.config.schema import ModelConfig, ParallelConfig, TrainConfig
from dist_tfm.errors import ConfigError
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer
from dist_tfm.training.compilation import compile_layers
from dist_tfm.training.loss import TranslationLoss
from dist_tfm.training.randomness import SeededRunner

torch.set_num_threads(1)
CPU = torch.device("cpu")
SHAPES = [(3, 5, 7), (2, 8, 4), (6, 3, 9), (4, 11, 2), (5, 6, 6), (7, 4, 3), (3, 12, 12), (8, 2, 5)]


def build(**changes: Any) -> TranslationLoss:
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 16, "d_ff": 24, "heads": 2, "dropout": 0.2}
    model = Transformer(ModelConfig(**{**sizes, **changes}), 30)
    initialize(model, 1)
    return TranslationLoss(model, 0.1)


def micro_batch(pairs: int, source: int, target: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(source)
    ids = [torch.randint(4, 30, (pairs, n), generator=generator) for n in (source, target, target)]
    ids[0][0, 1:] = ids[2][-1, 1:] = 0
    return ids[0], ids[1], ids[2]


def differentiated(module: TranslationLoss, shape: tuple[int, int, int], checkpointing: bool) -> list[Tensor]:
    module.zero_grad()
    loss, _ = module(*micro_batch(*shape), SeededRunner(1, 5, 2, checkpointing))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("dtype", "checkpointing"), [(torch.float32, False), (torch.bfloat16, True)], ids=["fp32 sdpa", "bf16 matmul"]
)
def test_many_shapes_share_a_few_graphs_and_change_no_number(dtype: torch.dtype, checkpointing: bool) -> None:
    graphs: list[fx.GraphModule] = []

    def count(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    plain, compiled = build().to(dtype), build().to(dtype)
    compile_layers(compiled.model, CPU, backend=count)
    assert list(dict(compiled.named_parameters())) == list(dict(plain.named_parameters()))
    after_first = 0
    for shape in SHAPES:
        found, expected = (differentiated(module, shape, checkpointing) for module in (compiled, plain))
        assert len(found) == len(expected) > 40
        for mine, right in zip(found, expected, strict=True):
            assert torch.equal(mine, right)
        after_first = after_first or len(graphs)
    assert after_first == len(graphs) == 2  # one for the layers of each stack
    torch._dynamo.reset()


def test_a_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"train\.compile: expected the compiler no-such-compiler, found none"):
        compile_layers(build().model, CPU)


@pytest.mark.parametrize(
    ("section", "value", "named"),
    [
        ("parallel", ParallelConfig(tp=2), "parallel.tp=2"),
        ("train", TrainConfig(activation_checkpointing="attention"), "train.activation_checkpointing=attention"),
        ("model", ModelConfig(self_attention="linear"), "model.self_attention=linear"),
        ("model", ModelConfig(positions="relative"), "model.positions=relative"),
    ],
)
def test_what_breaks_graphs_is_refused(section: str, value: Any, named: str) -> None:
    sections = {name: kind() for name, kind in SECTIONS.items()}
    sections[section] = value
    check_sections(sections)
    train = sections["train"].__dict__ | {"compile": True}
    with pytest.raises(ConfigError, match=f"train.compile: expected false with {named}"):
        check_sections(sections | {"train": TrainConfig(**train)})
