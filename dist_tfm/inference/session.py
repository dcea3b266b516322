"""One run of `translate`: builds the parts in plain sight, then lines in, translations out, a window at a time.

On several ranks the first one reads and writes, and all translate.
"""

import sys
from typing import cast

from dist_tfm.errors import InputError, describe_os_error
from dist_tfm.inference.command_line import DecodingSettings
from dist_tfm.inference.lines import (
    LineProgress,
    LineSource,
    TranslationWriter,
    count_lines,
    is_regular,
    open_source,
)
from dist_tfm.inference.loading import DTYPES, load_models
from dist_tfm.inference.translator import Translator
from dist_tfm.parallel.collectives import Group, Json, first_rank_alone, together
from dist_tfm.parallel.topology import Topology


def translate_standard_input(settings: DecodingSettings, n_best: bool, topology: Topology) -> None:
    """Translates standard input to standard output. n_best: all decode.n_best of each line, numbered and with scores.

    Collective. Raises DistTfmError on every rank, BrokenPipeError on rank 0.
    """
    group = topology.world
    models, tokenizer, _ = together(
        group,
        "loading the checkpoint",
        lambda: load_models(settings.checkpoints, topology.device, DTYPES[settings.precision.dtype], settings.kind),
    )
    source = together(group, "opening standard input", lambda: _open(topology, settings))
    progress = _progress(topology)
    try:
        translator = Translator(models, tokenizer, settings.decode, group, warn=progress.say)
        writer = TranslationWriter(sys.stdout.buffer, n_best)
        translate_stream(translator, source, writer, progress, group, settings.decode.window)
    finally:
        progress.close()


def translate_stream(
    translator: Translator,
    source: LineSource | None,
    writer: TranslationWriter,
    progress: LineProgress,
    group: Group,
    window: int,
) -> None:
    """Translates everything that `source` holds, in order; each window of lines is written before the next is read.

    source: on rank 0; None on the others. window: lines a rank. Collective.
    Raises DistTfmError on every rank; BrokenPipeError on rank 0, once the others know that all is over.
    """
    done = 0
    while lines := _next_lines(source, writer, group, window * group.size):
        translations = translator.translate(lines, done, progress.advance)
        done += len(lines)
        progress.settle(done)

        def write() -> None:
            if group.rank == 0:
                writer.write(translations)  # noqa: B023 (it is called before the next window)

        together(group, "writing the translations", write)
    if writer.broken is not None:
        raise writer.broken


def _next_lines(source: LineSource | None, writer: TranslationWriter, group: Group, count: int) -> list[str]:
    """The next lines on every rank; none at the end, or when nobody reads the output any more."""
    lines: list[str] = []

    def read() -> None:
        if source is not None and writer.broken is None:
            try:
                lines.extend(source.read(count))
            except OSError as fault:
                raise describe_os_error(fault, "reading standard input") from fault

    # A person may think for hours, so the other ranks must not wait in a collective that times out.
    first_rank_alone(group, "reading standard input", read)
    return cast(list[str], group.broadcast(cast(Json, lines)))


def _open(topology: Topology, settings: DecodingSettings) -> LineSource | None:
    if not topology.is_main:
        return None
    if sys.stdin is None:
        raise InputError("expected lines on standard input, found it closed: give a file, as in `< in.txt`")
    loaded = " + ".join(map(str, settings.checkpoints)) + (" (moving average)" if settings.kind == "ema" else "")
    greeting = f"{loaded}, beam {settings.decode.beam}: one sentence a line, Ctrl-D ends"
    return open_source(sys.stdin.buffer, settings.decode.window * topology.world.size, greeting)


def _progress(topology: Topology) -> LineProgress:
    """A bar where someone watches it, on rank 0, and where no prompt or translation is shown on the same screen."""
    if not topology.is_main or sys.stdin is None:
        return LineProgress(None, enabled=False)
    watched = sys.stderr.isatty() and not sys.stdin.isatty() and not sys.stdout.isatty()
    total = count_lines(sys.stdin.buffer) if watched and is_regular(sys.stdin.buffer) else None
    return LineProgress(total, enabled=watched)
