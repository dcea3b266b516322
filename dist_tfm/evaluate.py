"""Scores translations: `python dist_tfm/evaluate.py --checkpoint runs/tiny --source test.en --reference test.de`.

Detokenised BLEU, chrF and TER by sacreBLEU, with signatures; paired bootstrap resampling; forced decoding.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from data_pipeline.files import write_bytes_atomically, write_json_atomically
from data_pipeline.settings import run_main
from dist_tfm.errors import ConfigError, describe_os_error
from dist_tfm.inference.command_line import DecodingSettings, parse_decoding
from dist_tfm.parallel.environment import cores_per_rank, read_ranks, speaks_for_all
from dist_tfm.parallel.memory import keep_freed_memory

if TYPE_CHECKING:
    from dist_tfm.inference.evaluation import Loaded, Report, Texts
    from dist_tfm.inference.systems import ModelSystem

DESCRIPTION = """Scores translations against references, one segment a line, detokenised: BLEU, chrF2 and TER by
sacreBLEU, each with its signature. What is scored: the output of --checkpoint, or a file, --hypothesis.

  evaluate.py --checkpoint runs/tiny --source test.en --reference test.de
  evaluate.py --hypothesis ours.de --compare theirs.de --reference test.de
  evaluate.py --checkpoint runs/base_ende/averaged --test-set wmt14/full --language-pair en-de
  evaluate.py --checkpoint runs/tiny --source test.en --reference test.de --forced

Files may be compressed (.gz, .xz, .zst); `embedded:swmsg_ende/test.en.xz` lies in the package. Exit code 2 for wrong
input: lines that do not match in number, subwords that were not put together."""


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return int(text)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hypothesis", metavar="FILE", help="in place of a checkpoint: translations made elsewhere")
    texts = parser.add_argument_group("the test set")
    texts.add_argument("--source", metavar="FILE", help="text to translate")
    texts.add_argument(
        "--reference", action="append", default=[], metavar="FILE", help="give it several times for several references"
    )
    texts.add_argument(
        "--test-set", metavar="NAME", help="one of sacreBLEU's own, such as wmt14/full (wmt14 is a part of it)"
    )
    texts.add_argument("--language-pair", metavar="XX-YY", help="such as en-de")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--compare", metavar="FILE", help="another system's translations, the baseline of a paired bootstrap"
    )
    how.add_argument("--samples", type=_positive, default=1000, metavar="N", help="of the bootstrap (default 1000)")
    how.add_argument("--tokenized-bleu", action="store_true", help="BLEU of text that was tokenised before, as well")
    how.add_argument("--compound-split-bleu", action="store_true", help="BLEU of 13a tokens, compounds split, as well")
    how.add_argument(
        "--forced",
        action="store_true",
        help="instead: log-probability of each reference under the model, nll a token, tokens; then the perplexity",
    )
    how.add_argument("--output", type=Path, metavar="FILE", help="write the translations of --checkpoint there")
    how.add_argument("--json", type=Path, metavar="FILE", help="write the whole report there")


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    settings, options = parse_decoding("evaluate.py", DESCRIPTION, argv, _add_options, required=False)
    _check(options)
    # Seconds of imports, which --help and a misspelt key do not wait for.
    from dist_tfm.inference.evaluation import Texts, print_report

    texts = Texts(options.source, tuple(options.reference), options.test_set, options.language_pair)
    texts.check(translating=options.checkpoint is not None)
    report = _report(options, settings, texts)
    print_report(report, print)
    if options.json is not None:
        _write(options.json, lambda: write_json_atomically(options.json, report))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError, with all faults, for options that do not go together."""
    translating = options.checkpoint is not None
    rules = (
        (translating == (options.hypothesis is not None), "expected either --checkpoint RUN or --hypothesis FILE"),
        (options.forced and not translating, "--forced asks a model: give --checkpoint"),
        (
            options.forced
            and (options.compare or options.output or options.tokenized_bleu or options.compound_split_bleu),
            "--forced translates nothing: leave out --compare, --output, --tokenized-bleu, --compound-split-bleu",
        ),
        (
            options.tokenized_bleu and translating,
            "--tokenized-bleu scores files that were tokenised before, but a checkpoint's output is not: "
            "tokenise it, then give it as --hypothesis",
        ),
        (options.output is not None and not translating, "--output takes the translations of --checkpoint"),
        (options.weights == "ema" and not translating, "--weights says which weights of --checkpoint"),
        (read_ranks(os.environ).world_size > 1, "evaluate.py is one process: start it without a launcher"),
    )
    faults = [sentence for broken, sentence in rules if broken]
    if faults:
        head = "" if len(faults) == 1 else f"{len(faults)} options do not go together:\n  "
        raise ConfigError(head + "\n  ".join(faults))


def _report(options: argparse.Namespace, settings: DecodingSettings, texts: "Texts") -> "Report":
    """Reads and checks all texts before a model is loaded."""
    from dist_tfm.inference import evaluation
    from dist_tfm.inference.systems import target_language

    loaded = evaluation.load_texts(texts, target_language(settings.checkpoints[0]) if settings.checkpoints else "")
    baseline = None if options.compare is None else evaluation.read_hypotheses(options.compare, loaded)
    if options.forced:
        return _forced(options, settings, loaded)
    if options.checkpoint is None:
        hypotheses, origin = evaluation.read_hypotheses(options.hypothesis, loaded), options.hypothesis
    else:
        hypotheses, origin = _translate(options, settings, loaded), _origin(options)
    report = evaluation.score_hypotheses(
        hypotheses, origin, loaded, options.tokenized_bleu, options.compound_split_bleu
    )
    if baseline is not None:
        report["comparison"] = evaluation.compare_hypotheses(
            hypotheses, origin, baseline, options.compare, loaded, options.samples
        )
    return report


def _translate(options: argparse.Namespace, settings: DecodingSettings, loaded: "Loaded") -> list[str]:
    from dist_tfm.inference.evaluation import describe_empty

    hypotheses = _load(settings).translate(loaded.sources)
    if (sentence := describe_empty(loaded.sources, hypotheses)) is not None:
        print(f"warning: {sentence}", file=sys.stderr, flush=True)
    if options.output is not None:
        content = "".join(f"{line}\n" for line in hypotheses).encode()
        _write(options.output, lambda: write_bytes_atomically(options.output, content))
    return hypotheses


def _forced(options: argparse.Namespace, settings: DecodingSettings, loaded: "Loaded") -> "Report":
    from dist_tfm.inference.evaluation import forced_report

    references = loaded.test_set.references
    if len(references) > 1:
        raise ConfigError(f"--forced scores one reference a segment, found {len(references)}: give --reference once")
    scores = _load(settings).force(loaded.sources, references[0])
    return forced_report(scores, _origin(options), loaded.origins[0])


def _load(settings: DecodingSettings) -> "ModelSystem":
    import torch

    from dist_tfm.inference.systems import ModelSystem
    from dist_tfm.parallel.topology import choose_device

    keep_freed_memory()
    launch, ranks = settings.launch, read_ranks(os.environ)
    torch.set_num_threads(launch.threads or cores_per_rank(ranks, os.environ))
    device = choose_device(launch.device, ranks, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return ModelSystem(settings, device)


def _origin(options: argparse.Namespace) -> str:
    average = " (moving average)" if options.weights == "ema" else ""
    return " + ".join(options.checkpoint) + average


def _write(path: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as fault:
        raise describe_os_error(fault, f"writing {path}") from fault


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]), speaks_for_all)
