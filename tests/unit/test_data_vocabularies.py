"""Tokenizers that are not trained here: one's own SentencePiece model, segmented text, ids."""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import sentencepiece

from data_pipeline.api import TokenizerConfig
from data_pipeline.clean import normalise
from data_pipeline.errors import InputError
from data_pipeline.sources import read_lines, resolve
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer_training import adopt_model, count_words, make_tokenizer, read_words, tokenizer_faults
from data_pipeline.vocabularies import ids_file, words_file


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return [normalise(line) for line in read_lines(resolve("embedded:swmsg_ende/valid.de.xz"))]


def never() -> Iterator[str]:
    raise AssertionError("nothing is to be learnt from the corpus")


def own_model(lines: Sequence[str], **options: object) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=500, minloglevel=5, num_threads=1, **options
    )
    return model.getvalue()


FOREIGN: dict[str, dict[str, object]] = {
    "BPE, the library's own ids": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram"},
    "other names and places": {
        "model_type": "bpe", "pad_id": 3, "pad_piece": "[PAD]", "bos_id": -1, "unk_id": 1, "unk_piece": "[UNK]",
        "eos_id": 0, "byte_fallback": True, "user_defined_symbols": ["<2de>"],
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FOREIGN)
def test_an_own_model_cuts_text_as_it_did(tmp_path: Path, lines: list[str], form: str) -> None:
    path = tmp_path / "own.model"
    path.write_bytes(own_model(lines, **FOREIGN[form]))
    adopted = Tokenizer(adopt_model(path), "adopted")
    own = sentencepiece.SentencePieceProcessor(model_file=str(path))
    texts = [*lines[:100], "<2de> Datei nicht gefunden", "\u4e2d unbekannt"]
    for text, ids in zip(texts, adopted.encode(texts), strict=True):
        theirs = own.encode(text, out_type=int)
        assert len(ids) == len(theirs)
        known = [(a, b) for a, b in zip(ids, theirs, strict=True) if b != own.unk_id()]
        assert adopted.pieces([a for a, _ in known]) == own.id_to_piece([b for _, b in known])
        assert all(a == 3 for a, b in zip(ids, theirs, strict=True) if b == own.unk_id())
        assert adopted.decode(ids) == own.decode([b for b in theirs if b != own.unk_id()])
    # Each of the four special pieces that the model did not have makes it one larger.
    names = [name for name in ("pad", "bos", "eos", "unk") if getattr(own, f"{name}_id")() < 0]
    assert adopted.vocab_size == own.vocab_size() + len(names)
    again = tmp_path / "again.model"
    again.write_bytes(adopted.model)
    assert adopt_model(again) == adopted.model, "what is in order already stays"


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.model"
    with pytest.raises(InputError, match=r"own\.model not found"):
        adopt_model(path)
    for content in (b"plain text, no model", b""):
        path.write_bytes(content)
        with pytest.raises(InputError, match="is not a SentencePiece model"):
            adopt_model(path)


def test_segmented_text_comes_back_as_words() -> None:
    tokenizer = Tokenizer(words_file(["the", "unknow@@", "able", "cat", "un@@"]), "words")
    assert tokenizer.vocab_size == 9
    assert tokenizer.encode(["the  unknow@@ able cat", "", "the dog un@@"]) == [[4, 5, 6, 7], [], [4, 3, 8]]
    assert tokenizer.decode([1, 4, 5, 6, 7, 2, 0]) == "the unknowable cat"
    assert tokenizer.decode([4, 3, 8]) == "the un", "a joiner at the end has nothing to join"
    assert tokenizer.pieces([0, 3, 5]) == ["<pad>", "<unk>", "unknow@@"]
    assert Tokenizer(tokenizer.model, "again").checksum == tokenizer.checksum
    with pytest.raises(ValueError, match="expected ids below 9"):
        tokenizer.decode([9])


def test_vocabularies_of_other_programs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "vocab"
    path.write_text("the 100\nun@@ 20\n</s> 7\n12 3\nplain\n", encoding="utf-8")
    assert read_words(path) == ["the", "un@@", "12", "plain"]
    for content, sentence in (
        ("a 1\nb 2\na 3\n", "vocab, line 3: 'a' stands in line 1 already"),
        ("a 1\n\n", "vocab, line 2: expected a token"),
        ("a b 1\n", "vocab, line 1: expected a token, or a token and its count, found 'a b 1'"),
        ("<s> 1\n", "holds no token"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=sentence):
            read_words(path)


def test_words_are_counted_reproducibly_and_no_more_than_asked_for() -> None:
    texts = ["b a", "a c", "c a d"]
    assert count_words(texts, 4 + 3) == ["a", "c", "b"]
    assert count_words(texts, 300) == ["a", "c", "b", "d"]
    content = make_tokenizer(lambda: iter(texts), TokenizerConfig(kind="words"))
    assert Tokenizer(content, "words").encode(["a b c d e"]) == [[4, 6, 5, 7, 3]]


def test_ids_stay_as_they_are() -> None:
    tokenizer = Tokenizer(make_tokenizer(never, TokenizerConfig(kind="ids", vocab_size=70_000)), "ids")
    assert tokenizer.encode(["4 17  69999 3", ""]) == [[4, 17, 69999, 3], []]
    assert tokenizer.decode([1, 4, 17, 2]) == "4 17"
    assert (tokenizer.vocab_size, tokenizer.id_dtype.name) == (70_000, "uint32")
    for wrong in ("2", "70000", "-1", "word", "1e3", "\u0663", "9" * 50):
        with pytest.raises(InputError, match=r"expected ids from 3 \(unknown\) to 69999 between blanks") as caught:
            tokenizer.encode([f"5 {wrong}"])
        assert len(str(caught.value)) < 300


def test_each_side_may_have_its_own_vocabulary(tmp_path: Path) -> None:
    texts = ["a b c", "x y", "a b", "x z z"]
    content = make_tokenizer(lambda: iter(texts), TokenizerConfig(kind="words", shared=False))
    (tmp_path / "tokenizer.model").write_bytes(content)
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.model")
    assert not tokenizer.is_shared
    assert tokenizer.source.encode(["a b c x"]) == tokenizer.encode(["a b c x"]) == [[4, 5, 6, 3]]
    assert tokenizer.target.encode(["x y z a"]) == [[4, 6, 5, 3]]
    assert (tokenizer.source.decode([4, 5]), tokenizer.target.decode([4, 5])) == ("a b", "x z")
    assert tokenizer.decode([4, 5]) == "x z"
    (tmp_path / "s").write_text("q\n")
    (tmp_path / "t").write_text("r\ns\n")
    files = TokenizerConfig(kind="words", shared=False, model=str(tmp_path / "s"), target_model=str(tmp_path / "t"))
    own = Tokenizer(make_tokenizer(never, files), "own")
    assert (own.source.vocab_size, own.target.vocab_size, own.vocab_size) == (5, 6, 6)
    with pytest.raises(ValueError, match="expected ids below 5"):
        own.source.decode([5])
    shared = Tokenizer(words_file(["a"]), "shared")
    assert shared.source is shared.target is shared
    with pytest.raises(InputError, match="own is no pair of vocabularies"):
        Tokenizer(content[:-9], "own")


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"kind": "other"}',
        b'{"kind": "words", "tokens": ["a", "a"]}',
        b'{"kind": "words", "tokens": ["a b"]}',
        b'{"kind": "words", "tokens": [""]}',
        b'{"kind": "words", "tokens": [1]}',
        b'{"kind": "ids", "size": 4}',
        b'{"kind": "ids", "size": 9, "more": 1}',
        json.dumps({"kind": "ids", "size": 1 << 40}).encode(),
    ],
)
def test_damaged_vocabularies_are_one_sentence(content: bytes) -> None:
    with pytest.raises(InputError, match=r"x\.model is no vocabulary \(.*\): restore the file") as caught:
        Tokenizer(content, "x.model")
    assert "\n" not in str(caught.value)
    assert Tokenizer(ids_file(9), "x").vocab_size == 9


def test_keys_that_do_not_go_together() -> None:
    assert not tokenizer_faults(TokenizerConfig())
    assert not tokenizer_faults(TokenizerConfig(kind="words"))
    assert not tokenizer_faults(TokenizerConfig(kind="sentencepiece", model="x"))
    (fault,) = tokenizer_faults(TokenizerConfig(kind="sentencepiece"))
    assert fault.startswith("tokenizer.model: expected the file of a SentencePiece model")
    assert not tokenizer_faults(TokenizerConfig(kind="words", shared=False))
    for wrong in (
        TokenizerConfig(kind="words", target_model="x"),
        TokenizerConfig(kind="words", shared=False, model="x"),
        TokenizerConfig(kind="ids", shared=False),
    ):
        assert len(tokenizer_faults(wrong)) == 1, wrong
    (fault,) = tokenizer_faults(TokenizerConfig(model="x"))
    assert "found 'x'; tokenizer.kind=sentencepiece takes a model" in fault
