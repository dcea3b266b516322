"""The label-smoothed loss in closed form, against the plain formula, and at its edges."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dist_tfm.training.loss as loss_module
from data_pipeline.api import BOS, EOS, PAD, zero_weight_batch
from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer
from dist_tfm.training.loss import TranslationLoss, smoothed_cross_entropy

torch.set_num_threads(1)
SMOOTHINGS = pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
CONFIG = ModelConfig(encoder_layers=1, decoder_layers=1, d_model=16, d_ff=24, heads=2, dropout=0.0)
SOURCE = torch.tensor([[5, 6, EOS], [7, EOS, PAD]])
TARGET_IN = torch.tensor([[BOS, 8, 9, 10], [BOS, 11, PAD, PAD]])
LABELS = torch.tensor([[8, 9, 10, EOS], [11, EOS, PAD, PAD]])


def plain(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The formula of the module's head as it stands."""
    minus_log_p = -torch.log_softmax(logits.double(), -1)
    nll = minus_log_p.gather(-1, labels[:, None]).squeeze(-1)
    return ((1 - smoothing) * nll + smoothing * minus_log_p.mean(-1)).sum(), nll.sum()


def build(smoothing: float = 0.1) -> TranslationLoss:
    model = Transformer(CONFIG, 20)
    initialize(model, 1)
    return TranslationLoss(model, smoothing)


def random_logits(
    rows: int, vocab: int, dtype: torch.dtype = torch.float32, scale: float = 3.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * vocab)
    logits = scale * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), torch.randint(0, vocab, (rows,), generator=generator)


@SMOOTHINGS
def test_uniform_scores_cost_log_v_whatever_the_smoothing(smoothing: float) -> None:
    loss, nll = smoothed_cross_entropy(torch.full((3, 50), 1.7), torch.tensor([0, 4, 49]), smoothing)
    assert float(loss) == pytest.approx(3 * math.log(50), rel=1e-6)
    assert float(nll) == pytest.approx(3 * math.log(50), rel=1e-6)


def test_an_example_by_hand() -> None:
    """p = (1/2, 1/4, 1/8, 1/8), right token 1, eps = 0.2. (Spread over the V - 1 wrong ones, eps would cost more.)"""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    loss, nll = smoothed_cross_entropy(logits, torch.tensor([1]), 0.2)
    assert float(nll) == pytest.approx(2 * math.log(2))
    assert float(loss) == pytest.approx(0.8 * 2 * math.log(2) + 0.2 * (1 + 2 + 3 + 3) / 4 * math.log(2))


@SMOOTHINGS
def test_it_equals_torchs_own_label_smoothing(smoothing: float) -> None:
    logits, labels = random_logits(17, 23)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    loss, nll = smoothed_cross_entropy(logits, labels, smoothing)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float(nll) == pytest.approx(float(F.cross_entropy(logits, labels, reduction="sum").detach()), rel=1e-6)


@SMOOTHINGS
def test_gradients_pass_gradcheck_in_float64(smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 14)
    logits, labels = random_logits(5, 7, torch.float64)
    assert torch.autograd.gradcheck(lambda x: smoothed_cross_entropy(x, labels, smoothing)[0] * 0.37, [logits])


@SMOOTHINGS
def test_gradient_is_softmax_minus_smoothed_target(smoothing: float) -> None:
    logits, labels = random_logits(9, 11, torch.float64)
    (2.5 * smoothed_cross_entropy(logits, labels, smoothing)[0]).backward()
    target = torch.full((9, 11), smoothing / 11, dtype=torch.float64)
    target[torch.arange(9), labels] += 1 - smoothing
    assert logits.grad is not None
    assert torch.allclose(logits.grad, 2.5 * (logits.detach().softmax(-1) - target), atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 25, 60, 10_000], ids=["a row each", "a row", "two rows", "all rows"])
def test_chunks_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", chunk)
    logits, labels = random_logits(7, 25)
    loss, nll = smoothed_cross_entropy(logits, labels, 0.1)
    loss.backward()
    wanted = logits.detach().double().requires_grad_()
    expected, expected_nll = plain(wanted, labels, 0.1)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float(nll) == pytest.approx(float(expected_nll.detach()), rel=1e-6)
    assert logits.grad is not None
    assert wanted.grad is not None
    assert (logits.grad - wanted.grad).abs().max() < 1e-6


def test_bf16_scores_are_summed_in_fp32() -> None:
    """The only error is that of the rounded scores themselves: 1e-6 of the exact value for those scores."""
    logits, labels = random_logits(300, 200, torch.bfloat16)
    loss, nll = smoothed_cross_entropy(logits, labels, 0.1)
    expected, expected_nll = plain(logits.detach(), labels, 0.1)
    assert loss.dtype == nll.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float(nll) == pytest.approx(float(expected_nll.detach()), rel=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_scores_of_any_size_neither_overflow_nor_vanish() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e38, 0.0, 3e38]], requires_grad=True)
    loss, nll = smoothed_cross_entropy(logits, torch.tensor([0, 2]), 0.0)
    loss.backward()
    assert float(loss.detach()) == float(nll) == 0.0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_a_non_finite_score_shows_in_loss_and_gradient() -> None:
    logits, labels = random_logits(3, 5)
    with torch.no_grad():
        logits[1, 2] = math.nan
    loss, nll = smoothed_cross_entropy(logits, labels, 0.1)
    loss.backward()
    assert math.isnan(float(loss.detach()))
    assert math.isnan(float(nll))
    assert logits.grad is not None
    assert logits.grad[1].isnan().any()


def test_nll_has_no_gradient_and_no_smoothing() -> None:
    loss, nll = build(smoothing=0.3)(SOURCE, TARGET_IN, LABELS)
    assert loss.requires_grad
    assert not nll.requires_grad
    unsmoothed, same_nll = build(smoothing=0.0)(SOURCE, TARGET_IN, LABELS)
    assert float(nll) == float(same_nll) == pytest.approx(float(unsmoothed.detach()), rel=1e-6)
    assert float(loss.detach()) != pytest.approx(float(nll), rel=1e-3)


def test_the_loss_is_a_sum_over_real_labels_only() -> None:
    """Against the plain formula on the projection of every position, pads included, and then masked."""
    module = build()
    loss, nll = module(SOURCE, TARGET_IN, LABELS)
    hidden = module.model(SOURCE, TARGET_IN)
    real = LABELS != PAD
    expected, expected_nll = plain(module.model.logits(hidden)[real], LABELS[real], 0.1)
    assert int(real.sum()) == 6
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float(nll) == pytest.approx(float(expected_nll.detach()), rel=1e-6)


def test_sums_of_two_micro_batches_are_those_of_one() -> None:
    module = build()
    whole, _ = module(SOURCE, TARGET_IN, LABELS)
    whole.backward()
    expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    parts = []
    for row in (0, 1):
        part, _ = module(SOURCE[row : row + 1], TARGET_IN[row : row + 1], LABELS[row : row + 1])
        part.backward()
        parts.append(float(part.detach()))
    assert sum(parts) == pytest.approx(float(whole.detach()), rel=1e-6)
    for value, parameter in zip(expected, module.parameters(), strict=True):
        assert parameter.grad is not None
        assert (value - parameter.grad).abs().max() <= 1e-5 * value.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_micro_batch_without_real_labels_contributes_exactly_nothing(dtype: torch.dtype) -> None:
    module = build().to(dtype)
    batch = zero_weight_batch()
    source, target_in, labels = (torch.from_numpy(a) for a in (batch.source, batch.target_in, batch.labels))
    loss, nll = module(source, target_in, labels)
    loss.backward()
    assert float(loss.detach()) == float(nll) == 0.0
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name}: every rank must take part in reducing it"
        assert (parameter.grad == 0).all(), name


def test_without_gradients_the_loss_is_the_same() -> None:
    module = build()
    with torch.no_grad():
        silent, _ = module(SOURCE, TARGET_IN, LABELS)
    loss, _ = module(SOURCE, TARGET_IN, LABELS)
    assert not silent.requires_grad
    assert torch.equal(silent, loss.detach())
