"""Models of other programs in our terms and ours in theirs: equal scores, with weights that nobody here made."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from data_pipeline.api import BOS, EOS, PAD
from data_pipeline.tokenizer import Tokenizer
from dist_tfm import average, import_model
from dist_tfm.checkpoint.layout import CONFIG, TOKENIZER
from dist_tfm.config.loading import SECTIONS, check_sections, read_config
from dist_tfm.config.schema import ModelConfig
from dist_tfm.errors import InputError
from dist_tfm.inference.loading import load_models
from dist_tfm.interop.marian import from_marian, marian_settings, marian_weights
from dist_tfm.interop.pieces import pieces_of_folder
from dist_tfm.interop.t5 import from_t5, t5_settings, t5_weights
from dist_tfm.interop.torch_transformer import from_torch, torch_settings, torch_weights
from dist_tfm.interop.translation import Imported, token_order
from dist_tfm.model.attention import padding_mask
from dist_tfm.model.initialization import initialize
from dist_tfm.model.layers import run_plainly
from dist_tfm.model.transformer import Transformer

torch.set_num_threads(1)
VOCAB = 320
SIZES = {"d_model": 32, "d_ff": 48, "heads": 4}
NEEDS = "transformers is what this is compared with (pip install transformers)"


def shaken(module: nn.Module, seed: int = 1) -> nn.Module:
    """Every parameter and stored bias moved, so that none is 0 or 1 only because it was never trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if "embed_positions" not in name:
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
    return module.eval()


def build(imported: Imported) -> Transformer:
    model = Transformer(imported.config, len(imported.order))
    model.load_state_dict(imported.weights)
    return model.eval()


def ids(size: int, low: int) -> tuple[Tensor, Tensor]:
    """Source [2, 9] and target [2, 40] ids from low to size - 1; the longer ones reach far buckets of distances."""
    generator = torch.Generator().manual_seed(4)
    return torch.randint(low, size, (2, 9), generator=generator), torch.randint(low, size, (2, 40), generator=generator)


@torch.no_grad()
def compare(theirs: Any, imported: Imported, pad: int, start: int, end: int) -> Transformer:
    """Asserts equal scores for their ids and ours, the second source being shorter; our model.

    1e-5 is for scores of about 1: fp32 alone moves either program's by 2e-5 of scores of about 10.
    """
    ours, order = build(imported), imported.order
    back = {row: token for token, row in enumerate(order) if row is not None}
    source, target = ids(VOCAB, 5)
    source[:, -1] = end
    source[1, 6:] = torch.tensor([end, pad, pad])
    target[:, 0] = start
    expected = theirs(source, attention_mask=source.ne(pad) | (torch.arange(9) < 7), decoder_input_ids=target).logits
    renumber = torch.tensor([back.get(row, -1) for row in range(VOCAB)])
    real = renumber[source]
    real[1, 7:] = PAD
    found = ours.logits(ours(real, renumber[target]))
    assert torch.equal(real[:, :6], renumber[source[:, :6]])
    assert (int(real[1, 6]), int(renumber[start])) == (EOS, BOS)
    known = torch.tensor([token for token, row in enumerate(order) if row is not None])
    rows = torch.tensor([row for row in order if row is not None])
    assert sorted(rows.tolist()) == list(range(VOCAB))
    assert float((found[..., known] - expected[..., rows]).abs().max()) < 1e-5
    assert float(expected.std()) > 0.3, "scores that say nothing compare nothing"
    silent = found.softmax(-1)[..., [token for token, row in enumerate(order) if row is None]]
    assert not silent.any()
    return ours


@torch.no_grad()
def compare_back(theirs: Any, ours: Transformer) -> None:
    """Asserts equal scores of our model and of theirs with our weights, both with our ids, but for silent tokens."""
    source, target = ids(ours.vocab_size, 5)
    source[1, 6:] = torch.tensor([EOS, PAD, PAD])
    target[:, 0] = BOS
    expected = ours.logits(ours(source, target))
    found = theirs.eval()(source, attention_mask=source.ne(PAD), decoder_input_ids=target).logits
    assert float((found - expected)[..., BOS:].abs().max()) < 1e-5


@pytest.mark.parametrize("norm_first", [False, True])
@torch.no_grad()
def test_torch_transformer_both_ways(norm_first: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.Transformer(32, 4, 2, 3, 48, 0.0, nn.functional.gelu, norm_first=norm_first, batch_first=True)
    shaken(theirs).train()  # no dropout; evaluation would take a path that leaves pads out
    config, weights = from_torch(theirs)
    ours = Transformer(config, VOCAB)
    assert ours.load_state_dict(weights, strict=False).missing_keys == ["embedding.weight"]
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(2, length, 32, generator=generator) for length in (7, 5))
    pads = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    mask = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5), "tgt_is_causal": True}
    expected = theirs(x, y, src_key_padding_mask=pads, memory_key_padding_mask=pads, **mask)
    visible = padding_mask(pads.long(), 1)
    found = ours.decoder(y, ours.encoder(x, visible, run_plainly), visible, run_plainly)
    assert float((found - expected).abs().max()) < 1e-5
    again = nn.Transformer(**torch_settings(config))
    again.load_state_dict(torch_weights(ours))
    again.train()
    assert torch.equal(again(x, y, src_key_padding_mask=pads, memory_key_padding_mask=pads, **mask), expected)
    assert config.norm == ("pre" if norm_first else "post")
    with pytest.raises(ValueError, match=r"needs a final norm, model\.attention_bias=true"):
        torch_settings(ModelConfig())


@pytest.mark.parametrize(("activation", "shared"), [("swish", True), ("gelu", False)])
def test_marian_both_ways(activation: str, shared: bool) -> None:
    transformers = pytest.importorskip("transformers", reason=NEEDS)
    sizes = {
        **{"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
        **{"pad_token_id": 319, "decoder_start_token_id": 319, "eos_token_id": 0, "forced_eos_token_id": 0},
        **{"share_encoder_decoder_embeddings": shared, "scale_embedding": True, "activation_function": activation},
    }
    torch.manual_seed(0)
    theirs = shaken(transformers.MarianMTModel(transformers.MarianConfig(**sizes)))
    with torch.no_grad():
        theirs.final_logits_bias[:, 5] = 2.0
        for parameter in (theirs.get_encoder().embed_tokens.weight, theirs.get_decoder().embed_tokens.weight):
            parameter.mul_(3.0)
    settings = {**sizes, "model_type": "marian"}
    imported = from_marian(settings, theirs.state_dict(), 1, "theirs")
    assert (imported.config.tied, imported.order[:5]) == ("all" if shared else "decoder", (None, 319, 0, 1, 2))
    ours = compare(theirs, imported, pad=319, start=319, end=0)
    back = transformers.MarianMTModel(transformers.MarianConfig(**marian_settings(ours)))
    missing, unknown = back.load_state_dict(marian_weights(ours), strict=False)
    assert not unknown
    assert all(name.endswith(("embed_positions.weight", "embed_tokens.weight", "lm_head.weight")) for name in missing)
    back.tie_weights()
    compare_back(back, ours)


@pytest.mark.parametrize("case", ["gated", "first", "untied", "umt5"])
def test_t5_both_ways(case: str) -> None:
    transformers = pytest.importorskip("transformers", reason=NEEDS)
    kind = "UMT5" if case == "umt5" else "T5"
    sizes = {
        **{"vocab_size": VOCAB, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3},
        **{"num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
        **{"feed_forward_proj": "relu" if case == "first" else "gated-gelu", "tie_word_embeddings": case != "untied"},
        **{"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    }
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**sizes))
    if case == "untied":
        theirs.lm_head.weight = nn.Parameter(torch.zeros(VOCAB, 32))
    shaken(theirs)
    if theirs.config.scale_decoder_outputs:
        with torch.no_grad():
            theirs.lm_head.weight.mul_(4.0)  # else its scores would hardly differ from each other
    settings = {**sizes, "scale_decoder_outputs": theirs.config.scale_decoder_outputs}
    imported = from_t5(settings, theirs.state_dict(), "theirs")
    assert imported.config.tied == ("inputs" if case == "untied" else "all")
    assert imported.order[:5] == (None, 0, 1, 2, 3)
    ours = compare(theirs, imported, pad=0, start=0, end=1)
    if case == "untied":
        with pytest.raises(ValueError, match=r"it needs model\.tied=all"):
            t5_settings(ours)
        return
    described = t5_settings(ours)
    assert described.pop("model_type") == kind.lower()
    back = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**described))
    missing, unknown = back.load_state_dict(t5_weights(ours), strict=False)
    assert not unknown
    assert all(name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in missing)
    back.tie_weights()
    with torch.no_grad():
        ours.score_bias.bias.zero_()  # type: ignore[union-attr]
    compare_back(back, ours)


def saved(folder: Path, **changes: object) -> Transformer:
    """One of our models, written as Marian's programs write theirs."""
    config = ModelConfig(encoder_layers=1, decoder_layers=1, **SIZES, positions="sinusoidal_concatenated")
    config = replace(config, layer_norm_eps=1e-5, attention_bias=True)
    model = Transformer(config, VOCAB)
    initialize(model, 3)
    folder.mkdir()
    save_file({**marian_weights(model), "final_logits_bias": torch.zeros(1, VOCAB)}, folder / "model.safetensors")
    settings = {**marian_settings(model), "model_type": "marian", "decoder_start_token_id": PAD, **changes}
    (folder / "config.json").write_text(json.dumps(settings))
    return model.eval()


@torch.no_grad()
def test_an_imported_run_is_read_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, run = saved(tmp_path / "theirs"), tmp_path / "run"
    assert import_model.main([str(tmp_path / "theirs"), "--output", str(run)]) == 0
    assert "marian, " in capsys.readouterr().out
    assert average.main([str(run)]) == 0
    check_sections({name: getattr(read_config(run / "checkpoints" / "step_0" / CONFIG), name) for name in SECTIONS})
    source, target = ids(VOCAB, 5)
    for place in (run, run / "averaged"):
        [ours], tokenizer, config = load_models([place], torch.device("cpu"), torch.float32)
        assert (tokenizer.vocab_size, config.tokenizer.kind) == (VOCAB + 2, "ids")
        # Their 0 is our BOS, 2 our EOS; 1 and 3 (unknown is not told) come after them; the others move by two.
        found = ours.logits(ours(source + 2, target + 2))[..., 7:]
        torch.testing.assert_close(found, model.logits(model(source, target))[..., 5:], rtol=0, atol=1e-5)
    with pytest.raises(InputError, match="an empty one, found something in it"):
        import_model.main([str(tmp_path / "theirs"), "--output", str(run)])


def test_what_has_no_equal_is_refused_and_nothing_is_unpickled(tmp_path: Path) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(InputError) as refused:
            import_model.main([str(folder), "--output", str(tmp_path / "out")])
        assert not (tmp_path / "out" / "checkpoints" / "step_0").exists()
        return str(refused.value)

    for name, (changes, said) in {
        "kind": ({"model_type": "bart"}, "expected model_type to be one of marian, t5, mt5, umt5, found 'bart'"),
        "activation": ({"activation_function": "mish"}, "expected activation_function to be one of relu, gelu, swish"),
        "heads": ({"decoder_attention_heads": 2}, "expected one value for encoder_attention_heads and decoder"),
        "type": ({"d_model": "32"}, "expected d_model to be int, found '32'"),
        "norm": ({"normalize_before": True}, "normalize_before has no equal here"),
        "layers": ({"decoder_layers": 0}, "decoder"),
        "fewer": ({"encoder_layers": 2}, "expected a tensor model.encoder.layers.1."),
        "width": (
            {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40},
            "expected model.encoder.layers.0.fc1.weight to be [40",
        ),
        "ids": ({"eos_token_id": 0}, "expected different special ids"),
    }.items():
        saved(tmp_path / name, **changes)
        assert said in refusal(tmp_path / name), name
    saved(tmp_path / "pickle")
    (tmp_path / "pickle" / "model.safetensors").rename(tmp_path / "pickle" / "pytorch_model.bin")
    assert "found pytorch_model.bin only: such files can run code" in refusal(tmp_path / "pickle")
    (tmp_path / "pickle" / "config.json").write_text("[1]")
    assert "found no JSON object" in refusal(tmp_path / "pickle")


def test_their_ids_become_ours() -> None:
    assert token_order(6, pad=5, start=5, end=0, unknown=1) == (None, 5, 0, 1, 2, 3, 4)
    assert token_order(5, pad=3, start=4, end=0, unknown=None) == (3, 4, 0, None, 1, 2)
    with pytest.raises(InputError, match="below 5, found pad 3, start 0, end 0"):
        token_order(5, pad=3, start=0, end=0, unknown=None)


def sentences(language: str) -> Iterator[str]:
    words = {"en": "the cat dog sees a tall man quickly", "de": "die Katze der Hund sieht einen Mann schnell"}[language]
    for first in words.split():
        yield from (f"{first} {second} {third}" for second in words.split() for third in words.split())


def train_pieces(path: Path, language: str, **ids_: int) -> sentencepiece.SentencePieceProcessor:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(language),
        model_prefix=str(path.with_suffix("")),
        vocab_size=40,
        hard_vocab_limit=False,
        model_type="unigram",
        minloglevel=5,
        num_threads=1,
        **ids_,
    )
    path.with_suffix(".model").rename(path)
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def test_pieces_of_t5_are_cut_alike_with_our_ids(tmp_path: Path) -> None:
    theirs = train_pieces(tmp_path / "spiece.model", "en", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    size = theirs.vocab_size() + 5  # five rows without a piece
    order = token_order(size, pad=0, start=0, end=1, unknown=2)
    pieces = pieces_of_folder(tmp_path, order)
    assert pieces is not None
    ours = Tokenizer(pieces[0], "theirs")
    assert (ours.is_shared, ours.vocab_size) == (pieces[0] == pieces[1], size + 1)
    for text in ("the tall dog sees", "quickly a man xyz"):
        assert ours.encode([text])[0] == [order.index(i) for i in theirs.encode(text)]
    assert ours.decode(ours.encode(["the tall dog sees"])[0]) == "the tall dog sees"
    assert ours.decode([size]) == ""


def test_pieces_of_marian_are_cut_by_side_with_the_ids_of_one_vocabulary(tmp_path: Path) -> None:
    sides = {
        side: train_pieces(tmp_path / f"{side}.spm", language)
        for side, language in (("source", "en"), ("target", "de"))
    }
    names = sorted({p.id_to_piece(i) for p in sides.values() for i in range(3, p.vocab_size())})
    vocabulary = {"</s>": 0, "<unk>": 1, **{name: i for i, name in enumerate(names, 2)}, "<pad>": len(names) + 2}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    order = token_order(len(vocabulary), pad=len(names) + 2, start=len(names) + 2, end=0, unknown=1)
    pieces = pieces_of_folder(tmp_path, order)
    assert pieces is not None
    for content, (side, text) in zip(pieces, (("source", "the tall dog"), ("target", "einen Hund Katze")), strict=True):
        ours, expected = Tokenizer(content, side), sides[side].encode(text, out_type=str)
        assert ours.vocab_size == len(order)
        assert ours.encode([text])[0] == [order.index(vocabulary[piece]) for piece in expected]
        assert ours.decode(ours.encode([text])[0]) == text
    (tmp_path / "vocab.json").unlink()
    assert pieces_of_folder(tmp_path, order) is None


def test_two_vocabularies_give_the_source_a_matrix_of_its_own(tmp_path: Path) -> None:
    folder, run = tmp_path / "theirs", tmp_path / "run"
    saved(folder)
    for side, language in (("source", "en"), ("target", "de")):
        train_pieces(folder / f"{side}.spm", language)
    names = ["<pad>", "a", "</s>", "<unk>", *(f"x{i}" for i in range(VOCAB - 4))]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    import_model.main([str(folder), "--output", str(run)])
    config = read_config(run / "checkpoints" / "step_0" / CONFIG)
    assert (config.model.tied, config.tokenizer.shared) == ("decoder", False)
    check_sections({name: getattr(config, name) for name in SECTIONS})
    tokenizer = Tokenizer.load(run / "checkpoints" / "step_0" / TOKENIZER)
    assert not tokenizer.is_shared
    [model], _, _ = load_models([run], torch.device("cpu"), torch.float32)
    assert model.source_embedding is not None
    assert torch.equal(model.source_embedding.weight, model.embedding.weight)
    assert math.isclose(float(model.output_bias[PAD]), -100.0)  # type: ignore[index]
