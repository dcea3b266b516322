"""The command line that every program shares: --config, --print-config, dotted overrides, and its own options."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data_pipeline.errors import ConfigError, shorten
from data_pipeline.settings import describe_sections, known_paths, load_sections, split_overrides, to_yaml


def parse_command_line(
    program: str,
    description: str,
    sections: Mapping[str, type],
    default_config: str,
    argv: Sequence[str],
    foreign: Callable[[str], bool] = lambda _: False,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _: None,
    check: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> tuple[dict[str, Any], argparse.Namespace]:
    """The checked sections and the program's own options.

    foreign tells the names of sections that belong to another program (see `settings.foreign_to`); add_options adds the
    program's own options; check raises ConfigError for faults that span sections. --help and
    --print-config print and exit 0. Raises ConfigError.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every key of the configuration can be given as --section.key=value; the last value counts. Keys, with\n"
        "their defaults before any configuration file:\n" + describe_sections(sections),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", default=default_config, metavar="FILE", help=f"YAML file (default {default_config})"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    add_options(parser)
    overrides, rest = split_overrides(argv)
    options = parse_options(parser, rest, sections)
    built = load_sections(options.config, overrides, sections, foreign)
    check(built)
    if options.print_config:
        print(to_yaml(built), end="")
        sys.exit(0)
    return built, options


def parse_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str], sections: Mapping[str, type]
) -> argparse.Namespace:
    """What is left of a command line without its dotted keys. Raises ConfigError for what is no option of the program;
    of the bare name of a key it says the section."""
    options, unknown = parser.parse_known_args(arguments)
    if not unknown:
        return options
    names = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
    if not names:
        raise ConfigError(f"expected options alone, found {shorten(unknown[0])}: --help lists them")
    faults = []
    for name in names:
        bare = name.lstrip("-").replace("-", "_")
        keys = [f"--{path}" for path in known_paths(sections) if path.partition(".")[2] == bare]
        faults.append(shorten(name) + (f" (the key of this name is {' or '.join(keys)})" if keys else ""))
    raise ConfigError(
        f"unknown: {', '.join(faults)}; keys are given as --section.key=VALUE, and --help lists them and all options"
    )
