"""The loss that makes logits a chunk at a time, against the plain one over all logits: values, gradients, memory."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dist_tfm.training.projected_loss as module
from dist_tfm.parallel.axis import Alone, Axis
from dist_tfm.parallel.layers import VocabularyShard
from dist_tfm.training.loss import smoothed_cross_entropy
from dist_tfm.training.projected_loss import projected_loss
from tests.threads import on_ranks

torch.set_num_threads(1)
ROWS, WIDTH, VOCABULARY = 11, 6, 23
Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def problem(
    dtype: torch.dtype, rows: int = ROWS, width: int = WIDTH, vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (rows, vocabulary))
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def whole(vocabulary: int = VOCABULARY) -> VocabularyShard:
    return VocabularyShard(Alone(), vocabulary)


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return projected_loss(hidden, weight, labels, 0.1, whole(len(weight)))


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return smoothed_cross_entropy(F.linear(hidden, weight), labels, 0.1)


def differentiated(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """[loss, nll, gradient of hidden, gradient of weight] of 0.7 times the loss."""
    hidden, weight = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    loss_sum, nll_sum = loss(hidden, weight, labels)
    assert not nll_sum.requires_grad
    (0.7 * loss_sum).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss_sum.detach(), nll_sum, hidden.grad, weight.grad]


@pytest.mark.parametrize("chunk", [1, 3 * VOCABULARY, 1000], ids=["a row", "three rows", "all rows"])
def test_it_equals_the_plain_loss(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 8 * chunk)
    for found, expected in zip(
        differentiated(chunked, *problem(torch.float64)), differentiated(plain, *problem(torch.float64)), strict=True
    ):
        assert (found - expected).abs().max() <= 1e-13 * expected.abs().max()


@pytest.mark.parametrize("chunk", [1, 3 * VOCABULARY, 1000], ids=["a row", "three rows", "all rows"])
def test_a_bias_of_the_scores_is_added_and_learns(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 8 * chunk)
    given = torch.randn(VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    biases = [given.clone().requires_grad_() for _ in range(2)]

    def with_bias(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return projected_loss(hidden, weight, labels, 0.1, whole(), biases[0])

    def plainly(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return smoothed_cross_entropy(F.linear(hidden, weight, biases[1]), labels, 0.1)

    found, expected = (differentiated(loss, *problem(torch.float64)) for loss in (with_bias, plainly))
    assert biases[0].grad is not None
    assert biases[1].grad is not None
    for mine, right in zip([*found, biases[0].grad], [*expected, biases[1].grad], strict=True):
        assert (mine - right).abs().max() <= 1e-13 * right.abs().max()


def test_in_bf16_gradients_are_as_near_to_exact_ones_as_the_plain_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 chunks: a sum in bf16 over them would lose the small addends (an error of 10 %)."""
    hidden, weight, labels = problem(torch.bfloat16, rows=300)
    exact = differentiated(plain, hidden.double(), weight.double(), labels)

    def errors(loss: Loss) -> list[float]:
        found = differentiated(loss, hidden, weight, labels)
        assert [t.dtype for t in found] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
        return [float((f - e).abs().max() / e.abs().max()) for f, e in zip(found, exact, strict=True)]

    reference = errors(plain)
    for chunk in (VOCABULARY, 10**6):
        monkeypatch.setattr(module, "CHUNK_BYTES", 2 * chunk)
        for mine, theirs in zip(errors(chunked), reference, strict=True):
            assert mine <= 1.5 * theirs + 1e-6


def test_autocast_rounds_as_it_does_for_a_linear_layer() -> None:
    hidden, weight, labels = problem(torch.float32)
    exact = differentiated(plain, hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (differentiated(loss, hidden, weight, labels) for loss in (chunked, plain))
    assert not torch.equal(found[0], exact[0])
    for mine, theirs, right in zip(found, expected, exact, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        assert (mine - right).abs().max() <= 1.5 * (theirs - right).abs().max() + 1e-6 * right.abs().max()


@pytest.mark.parametrize("vocabulary", [5, VOCABULARY])
def test_divided_vocabularies_give_the_whole_loss_and_each_rank_its_rows(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 tokens the ranks have 2 and 3: cut by their own logits, they would wait for each other's chunks."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 8 * 6)
    hidden, weight, labels = problem(torch.float64, vocabulary=vocabulary)
    loss, nll, of_hidden, of_weight = differentiated(plain, hidden, weight, labels)

    def work(axis: Axis) -> list[Tensor]:
        shard = VocabularyShard(axis, vocabulary)
        part = weight.detach()[shard.low : shard.high]
        return differentiated(lambda h, w, y: projected_loss(h, w, y, 0.1, shard), hidden, part, labels)

    found = on_ranks(2, work)
    for mine in found:
        assert float(mine[0]) == pytest.approx(float(loss), rel=1e-13)
        assert float(mine[1]) == pytest.approx(float(nll), rel=1e-13)
    assert torch.allclose(found[0][2] + found[1][2], of_hidden, rtol=0, atol=1e-13)
    assert torch.allclose(torch.cat([mine[3] for mine in found]), of_weight, rtol=0, atol=1e-13)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest memory behind any tensor that an operator gives, and counts products."""

    nbytes = 0
    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.products += "mm" in str(func)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_tensor_is_larger_than_a_chunk_or_the_operands(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width, vocabulary = 512, 8, 400
    monkeypatch.setattr(module, "CHUNK_BYTES", 16 * vocabulary * dtype.itemsize)
    hidden, weight, labels = problem(dtype, rows, width, vocabulary)
    largest = {}
    for name, loss in (("chunked", chunked), ("plain", plain)):
        with Largest() as seen:
            differentiated(loss, hidden, weight, labels)
        largest[name] = seen.nbytes
    assert largest["plain"] >= rows * vocabulary * dtype.itemsize
    assert largest["chunked"] == 4 * 16 * vocabulary  # a chunk in fp32; operands and their gradients are smaller
    assert 4 * max(rows, vocabulary) * width < largest["chunked"]


def test_without_gradients_there_is_one_product_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 4 * VOCABULARY)
    hidden, weight, labels = problem(torch.float32)
    expected = chunked(hidden, weight, labels)
    with torch.no_grad(), Largest() as seen:
        found = chunked(hidden, weight, labels)
    assert seen.products == 3
    assert not found[0].requires_grad
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_no_rows_give_zero_and_zero_gradients() -> None:
    hidden, weight, labels = problem(torch.float32)
    for value in differentiated(chunked, hidden[:0], weight, labels[:0]):
        assert (value == 0).all()


def test_a_non_finite_state_shows_in_the_loss_and_both_gradients() -> None:
    hidden, weight, labels = problem(torch.float32)
    with torch.no_grad():
        hidden[4, 1] = math.inf
    loss, nll, of_hidden, of_weight = differentiated(chunked, hidden, weight, labels)
    assert not loss.isfinite()
    assert not nll.isfinite()
    assert of_hidden[4].isnan().any()
    assert of_hidden[:4].isfinite().all()
    assert of_weight.isnan().any()


def test_a_gradient_that_is_not_finite_reaches_every_operand() -> None:
    """The engine multiplies the loss by NaN where a step must be skipped."""
    hidden, weight, labels = problem(torch.float32)
    loss, _ = chunked(hidden, weight, labels)
    (loss * math.nan).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.isnan().all()
    assert weight.grad.isnan().all()


def test_a_matrix_of_another_shard_is_refused() -> None:
    hidden, weight, labels = problem(torch.float32)
    with pytest.raises(ValueError, match="tokens 0 to 24, found a matrix of 23 rows"):
        projected_loss(hidden, weight, labels, 0.1, whole(24))
