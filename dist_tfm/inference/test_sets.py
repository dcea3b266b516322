"""sacreBLEU's own test sets by name (wmt14, en-de), from its cache or from the network."""

import difflib
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sacrebleu import utils

from data_pipeline.sources import read_lines
from dist_tfm.errors import InputError

PATIENCE_S = 30.0
"""Silence of a server after which a download is given up."""


class NamedTestSet(NamedTuple):
    """Source segments and, for each reference translation, its segments."""

    sources: list[str]
    references: list[list[str]]


def load_test_set(name: str, pair: str) -> NamedTestSet:
    """The test set `name` for a language pair such as en-de. Raises InputError for unknown ones, and where the set is
    neither cached nor to be had from the network."""
    known = utils.get_available_testsets()
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.3)) or ", ".join(known[:3])
        raise InputError(f"sacreBLEU has no test set {name!r}: expected one such as {near} (sacrebleu --list)")
    pairs = utils.get_langpairs_for_testset(name)
    if pair not in pairs:
        raise InputError(f"sacreBLEU's {name} has no language pair {pair!r}: expected one of {', '.join(pairs)}")
    try:
        with _patiently():
            source, references = utils.get_source_file(name, pair), utils.get_reference_files(name, pair)
    except (Exception, SystemExit) as fault:  # sacreBLEU ends the process where a download is not what it should be
        reason = f"{type(fault).__name__}: {fault}" if str(fault) else type(fault).__name__
        raise InputError(
            f"test set {name} {pair} is not in sacreBLEU's cache {utils.SACREBLEU_DIR} and could not be fetched "
            f"({reason}): run `sacrebleu -t {name} -l {pair} --echo src` where there is a network and copy "
            f"{Path(utils.SACREBLEU_DIR) / name} here, or give files with --source and --reference"
        ) from None
    return NamedTestSet(list(read_lines(Path(source))), [list(read_lines(Path(path))) for path in references])


@contextmanager
def _patiently() -> Iterator[None]:
    """sacreBLEU downloads without a time limit, and logs what the error raised here says better."""
    logger, before = logging.getLogger("sacrebleu"), socket.getdefaulttimeout()
    level = logger.level
    socket.setdefaulttimeout(PATIENCE_S)
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
        logger.setLevel(level)
