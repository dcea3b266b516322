"""Scaled dot-product attention: the kernels against each other and against what their masks promise."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.attention import BackendName, MultiHeadAttention, attention_kernel, kernel_name, padding_mask
from dist_tfm.model.attention_kernels import (
    Attend,
    ExactBackend,
    Weighting,
    attend_matmul,
    attend_reference,
    attend_sdpa,
    chosen_backend,
)
from dist_tfm.model.initialization import initialize

torch.set_num_threads(1)
BATCH, HEADS, WIDTH, VALUE_WIDTH = 3, 2, 8, 12
NAMES: tuple[ExactBackend, ...] = ("sdpa", "matmul", "reference")
KERNELS = pytest.mark.parametrize("attend", [attention_kernel(name) for name in NAMES], ids=NAMES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def inputs(queries: int, keys: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((queries, WIDTH), (keys, WIDTH), (keys, VALUE_WIDTH))
    q, k, v = (torch.randn(BATCH, HEADS, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def key_mask(lengths: tuple[int, ...], keys: int) -> Tensor:
    return (torch.arange(keys) < torch.tensor(lengths)[:, None])[:, None, None, :]


def boundaries(queries: tuple[int, ...], keys: tuple[int, ...]) -> Tensor:
    """The mask of sentences of these lengths that are laid end to end: each sees its own keys."""
    sides = [torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) for sizes in (queries, keys)]
    return (sides[0][:, None] == sides[1][None, :]).expand(BATCH, 1, -1, -1)


CASES: dict[str, tuple[int, int, Callable[[], Tensor | None], bool]] = {
    "everything visible": (5, 7, lambda: None, False),
    "causal": (6, 6, lambda: None, True),
    "causal after cached keys": (2, 6, lambda: None, True),
    "one query after cached keys": (1, 6, lambda: None, True),
    "padding": (5, 7, lambda: key_mask((7, 3, 1), 7), False),
    "padding hides a whole sentence": (5, 7, lambda: key_mask((7, 0, 1), 7), False),
    "causal and padding": (6, 6, lambda: key_mask((6, 4, 1), 6), True),
    "causal and padding after cached keys": (2, 6, lambda: key_mask((6, 4, 1), 6), True),
    "packed boundaries": (6, 7, lambda: boundaries((3, 1, 2), (2, 5, 0)), False),
    "packed boundaries and causal": (7, 7, lambda: boundaries((3, 0, 4), (3, 0, 4)), True),
    "a mask for each query": (
        4,
        5,
        lambda: torch.rand(BATCH, 1, 4, 5, generator=torch.Generator().manual_seed(3)) < 0.5,
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["sdpa", "matmul", "auto"])
def test_kernels_equal_the_reference_forward_and_backward(
    name: BackendName, case: str, dtype: torch.dtype, tolerance: float
) -> None:
    """bf16: within 4e-2 of the largest element, as the fast kernels round probabilities to 8 bits."""
    queries, keys, make_mask, causal = CASES[case]
    found: list[list[Tensor]] = []
    for attend in (attention_kernel(name), attention_kernel("reference")):
        q, k, v = inputs(queries, keys, dtype)
        output = attend(q, k, v, Weighting(make_mask(), causal))
        assert output.dtype == dtype
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
        output.backward(weights)
        found.append([output.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)])
    assert len(found[0]) == len(found[1]) == 4
    for fast, exact in zip(*found, strict=True):
        assert (fast - exact).abs().max() <= tolerance * exact.abs().max().clamp(min=1e-3)


def test_reference_follows_the_papers_formula_element_by_element() -> None:
    """Equation 1 in plain Python for one head: no tensor operation shared with the code under test."""
    q, k, v = (t.detach().double() for t in inputs(3, 3))
    output = attend_reference(q, k, v, Weighting(causal=True)).output[1, 1]
    for row in range(3):
        scores = [
            sum(float(a) * float(b) for a, b in zip(q[1, 1, row], k[1, 1, c], strict=True)) for c in range(row + 1)
        ]
        weights = [math.exp(s / math.sqrt(WIDTH)) for s in scores]
        for column in range(VALUE_WIDTH):
            expected = sum(w * float(v[1, 1, c, column]) for c, w in enumerate(weights)) / sum(weights)
            assert float(output[row, column]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", CASES)
@DTYPES
def test_probabilities_sum_to_one_over_visible_keys_and_are_zero_elsewhere(case: str, dtype: torch.dtype) -> None:
    queries, keys, make_mask, causal = CASES[case]
    mask = make_mask()
    probabilities = attend_reference(*inputs(queries, keys, dtype), Weighting(mask, causal)).probabilities
    assert probabilities.dtype == torch.float32, "softmax statistics stay fp32 under bf16"
    visible = torch.ones(BATCH, HEADS, queries, keys, dtype=torch.bool)
    if mask is not None:
        visible &= mask
    if causal:
        rows, columns = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
        visible &= columns <= rows + keys - queries
    assert (probabilities[~visible] == 0).all()
    expected = visible.any(-1).float()
    assert torch.allclose(probabilities.sum(-1), expected, atol=1e-6)


@KERNELS
@DTYPES
@pytest.mark.parametrize("per_query", [False, True], ids=["a sentence without keys", "a query without keys"])
def test_queries_that_see_nothing_give_zeros_and_zero_gradients(
    attend: Attend, dtype: torch.dtype, per_query: bool
) -> None:
    queries = keys = 4
    mask = key_mask((4, 0, 2), keys)
    blind = torch.zeros(BATCH, queries, dtype=torch.bool)
    if per_query:
        mask = mask.expand(BATCH, 1, queries, keys).clone()
        mask[0, 0, 2] = False
        blind[0, 2] = True
    blind[1] = True
    q, k, v = inputs(queries, keys, dtype)
    output = attend(q, k, v, Weighting(mask))
    output.float().square().sum().backward()
    by_query = output.transpose(1, 2)
    assert (by_query[blind] == 0).all()
    assert (by_query[~blind] != 0).all(), "the others are not blanked"
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    assert (q.grad.transpose(1, 2)[blind] == 0).all()
    assert (q.grad[2] != 0).any()
    assert (k.grad[1] == 0).all()
    assert (v.grad[1] == 0).all()
    for tensor in (output, q.grad, k.grad, v.grad):
        assert tensor.isfinite().all()


def test_the_fused_kernel_is_never_shown_a_row_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels answer such a row with NaN, which in the backward pass spreads whatever is done to the output."""

    def strict(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor, dropout_p: float) -> Tensor:
        assert attn_mask.any(-1).all()
        return query.new_full((*query.shape[:3], value.size(3)), 3.0)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", strict)
    output = attend_sdpa(*inputs(4, 4), Weighting(key_mask((4, 0, 2), 4)))
    assert (output[1] == 0).all()
    assert (output[[0, 2]] == 3).all()


@KERNELS
def test_causal_queries_before_the_first_key_see_nothing(attend: Attend) -> None:
    """More queries than keys: the lower right corner is aligned, so the first two rows are blind."""
    output = attend(*inputs(5, 3), Weighting(causal=True))
    assert (output[:, :, :2] == 0).all()
    assert (output[:, :, 2:] != 0).all()


@KERNELS
def test_invisible_keys_and_values_change_no_bit(attend: Attend) -> None:
    q, k, v = inputs(5, 7)
    mask = key_mask((7, 3, 1), 7)
    before = attend(q, k, v, Weighting(mask))
    hidden = ~mask.transpose(2, 3)
    after = attend(q, k.masked_fill(hidden, 77.0), v.masked_fill(hidden, -55.0), Weighting(mask))
    assert torch.equal(before, after)


@KERNELS
def test_dropout_acts_in_training_only(attend: Attend) -> None:
    config = ModelConfig(d_model=8, heads=2, attention_dropout=0.5, encoder_layers=1, decoder_layers=1)
    attention = MultiHeadAttention(config, attend).eval()
    x = inputs(4, 4)[0].detach()[:, 0]
    outputs = [attention(x, x, None, True) for _ in range(2)]
    assert torch.equal(*outputs)
    assert not torch.equal(attention.train()(x, x, None, True), outputs[0])


@KERNELS
def test_dropout_keeps_the_mean(attend: Attend) -> None:
    q, k, v = inputs(4, 4)
    plain = attend(q, k, v, Weighting())
    torch.manual_seed(1)
    draws = torch.stack([attend(q, k, v, Weighting(dropout=0.5)).detach() for _ in range(2000)])
    assert not torch.equal(draws[0], draws[1])
    assert (draws.mean(0) - plain).abs().max() < 6 * draws.std(0).max() / math.sqrt(2000)


@KERNELS
@pytest.mark.parametrize(
    ("mask", "complaint"),
    [
        (torch.ones(BATCH, 1, 1, 5), "boolean attention mask .*float32"),
        (torch.ones(BATCH, 1, 1, 5, dtype=torch.int64), "boolean attention mask .*int64"),
        (torch.ones(BATCH, 5, dtype=torch.bool), r"shape \[3, 1, 1, 5\] or \[3, 1, 4, 5\] .* found \[3, 5\]"),
        (torch.ones(4, 5, dtype=torch.bool), r"found \[4, 5\]"),
        (torch.ones(BATCH, 1, 5, 1, dtype=torch.bool), r"found \[3, 1, 5, 1\]"),
        (torch.ones(BATCH, 1, 1, 4, dtype=torch.bool), r"found \[3, 1, 1, 4\]"),
        (torch.ones(BATCH, 1, 5, 5, dtype=torch.bool), r"found \[3, 1, 5, 5\]"),
        (torch.ones(1, 1, 1, 5, dtype=torch.bool), r"found \[1, 1, 1, 5\]"),
        (torch.ones(BATCH, HEADS, 4, 5, dtype=torch.bool), r"found \[3, 2, 4, 5\]"),
    ],
)
def test_masks_of_wrong_dtype_or_shape_are_refused(attend: Attend, mask: Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        attend(*inputs(4, 5), Weighting(mask))


@KERNELS
def test_inputs_that_do_not_fit_each_other_are_refused(attend: Attend) -> None:
    q, k, v = inputs(4, 5)
    with pytest.raises(ValueError, match="expected query"):
        attend(q, k, v[:, :, :4], Weighting())
    with pytest.raises(ValueError, match="expected query"):
        attend(q[..., :4], k, v, Weighting())
    with pytest.raises(ValueError, match="expected query"):
        attend(q[:1], k, v, Weighting())
    with pytest.raises(ValueError, match="4 dimensions"):
        attend(q[0], k, v, Weighting())


@pytest.mark.parametrize(("heads", "d_k"), [(8, None), (8, 16), (1, 512), (4, 128)])
def test_scores_have_variance_one_at_initialisation(heads: int, d_k: int | None) -> None:
    """For inputs of unit variance; without 1 / sqrt(d_k) it would be d_k. Within 4 % over 8 weight draws."""
    config = ModelConfig(d_model=512, heads=heads, d_k=d_k, encoder_layers=1, decoder_layers=1)
    x = torch.randn(64, config.d_model, generator=torch.Generator().manual_seed(5))
    variances = []
    for seed in range(8):
        attention = torch.nn.ModuleDict({"self_attention": MultiHeadAttention(config, attend_sdpa)})
        initialize(attention, seed)
        layer = attention["self_attention"]
        assert isinstance(layer, MultiHeadAttention)
        with torch.no_grad():
            query = layer.query(x).view(64, heads, -1).transpose(0, 1)
            key = layer.keys_values(x[None]).keys[0]
            variances.append(float((query @ key.transpose(1, 2) / math.sqrt(config.key_width)).var()))
    assert sum(variances) / len(variances) == pytest.approx(1.0, abs=0.04)


def test_query_and_key_projections_have_variance_one_for_any_key_width() -> None:
    config = ModelConfig(d_model=512, heads=8, d_k=16, encoder_layers=1, decoder_layers=1)
    attention = torch.nn.ModuleDict({"self_attention": MultiHeadAttention(config, attend_sdpa)})
    initialize(attention, 1)
    x = torch.randn(2000, 512, generator=torch.Generator().manual_seed(5))
    for name in ("query", "key"):
        projection = attention.get_submodule(f"self_attention.{name}")
        assert float(projection(x).detach().var()) == pytest.approx(1.0, abs=0.03)


def test_softmax_of_large_bf16_scores_is_as_exact_as_fp32() -> None:
    """256 keys with equal scores: bf16 statistics would lose the smaller half of the sum."""
    q = torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 300, 4, dtype=torch.bfloat16)
    v = torch.ones(1, 1, 300, 4, dtype=torch.bfloat16)
    assert attend_reference(q, k, v, Weighting()).probabilities.sum() == pytest.approx(1.0, abs=1e-5)
    assert torch.allclose(attend_sdpa(q, k, v, Weighting()).float(), torch.ones(4), atol=4e-3)


def test_reference_keeps_fp32_under_autocast() -> None:
    q, k, v = (t.detach() for t in inputs(4, 4))
    exact = attend_reference(q, k, v, Weighting(causal=True))
    with torch.autocast("cpu", torch.bfloat16):
        found = attend_reference(q, k, v, Weighting(causal=True))
    assert torch.equal(found.output, exact.output)
    assert torch.equal(found.probabilities, exact.probabilities)


@KERNELS
def test_a_probability_is_dropped_as_often_as_asked_and_the_rest_is_scaled(attend: Attend) -> None:
    """Values of the identity show the probabilities themselves. 40,960 draws: a rate within 5 standard deviations."""
    keys, p = 64, 0.3
    q, k = (torch.randn(5, 2, keys, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    identity = torch.eye(keys).expand(5, 2, keys, keys).contiguous()
    plain = attend(q, k, identity, Weighting())
    torch.manual_seed(3)
    dropped = attend(q, k, identity, Weighting(dropout=p))
    kept = dropped != 0
    assert abs(float((~kept).float().mean()) - p) < 5 * math.sqrt(p * (1 - p) / kept.numel())
    assert torch.allclose(dropped[kept], plain[kept] / (1 - p), rtol=1e-5)


class LargestMask(TorchDispatchMode):
    """Notes the elements of the largest boolean tensor that any operator gives, views of smaller ones apart."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.bool:
            self.elements = max(self.elements, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("name", ["sdpa", "matmul"])
@pytest.mark.parametrize("causal", [False, True], ids=["lengths", "causal"])
def test_lengths_and_causality_need_no_mask_of_the_scores_size(name: BackendName, causal: bool) -> None:
    q, k, v = inputs(16, 16)
    mask = None if causal else key_mask((16, 0, 5), 16)
    with LargestMask() as seen:
        attention_kernel(name)(q, k, v, Weighting(mask, causal)).sum().backward()
    assert seen.elements <= (16 * 16 if causal else BATCH * 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_auto_runs_the_kernel_that_its_rule_names(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By bits: the kernels round differently in bf16, and in fp32 nothing but the named one may be called."""
    named = chosen_backend(torch.device("cpu"), dtype)
    assert named == ("matmul" if dtype == torch.bfloat16 else "sdpa")
    q, k, v = inputs(9, 9, dtype)
    expected = attention_kernel(named)(q, k, v, Weighting(causal=True))
    other = "torch.matmul" if named == "sdpa" else "F.scaled_dot_product_attention"
    monkeypatch.setattr(f"dist_tfm.model.attention_kernels.{other}", None)
    assert torch.equal(attention_kernel("auto")(q, k, v, Weighting(causal=True)), expected)


def test_auto_is_fused_on_a_gpu() -> None:
    assert chosen_backend(torch.device("cuda"), torch.bfloat16) == "sdpa"


def test_matmul_keeps_its_dtype_under_autocast() -> None:
    q, k, v = (t.detach() for t in inputs(4, 4, torch.bfloat16))
    exact = attend_matmul(q, k, v, Weighting(causal=True))
    with torch.autocast("cpu", torch.bfloat16):
        found = attend_matmul(q, k, v, Weighting(causal=True))
    assert torch.equal(found, exact)


def test_kernels_know_their_names() -> None:
    for name in ("auto", *NAMES):
        assert kernel_name(attention_kernel(name)) == name
    with pytest.raises(ValueError, match="attention kernel"):
        kernel_name(lambda *_: torch.zeros(()))


def test_padding_mask_shows_real_tokens() -> None:
    mask = padding_mask(torch.tensor([[5, 2, 0], [2, 0, 0]]), pad=0)
    assert mask.tolist() == [[[[True, True, False]]], [[[True, False, False]]]]
