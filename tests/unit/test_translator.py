"""Lines in, as many lines out, in order; batches, order and rounding change no fp32 output."""

import os
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data_pipeline.api import UNK
from data_pipeline.tokenizer import Tokenizer
from dist_tfm.config.schema import Config, DecodeConfig, ModelConfig
from dist_tfm.errors import InputError
from dist_tfm.inference.lines import FileLines, PipeLines, TranslationWriter, count_lines, decode_lines, open_source
from dist_tfm.inference.translator import Translation, Translator, plan_batches
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.collectives import Json, SingleProcess
from tests.jobs import head
from tests.saved_models import small_tokenizer, talkative_model

torch.set_num_threads(1)
MODEL = ModelConfig(encoder_layers=2, decoder_layers=2, d_model=32, d_ff=64, heads=4)
DECODE = DecodeConfig(beam=4, n_best=4, max_extra=6, batch_tokens=300)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Real lines of many lengths, blank ones and doubles among them."""
    real = [line[: 8 + 7 * (i % 9)] for i, line in enumerate(head("test.en.xz", 22).split("\n")[:-1])]
    return [*real[:10], "", "  \t ", *real[10:], real[3]]


def build(tokenizer: Tokenizer, seed: int = 1) -> Transformer:
    return talkative_model(Config(model=MODEL), tokenizer, seed)


def texts(results: Sequence[Sequence[Translation]]) -> list[list[str]]:
    return [[t.text for t in found] for found in results]


class Rounding(Transformer):
    """A model whose fp32 scores are off, by up to about 3 * size, in a way that depends on the shape of the batch."""

    size = 0.0

    def logits(self, hidden: Tensor) -> Tensor:
        exact = super().logits(hidden)
        if exact.dtype == torch.float64:
            return exact
        noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(exact.size(0)))
        return exact + self.size * noise.clamp(-3, 3)


def outputs_of_many_batchings(
    model: Transformer, tokenizer: Tokenizer, lines: list[str], decode: DecodeConfig
) -> set[str]:
    """The n-best lists, in the order of `lines`, for batches of 1, 3, 7 and all that fit, and for other orders."""
    found = set()
    for sentences in (1, 3, 7, 0):
        translator = Translator([model], tokenizer, replace(decode, batch_sentences=sentences))
        found.add(repr(texts(translator.translate(lines))))
    for seed in (1, 2):
        order = list(range(len(lines)))
        random.Random(seed).shuffle(order)
        shuffled = texts(Translator([model], tokenizer, decode).translate([lines[i] for i in order]))
        found.add(repr([shuffled[order.index(i)] for i in range(len(lines))]))
    return found


@pytest.mark.parametrize("beam", [1, 4])
def test_output_is_the_same_for_any_batches_and_any_order(tokenizer: Tokenizer, lines: list[str], beam: int) -> None:
    """With scores as dense as an untrained model's."""
    decode = replace(DECODE, beam=beam, n_best=beam)
    assert len(outputs_of_many_batchings(build(tokenizer), tokenizer, lines, decode)) == 1


def test_words_that_are_exactly_alike_are_chosen_by_token_id_whatever_the_rounding(
    tokenizer: Tokenizer, lines: list[str]
) -> None:
    """Every even token has a twin of the same embedding after it: in fp32 rounding chooses one of the two."""
    model = Rounding(MODEL, tokenizer.vocab_size)
    model.load_state_dict(build(tokenizer).state_dict())
    model.eval().size = 2e-6
    with torch.no_grad():
        model.embedding.weight[5::2] = model.embedding.weight[4::2]
    assert len(outputs_of_many_batchings(model, tokenizer, lines[:8], replace(DECODE, exact=False))) > 1
    assert len(outputs_of_many_batchings(model, tokenizer, lines[:8], DECODE)) == 1
    translator = Translator([model], tokenizer, replace(DECODE, beam=1, n_best=1))
    results = translator._search([ids for ids in tokenizer.encode(lines[:8]) if ids])
    predicted = {token for result in results for token in result.hypotheses[0].tokens}
    assert predicted
    assert all(token % 2 == 0 for token in predicted), "the lower id of each pair"


def test_an_ensemble_of_a_model_with_itself_translates_like_the_model(tokenizer: Tokenizer, lines: list[str]) -> None:
    model = build(tokenizer)
    alone = Translator([model], tokenizer, DECODE).translate(lines)
    assert texts(Translator([model, model], tokenizer, DECODE).translate(lines)) == texts(alone)
    other = Translator([model, build(tokenizer, seed=2)], tokenizer, DECODE).translate(lines)
    assert texts(other) != texts(alone)


def test_results_are_in_order_scored_best_first_and_blank_lines_stay_blank(
    tokenizer: Tokenizer, lines: list[str]
) -> None:
    results = Translator([build(tokenizer)], tokenizer, DECODE).translate(lines)
    assert len(results) == len(lines)
    assert results[10] == results[11] == [Translation("", 0.0, 0.0, 0)]
    assert texts(results)[3] == texts(results)[-1], "the same line, elsewhere in the input"
    assert len(set(map(repr, texts(results)))) > len(lines) // 2, "different lines have different translations"
    for line, found in zip(lines, results, strict=True):
        scores = [t.score for t in found]
        assert scores == sorted(scores, reverse=True)
        assert len(found) == (4 if line.strip() else 1)
        assert all(t.tokens <= len(tokenizer.encode([line])[0]) + 6 + 1 for t in found)
        assert all("\n" not in t.text for t in found)


def test_lines_are_normalised_as_in_training(tokenizer: Tokenizer) -> None:
    translator = Translator([build(tokenizer)], tokenizer, DECODE)
    plain, *variants = texts(
        translator.translate(["café file", "cafe\u0301 file", "  café \t file\r", "\ufeffcafé file"])
    )
    assert variants == [plain] * 3


def test_long_lines_are_cut_with_a_warning_and_never_dropped(tokenizer: Tokenizer) -> None:
    warnings: list[str] = []
    translator = Translator(
        [build(tokenizer)], tokenizer, replace(DECODE, max_source=20, n_best=1), warn=warnings.append
    )
    long = "file server " * 500
    prefix = tokenizer.decode(tokenizer.encode([long])[0][:20])
    found = texts(translator.translate(["file", long, prefix, "file"], first=40))
    assert len(found) == 4
    assert found[1] == found[2]
    assert len(warnings) == 1
    assert warnings[0].startswith("line 42 has ")
    assert "first 20 are translated (decode.max_source)" in warnings[0]


def test_scripts_that_were_never_seen_are_spelt_by_bytes(tokenizer: Tokenizer) -> None:
    strange = ["日本語の文", "Ωμέγα", "🙂🙂", "नमस्ते", "\u0000\u0007", "a\u2028b"]
    encoded = tokenizer.encode(strange)
    assert not any(UNK in ids for ids in encoded)
    assert tokenizer.decode(encoded[0]) == strange[0]
    found = Translator([build(tokenizer)], tokenizer, DECODE).translate(strange)
    assert [len(translations) for translations in found] == [4, 4, 4, 4, 1, 4]


def test_batches_keep_their_bounds_and_lose_nothing() -> None:
    generator = random.Random(5)
    for tokens, sentences in ((1, 0), (50, 0), (50, 3), (400, 7), (10_000, 0), (10_000, 1)):
        lengths = [generator.randint(1, 60) for _ in range(97)]
        batches = plan_batches(lengths, tokens, sentences)
        assert sorted(i for batch in batches for i in batch) == list(range(97))
        for batch in batches:
            longest = max(lengths[i] for i in batch)
            assert len(batch) == 1 or len(batch) * longest <= tokens
            assert not sentences or len(batch) <= sentences
        in_order = [lengths[i] for batch in batches for i in batch]
        assert in_order == sorted(lengths, reverse=True), "batches are of like length"
    assert plan_batches([], 100) == []
    assert len(plan_batches([10] * 20, 100)) == 2, "batches are filled"


class OneOfTwo(SingleProcess):
    """Rank `rank` of two, the other one's record being at hand."""

    size = 2

    def __init__(self, rank: int, other: "list[Json]") -> None:
        self.rank, self._other = rank, other

    def gather(self, record: Json) -> list[Json]:
        if record is None:  # both have done their work without a fault
            return [None, None]
        self._other.append(record)
        return self._other if len(self._other) == 2 else [record]


def test_ranks_share_the_batches_and_all_get_everything(tokenizer: Tokenizer, lines: list[str]) -> None:
    model, records = build(tokenizer), []  # type: tuple[Transformer, list[Json]]
    done: list[int] = []
    decode = replace(DECODE, batch_sentences=2)
    alone = Translator([model], tokenizer, decode).translate(lines)
    Translator([model], tokenizer, decode, OneOfTwo(0, records)).translate(lines, advance=done.append)
    first = sum(done)
    both = Translator([model], tokenizer, decode, OneOfTwo(1, records)).translate(lines, advance=done.append)
    assert texts(both) == texts(alone)
    assert sum(done) == len(lines) - 2, "each line once, blank ones by nobody"
    assert abs(2 * first - sum(done)) <= 2 * 2


# Input and output.


def test_lines_end_with_line_feeds_only_and_the_last_may_lack_it(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes("one\r\ntwo\u2028still two\x0b\x1c\n\nfour".encode())
    expected = ["one\r", "two\u2028still two\x0b\x1c", "", "four"]
    with path.open("rb") as file:
        assert count_lines(file) == 4
        source = open_source(file, 3, "unseen")
        assert isinstance(source, FileLines)
        assert [source.read(3), source.read(3), source.read(3)] == [expected[:3], expected[3:], []]
    path.write_bytes(b"one\n")
    with path.open("rb") as file:
        assert count_lines(file) == 1
        assert FileLines(file).read(5) == ["one"]
    path.write_bytes(b"")
    with path.open("rb") as file:
        assert count_lines(file) == 0
        assert FileLines(file).read(5) == []


def test_a_pipe_is_answered_when_it_pauses() -> None:
    reader, writer = os.pipe()
    source = PipeLines(reader, ahead=10, pause=0.1)
    os.write(writer, b"one\ntwo\nthr")
    assert source.read(5) == ["one", "two"]
    os.write(writer, b"ee\nfour\n" + b"x" * 70_000)
    threading.Timer(0.3, lambda: (os.write(writer, b"y\n\nlast"), os.close(writer))).start()
    assert source.read(5) == ["three", "four"]
    rest: list[str] = []
    while lines := source.read(2):
        assert len(lines) <= 2
        rest += lines
    assert rest == ["x" * 70_000 + "y", "", "last"]
    assert source.read(5) == [], "the end stays the end"
    os.close(reader)


def test_what_is_not_utf8_is_named_by_line_and_byte() -> None:
    with pytest.raises(InputError, match="line 13 of the input: expected UTF-8, found byte 0xe9 at byte 4"):
        decode_lines([b"fine\n", b"caf\xe9\n"], before=11)


def test_n_best_lists_number_lines_across_windows(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        writer = TranslationWriter(file, n_best=True)
        writer.write(
            [[Translation("ä", -0.5, -1.0, 3), Translation("b", -0.75, -1.5, 3)], [Translation("", 0.0, 0.0, 0)]]
        )
        writer.write([[Translation("c", -2.0, -4.0, 3)]])
    assert (tmp_path / "out").read_text("utf-8").split("\n") == [
        "0 ||| ä ||| -0.5000",
        "0 ||| b ||| -0.7500",
        "1 |||  ||| 0.0000",
        "2 ||| c ||| -2.0000",
        "",
    ]
