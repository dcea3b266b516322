"""The compiled kernels against their twins in plain torch, and how they are built."""

import math
import os
import pwd
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dist_tfm.config.layout import check_device
from dist_tfm.config.loading import SECTIONS, check_sections
from dist_tfm.config.schema import Config, ModelConfig, TrainConfig
from dist_tfm.engine.eager_adam import EagerAdamW
from dist_tfm.engine.native_adam import NativeUpdate, UpdatedCopies
from dist_tfm.errors import ConfigError, RunError
from dist_tfm.kernels import building
from dist_tfm.kernels.building import build
from dist_tfm.kernels.dropout import CountedDropout, drawn_numbers, dropout_plainly
from dist_tfm.kernels.native import AdamRule, Kernels
from dist_tfm.model.dropout import Dropout
from dist_tfm.model.initialization import initialize
from dist_tfm.model.layers import LayerRunner
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.axis import Alone, Axis
from dist_tfm.parallel.layers import VocabularyShard
from dist_tfm.training.loss import TranslationLoss
from dist_tfm.training.native import NativeRowLoss, use_counted_dropout
from dist_tfm.training.projected_loss import projected_loss
from dist_tfm.training.randomness import SeededRunner
from dist_tfm.training.smoothing import Goal, row_loss
from tests.compiler import require_compiler
from tests.threads import on_ranks

torch.set_num_threads(1)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SMOOTHING = 0.1
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_compiler()
    return build({**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))})


@pytest.fixture(scope="module")
def kernels(library: Path) -> Kernels:
    return Kernels(library)


def scores_of(dtype: torch.dtype, rows: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    scores = (4 * torch.randn(rows, size, generator=generator)).to(dtype)
    return scores, torch.randint(0, size, (rows,), generator=generator)


def goal_of(labels: Tensor, size: int) -> Goal:
    return Goal(labels, torch.ones_like(labels, dtype=torch.bool), SMOOTHING, VocabularyShard(Alone(), size))


@DTYPES
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("size", [2, 17, 64, 2048, 5003])
def test_rows_are_those_of_the_plain_loss(kernels: Kernels, size: int, with_bias: bool, dtype: torch.dtype) -> None:
    """Against float64: sums to 2e-6, slopes to 2e-6 (fp32) or half a unit in the last place (bf16)."""
    scores, labels = scores_of(dtype, 7, size)
    bias = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype) if with_bias else None
    exact = scores.double()
    right = row_loss(exact, None if bias is None else bias.double(), goal_of(labels, size), differentiate=True)
    kept = scores.clone()
    untouched = kernels.cross_entropy_(kept, bias, labels, SMOOTHING, differentiate=False)
    assert torch.equal(kept, scores)
    found = NativeRowLoss(kernels)(scores, bias, goal_of(labels, size), differentiate=True)
    assert found.tolist() == pytest.approx(right.tolist(), rel=2e-6)
    assert [float(part.sum()) for part in untouched] == found.tolist()
    error = (scores.double() - exact).abs()
    assert (error <= 3e-7 + exact.abs() * (2**-8 if dtype == torch.bfloat16 else 2e-6)).all()


@DTYPES
def test_threads_share_the_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    scores, labels = scores_of(dtype, 23, 100)
    x, twice = torch.randn(100_003).to(dtype), scores.clone()
    loss, nll = kernels.cross_entropy_(scores, None, labels, SMOOTHING, differentiate=True)
    dropped = kernels.dropout(x, 5, 0.3)
    torch.set_num_threads(3)
    try:
        again = kernels.cross_entropy_(twice, None, labels, SMOOTHING, differentiate=True)
        assert torch.equal(kernels.dropout(x, 5, 0.3), dropped)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(again[0], loss)
    assert torch.equal(again[1], nll)
    assert torch.equal(twice, scores)


@DTYPES
@pytest.mark.parametrize("value", [math.inf, math.nan], ids=["inf", "nan"])
def test_a_score_that_is_not_finite_spoils_its_row_alone(kernels: Kernels, value: float, dtype: torch.dtype) -> None:
    scores, labels = scores_of(dtype, 3, 50)
    scores[1, 49] = value
    loss, nll = kernels.cross_entropy_(scores, None, labels, SMOOTHING, differentiate=True)
    assert loss.isfinite().tolist() == nll.isfinite().tolist() == [True, False, True]
    assert scores[1].isnan().all()
    assert scores[::2].isfinite().all()


def test_extreme_scores_lose_nothing(kernels: Kernels) -> None:
    scores = torch.tensor([[3e4, -3e4, 2.9e4], [-200.0, -200.0, -200.0]])
    _, nll = kernels.cross_entropy_(scores, None, torch.tensor([1, 0]), 0.0, differentiate=True)
    assert nll.tolist() == pytest.approx([6e4, math.log(3)], rel=1e-6)
    assert torch.allclose(scores, torch.tensor([[1.0, -1.0, 0.0], [-2 / 3, 1 / 3, 1 / 3]]), atol=1e-6)


def test_operands_that_a_kernel_cannot_take_are_refused(kernels: Kernels) -> None:
    scores, labels = scores_of(torch.float32, 4, 9)
    for bad in (9, -1):
        with pytest.raises(ValueError, match="labels from 0 to 8"):
            kernels.cross_entropy_(scores, None, torch.tensor([0, bad, 1, 2]), SMOOTHING, differentiate=True)
    for given in ((scores.half(), None, labels), (scores.t(), None, torch.zeros(9, dtype=torch.int64))):
        with pytest.raises(ValueError, match="a contiguous tensor in bf16 or fp32"):
            kernels.cross_entropy_(*given, SMOOTHING, differentiate=True)
    for given in ((scores, None, labels[:3]), (scores, torch.zeros(4), labels), (scores, None, labels.int())):
        with pytest.raises(ValueError, match="expected 4 labels in int64"):
            kernels.cross_entropy_(*given, SMOOTHING, differentiate=True)
    with pytest.raises(ValueError, match="a probability from 0 to below 1, found 1"):
        kernels.dropout(scores, 1, 1.0)


def test_a_divided_vocabulary_stays_with_torch(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(9, 6, generator=generator), torch.randn(23, 6, generator=generator)
    labels = torch.randint(0, 23, (9,), generator=generator)

    def work(axis: Axis) -> tuple[Tensor, Tensor]:
        shard = VocabularyShard(axis, 23)
        own = weight[shard.low : shard.high]
        return projected_loss(hidden, own, labels, SMOOTHING, shard, None, NativeRowLoss(kernels))

    whole = projected_loss(hidden, weight, labels, SMOOTHING, VocabularyShard(Alone(), 23))
    for loss, nll in on_ranks(2, work):
        assert [float(loss), float(nll)] == pytest.approx([float(part) for part in whole], rel=1e-6)


@DTYPES
@pytest.mark.parametrize("seed", [0, 1, 0xFFFFFFFF, (1 << 62) - 1])
def test_dropout_draws_the_plain_numbers_bit_for_bit(kernels: Kernels, seed: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, 1009, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[0, :40], x[1, :40] = math.nan, math.inf
    for probability in (0.0, 0.1, 0.5, 1 - 1e-12):
        found, right = kernels.dropout(x, seed, probability), dropout_plainly(x, seed, probability)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        finite = found.isfinite()
        assert torch.equal(finite, right.isfinite())
        assert torch.equal(found[finite].view(bits), right[finite].view(bits))
        assert torch.equal(found.isnan(), right.isnan())
    assert torch.equal(kernels.dropout(x[2:], seed, 0.0), x[2:])


def test_drawn_numbers_are_even_and_those_of_two_seeds_independent() -> None:
    """Each bound is 5 standard deviations of independent draws. Seeds that differ by little, or in their upper half
    alone, give no shifted copies of each other."""
    count, seeds = 1 << 16, (7, 8, 7 + (1 << 32), 123_456_789_012)
    kept = torch.stack([drawn_numbers(seed, count) >= 1 << 31 for seed in seeds]).double() * 2 - 1
    bound = 5 / math.sqrt(count)
    assert (kept.mean(1).abs() <= bound).all()
    assert ((kept[:, 1:] * kept[:, :-1]).mean(1).abs() <= bound).all()  # neighbours
    for shift in (0, 1, -1):
        between = kept @ kept.roll(shift, 1).t() / count
        assert (between - torch.diag(between.diag())).abs().max() <= bound
    low_bits = drawn_numbers(7, count) & 255
    assert (low_bits.bincount(minlength=256) - count / 256).abs().max() <= 5 * math.sqrt(count / 256)


def test_dropout_keeps_the_expectation_and_its_gradient_has_the_same_mask(kernels: Kernels) -> None:
    layer, x = CountedDropout(0.25, kernels), torch.ones(100_000, requires_grad=True)
    torch.manual_seed(1)
    y = layer(x)
    assert float(y.detach().mean()) == pytest.approx(1.0, abs=5 * math.sqrt(1 / 3 / 100_000))
    y.backward(torch.full_like(y, 2.0))
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * y.detach())
    assert not torch.equal(layer(x), y)  # another draw
    torch.manual_seed(1)
    assert torch.equal(layer(x), y)
    assert layer.eval()(x) is x


def micro_batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    source, target = (torch.randint(4, 40, (3, n), generator=generator) for n in (6, 7))
    return source, target[:, :-1], target[:, 1:]


def trained(kernels: Kernels | None, run: LayerRunner, dropout: float) -> list[Tensor]:
    config = ModelConfig(encoder_layers=1, decoder_layers=2, d_model=16, d_ff=24, heads=2, dropout=dropout)
    model = Transformer(config, 40)
    initialize(model, 3)
    of_rows = row_loss if kernels is None else NativeRowLoss(kernels)
    if kernels is not None:
        use_counted_dropout(model, kernels)
        assert not any(isinstance(module, Dropout) for module in model.modules())
    loss, nll = TranslationLoss(model, SMOOTHING, of_rows=of_rows)(*micro_batch(), run)
    loss.backward()
    return [loss.detach(), nll, *(p.grad for p in model.parameters() if p.grad is not None)]


def test_a_model_trains_alike_and_recomputes_its_masks(kernels: Kernels) -> None:
    """Without dropout the plain numbers; with it, the seed decides, also where layers are run again."""
    plain, native = (trained(which, SeededRunner(1, 2, 3, 0), 0.0) for which in (None, kernels))
    for found, right in zip(native, plain, strict=True):
        assert (found - right).abs().max() <= 2e-6 * right.abs().max() + 1e-6
    once, again, kept = (trained(kernels, SeededRunner(1, 2, 3, layers), 0.3) for layers in (1, 1, 0))
    other = trained(kernels, SeededRunner(1, 3, 3, 0), 0.3)
    for one, two, three in zip(once, again, kept, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    assert not torch.equal(once[0], other[0])
    assert not torch.equal(once[0], native[0])


class Updated(NamedTuple):
    """Weights and moments after updates, and a bf16 copy of the weights, if one was kept."""

    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copies: Tensor | None = None


def updated(
    start: Tensor, gradients: list[Tensor], update: NativeUpdate | None, copied: bool = False, **settings: Any
) -> Updated:
    """After an update of each gradient, with a learning rate of its own."""
    weights = start.clone().requires_grad_()
    adam = EagerAdamW([weights], update, lr=1.0, betas=(0.9, 0.98), fused=True, **settings)
    zeros = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(start), "exp_avg_sq": torch.zeros_like(start)}
    adam.state[weights].update(zeros)
    copies = torch.zeros_like(start, dtype=torch.bfloat16) if copied else None
    if update is not None and copies is not None:
        update.keep_copy(weights, copies)
    for step, gradient in enumerate(gradients):
        weights.grad = gradient.clone()
        adam.param_groups[0]["lr"] = 1e-3 * (step + 1)
        adam.step()
    assert float(adam.state[weights]["step"]) == len(gradients)
    moments = (adam.state[weights][name] for name in ("exp_avg", "exp_avg_sq"))
    return Updated(weights.detach(), *moments, copies)


def gradients_of(size: int) -> list[Tensor]:
    """Of twelve updates, by six orders of magnitude apart within each; one element never has any."""
    generator = torch.Generator().manual_seed(size)
    scale = 10.0 ** torch.linspace(-6, 0, size)
    found = [torch.randn(size, generator=generator) * scale for _ in range(12)]
    for gradient in found:
        gradient[size // 2] = 0.0
    return found


@pytest.mark.parametrize("copied", [False, True], ids=["alone", "copied"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("size", [1, 15, 1000, 100_003])
def test_adam_is_torchs(kernels: Kernels, size: int, decay: float, copied: bool) -> None:
    start, gradients = torch.randn(size), gradients_of(size)
    settings = {"eps": 1e-9, "weight_decay": decay}
    expected = updated(start, gradients, None, **settings)
    found = updated(start, gradients, NativeUpdate(kernels), copied, **settings)
    # What cancels out keeps the rounding of its terms: gradients, their squares, and weights moved by up to 0.012 each.
    largest = torch.stack(gradients).abs().amax(dim=0)
    for ours, theirs, terms in zip(found[:3], expected[:3], (torch.full_like(start, 0.1), largest, 0.0), strict=True):
        assert bool(((ours - theirs).abs() <= 2e-6 * theirs.abs() + 2e-7 * terms).all())
    assert not torch.equal(found.weights, start) or size == 1
    if copied:
        assert found.copies is not None
        assert torch.equal(found.copies, found.weights.bfloat16())


def test_threads_share_an_update(kernels: Kernels) -> None:
    start, gradients = torch.randn(5000), gradients_of(5000)
    one = updated(start, gradients, NativeUpdate(kernels), copied=True)
    torch.set_num_threads(3)
    try:
        three = updated(start, gradients, NativeUpdate(kernels), copied=True)
    finally:
        torch.set_num_threads(1)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(one, three, strict=True))


def test_an_update_says_which_copies_it_has_written_once(kernels: Kernels) -> None:
    update = NativeUpdate(kernels)
    weights, other = (torch.ones(4, requires_grad=True) for _ in range(2))
    update.keep_copy(weights, torch.zeros(4, dtype=torch.bfloat16))
    group = {"lr": 1.0, "betas": (0.9, 0.98), "eps": 1e-9, "weight_decay": 0.0}
    for tensor in (weights, other):
        tensor.grad = torch.ones(4)
        with torch.no_grad():
            update(tensor, {name: torch.zeros(()) if name == "step" else torch.zeros(4) for name in MOMENTS}, group)
    assert update.take_written() == {weights}
    assert update.take_written() == set()
    weights.grad = None
    with pytest.raises(ValueError, match=r"expected a gradient of \[4\], found none"):
        update(weights, {}, group)


def test_a_step_writes_the_bf16_weights_and_the_pass_for_them_is_left_out(kernels: Kernels) -> None:
    update, copied = NativeUpdate(kernels), list[str]()
    masters, weights = torch.ones(4, requires_grad=True), torch.zeros(4, dtype=torch.bfloat16)
    optimizer = SimpleNamespace(
        bf16_groups=[],
        fp32_groups_flat_partition=[masters],
        bf16_partitioned_groups=[[weights]],
        update_lp_params=lambda: copied.append("all"),
    )
    assert UpdatedCopies.fits(optimizer, 1)
    assert not UpdatedCopies.fits(optimizer, 2)
    UpdatedCopies(optimizer, update)
    adam = EagerAdamW([masters], update, lr=0.5)
    adam.state[masters].update({"step": torch.zeros(()), "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)})
    for _ in range(2):
        masters.grad = torch.ones(4)
        adam.step()
        optimizer.update_lp_params()
        assert torch.equal(weights, masters.detach().bfloat16())
    assert copied == []
    optimizer.update_lp_params()  # as after a checkpoint was read into the masters
    assert copied == ["all"]
    del optimizer.update_lp_params
    with pytest.raises(RunError, match="expected update_lp_params in DeepSpeed's BF16_Optimizer, found none"):
        UpdatedCopies(optimizer, update)


def test_adam_refuses_what_it_cannot_take(kernels: Kernels) -> None:
    rule = AdamRule(1e-3, 0.0, 0.9, 0.98, 1e-9, 1)
    fine = [torch.zeros(6) for _ in range(4)]
    for place, wrong in ((1, torch.zeros(5)), (2, torch.zeros(6).double()), (3, torch.zeros(12)[::2])):
        operands = [*fine[:place], wrong, *fine[place + 1 :]]
        with pytest.raises(ValueError, match="expected"):
            kernels.adam_(*operands, rule, None)
    for copies in (torch.zeros(6), torch.zeros(7, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="copies in bf16"):
            kernels.adam_(*fine, rule, copies)
    with pytest.raises(ValueError, match="no closure"):
        EagerAdamW([torch.zeros(1)], NativeUpdate(kernels)).step(lambda: 0.0)


def test_processes_that_build_at_once_all_get_the_library(tmp_path: Path, library: Path) -> None:
    variables, found = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, []
    threads = [threading.Thread(target=lambda: found.append(build(variables))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    Kernels(found[0])
    assert [path.name for path in found[0].parent.iterdir()] == ["kernels.so"]  # nothing half made is left
    written = found[0].stat().st_mtime_ns
    assert build(variables) == found[0]
    assert found[0].stat().st_mtime_ns == written
    assert found[0].parent.name == library.parent.name  # the same key in another cache


@pytest.mark.usefixtures("library")
def test_a_library_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, int]] = []

    def sync(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        synced.append((Path(f"/proc/self/fd/{descriptor}").resolve().name, size))

    monkeypatch.setattr(os, "fsync", sync)
    place = build({**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert [name for name, _ in synced] == [place.name, place.parent.name]
    assert synced[0][1] == place.stat().st_size


def test_what_cannot_be_built_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with pytest.raises(ConfigError, match="expected no-such-compiler, found none: install it"):
        build({**variables, "CXX": "no-such-compiler"})
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: bad option' >&2\nexit 4\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match=r"could not compile the kernels \(exit code 4: .*bad option\)"):
        build({**variables, "CXX": str(broken)})
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    broken.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(building, "PATIENCE", 0.2)
    with pytest.raises(ConfigError, match=r"has not compiled the kernels in 0.2 s"):
        build({**variables, "CXX": str(broken)})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot keep the compiled kernels in .*XDG_CACHE_HOME"):
        build({**variables, "XDG_CACHE_HOME": str(tmp_path / "file")})
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match=r"this user has no home directory: name a folder .*XDG_CACHE_HOME"):
        build({**variables, "XDG_CACHE_HOME": "relative"})
    (tmp_path / "kernels.so").write_text("no library")
    with pytest.raises(ConfigError, match=r"cannot load .*kernels.so"):
        Kernels(tmp_path / "kernels.so")


def test_native_kernels_are_a_cpus_and_not_compiled_again() -> None:
    config = Config(train=TrainConfig(kernels="native"))
    check_device(config, "cpu")
    with pytest.raises(ConfigError, match=r"native ones run on CPUs only, found launch\.device cuda"):
        check_device(config, "cuda")
    sections = {name: kind() for name, kind in SECTIONS.items()}
    with pytest.raises(ConfigError, match=r"train\.compile: expected false with train\.kernels=native"):
        check_sections(sections | {"train": TrainConfig(kernels="native", compile=True)})
