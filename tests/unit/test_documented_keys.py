"""Every dotted key that the documentation names is one that the programs know."""

import dataclasses
import re
from pathlib import Path

import pytest

from data_pipeline.settings import load_sections
from dist_tfm.config.loading import SECTIONS, check_sections

ROOT = Path(__file__).parents[2]
KEYS = {f"{name}.{field.name}" for name, kind in SECTIONS.items() for field in dataclasses.fields(kind)}
FILES = frozenset({"py", "pt", "md", "yaml", "json", "jsonl", "txt", "cpp"})
"""Endings that make `word.word` a file's name."""

CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
DOTTED = re.compile(r"(?<![\w./-])(?:--)?([a-z_][a-z0-9_]*)\.([a-z_][a-z0-9_]*)(?![\w./])")


def dotted_keys(text: str) -> set[str]:
    """What looks like a key in the code spans and blocks of a Markdown text, whether its section exists or not; all but
    `section.key`, which stands for any of them."""
    spans = " ".join(CODE.findall(text))
    return {f"{section}.{key}" for section, key in DOTTED.findall(spans) if key not in FILES} - {"section.key"}


def test_keys_are_told_from_files_and_prose() -> None:
    prose, block = (
        "so.prose `train.steps=3` `dist_tfm/train.py` `train.py`",
        "x --optm.eps 1 > in.txt --data.shards=a/b.c",
    )
    assert dotted_keys(f"{prose}\n```\n{block}\n```") == {"train.steps", "optm.eps", "data.shards"}


@pytest.mark.parametrize(
    ("name", "least"), [("README.md", 10), ("docs/coming-from-fairseq.md", 50), ("docs/slurm.md", 4)]
)
def test_every_key_that_is_documented_exists(name: str, least: int) -> None:
    found = dotted_keys((ROOT / name).read_text(encoding="utf-8"))
    assert len(found & KEYS) >= least, "the pattern finds nothing any more"
    assert found <= KEYS, f"{name} names keys that no section has: {sorted(found - KEYS)}"


def test_the_recipe_for_people_from_fairseq_is_a_configuration(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "coming-from-fairseq.md").read_text("utf-8"), re.DOTALL)
    assert block is not None
    (tmp_path / "recipe.yaml").write_text(block[1])
    sections = load_sections(str(tmp_path / "recipe.yaml"), [], SECTIONS)
    check_sections(sections)
    assert sections["data"].batch_tokens // sections["data"].micro_batches == 4096
    assert (sections["schedule"].peak, sections["train"].steps) == (5e-4, 50_000)
