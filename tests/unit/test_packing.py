"""A model with packed weights says what the same model says without."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dist_tfm.config.schema import ModelConfig
from dist_tfm.inference.beam_search import SearchOptions, beam_search
from dist_tfm.inference.forced import forced_scores
from dist_tfm.inference.packing import PackedLinear, PackedTransformer, can_pack, packed_where_possible
from dist_tfm.inference.penalties import length_penalty
from dist_tfm.inference.ranking import FastRanking
from dist_tfm.inference.scorer import ModelScorer
from dist_tfm.inference.translator import pad_sources
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer

torch.set_num_threads(1)
CPU = torch.device("cpu")
MODEL = ModelConfig(encoder_layers=2, decoder_layers=2, d_model=64, d_ff=96, heads=4, d_k=6, d_v=10)
SOURCES = [[5, 9, 77, 300], [8], [400, 6, 5, 4, 44, 21, 90]]
needs_kernels = pytest.mark.skipif(
    not can_pack(torch.empty(1, dtype=torch.bfloat16)), reason="this processor does not multiply in bf16"
)


def build(dtype: torch.dtype = torch.bfloat16, source: int | None = None, **changes: object) -> Transformer:
    model = Transformer(replace(MODEL, **changes), 501, source)  # type: ignore[arg-type]
    initialize(model, 2)
    with torch.no_grad():
        (model.embedding if model.projection is None else model.projection).weight.mul_(2.0)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return model.to(dtype).eval().requires_grad_(False)


@needs_kernels
@pytest.mark.parametrize("rows", [1, 4, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_product_is_the_product(rows: int, bias: bool) -> None:
    linear = nn.Linear(48, 100, bias=bias).bfloat16()
    packed = PackedLinear(linear.weight, linear.bias)
    x = torch.randn(2, rows, 48, generator=torch.Generator().manual_seed(rows)).bfloat16()
    for given in (x, x.transpose(0, 1), x[:, 0], x[:0]):
        expected, found = linear(given), packed(given)
        assert found.shape == expected.shape
        assert found.dtype == torch.bfloat16
        # bf16 has 8 bits: a sum that is rounded elsewhere may come out one step away.
        assert torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=1e-3)


@needs_kernels
@pytest.mark.parametrize(
    "changes",
    [{}, {"tied": "none", "norm": "pre", "kv_heads": 2, "source": 620, "attention_bias": True, "output_bias": True}],
    ids=["the paper's", "another"],
)
def test_a_packed_model_translates_and_scores_alike(changes: dict[str, Any]) -> None:
    model, limits = build(**changes), [9, 6, 12]
    packed = PackedTransformer(model)
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    assert torch.equal(packed.embedding.weight, model.embedding.weight)
    source, options = pad_sources(SOURCES, CPU), SearchOptions(4, length_penalty("gnmt"), n_best=4)
    found, expected = (
        beam_search(ModelScorer([m], source), limits, options, FastRanking(0.0)) for m in (packed, model)
    )
    best = [result.hypotheses[0].tokens for result in expected]
    assert [result.hypotheses[0].tokens for result in found] == best
    assert any(best), "empty translations compare nothing"
    for one, other in zip(found, expected, strict=True):
        assert [h.score for h in one.hypotheses] == pytest.approx([h.score for h in other.hypotheses], abs=0.02)
    scores = [[s.log_probability for s in forced_scores([m], SOURCES, best, CPU)] for m in (packed, model)]
    assert scores[0] == pytest.approx(scores[1], abs=0.02)


@needs_kernels
def test_only_bf16_on_a_cpu_is_packed() -> None:
    full, half = build(torch.float32), build()
    unchanged, packed = packed_where_possible([full, half])
    assert unchanged is full
    assert isinstance(packed, PackedTransformer)
    assert not can_pack(torch.empty(1, dtype=torch.bfloat16, device="meta"))
    with pytest.raises(ValueError, match="bf16 on a CPU"):
        PackedTransformer(full)
    assert isinstance(half.decoder.layers[0].feed_forward.up, nn.Linear), "the model itself is left as it was"
