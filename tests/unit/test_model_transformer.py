"""The whole model: what may influence what, in both norm placements."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from data_pipeline.api import BOS, EOS, PAD
from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.embedding import Embedding
from dist_tfm.model.feed_forward import FeedForward
from dist_tfm.model.initialization import initialize
from dist_tfm.model.layers import run_plainly
from dist_tfm.model.norm import connect_post_norm, connect_pre_norm
from dist_tfm.model.positions import SinusoidalPositions, sinusoids
from dist_tfm.model.transformer import Transformer
from dist_tfm.training.loss import TranslationLoss

torch.set_num_threads(1)
VOCAB = 41
SMALL = ModelConfig(encoder_layers=2, decoder_layers=3, d_model=32, d_ff=48, heads=4, d_k=6, d_v=10, dropout=0.1)
NORMS = pytest.mark.parametrize("norm", ["post", "pre"])
KERNELS = pytest.mark.parametrize("attention", ["sdpa", "reference"])


def build(dtype: torch.dtype = torch.float32, **changes: object) -> Transformer:
    model = Transformer(replace(SMALL, **changes), VOCAB)  # type: ignore[arg-type]
    initialize(model, seed=7)
    return model.to(dtype).eval()


def ragged(lengths: list[int], width: int, seed: int, first: int | None = None) -> Tensor:
    """[B, width] ids: `first` if given, random tokens, EOS as the last real one unless `first` is given, then PAD."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (len(lengths), width), generator=generator)
    for row, length in enumerate(lengths):
        ids[row, length:] = PAD
        if first is None and length:
            ids[row, length - 1] = EOS
    if first is not None:
        ids[:, 0] = first
    return ids


def sentences() -> tuple[Tensor, Tensor, Tensor]:
    """source [3, 7], target_in [3, 6], labels [3, 6], with pads in each."""
    target_in = ragged([6, 3, 1], 6, seed=2, first=BOS)
    labels = torch.cat([target_in[:, 1:], torch.full((3, 1), PAD)], 1)
    for row, length in enumerate([6, 3, 1]):
        labels[row, length - 1] = EOS
    return ragged([7, 4, 2], 7, seed=1), target_in, labels


def widen(ids: Tensor, columns: int) -> Tensor:
    return torch.cat([ids, torch.full((ids.size(0), columns), PAD)], 1)


def loss_and_gradients(model: Transformer, source: Tensor, target_in: Tensor, labels: Tensor) -> list[Tensor]:
    module = TranslationLoss(model, 0.1)
    model.zero_grad()
    loss, nll = module(source, target_in, labels, run_plainly)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [loss.detach(), nll, *gradients]


@NORMS
@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_later_target_token_changes_no_bit_before_it(norm: str, attention: str, dtype: torch.dtype) -> None:
    model = build(dtype, norm=norm, attention=attention)
    source, target_in, _ = sentences()
    target_in[target_in == PAD] = 5
    before = model(source, target_in)
    for place in range(1, target_in.size(1)):
        changed = target_in.clone()
        changed[:, place] = (changed[:, place] - 4 + 1) % (VOCAB - 4) + 4
        after = model(source, changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place:], before[:, place:])


@NORMS
@KERNELS
def test_added_padding_columns_change_neither_loss_nor_gradients(norm: str, attention: str) -> None:
    """Within 1e-5 of each tensor's largest element: other shapes sum in another order."""
    model = build(norm=norm, attention=attention)
    source, target_in, labels = sentences()
    narrow = loss_and_gradients(model, source, target_in, labels)
    wide = loss_and_gradients(model, widen(source, 5), widen(target_in, 9), widen(labels, 9))
    for a, b in zip(narrow, wide, strict=True):
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()


@NORMS
@KERNELS
def test_what_stands_in_padding_is_never_read(norm: str, attention: str) -> None:
    """The encoder's output at pads may be anything: no bit of the decoder's real positions and of the loss changes."""
    model = build(norm=norm, attention=attention)
    source, target_in, _ = sentences()
    mask = model.source_mask(source)
    memory = model.encode(source)
    filled = memory.masked_fill((source == PAD)[..., None], 1e3)
    assert not torch.equal(memory, filled)
    assert torch.equal(model.decode(target_in, memory, mask), model.decode(target_in, filled, mask))


@NORMS
def test_target_ids_where_labels_are_padding_change_no_bit_of_loss_and_gradients(norm: str) -> None:
    model = build(norm=norm)
    source, target_in, labels = sentences()
    before = loss_and_gradients(model, source, target_in, labels)
    noisy = target_in.masked_fill(target_in == PAD, 9)
    after = loss_and_gradients(model, source, noisy, labels)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    for a, b in zip(before[2:], after[2:], strict=True):
        assert (a - b).abs().max() <= 1e-6 * a.abs().max()


@NORMS
@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_source_of_pads_alone_gives_finite_loss_and_gradients(norm: str, attention: str, dtype: torch.dtype) -> None:
    model = build(dtype, norm=norm, attention=attention)
    source, target_in, labels = sentences()
    source[1] = PAD
    for tensor in loss_and_gradients(model, source, target_in, labels):
        assert tensor.isfinite().all()


@NORMS
def test_sentences_of_a_batch_do_not_influence_each_other(norm: str) -> None:
    model = build(norm=norm)
    source, target_in, _ = sentences()
    together = model(source, target_in)
    for row in range(3):
        alone = model(source[row : row + 1], target_in[row : row + 1])
        assert torch.allclose(together[row], alone[0], atol=2e-6)


@NORMS
def test_every_real_source_token_reaches_every_target_position(norm: str) -> None:
    model = build(norm=norm)
    source, target_in, _ = sentences()
    before = model(source, target_in)
    for place in range(source.size(1)):
        changed = source.clone()
        changed[0, place] = 4 if changed[0, place] != 4 else 5
        assert (model(changed, target_in)[0] != before[0]).any(-1).all()


@NORMS
def test_both_kernels_give_the_same_loss_and_gradients(norm: str) -> None:
    fast, exact = (loss_and_gradients(build(norm=norm, attention=name), *sentences()) for name in ("sdpa", "reference"))
    for a, b in zip(fast, exact, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_the_kernel_that_runs_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Tensor, **options: object) -> Tensor:
        calls.append(1)
        return fused(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    source, target_in, _ = sentences()
    for name, expected in (("sdpa", 2 + 2 * 3), ("reference", 0), ("matmul", 0), ("auto", 2 + 2 * 3)):
        calls.clear()
        model = build(attention=name)
        model(source, target_in)
        ran = "sdpa" if name == "auto" else name
        assert model.attention_backend(torch.device("cpu"), torch.float32) == ran
        assert len(calls) == expected


@NORMS
def test_the_three_embeddings_are_one_parameter(norm: str) -> None:
    model = build(norm=norm)
    shaped = [name for name, p in model.named_parameters() if VOCAB in p.shape]
    assert shaped == ["embedding.weight"]
    source, target_in, _ = sentences()
    hidden = model(source, target_in)
    assert torch.equal(model.logits(hidden), hidden @ model.embedding.weight.T), "no bias, the same matrix"
    before = model.logits(hidden)
    unused = next(i for i in range(4, VOCAB) if not (source == i).any() and not (target_in == i).any())
    with torch.no_grad():
        model.embedding.weight[unused] *= 2.0
    assert torch.equal(model(source, target_in), hidden), "no token of the input used that row"
    assert torch.allclose(model.logits(hidden)[..., unused], 2.0 * before[..., unused])


def test_embedding_is_scaled_token_plus_position() -> None:
    embedding = Embedding(SMALL, VOCAB).eval()
    ids = torch.tensor([[4, 9, 4]])
    expected = embedding.weight[ids] * 32**0.5 + sinusoids(3, 32)
    assert torch.allclose(embedding(ids), expected)
    shifted = embedding.weight[ids] * 32**0.5 + sinusoids(8, 32)[5:8]
    assert torch.allclose(embedding(ids, 5), shifted)


def test_feed_forward_is_relu_between_two_affine_maps() -> None:
    layer = FeedForward(SMALL)
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    inner = (x @ layer.up.weight.T + layer.up.bias).clamp(min=0)
    assert (inner == 0).any()
    assert torch.allclose(layer(x), inner @ layer.down.weight.T + layer.down.bias, atol=1e-6)


@NORMS
@KERNELS
def test_gradients_of_every_parameter_are_slopes_of_the_loss(norm: str, attention: str) -> None:
    """Central differences in float64 along a random direction of each parameter; all three uses of the tied matrix."""
    model = build(torch.float64, norm=norm, attention=attention)
    module, batch, step = TranslationLoss(model, 0.1), sentences(), 1e-6
    module(*batch)[0].backward()
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        start = parameter.detach().clone()
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.copy_(start + sign * step * direction)
                values.append(float(module(*batch)[0]))
            parameter.copy_(start)
        assert parameter.grad is not None
        slope = float((parameter.grad * direction).sum())
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-4, abs=1e-5), name


def test_sinusoids_are_interleaved_as_in_the_paper() -> None:
    table = sinusoids(50, 6)
    assert table.dtype == torch.float32
    for position in (0, 1, 49):
        for pair in range(3):
            angle = torch.tensor(position / 10_000 ** (2 * pair / 6), dtype=torch.float64)
            assert float(table[position, 2 * pair]) == pytest.approx(float(angle.sin()), abs=1e-7)
            assert float(table[position, 2 * pair + 1]) == pytest.approx(float(angle.cos()), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_positions_grow_on_demand_and_keep_their_values(dtype: torch.dtype) -> None:
    positions = SinusoidalPositions(16)
    like = torch.empty(0, dtype=dtype)
    short = positions.rows(0, 5, like)
    long = positions.rows(0, 3001, like)
    assert long.shape == (3001, 16)
    assert long.dtype == dtype
    assert torch.equal(long[:5], short)
    assert torch.equal(long, sinusoids(3001, 16).to(dtype)), "rounded once, from fp32"
    assert torch.equal(positions.rows(2990, 20, like), sinusoids(3010, 16)[2990:].to(dtype))


def test_inputs_longer_than_any_before_are_not_cut() -> None:
    model = build()
    source = ragged([600], 600, seed=1)
    hidden = model(source, ragged([700], 700, seed=2, first=BOS))
    assert hidden.shape == (1, 700, 32)
    assert hidden.isfinite().all()


def test_post_and_pre_norm_compose_as_in_their_formulae() -> None:
    norm, dropout = nn.LayerNorm(8), nn.Dropout(0.5)
    dropout.eval()
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 8)
    assert torch.equal(connect_post_norm(x, torch.tanh, norm, dropout), norm(x + torch.tanh(x)))
    assert torch.equal(connect_pre_norm(x, torch.tanh, norm, dropout), x + torch.tanh(norm(x)))
    dropout.train()
    torch.manual_seed(3)
    dropped = dropout(torch.tanh(x))
    torch.manual_seed(3)
    assert torch.equal(connect_post_norm(x, torch.tanh, norm, dropout), norm(x + dropped)), (
        "the residual is not dropped"
    )


@NORMS
def test_a_stack_ends_normalised(norm: str) -> None:
    """Post-norm by its last layer, pre-norm by a norm of its own: else pre-norm's output grows with depth."""
    model = build(norm=norm)
    source, target_in, _ = sentences()
    for output in (model.encode(source), model(source, target_in)):
        assert torch.allclose(output.mean(-1), torch.zeros(()), atol=1e-5)
        assert torch.allclose(output.var(-1, unbiased=False), torch.ones(()), atol=1e-3)
    names = [name for name, _ in model.named_parameters()]
    assert ("encoder.norm.weight" in names) == ("decoder.norm.bias" in names) == (norm == "pre")


def test_canonical_names_and_shapes() -> None:
    """These names are the checkpoint format."""
    shapes = {name: tuple(p.shape) for name, p in build(encoder_layers=1, decoder_layers=1).named_parameters()}
    attention = {"query": (24, 32), "key": (24, 32), "value": (40, 32), "output": (32, 40)}
    expected: dict[str, tuple[int, ...]] = {"embedding.weight": (VOCAB, 32)}
    for stack, kinds in (("encoder", ["self"]), ("decoder", ["self", "cross"])):
        layer = f"{stack}.layers.0"
        for kind in kinds:
            expected |= {f"{layer}.{kind}_attention.{part}.weight": shape for part, shape in attention.items()}
        for norm in [f"{kind}_attention" for kind in kinds] + ["feed_forward"]:
            expected |= {f"{layer}.{norm}_norm.{part}": (32,) for part in ("weight", "bias")}
        expected |= {f"{layer}.feed_forward.up.weight": (48, 32), f"{layer}.feed_forward.up.bias": (48,)}
        expected |= {f"{layer}.feed_forward.down.weight": (32, 48), f"{layer}.feed_forward.down.bias": (32,)}
    assert shapes == expected
    assert [name for name, _ in build().named_buffers()] == [], "nothing but parameters belongs to a checkpoint"


@NORMS
def test_layers_are_numbered_through_the_whole_model_and_hold_all_dropout(norm: str) -> None:
    """A runner that runs each layer in evaluation mode leaves no dropout in a model in training mode."""
    model = build(norm=norm, dropout=0.5, attention_dropout=0.5)
    source, target_in, _ = sentences()
    expected = model(source, target_in)
    numbers: list[int] = []

    def without_dropout(number: int, layer: nn.Module, *inputs: Tensor) -> Tensor:
        numbers.append(number)
        layer.eval()
        output: Tensor = layer(*inputs)
        layer.train()
        return output

    model.train()
    assert torch.equal(model(source, target_in, without_dropout), expected)
    assert numbers == [0, 2, 3, 1, 4, 5, 6]
    assert not torch.equal(model(source, target_in), expected)


def test_dropouts_are_the_ones_that_the_configuration_names() -> None:
    def probabilities(**changes: float) -> tuple[float, set[float]]:
        model = build(**changes)
        layers = {m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout) and "layers" in name}
        return model.embedding.dropout.p, layers

    assert probabilities(dropout=0.3) == (0.3, {0.3})
    assert probabilities(dropout=0.3, embedding_dropout=0.2) == (0.2, {0.3})
