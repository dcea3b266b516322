"""The command line that every program shares: --config, --print-config, dotted overrides, and its own options."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data_pipeline.settings import describe_sections, load_sections, split_overrides, to_yaml


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
    options = parser.parse_args(rest)
    built = load_sections(options.config, overrides, sections, foreign)
    check(built)
    if options.print_config:
        print(to_yaml(built), end="")
        sys.exit(0)
    return built, options
