"""What copying scores: for each source the translation of the training source that shares the most words with it.

Program messages repeat each other. A system that has learnt nothing but to look its training corpus up scores this, and
a score is worth what it has above it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence


class NearestCopy:
    """Translates a source by the target of the nearest training pair.

    Nearness is Dice's coefficient over words between blanks, as they are written, repetitions counted: 2 * shared words
    / (words of one + words of the other), from 0 to 1. Of equally near pairs the first one counts.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        """pairs: (source, target) of the training corpus. Raises ValueError if there are none."""
        self._targets: list[str] = []
        self._sizes: list[int] = []
        # Word to (pair, occurrences): a source is compared with those pairs alone that share a word with it.
        self._postings: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, (source, target) in enumerate(pairs):
            words = source.split()
            for word, count in Counter(words).items():
                self._postings[word].append((number, count))
            self._targets.append(target)
            self._sizes.append(len(words))
        if not self._targets:
            raise ValueError("expected at least one training pair, found none")

    def translate(self, sources: Sequence[str]) -> list[str]:
        """One target for each source, in order; the first pair's where no word is shared."""
        return [self._targets[self._nearest(source)] for source in sources]

    def _nearest(self, source: str) -> int:
        words = source.split()
        shared: defaultdict[int, int] = defaultdict(int)
        for word, count in Counter(words).items():
            for number, other in self._postings.get(word, ()):
                shared[number] += min(count, other)
        # The likeness is negated, so that the smallest number wins among equals.
        return min(shared, key=lambda n: (-2 * shared[n] / (len(words) + self._sizes[n]), n), default=0)
