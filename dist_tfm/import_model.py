"""Imports a model of another program: `python dist_tfm/import_model.py MODEL --output runs/imported`.

The result is a run directory that translate, evaluate, average and train.init_from read like any other.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Sequence

from data_pipeline.settings import run_main
from dist_tfm.errors import describe_os_error

DESCRIPTION = """Imports a model that Hugging Face's transformers has saved: Marian, T5 (also T5 1.1 and mT5) or UMT5.
MODEL holds config.json and model.safetensors (or its numbered parts); files that can run code (pytorch_model.bin) are
refused. SentencePiece models beside them (spiece.model; source.spm, target.spm and vocab.json) become the tokenizer;
without them, text is ids between blanks.

The result computes the same function: docs/interoperability.md says what is spelt otherwise. It is a run directory with
one checkpoint, of weights alone. To go on training:
  prepare.py --config RUN/checkpoints/step_0/config.yaml --data.train_source=... --data.shards=shards/mine
  train.py   --config RUN/checkpoints/step_0/config.yaml --train.init_from=RUN --train.run_dir=runs/mine ..."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="import_model.py",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="a folder with config.json and model.safetensors")
    parser.add_argument("--output", type=Path, metavar="RUN", required=True, help="the run directory to write")
    parser.add_argument("--ids", action="store_true", help="text is ids between blanks, whatever the folder holds")
    return parser


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    options = _parser().parse_args(argv)
    # Seconds of imports, which --help does not wait for.
    from dist_tfm.interop.importing import import_model

    try:
        found = import_model(options.model, options.output, options.ids)
    except OSError as fault:
        raise describe_os_error(fault, f"importing into {options.output}") from fault
    print(
        f"{found.checkpoint}: {found.kind}, {found.parameters:,} parameters, {found.tokens:,} tokens, "
        f"tokenizer {found.tokenizer}"
    )
    return 0


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
