"""The command line of programs that decode: which checkpoints, and the keys of sections decode, launch and precision.

Section decode starts from what the (first) checkpoint's run was configured with; launch and precision are about this
process and start from their own defaults, so a model that was trained in bf16 on GPUs is decoded in fp32 on whatever is
here unless the command line says otherwise.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.command_line import parse_options
from data_pipeline.settings import (
    COMMAND_LINE,
    Layers,
    build_sections,
    describe_sections,
    faults_error,
    override_tree,
    split_overrides,
    to_yaml,
)
from dist_tfm.config.loading import decode_faults, read_config
from dist_tfm.config.schema import DecodeConfig, LaunchConfig, PrecisionConfig

SECTIONS = {"decode": DecodeConfig, "launch": LaunchConfig, "precision": PrecisionConfig}


@dataclass(frozen=True)
class DecodingSettings:
    """What to decode with. checkpoints: complete directories, as `find_checkpoint` gives them; kind: of weights, "fp32"
    or "ema"."""

    checkpoints: tuple[Path, ...]
    kind: str
    decode: DecodeConfig
    launch: LaunchConfig
    precision: PrecisionConfig


def parse_decoding(
    program: str,
    description: str,
    argv: Sequence[str],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _: None,
    overrides_of: Callable[[argparse.Namespace], Sequence[tuple[str, str]]] = lambda _: (),
    required: bool = True,
) -> tuple[DecodingSettings, argparse.Namespace]:
    """The checked settings and the program's own options.

    add_options adds the program's own; overrides_of turns them into (dotted key, text) pairs that come before the
    command line's. required: whether there must be a checkpoint; without one, checkpoints is empty and section decode
    starts from its defaults. --help and --print-config print and exit 0. Raises InputError, ConfigError.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every key below can be given as --section.key=value; the last value counts. Section decode starts\n"
        "from the configuration that the checkpoint was trained with. Keys, with their defaults:\n"
        + describe_sections(SECTIONS),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint",
        action="append",
        required=required,
        metavar="RUN",
        help="a run directory (its newest checkpoint) or a checkpoint in it; several make an ensemble",
    )
    parser.add_argument(
        "--weights",
        choices=("trained", "ema"),
        default="trained",
        help="the weights that were trained, or their moving average, if the run kept one (train.ema)",
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved keys and exit")
    # The deepspeed launcher adds it to the command line; the variable LOCAL_RANK, which it also sets, is what counts.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    add_options(parser)
    overrides, rest = split_overrides(argv)
    options = parse_options(parser, rest, SECTIONS)
    settings = _settle(options, [*overrides_of(options), *overrides])
    if options.print_config:
        sections = {name: getattr(settings, name) for name in SECTIONS}
        print(to_yaml(sections), end="")
        sys.exit(0)
    return settings, options


def _settle(options: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> DecodingSettings:
    # Seconds of imports (torch), which --help does not wait for.
    from dist_tfm.checkpoint.layout import CONFIG
    from dist_tfm.checkpoint.weights import find_checkpoint

    checkpoints = tuple(find_checkpoint(Path(path)) for path in options.checkpoint or ())
    layers = Layers()
    if checkpoints:
        saved = checkpoints[0] / CONFIG
        layers.merge({"decode": dataclasses.asdict(read_config(saved).decode)}, f"in {saved}")
    for path, text in overrides:
        layers.merge(override_tree(path, text), COMMAND_LINE)
    built = build_sections(layers, SECTIONS)
    if faults := decode_faults(built["decode"]):
        raise faults_error(faults)
    return DecodingSettings(checkpoints, "ema" if options.weights == "ema" else "fp32", **built)
