"""Writes the tables of docs/benchmarks.md and the README from the rows in benchmarks/results/: `python
benchmarks/tables.py`.

A table stands between two markers, the first of which names the file of rows and the prefixes of the names to show:

    <!-- table: train_throughput dist_tfm- gemm-peak- -->
    <!-- end of table -->
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import itertools
import re
from collections.abc import Sequence

from benchmarks.harness import ROOT, Row, markdown_table, read_rows
from data_pipeline.errors import InputError
from data_pipeline.settings import run_main

DOCUMENT = ROOT / "docs" / "benchmarks.md"
DOCUMENTS = (DOCUMENT, ROOT / "README.md")
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(
    r"(?P<start><!-- table: (?P<file>\w+)(?P<prefixes>( [\w-]+)+) -->\n).*?(?P<end><!-- end of table -->)", re.DOTALL
)


def render(text: str, results: Path = RESULTS) -> str:
    """The document with every table made anew from the rows in `results`. Raises InputError."""

    def table(match: re.Match[str]) -> str:
        path = results / f"{match['file']}.json"
        prefixes = tuple(match["prefixes"].split())
        rows = [row for row in read_rows(path) if row.name.startswith(prefixes)]
        if not rows:
            raise InputError(f"{path} holds no row whose name begins with {' or '.join(prefixes)}: mend the marker")
        return f"{match['start']}{captioned(rows)}\n{match['end']}"

    return MARKED.sub(table, text)


def captioned(rows: Sequence[Row]) -> str:
    """Tables of rows, one for each origin, under the command, machine, commit and date that they come from."""

    def origin(row: Row) -> tuple[str, str, str, str]:
        return row.command, row.machine, row.commit, row.date

    parts = []
    for (command, machine, commit, date), group in itertools.groupby(rows, key=origin):
        parts.append(f"`{command}` · {machine} · commit {commit} · {date}\n\n{markdown_table(list(group))}")
    return "\n\n".join(parts)


def main(argv: Sequence[str]) -> int:
    """The program: rewrites the documents, or with --check only says whether they are up to date."""
    parser = argparse.ArgumentParser(prog="tables.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 2 if the tables are not up to date")
    options = parser.parse_args(list(argv))
    for document in DOCUMENTS:
        before = document.read_text(encoding="utf-8")
        after = render(before)
        if options.check and after != before:
            raise InputError(
                f"{document.relative_to(ROOT)} differs from the recorded rows: run python benchmarks/tables.py"
            )
        if after != before:
            document.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
