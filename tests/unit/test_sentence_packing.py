"""Training on sentences laid end to end: loss and gradients are those of padded batches."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dist_tfm.model.packed as packed_module
from data_pipeline.api import BOS, EOS, PAD, Batch, zero_weight_batch
from data_pipeline.errors import ConfigError
from dist_tfm.config.loading import SECTIONS, check_sections
from dist_tfm.config.schema import Config, DataConfig, ModelConfig, ParallelConfig
from dist_tfm.metrics.writers import Console
from dist_tfm.model.attention import BackendName, attention_kernel
from dist_tfm.model.attention_kernels import Weighting, attend_reference
from dist_tfm.model.initialization import initialize
from dist_tfm.model.packed import Lengths, Segments, attend_packed, pack, varlen_kernel_runs
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.axis import Axis
from dist_tfm.parallel.plan import divide
from dist_tfm.parallel.traffic import tensor_traffic
from dist_tfm.training.dry_run import _say_traffic
from dist_tfm.training.loss import TranslationLoss
from dist_tfm.training.recomputation import recompute_inside
from tests.threads import on_ranks

torch.set_num_threads(1)
SOURCES, TARGETS = (5, 3, 3, 1, 7), (4, 6, 6, 2, 1)
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "matmul": {"attention": "matmul", "norm": "pre"},
    "reference": {"attention": "reference"},
    "learned": {"positions": "learned", "tied": "none"},
    "rotary": {"positions": "rotary", "kv_heads": 1, "normalization": "rms"},
    "relative": {"positions": "relative", "relative_buckets": 8, "relative_distance": 6, "output_bias": True},
    "window": {"self_attention": "window", "window": 2, "positions": "rotary"},
    "d_v": {"positions": "sinusoidal_concatenated", "d_v": 5, "norm": "deep"},
}


def build(packed: bool, **changes: Any) -> TranslationLoss:
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 16, "d_ff": 24, "heads": 2, "dropout": 0.0}
    model = Transformer(ModelConfig(**{**sizes, **changes}), 30)
    initialize(model, 1)
    model.packed = packed
    return TranslationLoss(model, 0.1)


def rows(lengths: tuple[int, ...], seed: int) -> Tensor:
    """Random sentences, EOS last, pads on the right."""
    ids = torch.randint(4, 30, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    places, ends = torch.arange(max(lengths)), torch.tensor(lengths)[:, None] - 1
    return torch.where(places < ends, ids, torch.where(places == ends, EOS, PAD))


def micro_batch(sources: tuple[int, ...] = SOURCES) -> tuple[Tensor, Tensor, Tensor]:
    source, labels = rows(sources, 1), rows(TARGETS, 2)
    before = torch.where(labels == EOS, PAD, labels)[:, :-1]
    return source, torch.cat((torch.full((len(TARGETS), 1), BOS), before), 1), labels


def differentiated(module: TranslationLoss, batch: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    loss, nll = module(*batch)
    loss.backward()
    return [loss.detach(), nll, *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected) > 30
    for mine, right in zip(found, expected, strict=True):
        assert (mine - right).abs().max() <= tolerance * right.abs().max() + 1e-7


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_the_padded_batch(variant: str) -> None:
    """A sentence whose source is empty is among them: nothing is seen of it."""
    changes, batch = VARIANTS[variant], micro_batch((5, 3, 3, 0, 7))
    assert_equal(
        differentiated(build(True, **changes), batch), differentiated(build(False, **changes), batch), tolerance=2e-6
    )


def test_in_bf16_the_loss_is_that_of_the_padded_batch() -> None:
    found, expected = (build(packed).bfloat16()(*micro_batch())[0].detach() for packed in (True, False))
    assert float(found) == pytest.approx(float(expected), rel=2e-3)


@pytest.mark.parametrize("causal", [False, True], ids=["cross", "causal"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["sdpa", "matmul", "reference"])
def test_sentences_attended_one_by_one_equal_a_mask_of_their_boundaries(
    name: BackendName, dtype: torch.dtype, tolerance: float, causal: bool
) -> None:
    """Forward and backward, against the reference under a dense mask; bf16 within 4e-2 of the largest element."""
    queries, keys = ((5, 3, 3, 0, 7),) * 2 if causal else ((5, 3, 3, 2, 7), (2, 4, 4, 0, 9))
    segments = Segments(*(Lengths.of(sizes, torch.device("cpu")) for sizes in (queries, keys)))
    owners = [torch.arange(5).repeat_interleave(torch.tensor(sizes)) for sizes in (queries, keys)]
    mask = (owners[0][:, None] == owners[1][None, :])[None, None]
    found = []
    for dense in (False, True):
        generator = torch.Generator().manual_seed(4)
        shapes = ((sum(queries), 6), (sum(keys), 6), (sum(keys), 5))
        sides = [torch.randn(1, 2, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
        query, key, value = sides
        if dense:
            output = attend_reference(query, key, value, Weighting(mask, causal)).output
        else:
            weighting = Weighting(causal=causal)
            output = attend_packed(attention_kernel(name), True, query, key, value, segments, weighting)
        upstream = torch.randn(output.shape, generator=generator).to(dtype)
        found.append([output.detach(), *torch.autograd.grad(output, sides, upstream)])
    for mine, right in zip(*found, strict=True):
        assert (mine - right).abs().max() <= tolerance * right.abs().max()


def test_a_batch_that_fills_a_round_contributes_exactly_nothing() -> None:
    batch = zero_weight_batch()
    arrays = (torch.from_numpy(a) for a in (batch.source, batch.target_in, batch.labels))
    for value in differentiated(build(True), tuple(arrays)):  # type: ignore[arg-type]
        assert (value == 0).all()


@pytest.mark.parametrize("part", ["attention", "feed_forward"])
def test_parts_are_recomputed_with_segments_too(part: str) -> None:
    module = build(True)
    recompute_inside(module.model, part)  # type: ignore[arg-type]
    for mine, right in zip(
        differentiated(module, micro_batch()), differentiated(build(True), micro_batch()), strict=True
    ):
        assert torch.equal(mine, right)


def test_heads_divided_over_ranks_give_the_same_loss() -> None:
    expected = float(build(False)(*micro_batch())[0].detach())

    def work(axis: Axis) -> float:
        module = build(True)
        divide(module.model, axis)
        return float(TranslationLoss(module.model, 0.1, axis)(*micro_batch())[0].detach())

    assert on_ranks(2, work) == pytest.approx([expected] * 2, rel=1e-6)


def test_packing_lays_every_token_once_and_restarts_positions() -> None:
    source, target_in, labels = micro_batch()
    packed = pack(source, target_in, labels, PAD)
    assert packed.source.tolist() == [[int(i) for row in source for i in row if i != PAD]]
    assert packed.labels.tolist() == [[int(i) for row in labels for i in row if i != PAD]]
    assert packed.target_in.shape == packed.labels.shape
    assert packed.segments.keys.sizes == SOURCES
    assert packed.segments.queries.sizes == TARGETS
    lengths = Lengths.of((2, 0, 3), torch.device("cpu"))
    assert lengths.positions.tolist() == [0, 1, 0, 1, 2]
    assert lengths.offsets.tolist() == [0, 2, 2, 5]
    assert lengths.longest == 3


def test_torchs_kernel_for_varying_lengths_is_told_where_sentences_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs on GPUs only: here a plain function of the same signature takes its place."""
    calls: list[bool] = []

    def by_offsets(
        q: Tensor, k: Tensor, v: Tensor, at_q: Tensor, at_k: Tensor, longest_q: int, longest_k: int, **options: Any
    ) -> Tensor:
        causal = options == {"window_size": (-1, 0)}
        assert causal or not options
        assert q.is_contiguous()
        assert (longest_q, longest_k) == (int(at_q.diff().max()), int(at_k.diff().max()))
        calls.append(causal)
        parts = []
        for (a, b), (c, d) in zip(at_q.unfold(0, 2, 1).tolist(), at_k.unfold(0, 2, 1).tolist(), strict=True):
            sides = (q[a:b], k[c:d], v[c:d])
            heads = (side.transpose(0, 1)[None] for side in sides)
            attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal)
            parts.append(attended[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(packed_module, "varlen_kernel_runs", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_offsets)
    found = differentiated(build(True), micro_batch())
    assert calls == [False, False, *[True, False] * 2]
    assert_equal(found, differentiated(build(False), micro_batch()), tolerance=2e-6)
    calls.clear()
    differentiated(build(True, attention="matmul"), micro_batch())
    assert not calls, "a kernel that is named runs"


def test_when_torchs_kernel_can_run() -> None:
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    assert varlen_kernel_runs(cuda, bf16, (64, 64), 0.0)
    for device, dtype, widths, dropout in (
        (torch.device("cpu"), bf16, (64, 64), 0.0),
        (cuda, torch.float32, (64, 64), 0.0),
        (cuda, bf16, (64, 32), 0.0),
        (cuda, bf16, (60, 60), 0.0),
        (cuda, bf16, (512, 512), 0.0),
        (cuda, bf16, (64, 64), 0.1),
    ):
        assert not varlen_kernel_runs(device, dtype, widths, dropout)


def test_metrics_say_what_runs() -> None:
    model = build(True).model
    assert model.attention_backend(torch.device("cpu"), torch.float32) == "packed-sdpa"
    assert model.attention_backend(torch.device("cpu"), torch.bfloat16) == "packed-matmul"
    assert model.attention_backend(torch.device("cuda"), torch.bfloat16) == "varlen"
    assert model.attention_backend(torch.device("cuda"), torch.float32) == "packed-sdpa"
    relative = build(True, positions="relative").model
    assert relative.attention_backend(torch.device("cuda"), torch.bfloat16) == "packed-sdpa+varlen"
    linear = build(False, self_attention="linear").model
    assert linear.attention_backend(torch.device("cpu"), torch.float32) == "linear+sdpa"


def test_a_pipeline_refuses_it() -> None:
    sections = {name: section() for name, section in SECTIONS.items()}
    sections |= {"data": DataConfig(packing=True), "parallel": ParallelConfig(pp=2)}
    with pytest.raises(ConfigError, match=r"data\.packing: expected false with parallel\.pp=2"):
        check_sections(sections)


@pytest.mark.parametrize("packing", [False, True])
def test_a_dry_run_counts_what_is_sent(packing: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sentences of 300 and 100 source tokens, 200 and 20 target tokens: pads are not sent if they are not there."""
    source, target = (300, 100), (200, 20)
    sides = [np.zeros((2, side[0]), dtype=np.int64) for side in (source, target, target)]
    batch = Batch(*sides, np.array(source), np.array(target), np.arange(2), 0)
    config = Config(model=ModelConfig(d_model=256), data=DataConfig(packing=packing))
    engine = SimpleNamespace(facts=SimpleNamespace(precision="fp32", tensor_parallel=2))
    _say_traffic(engine, batch, config, 1000, Console(enabled=True))  # type: ignore[arg-type]
    cells = (400, 220) if packing else (600, 400)
    sent = tensor_traffic(config.model, *cells, 220, 4).total / (1 << 20)
    assert f"add up {sent:,.1f} MiB" in capsys.readouterr().out
