"""Cleaning of text and pairs: one normalisation for preparation and translation, rejections counted by reason."""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field

RULES = 1
"""Version of the rules below; part of the preparation's fingerprint."""

BLANK, RATIO, TOO_LONG = "blank", "ratio", "too_long"
REASONS: Mapping[str, str] = {
    BLANK: "one side is blank",
    RATIO: "one side is too many times longer than the other",
    TOO_LONG: "one side has too many tokens",
}

RATIO_FREE_CHARACTERS = 20
"""A longer side of at most so many characters is never rejected for its ratio ("OK" may be a phrase elsewhere)."""

LINE_SEPARATORS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""Everything that some reader takes for the end of a line (str.splitlines takes all of them)."""

_SPACES = re.compile(r"\s+")
_CONTROLS = {code: " " if chr(code).isspace() else None for code in (*range(0x20), *range(0x7F, 0xA0))}
# U+FEFF is a byte order mark; U+2581 is SentencePiece's own sign for a space, which would come back as one.
_TRANSLATION: dict[int, str | None] = {**_CONTROLS, 0x2028: " ", 0x2029: " ", 0xFEFF: None, 0x2581: "_"}


def normalise(text: str) -> str:
    """NFC, controls (C0, C1, byte order marks) removed, any run of white space one space, none at the ends.

    Controls that are white space, and line separators, count as white space. Idempotent.
    """
    # Most text is clean already. Printable text has no controls and no white space but plain spaces.
    tidy = text.isprintable() and "  " not in text and text[:1] != " " and text[-1:] != " " and "\u2581" not in text
    if tidy and unicodedata.is_normalized("NFC", text):
        return text
    return _SPACES.sub(" ", unicodedata.normalize("NFC", text.translate(_TRANSLATION))).strip()


def rejection(source: str, target: str, max_ratio: float) -> str | None:
    """Why a normalised training pair is left out, judged by its characters; None if it stays."""
    if not source or not target:
        return BLANK
    longer, shorter = max(len(source), len(target)), min(len(source), len(target))
    if longer > RATIO_FREE_CHARACTERS and longer > max_ratio * shorter:
        return RATIO
    return None


@dataclass
class CleaningReport:
    """Pairs read, kept, and rejected by reason: read == kept + sum of rejected."""

    read: int = 0
    kept: int = 0
    rejected: dict[str, int] = field(default_factory=dict)

    def reject(self, reason: str, pairs: int = 1) -> None:
        """Counts rejected pairs."""
        if pairs:
            self.rejected[reason] = self.rejected.get(reason, 0) + pairs

    def add(self, other: "CleaningReport") -> None:
        """Adds another part of the same corpus."""
        self.read += other.read
        self.kept += other.kept
        for reason, pairs in other.rejected.items():
            self.reject(reason, pairs)
