"""Attention over windows and by kernels, each against its formula: pads, causality, caches, long inputs, gradients."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_tfm.config.schema import ModelConfig
from dist_tfm.metrics.flops import LengthSums, forward_flops
from dist_tfm.model.attention import attention_kernel
from dist_tfm.model.attention_kernels import Attend, Weighting, attend_sdpa
from dist_tfm.model.linear_attention import BLOCK, attend_linear
from dist_tfm.model.window_attention import LEAST_BLOCK, WindowAttend
from tests.unit.test_sentence_packing import build, differentiated, micro_batch

torch.set_num_threads(1)
LONG = 150  # more than two blocks of either


def inputs(length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key [2, 3, length, 5], value [2, 3, length, 4], and a mask of keys that hides the second's last third."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((2, 3, length, 5), (2, 3, length, 5), (2, 3, length, 4))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    lengths = torch.tensor([length, length - length // 3])
    return (*made, (torch.arange(length) < lengths[:, None])[:, None, None])  # type: ignore[return-value]


def seen(queries: int, keys: int, causal: bool, window: int | None) -> Tensor:
    """[Tq, Tk], the queries being the last ones, written as it is said."""
    at = range(keys - queries, keys)
    far = keys if window is None else window
    return torch.tensor([[-far <= k - q <= (0 if causal else far) for k in range(keys)] for q in at])


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 7, 70, 149, 1000])
def test_a_window_is_full_attention_with_the_rest_hidden(kernel: Any, causal: bool, window: int) -> None:
    query, key, value, mask = inputs(LONG)
    bias = torch.randn(1, 3, LONG, LONG, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for visible, added in ((None, None), (mask, None), (mask.expand(2, 1, LONG, LONG), bias)):
        found = WindowAttend(attention_kernel(kernel), window)(
            query, key, value, Weighting(visible, causal, bias=added)
        )
        shown = seen(LONG, LONG, causal, window) & (torch.tensor(True) if visible is None else visible)
        scores = query @ key.mT / math.sqrt(5) + (0.0 if added is None else added)
        weights = scores.masked_fill(~shown, -math.inf).softmax(-1).nan_to_num(0.0)
        torch.testing.assert_close(found, weights @ value, rtol=0, atol=1e-12)


def test_a_window_over_a_cache_is_that_of_the_whole_and_costs_a_window() -> None:
    query, key, value, mask = inputs(LONG)
    widths: list[int] = []

    def counting(*given: Any) -> Tensor:
        widths.append(given[1].size(2))
        return attend_sdpa(*given)

    kernel: Attend = counting  # type: ignore[assignment]
    attend = WindowAttend(kernel, 7)
    whole = attend(query, key, value, Weighting(mask, True))
    assert max(widths) == LEAST_BLOCK + 7
    widths.clear()
    for count in (1, 5):
        newest = attend(query[:, :, -count:], key, value, Weighting(mask, True))
        torch.testing.assert_close(newest, whole[:, :, -count:], rtol=0, atol=1e-12)
    assert widths == [8, 12]


def quadratic(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Katharopoulos et al. 2020, equation 4 with the kernel of equation 7, by all pairs, one query at a time."""
    q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (query, key))
    rows = []
    for i in range(query.size(2)):
        weights = (q[:, :, i : i + 1] * k).sum(-1) * visible[..., i, :]
        rows.append((weights[..., None] * value).sum(2) / weights.sum(-1, keepdim=True).clamp(min=1e-300))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [3, BLOCK, LONG])
def test_linear_attention_is_its_quadratic_form(causal: bool, length: int) -> None:
    *made, mask = inputs(length)
    leaves = [[part.clone().requires_grad_() for part in made] for _ in range(2)]
    found = attend_linear(*leaves[0], Weighting(mask, causal))
    expected = quadratic(*leaves[1], seen(length, length, causal, None) & mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for result in (found, expected):
        (result * torch.arange(4)).sum().backward()
    for ours, theirs in zip(*leaves, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)


def test_linear_attention_over_a_cache_is_that_of_the_whole() -> None:
    query, key, value, mask = inputs(LONG)
    whole = attend_linear(query, key, value, Weighting(mask, True))
    for count in (1, 5, 90):
        newest = attend_linear(query[:, :, -count:], key, value, Weighting(mask, True))
        torch.testing.assert_close(newest, whole[:, :, -count:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [3, LONG])
def test_linear_attention_stays_finite_and_blank_rows_are_zeros(length: int) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        query, key, value, mask = inputs(length, dtype)
        for causal in (True, False):
            found = attend_linear(query, key, value, Weighting(mask, causal))
            exact = (part.double() for part in (query, key, value))
            expected = quadratic(*exact, seen(length, length, causal, None) & mask)
            assert found.dtype == dtype
            assert float((found.double() - expected).abs().max()) < tolerance
            assert not attend_linear(query, key, value, Weighting(torch.zeros_like(mask), causal)).any()
            assert attend_linear(query * 1e4, key * 1e4, value, Weighting(mask, causal)).isfinite().all()


def test_linear_attention_over_packed_sentences_is_that_over_padded_ones() -> None:
    """In float64, since it is computed in another way for each length."""
    padded, packed = (
        differentiated(build(packed, self_attention="linear", d_k=2).double(), micro_batch((5, 3, 3, 0, 7)))
        for packed in (False, True)
    )
    for one, other in zip(packed, padded, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_what_linear_attention_has_not_is_refused() -> None:
    query, key, value, mask = inputs(4)
    for given in (
        Weighting(mask, bias=torch.zeros(1, 3, 4, 4)),
        Weighting(mask, dropout=0.1),
        Weighting(mask.expand(2, 1, 4, 4)),
    ):
        with pytest.raises(ValueError, match="no bias, no dropout on them and a mask of keys alone"):
            attend_linear(query, key, value, given)


def test_flops_of_windows_and_of_kernels_grow_with_the_length() -> None:
    config = ModelConfig(encoder_layers=1, decoder_layers=1, d_model=16, d_ff=8, heads=2, d_k=3, d_v=5, window=4)

    def products(kind: Any, n: int) -> int:
        """What one more layer of each stack costs over tokens that are not paired at all."""
        sums = LengthSums(n, n, n * n, 0, n * n)
        alone = replace(sums, source_source=0, target_target=0)
        whole, bare = (forward_flops(replace(config, self_attention=kind), 10, s) for s in (sums, alone))
        return whole - (bare if kind != "linear" else forward_flops(config, 10, alone))

    assert products("full", 50) == 2 * 50 * 50 * 2 * 2 * (3 + 5)
    assert products("window", 50) == 50 * (9 + 5) * 2 * 2 * (3 + 5)
    assert products("window", 3) == products("full", 3), "all lies within the window"
    assert products("linear", 50) == 2 * 50 * 2 * 2 * 2 * 3 * 5
