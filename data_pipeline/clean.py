"""Cleaning of text: one normalisation for preparation and translation. What was changed and rejected, counted."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

RULES = 1
"""Version of the rules below; part of the preparation's fingerprint."""

BLANK, RATIO, TOO_LONG = "blank", "ratio", "too_long"
NFC, CONTROLS = "nfc", "controls"
CHANGES: Mapping[str, str] = {
    NFC: "text that was not in canonical composition",
    CONTROLS: "control characters, byte order marks or irregular white space",
}
REASONS: Mapping[str, str] = {
    BLANK: "one side is blank",
    "characters": "one side has too few or too many characters",
    RATIO: "one side is too many times longer than the other",
    "identical": "both sides are the same",
    "digits": "the sides differ in their digits",
    "held_out": "the validation set or a test set has it too",
    TOO_LONG: "one side has too many tokens",
    "duplicates": "another pair is the same",
}
"""Reason to what it says, in the order in which they are looked for."""

LINE_SEPARATORS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""Everything that some reader takes for the end of a line (str.splitlines takes all of them)."""

_TOGETHER = 16
_BETWEEN = "|"

_SPACES = re.compile(r"\s+")
_CONTROLS = {code: " " if chr(code).isspace() else None for code in (*range(0x20), *range(0x7F, 0xA0))}
# U+FEFF is a byte order mark; U+2581 is SentencePiece's own sign for a space, which would come back as one.
_TRANSLATION: dict[int, str | None] = {**_CONTROLS, 0x2028: " ", 0x2029: " ", 0xFEFF: None, 0x2581: "_"}


def normalise(text: str) -> str:
    """NFC, controls (C0, C1, byte order marks) removed, any run of white space one space, none at the ends.

    Controls that are white space, and line separators, count as white space. Idempotent; clean text is returned as the
    very object that it is.
    """
    # Most text is clean already.
    if text[:1] != " " and text[-1:] != " " and _is_tidy(text):
        return text
    return _SPACES.sub(" ", unicodedata.normalize("NFC", text.translate(_TRANSLATION))).strip()


def normalise_all(texts: Sequence[str]) -> list[str]:
    """`normalise` of every text: faster, since texts are looked at several at a time."""
    cleaned: list[str] = []
    for first in range(0, len(texts), _TOGETHER):
        some = texts[first : first + _TOGETHER]
        # What stands between the texts makes spaces at their ends visible. A piece of a tidy text is tidy.
        joined = f"{_BETWEEN}{_BETWEEN.join(some)}{_BETWEEN}"
        tidy = f"{_BETWEEN} " not in joined and f" {_BETWEEN}" not in joined and _is_tidy(joined)
        cleaned += some if tidy else map(normalise, some)
    return cleaned


def _is_tidy(text: str) -> bool:
    """Whether nothing is to be done but at the ends. Printable text has no controls, and no white space but spaces."""
    return text.isprintable() and "  " not in text and "\u2581" not in text and unicodedata.is_normalized("NFC", text)


def changes_of(text: str) -> set[str]:
    """What `normalise` changes in a text: names out of CHANGES."""
    found = set() if unicodedata.is_normalized("NFC", text) else {NFC}
    if _SPACES.sub(" ", text.translate(_TRANSLATION)).strip() != text:
        found.add(CONTROLS)
    return found


def hash_of(text: str) -> int:
    """64 bits that stand for a cleaned text when duplicates are looked for; the same in every process."""
    return xxhash.xxh3_64_intdigest(text.encode())


def hash_of_pair(source: str, target: str) -> int:
    """64 bits that stand for a pair of cleaned texts, which hold no line ends."""
    return hash_of(f"{source}\n{target}")


@dataclass
class CleaningReport:
    """Pairs read, kept, and rejected by reason: read == kept + sum of rejected; and pairs whose text was changed."""

    read: int = 0
    kept: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)

    def reject(self, reason: str, pairs: int = 1) -> None:
        """Counts rejected pairs."""
        if pairs:
            self.rejected[reason] = self.rejected.get(reason, 0) + pairs

    def change(self, what: str, pairs: int = 1) -> None:
        """Counts pairs with a side that `normalise` changed."""
        if pairs:
            self.changed[what] = self.changed.get(what, 0) + pairs

    def add(self, other: "CleaningReport") -> None:
        """Adds another part of the same corpus."""
        self.read += other.read
        self.kept += other.kept
        for reason, pairs in other.rejected.items():
            self.reject(reason, pairs)
        for change, pairs in other.changed.items():
            self.change(change, pairs)
