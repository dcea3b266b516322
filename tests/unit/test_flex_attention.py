"""Attention by torch's flex_attention: forward on a CPU, where it has no backward pass (tests/gpu has both)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_tfm.config.layout import check_device
from dist_tfm.config.loading import SECTIONS, check_sections
from dist_tfm.config.schema import Config, ModelConfig, TrainConfig
from dist_tfm.errors import ConfigError
from dist_tfm.inference.greedy import greedy
from dist_tfm.model import flex_attention
from dist_tfm.model.attention import attention_kernel, kernel_name
from dist_tfm.model.attention_kernels import Attend, Weighting
from dist_tfm.model.flex_attention import FlexAttend
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer
from dist_tfm.model.window_attention import WindowAttend
from tests.unit.test_attention import CASES, DTYPES, inputs

torch.set_num_threads(1)
SMALL = ModelConfig(d_model=16, heads=2, d_ff=16, encoder_layers=1, decoder_layers=1, attention="flex")


def kernels(window: int | None) -> tuple[Attend, Attend]:
    """(flex, the reference), of all keys or of a window."""
    reference = attention_kernel("reference")
    return FlexAttend(window), reference if window is None else WindowAttend(reference, window)


@pytest.mark.parametrize("window", [None, 2], ids=["full", "window"])
@DTYPES
def test_it_equals_the_reference(dtype: torch.dtype, window: int | None) -> None:
    """In every case of the other kernels' tests; bf16 within 4e-2 of the largest element."""
    flex, reference = kernels(window)
    for case, (queries, keys, make_mask, causal) in CASES.items():
        query, key, value = (side.detach() for side in inputs(queries, keys, dtype))
        found, expected = (attend(query, key, value, Weighting(make_mask(), causal)) for attend in (flex, reference))
        assert found.dtype == dtype, case
        tolerance = 1e-5 if dtype == torch.float32 else 4e-2
        assert (found - expected).abs().max() <= tolerance * expected.abs().max(), case


def test_blocks_out_of_sight_are_not_computed() -> None:
    """300 positions are 3 x 3 blocks of 128: causality leaves 6, a window of 20 positions 5, or 7 both ways."""
    device = torch.device("cpu")
    for causal, window, expected in ((True, None, 6), (True, 20, 5), (False, 20, 7), (False, None, 9)):
        mask = flex_attention._blocks(300, 300, causal, window, device)
        computed = [mask.kv_num_blocks] + ([] if mask.full_kv_num_blocks is None else [mask.full_kv_num_blocks])
        assert sum(int(blocks.sum()) for blocks in computed) == expected


def test_shapes_share_compiled_graphs() -> None:
    """A single query, and more positions than a block, have their own: 3 graphs, however many shapes and windows."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = flex_attention._compiled(backend)
    patched = pytest.MonkeyPatch()
    patched.setattr(flex_attention, "flex_attention", compiled)
    shapes = (3, 3, 1), (4, 3, 9), (5, 4, 12), (6, 0, 17), (3, 7, 1), (7, 1, 140), (4, 0, 150)
    try:
        for batch, extra, queries in shapes:
            for causal, window in ((True, None), (False, 7), (True, 5)):
                keys = queries + extra
                q, k, v = (torch.randn(batch, 2, length, 16) for length in (queries, keys, keys))
                weighting = Weighting(torch.rand(batch, 1, 1, keys) < 0.7, causal)
                flex, reference = kernels(window)
                torch.testing.assert_close(flex(q, k, v, weighting), reference(q, k, v, weighting))
    finally:
        patched.undo()
    assert len(graphs) <= 3


def test_more_graphs_than_are_allowed_end_a_run_instead_of_running_uncompiled() -> None:
    torch.compiler.reset()  # graphs of other tests count, too
    compiled = flex_attention._compiled(lambda graph, _: graph.forward)
    mask = flex_attention._blocks(150, 150, True, None, torch.device("cpu"))
    one, many = (torch.randn(batch, 2, 150, 16) for batch in (1, 3))
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(one, one, one, block_mask=mask)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            compiled(many, many, many, block_mask=mask)


def test_a_model_decodes_as_it_does_with_another_kernel() -> None:
    """Windows in self-attention, everything in cross-attention, heads that share keys, a source that is all pads."""
    config = replace(SMALL, self_attention="window", window=2, positions="rotary", kv_heads=1)
    models = [Transformer(replace(config, attention=name), 20).eval() for name in ("flex", "sdpa")]
    for model in models:
        initialize(model, 3)
    source = torch.tensor([[5, 6, 7, 8, 9, 3], [5, 7, 3, 0, 0, 0], [0] * 6])
    target = torch.tensor([[2, 5, 6, 7, 8], [2, 9, 9, 0, 0], [2, 4, 0, 0, 0]])
    with torch.no_grad():
        found, expected = (model(source, target) for model in models)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    ours, theirs = (greedy(model, source, 6) for model in models)
    assert ours == theirs


def test_metrics_and_its_name_say_flex() -> None:
    assert kernel_name(attention_kernel("flex")) == "flex"
    model = Transformer(SMALL, 20)
    assert model.attention_backend(torch.device("cuda"), torch.bfloat16) == "flex"


def test_what_it_has_not_is_refused() -> None:
    q, k, v = inputs(4, 4)
    flex = FlexAttend()
    with pytest.raises(ValueError, match="no backward pass for it on a CPU"):
        flex(q, k, v, Weighting())
    plain = q.detach(), k.detach(), v.detach()
    for weighting in (Weighting(dropout=0.1), Weighting(bias=torch.zeros(1, 2, 4, 4))):
        with pytest.raises(ValueError, match="no dropout of weights and no bias of scores"):
            flex(*plain, weighting)
    with pytest.raises(ValueError, match="expected query"):
        flex(plain[0], plain[1], plain[2][:, :, :3], Weighting())


def test_configurations_that_cannot_train_are_refused() -> None:
    wide = ModelConfig(attention="flex", attention_dropout=0.0)
    check_device(Config(model=wide), "cuda")
    with pytest.raises(ConfigError, match=r"flex trains on GPUs only, found launch\.device cpu.*: use auto"):
        check_device(Config(model=wide), "cpu")
    with pytest.raises(ConfigError, match=r"heads at least 16 wide on a GPU, found d_k, d_v = \(64, 8\)"):
        check_device(Config(model=replace(wide, d_v=8)), "cuda")
    sections = {name: section() for name, section in SECTIONS.items()} | {"model": wide}
    check_sections(sections)
    for changes in ({"attention_dropout": 0.1}, {"positions": "relative"}):
        with pytest.raises(ConfigError, match="flex has no dropout of its weights and no bias"):
            check_sections(sections | {"model": replace(wide, **changes)})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"expected false with model\.attention=flex"):
        check_sections(sections | {"train": TrainConfig(compile=True)})
