"""What cleaning did: report.json, and the table that is printed."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from data_pipeline.assemble import LongPairs
from data_pipeline.clean import CHANGES, REASONS, TOO_LONG, CleaningReport
from data_pipeline.files import write_json_atomically
from data_pipeline.index import Index
from data_pipeline.prepared import VALID
from data_pipeline.progress import Log
from data_pipeline.steps import Length, Step
from data_pipeline.tokenizer import Tokenizer

REPORT_FILE = "report.json"

Splits = dict[str, tuple[CleaningReport, Index]]


def reason_of(step: Step) -> str:
    """The name that a step's counts go by."""
    return TOO_LONG if isinstance(step, Length) else step.step


RARE, ENOUGH = 25, 100
"""How often an id occurs on average. On the embedded corpus, half the pieces occur fewer than 10 times at about 25 (of
16,000 pieces, at 21, 73 %; of 32,000, at 10, 88 %; of 4,000, at 112, 8 %)."""
SMALL_VOCABULARY = 1000
"""Vocabularies up to this size are never called too large."""


def write_report(folder: Path, splits: Splits, long: LongPairs, steps: Sequence[Step]) -> None:
    """Writes report.json: of each split pairs read, kept, rejected and changed, by step, and tokens. Raises OSError."""
    content: dict[str, dict[str, object]] = {}
    for split, (report, index) in splits.items():
        source_tokens, target_tokens = index.tokens
        # In the order of the steps: pairs were met in another one by every number of tasks.
        counts = {
            "read": report.read,
            "kept": report.kept,
            "rejected": {name: report.rejected[name] for name in REASONS if name in report.rejected},
            "changed": {name: report.changed[name] for name in CHANGES if name in report.changed},
        }
        content[split] = {**counts, "source_tokens": source_tokens, "target_tokens": target_tokens}
    content[VALID]["longer_than_max_length"] = asdict(long)
    write_json_atomically(folder / REPORT_FILE, {**content, "steps": [asdict(step) for step in steps]})


def print_report(splits: Splits, steps: Sequence[Step], log: Log) -> None:
    """Prints a line a step: how many pairs it changed or rejected."""
    width = max(len(reason_of(step)) for step in steps) + 1
    log(f"{'pairs':{width}}" + "".join(f"{split:>14}" for split in splits))
    reports = [report for report, _ in splits.values()]
    rows = [("read", [report.read for report in reports], "")]
    for step in steps:
        reason = reason_of(step)
        if reason in CHANGES:
            rows.append((reason, [report.changed.get(reason, 0) for report in reports], f"changed: {CHANGES[reason]}"))
        else:
            rows.append((reason, [-report.rejected.get(reason, 0) for report in reports], REASONS[reason]))
    rows.append(("kept", [report.kept for report in reports], ""))
    for name, counts, meaning in rows:
        log((f"{name:{width}}" + "".join(f"{count:14,}" for count in counts) + f"  {meaning}").rstrip())


def describe_rejections(report: CleaningReport) -> str:
    """Pairs read and rejected, in a sentence."""
    rejected = ", ".join(f"{pairs:,}: {REASONS[reason]}" for reason, pairs in report.rejected.items())
    return f"{report.read:,} read; {rejected}"


def warn_of_rare_tokens(train: Index, tokenizer: Tokenizer, log: Log) -> None:
    """Says so if the vocabulary is far too large for the training pairs: its ids occur too seldom on average."""
    source, target = (tokens - train.pairs for tokens in train.tokens)  # without EOS
    target_size, source_size = tokenizer.sizes
    counts = [(source + target, target_size)] if tokenizer.is_shared else [(target, target_size), (source, source_size)]
    for tokens, size in counts:
        if size > SMALL_VOCABULARY and tokens < RARE * size:
            suits = max(SMALL_VOCABULARY, round(tokens / ENOUGH, -3))
            log(
                f"warning: an id of the vocabulary of {size:,} occurs {tokens / size:.1f} times on average in training "
                f"pairs, most of them too rarely to be learned: tokenizer.vocab_size should be about {suits:,.0f} "
                "(delete the shards, and prepare again)"
            )
