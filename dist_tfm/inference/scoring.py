"""Scores of translations against references, by sacreBLEU, each with the signature that makes it comparable.

Text is detokenised: what a person would read. A segment is one line.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest, Result
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from dist_tfm.errors import InputError

SUBWORD_MARK = re.compile(r"\S@@(?=\s|$)|\u2581")
"""What subword-nmt ("Hau@@ s") and SentencePiece ("\u2581Haus") leave in text that was not put together again."""

NOT_COMPARABLE = (
    "not comparable with sacreBLEU: tokenisation decides the number (the system of Ott et al. 2018 has 29.3 as "
    "tokenised, compound-split BLEU on newstest2014 En-De, and 28.6 by sacreBLEU); compare it only with numbers made "
    "in this very way"
)

_COMPOUND = re.compile(r"(\S)-(\S)")


@dataclass(frozen=True)
class Score:
    """A corpus score: `name` as sacreBLEU calls it (BLEU, chrF2, TER), `value` in percent, `signature` of the method.

    warning: what must be said beside it; empty for the standard ones.
    """

    name: str
    value: float
    signature: str
    warning: str = ""


@dataclass(frozen=True)
class Comparison:
    """One metric of two systems by paired bootstrap resampling (Koehn 2004).

    Of each system the score, and the mean and half the width of the 95 % interval over the resampled test sets;
    p_value: how probable so large a difference were if the systems were equally good (1 where there is none).
    """

    name: str
    baseline: float
    baseline_interval: tuple[float, float]
    system: float
    system_interval: tuple[float, float]
    p_value: float
    signature: str


@dataclass(frozen=True)
class TestSet:
    """References that translations are scored against, one list of segments for each reference translation.

    language: of the references, so that sacreBLEU tokenises Chinese, Japanese and Korean as it must; empty: unknown.
    name, pair: what sacreBLEU calls its own test sets; they go into the signatures.
    """

    __test__ = False  # no test case, whatever pytest thinks of the name

    references: Sequence[Sequence[str]]
    language: str = ""
    name: str | None = None
    pair: str | None = None


def refuse_subwords(lines: Sequence[str], origin: str) -> None:
    """Raises InputError that names the first line which still consists of subwords.

    Scoring subwords gives a number that is too high and that nobody can compare.
    """
    for number, line in enumerate(lines, 1):
        if (found := SUBWORD_MARK.search(line)) is not None:
            mark = found[0][-2:] if found[0].endswith("@@") else found[0]
            raise InputError(
                f"{origin}, line {number}: expected plain text, found the subword mark {mark!r}: put the subwords "
                "together before scoring (subword-nmt: sed -r 's/(@@ )|(@@ ?$)//g'; SentencePiece: spm_decode)"
            )


def refuse_unequal(lines: Sequence[str], origin: str, others: Sequence[str], other_origin: str) -> None:
    """Raises InputError with both counts unless the two have equally many segments, and some at all."""
    if len(lines) != len(others):
        raise InputError(
            f"{origin} has {len(lines)} lines but {other_origin} has {len(others)}: line n of one must belong to line "
            "n of the other"
        )
    if not lines:
        raise InputError(f"{origin} and {other_origin} are empty: expected one segment a line")


def corpus_scores(hypotheses: Sequence[str], test_set: TestSet) -> list[Score]:
    """Detokenised BLEU, chrF2 and TER, as the program sacrebleu computes them by default.

    Raises InputError where sacreBLEU lacks the tokeniser of the language.
    """
    scores = []
    for metric in _metrics(test_set.language):
        result = metric.corpus_score(list(hypotheses), [list(r) for r in test_set.references])
        scores.append(Score(str(result.name), float(result.score), _signature(metric, test_set)))
    return scores


def tokenized_bleu(hypotheses: Sequence[str], test_set: TestSet) -> Score:
    """BLEU over the tokens between blanks, unsmoothed, as multi-bleu.perl has it, of text that was tokenised before."""
    return _plain_bleu("tokenized BLEU", hypotheses, test_set, "between-blanks")


def compound_split_bleu(hypotheses: Sequence[str], test_set: TestSet) -> Score:
    """BLEU over mteval-v13a tokens with hyphenated compounds cut in three ("##AT##-##AT##"), as Tensor2Tensor's
    get_ende_bleu.sh cuts them: how English-German has been scored from GNMT to the paper."""
    split = TestSet([[split_compounds(line) for line in lines] for lines in test_set.references])
    hypotheses = [split_compounds(line) for line in hypotheses]
    return _plain_bleu("compound-split BLEU", hypotheses, split, "13a+compounds-split")


def split_compounds(line: str) -> str:
    """mteval-v13a tokens of a line, "A-B" becoming "A ##AT##-##AT## B"."""
    return _COMPOUND.sub(r"\1 ##AT##-##AT## \2", str(Tokenizer13a()(line)))


def compare_systems(
    system: Sequence[str], baseline: Sequence[str], test_set: TestSet, samples: int = 1000
) -> list[Comparison]:
    """Paired bootstrap resampling of BLEU, chrF2 and TER over the same `samples` resampled test sets for both systems.

    The random seed is sacreBLEU's (12345, or the variable SACREBLEU_SEED); it stands in the signatures.
    """
    references = [list(r) for r in test_set.references]
    metrics = {type(metric).__name__: metric for metric in _metrics(test_set.language)}
    named = [("baseline", list(baseline)), ("system", list(system))]
    signatures, results = PairedTest(named, metrics, references, test_type="bs", n_samples=samples)()
    comparisons = []
    for name, signature in signatures.items():
        first, second = results[name]
        comparisons.append(
            Comparison(
                name=name,
                baseline=float(first.score),
                baseline_interval=_interval(first),
                system=float(second.score),
                system_interval=_interval(second),
                # sacreBLEU's test gives its smallest p for a difference of exactly nothing.
                p_value=float(second.p_value) if second.score != first.score else 1.0,
                signature=_marked(signature, test_set),
            )
        )
    return comparisons


def _metrics(language: str) -> list[Metric]:
    try:
        bleu = BLEU(trg_lang=language)
    except (ImportError, RuntimeError) as fault:  # Japanese and Korean need a package of their own
        raise InputError(
            f"sacreBLEU cannot tokenise {language!r} here ({fault}): install sacrebleu[{language}]"
        ) from None
    return [bleu, CHRF(), TER()]


def _plain_bleu(name: str, hypotheses: Sequence[str], test_set: TestSet, tokens: str) -> Score:
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    result = metric.corpus_score(list(hypotheses), [list(r) for r in test_set.references])
    return Score(name, float(result.score), f"{metric.get_signature()}|tokens:{tokens}", NOT_COMPARABLE)


def _signature(metric: Metric, test_set: TestSet) -> str:
    return _marked(metric.get_signature(), test_set)


def _marked(signature: object, test_set: TestSet) -> str:
    """The signature, with the name of sacreBLEU's own test set."""
    if test_set.name is not None:
        signature.update("test", test_set.name)  # type: ignore[attr-defined]
        signature.update("lang", test_set.pair)  # type: ignore[attr-defined]
    return str(signature)


def _interval(result: Result) -> tuple[float, float]:
    return float(result.mean), float(result.ci)
