"""One evaluation from request to report: reads and checks the texts, translates, scores, compares."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data_pipeline.sources import read_lines, resolve
from dist_tfm.errors import ConfigError
from dist_tfm.inference.forced import ForcedScore
from dist_tfm.inference.scoring import (
    TestSet,
    compare_systems,
    compound_split_bleu,
    corpus_scores,
    refuse_subwords,
    refuse_unequal,
    tokenized_bleu,
)
from dist_tfm.inference.test_sets import load_test_set
from dist_tfm.metrics.meter import perplexity

SIGNIFICANT = 0.05

Report = dict[str, Any]


@dataclass(frozen=True)
class Texts:
    """The test set as files, or by the name that sacreBLEU gives it. Names of files may be `embedded:` ones."""

    source: str | None
    references: tuple[str, ...]
    test_set: str | None
    language_pair: str | None

    def check(self, translating: bool) -> None:
        """Raises ConfigError for what does not go together; translating: sources are needed."""
        if self.test_set is not None:
            if self.source is not None or self.references:
                raise ConfigError("--test-set brings its own texts: leave out --source and --reference")
            if self.language_pair is None:
                raise ConfigError("--test-set needs --language-pair, such as --language-pair en-de")
        elif not self.references:
            raise ConfigError("expected --reference FILE, or --test-set NAME --language-pair XX-YY; found neither")
        elif translating and self.source is None:
            raise ConfigError("--checkpoint needs --source FILE to translate")
        if self.language_pair is not None and len(self.language_pair.split("-")) != 2:
            raise ConfigError(f"--language-pair: expected two languages such as en-de, found {self.language_pair!r}")


@dataclass(frozen=True)
class Loaded:
    """The texts, read and checked. origins: what each list of references is called in errors and reports.

    sources: empty where only a hypothesis and references were named.
    """

    sources: list[str]
    test_set: TestSet
    origins: list[str]


def read_segments(name: str) -> list[str]:
    """The segments of a text file, put together (no subword marks). Raises InputError."""
    lines = list(read_lines(resolve(name)))
    refuse_subwords(lines, name)
    return lines


def load_texts(texts: Texts, language: str = "") -> Loaded:
    """Reads what `texts` names; language: of the references, where no pair says it. Raises InputError for unequal
    files and for subwords."""
    pair = texts.language_pair
    language = pair.split("-")[1] if pair is not None else language
    if texts.test_set is not None and pair is not None:
        sources, references = load_test_set(texts.test_set, pair)
        names = [f"{texts.test_set} {pair} reference {number}" for number in range(1, len(references) + 1)]
        source_name, test_set = f"{texts.test_set} {pair} source", TestSet(references, language, texts.test_set, pair)
    else:
        sources = [] if texts.source is None else read_segments(texts.source)
        references = [read_segments(name) for name in texts.references]
        names, source_name, test_set = list(texts.references), str(texts.source), TestSet(references, language)
    for name, lines in zip(names[1:], references[1:], strict=True):
        refuse_unequal(lines, name, references[0], names[0])
    if texts.source is not None or texts.test_set is not None:
        refuse_unequal(sources, source_name, references[0], names[0])
    return Loaded(sources, test_set, names)


def read_hypotheses(name: str, loaded: Loaded) -> list[str]:
    """Translations made elsewhere. Raises InputError for subwords, and unless there is one for each reference."""
    lines = read_segments(name)
    refuse_unequal(lines, name, loaded.test_set.references[0], loaded.origins[0])
    return lines


def describe_empty(sources: Sequence[str], hypotheses: Sequence[str]) -> str | None:
    """A sentence for the user if most of a model's translations are empty though their sources are not."""
    empty = [not hypothesis.strip() for source, hypothesis in zip(sources, hypotheses, strict=True) if source.strip()]
    if 2 * sum(empty) <= len(empty):
        return None
    return f"{sum(empty):,} of {len(empty):,} translations are empty: the model has probably trained too few steps"


def score_hypotheses(
    hypotheses: Sequence[str], origin: str, loaded: Loaded, tokenized: bool, compound_split: bool
) -> Report:
    """BLEU, chrF2 and TER, and the others where they were asked for, as the content of --json."""
    scores = corpus_scores(hypotheses, loaded.test_set)
    if tokenized:
        scores.append(tokenized_bleu(hypotheses, loaded.test_set))
    if compound_split:
        scores.append(compound_split_bleu(hypotheses, loaded.test_set))
    return {
        "system": origin,
        "references": loaded.origins,
        "segments": len(hypotheses),
        "scores": [asdict(score) for score in scores],
    }


def compare_hypotheses(
    hypotheses: Sequence[str], origin: str, baseline: Sequence[str], baseline_origin: str, loaded: Loaded, samples: int
) -> Report:
    """Paired bootstrap resampling against another system's translations, as the content of --json."""
    comparisons = compare_systems(hypotheses, baseline, loaded.test_set, samples)
    return {
        "system": origin,
        "baseline": baseline_origin,
        "samples": samples,
        "metrics": [asdict(comparison) for comparison in comparisons],
    }


def forced_report(scores: Sequence[ForcedScore], origin: str, references: str) -> Report:
    """Scores of given translations under a model, as the content of --json. Tokens count EOS."""
    tokens = sum(score.tokens for score in scores)
    nll = -sum(score.log_probability for score in scores) / tokens
    return {
        "system": origin,
        "references": [references],
        "segments": len(scores),
        "tokens": tokens,
        "nll": nll,
        "perplexity": perplexity(nll),
        "sentences": [asdict(score) | {"nll": score.nll} for score in scores],
    }


def print_report(report: Report, say: Callable[[str], None]) -> None:
    """The report for a person (and for `cut`): a line a sentence or a metric."""
    for sentence in report.get("sentences", ()):
        say(f"{sentence['log_probability']:.6f}\t{sentence['nll']:.6f}\t{sentence['tokens']}")
    if "perplexity" in report:
        say(
            f"perplexity = {report['perplexity']:.4f} (nll {report['nll']:.6f} a token, {report['tokens']} tokens, "
            f"{report['segments']} sentences)"
        )
    for score in report.get("scores", ()):
        say(f"{score['name']} = {score['value']:.2f} ({score['signature']})")
        if score["warning"]:
            say(f"  warning: {score['warning']}")
    if "comparison" in report:
        _print_comparison(report["comparison"], say)


def _print_comparison(comparison: Report, say: Callable[[str], None]) -> None:
    say(
        f"paired bootstrap resampling over {comparison['samples']} samples: {comparison['system']} against the "
        f"baseline {comparison['baseline']} (score, and mean ± half of the 95 % interval)"
    )
    for entry in comparison["metrics"]:
        (mean, half), (base_mean, base_half) = entry["system_interval"], entry["baseline_interval"]
        verdict = "the difference is significant" if entry["p_value"] < SIGNIFICANT else "no significant difference"
        say(
            f"{entry['name']}: {entry['system']:.2f} ({mean:.2f} ± {half:.2f}), baseline {entry['baseline']:.2f} "
            f"({base_mean:.2f} ± {base_half:.2f}), p = {entry['p_value']:.4f}: {verdict} at {SIGNIFICANT} "
            f"({entry['signature']})"
        )
