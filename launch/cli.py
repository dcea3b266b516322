"""The console script: `dist-tfm VERB ...` runs the same programs as the scripts of the same name."""

import importlib
import sys
from typing import NoReturn

from data_pipeline.settings import run_main
from dist_tfm.parallel.attempt import recorded
from dist_tfm.parallel.environment import speaks_for_all

VERBS = {
    "quickstart": ("launch.quickstart", "prepare, train and score a small model on the embedded corpus"),
    "preflight": ("launch.preflight", "check that a run can start, on the processes that will train it"),
    "submit": ("launch.submit", "data, training and evaluation as Slurm jobs that wait for each other"),
    "train": ("dist_tfm.train", "train a model (resumes by itself)"),
    "evaluate": ("dist_tfm.evaluate", "score translations, or how probable a model finds given ones"),
    "average": ("dist_tfm.average", "average the weights of a run"),
    "import": ("dist_tfm.import_model", "import a Marian or T5 model that transformers has saved"),
    "translate": ("dist_tfm.translate", "translate lines with one or several checkpoints"),
    "prepare": ("data_pipeline.prepare", "corpus to tokenizer to shards"),
    "browse": ("data_pipeline.browse", "show, verify and count what shards hold"),
}


def main() -> NoReturn:
    """Hands the remaining arguments to the verb's own main; exit code 2 for an unknown verb."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: dist-tfm VERB [OPTIONS]\n\nverbs (dist-tfm VERB --help says more):")
        for verb, (_, purpose) in VERBS.items():
            print(f"  {verb:<10} {purpose}")
        sys.exit(0 if arguments else 2)
    verb, *rest = arguments
    if verb not in VERBS:
        print(f"error: unknown verb {verb!r}; expected one of: {', '.join(VERBS)}", file=sys.stderr)
        sys.exit(2)
    program = importlib.import_module(VERBS[verb][0])
    run_main(recorded(lambda: program.main(rest)), speaks_for_all)
