"""Normalisation and rejection of pairs."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.clean import (
    BLANK,
    LINE_SEPARATORS,
    RATIO,
    CleaningReport,
    changes_of,
    normalise,
    normalise_all,
)

ANY_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("scho\u0308n", "schön"),
        ("  a \t b\u00a0\u3000c  ", "a b c"),
        ("\ufeffBOM", "BOM"),
        ("a\u2028b\u2029c\x85d\x0be", "a b c d e"),
        ("null\x00 bell\x07 esc\x1b[0m c1\x9b", "null bell esc[0m c1"),
        ("x\r", "x"),
        ("▁already", "_already"),
        ("\x00\ufeff \u2028", ""),
        ("emoji 👩\u200d💻 stays", "emoji 👩\u200d💻 stays"),
    ],
)
def test_normalise_examples(raw: str, expected: str) -> None:
    assert normalise(raw) == expected


@settings(max_examples=300, deadline=None)
@given(ANY_TEXT)
def test_normalised_text_is_stable_one_line_and_free_of_controls(text: str) -> None:
    clean = normalise(text)
    assert normalise(clean) == clean
    assert unicodedata.is_normalized("NFC", clean)
    assert clean == " ".join(clean.split())
    assert not any(unicodedata.category(c) == "Cc" or c in LINE_SEPARATORS or c in "\ufeff\u2581" for c in clean)


@settings(max_examples=200, deadline=None)
@given(ANY_TEXT)
def test_the_fast_path_changes_nothing(text: str) -> None:
    # A control at the end keeps the text off the fast path and vanishes.
    assert normalise(text) == normalise(text + "\x07")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(ANY_TEXT, st.sampled_from([" a", "b ", "|", "| a", "\u0301", "clean text", ""])), max_size=40)
)
def test_many_texts_at_a_time_are_normalised_as_one_by_one(texts: list[str]) -> None:
    assert normalise_all(texts) == [normalise(text) for text in texts]
    tidy = [f"clean text {n}" for n in range(40)]
    assert all(a is b for a, b in zip(normalise_all(tidy), tidy, strict=True)), "clean text is not copied"


def test_what_was_changed_is_named() -> None:
    assert changes_of("schön") == set()
    assert changes_of("scho\u0308n") == {"nfc"}
    assert changes_of(" schön") == changes_of("a\x00") == changes_of("a\u00a0b") == {"controls"}
    assert changes_of("scho\u0308n\t") == {"nfc", "controls"}


def test_reports_add_up() -> None:
    total = CleaningReport(read=3, kept=2, rejected={BLANK: 1})
    total.add(CleaningReport(read=5, kept=2, rejected={BLANK: 1, RATIO: 2}))
    assert total == CleaningReport(read=8, kept=4, rejected={BLANK: 2, RATIO: 2})
    total.reject(RATIO, 0)
    assert total.read == total.kept + sum(total.rejected.values())
