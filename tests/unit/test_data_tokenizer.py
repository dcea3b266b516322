"""The tokenizer: training is deterministic and bounded, every text comes back, output is always one line."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.api import SPECIAL_IDS, TokenizerConfig
from data_pipeline.clean import LINE_SEPARATORS, normalise
from data_pipeline.errors import InputError
from data_pipeline.report import warn_of_rare_tokens
from data_pipeline.sources import read_lines, resolve
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from data_pipeline.tokenizer_training import adopt_model
from data_pipeline.word_table import WordTable

FIRST_BYTE_PIECE = 4


def corpus() -> list[str]:
    files = (resolve(f"embedded:swmsg_ende/valid.{language}.xz") for language in ("en", "de"))
    return [normalise(line) for file in files for line in read_lines(file)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(corpus(), TokenizerConfig(vocab_size=1000)), "trained here")


def test_training_is_deterministic_and_keeps_the_size(tokenizer: Tokenizer) -> None:
    again = train_tokenizer(corpus(), TokenizerConfig(vocab_size=1000))
    assert again == tokenizer.model
    assert tokenizer.vocab_size == 1000
    assert tokenizer.pieces(range(4)) == ["<pad>", "<s>", "</s>", "<unk>"]
    assert tokenizer.pieces([FIRST_BYTE_PIECE, FIRST_BYTE_PIECE + 255]) == ["<0x00>", "<0xFF>"]


def test_a_saved_model_is_the_same_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(tokenizer.model)
    loaded = Tokenizer.load(path)
    assert loaded.checksum == tokenizer.checksum
    assert loaded.encode(["Datei nicht gefunden"]) == tokenizer.encode(["Datei nicht gefunden"])


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_text_to_ids_and_back(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == normalise(text)
    assert all(i > max(SPECIAL_IDS.values()) for i in ids), "encoded text holds no special ids"
    assert bool(ids) == bool(normalise(text))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=30), max_size=8))
def test_word_by_word_is_the_whole_line(tokenizer: Tokenizer, texts: list[str]) -> None:
    lines = [normalise(text) for text in [*texts, "Datei nicht gefunden", ""]]
    flat, lengths = tokenizer.encode_flat(lines)
    expected = tokenizer.encode_normalised(lines)
    assert flat.tolist() == [i for ids in expected for i in ids]
    assert lengths.tolist() == [len(ids) for ids in expected]
    assert flat.dtype == tokenizer.id_dtype


def test_remembered_words_are_bounded_and_change_nothing(tokenizer: Tokenizer) -> None:
    asked: list[int] = []

    def encode(words: list[str]) -> list[list[int]]:
        asked.append(len(words))
        return tokenizer.encode_normalised(words)

    table = WordTable(encode, most_words=40)
    lines = [*corpus()[:60], "", "a b a"]
    expected = tokenizer.encode_normalised(lines)
    for first in range(0, len(lines), 2):
        flat, lengths = table.encode(lines[first : first + 2])
        assert flat.tolist() == [i for ids in expected[first : first + 2] for i in ids]
        assert lengths.tolist() == [len(ids) for ids in expected[first : first + 2]]
    before = sum(asked)
    table.encode(["a b a"])
    assert sum(asked) == before, "known words are not encoded again"
    assert before > 40, "more words than are remembered"
    flat, lengths = table.encode([])
    assert (len(flat), len(lengths)) == (0, 0)


OTHER_MODELS: dict[str, dict[str, object]] = {
    "unigram": {"model_type": "unigram"},
    "pieces over blanks": {"split_by_whitespace": False},
    "own normalisation": {"normalization_rule_name": "nmt_nfkc"},
    "no blank in front": {"add_dummy_prefix": False},
    "symbols of one's own": {"user_defined_symbols": ["in der"]},
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_other_models_are_asked_for_whole_lines(tmp_path: Path, case: str) -> None:
    options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", **OTHER_MODELS[case]}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=model, vocab_size=700, minloglevel=5, num_threads=1, **options
    )
    (tmp_path / "own.model").write_bytes(model.getvalue())
    own = Tokenizer(adopt_model(tmp_path / "own.model"), case)
    flat, lengths = own.encode_flat(corpus())
    expected = own.encode_normalised(corpus())
    assert flat.tolist() == [i for ids in expected for i in ids]
    assert lengths.tolist() == [len(ids) for ids in expected]


@pytest.mark.parametrize("text", ["<s> </s> <pad> <unk>", "<0x0A>", "⁇", '%s: "%d"'])
def test_what_looks_like_a_special_piece_is_plain_text(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode([text])
    assert min(ids) > 3
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("separator", LINE_SEPARATORS)
def test_line_separators_from_byte_pieces_become_spaces(tokenizer: Tokenizer, separator: str) -> None:
    ids = [*tokenizer.encode(["a"])[0], *(FIRST_BYTE_PIECE + byte for byte in separator.encode())]
    decoded = tokenizer.decode([*ids, *tokenizer.encode(["b"])[0]])
    assert len(decoded.splitlines()) == 1
    assert separator not in decoded
    assert decoded.replace(" ", "") == "ab"


def test_invalid_bytes_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert "\ufffd" in tokenizer.decode([FIRST_BYTE_PIECE + 0xC3])


def test_special_ids_are_dropped_and_foreign_ones_refused(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode(["Datei nicht gefunden"])
    assert tokenizer.decode([1, *ids, 3, 2, 0, 0]) == "Datei nicht gefunden"
    assert tokenizer.decode([]) == ""
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="expected ids below 1000"):
            tokenizer.decode([5, wrong])


def test_too_large_a_vocabulary_names_the_largest_possible() -> None:
    lines = corpus()[:60]
    with pytest.raises(InputError, match=r"vocab_size is 30000, but this corpus allows \d+ at most") as caught:
        train_tokenizer(lines, TokenizerConfig(vocab_size=30000))
    largest = int(str(caught.value).rpartition(" ")[2])
    assert Tokenizer(train_tokenizer(lines, TokenizerConfig(vocab_size=largest)), "x").vocab_size == largest
    with pytest.raises(InputError):
        train_tokenizer(lines, TokenizerConfig(vocab_size=largest + 1))


def test_too_small_a_vocabulary_is_explained() -> None:
    with pytest.raises(InputError, match=r"characters of this corpus alone need \d+"):
        train_tokenizer(corpus(), TokenizerConfig(vocab_size=300))


def test_other_special_ids_and_other_files_are_refused(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=model, vocab_size=500, model_type="bpe", minloglevel=5
    )
    with pytest.raises(InputError, match="expected the special ids"):
        Tokenizer(model.getvalue(), "foreign.model")
    with pytest.raises(InputError, match="not a SentencePiece model"):
        Tokenizer(b"plain text, no model at all", "text.model")
    with pytest.raises(InputError, match="not found"):
        Tokenizer.load(tmp_path / "none.model")


@pytest.mark.parametrize(
    ("tokens", "sizes", "suggested"),
    [
        # Source and target tokens without EOS; sizes: of the target's and the source's vocabulary.
        ((217_886, 230_124), (4000,), None),  # the embedded corpus and its vocabulary
        ((150_000, 167_127), (32_000,), "32,000 occurs 9.9 times"),
        ((150_000, 167_127), (12_000,), None),
        ((13_000, 12_000), (1000,), None),
        ((12_000, 12_999), (1001,), "1,001 occurs 25.0 times"),
        ((90_000, 300_000), (5000, 5000), "5,000 occurs 18.0 times"),  # the source's alone
        ((300_000, 90_000), (5000, 3000), "5,000 occurs 18.0 times"),
    ],
)
def test_a_vocabulary_far_too_large_for_its_corpus_is_warned_of(
    tokens: tuple[int, int], sizes: tuple[int, ...], suggested: str | None
) -> None:
    pairs, said = 700, list[str]()
    index = SimpleNamespace(pairs=pairs, tokens=tuple(count + pairs for count in tokens))
    tokenizer = SimpleNamespace(sizes=(sizes[0], sizes[-1]), is_shared=len(sizes) == 1)
    warn_of_rare_tokens(index, tokenizer, said.append)  # type: ignore[arg-type]
    assert len(said) == (suggested is not None)
    assert suggested is None or suggested in said[0]
