"""Sides of a corpus that are columns of tables: every format gives the same pairs, nothing in a data set is run."""

import csv
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data_pipeline.errors import InputError
from data_pipeline.fetched import fetch, open_fetched
from data_pipeline.files import rename_durably
from data_pipeline.sides import is_streamed, measure_side, read_side, read_sides, stat_side
from data_pipeline.tables import Table, parse_column, read_columns

ROWS = [
    ("one", "eins"),
    ("NA", "007"),
    ('say "hi"', "sag\u2028'hallo', ja"),
    ("two\nlines", ""),
    ("a", None),
    ("ä", "ö"),
]
TEXTS = [("one", "eins"), ("NA", "007"), ('say "hi"', "sag\u2028'hallo', ja"), ("two lines", ""), ("a", ""), ("ä", "ö")]
CARD = "---\nconfigs:\n- config_name: de-en\n  data_files:\n  - split: train\n    path: de-en/train-*\n---\n"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows in every format, and as a data set in the layout of the hub."""
    folder = tmp_path_factory.mktemp("tables")
    nested = [{"en": source, "de": target} for source, target in ROWS]
    hub = folder / "hub" / "de-en"
    hub.mkdir(parents=True)
    (folder / "hub" / "README.md").write_text(CARD)
    for name, part in (("rows.0", nested[:2]), ("rows.1", nested[2:])):
        table = pyarrow.table({"translation": part, "id": list(range(len(part)))})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
        pyarrow.parquet.write_table(table, hub / f"train-{name}.parquet")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"translation": row, "n": 1}) + "\n" for row in nested))
    with open(folder / "rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([("en", "de"), *ROWS])
    tsv = "".join(f"{i}\t{source}\t{target}\n" for i, (source, target) in enumerate(TEXTS)).encode()
    (folder / "rows.tsv").write_bytes(tsv)
    (folder / "rows.tsv.gz").write_bytes(gzip.compress(tsv))
    return folder


NAMES = {
    "tsv": ("tsv:{}/rows.tsv#2", "tsv:{}/rows.tsv#3"),
    "tsv.gz": ("tsv:{}/rows.tsv.gz#2", "tsv:{}/rows.tsv.gz#3"),
    "tsv by URL": ("tsv:file://{}/rows.tsv.gz#2", "tsv:file://{}/rows.tsv.gz#3"),
    "csv": ("csv:{}/rows.csv#en", "csv:{}/rows.csv#de"),
    "jsonl": ("jsonl:{}/rows.jsonl#translation.en", "jsonl:{}/rows.jsonl#translation.de"),
    "parquet": ("parquet:{}/rows.*.parquet#translation.en", "parquet:{}/rows.*.parquet#translation.de"),
    "hub": ("hub:{}/hub:de-en:train#translation.en", "hub:{}/hub:de-en:train#translation.de"),
    "stream": ("stream:{}/hub:de-en:train#translation.en", "stream:{}/hub:de-en:train#translation.de"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("form", NAMES)
def test_every_format_gives_the_same_pairs(tables: Path, form: str) -> None:
    source, target = (name.format(tables) for name in NAMES[form])
    assert list(read_sides(source, target)) == TEXTS
    assert list(read_sides(source, target, skip=4)) == TEXTS[4:]
    streamed = form in ("stream", "tsv by URL")
    assert is_streamed(source) == streamed
    facts = measure_side(target)
    assert facts.lines == (0 if streamed else len(TEXTS))
    plain = tables / f"{form.replace(' ', '-')}.txt"
    plain.write_text("".join(f"{pair[1]}\n" for pair in TEXTS), encoding="utf-8")
    assert list(read_side(str(plain))) == list(read_side(target)) == [pair[1] for pair in TEXTS]
    assert streamed or measure_side(str(plain)) == facts, "the same text is the same corpus in every format"


def test_sides_may_be_of_different_kinds(tables: Path) -> None:
    assert list(read_sides(NAMES["csv"][0].format(tables), NAMES["jsonl"][1].format(tables))) == TEXTS
    with pytest.raises(InputError, match="expected two columns of one table, since it is streamed"):
        read_sides(NAMES["stream"][0].format(tables), NAMES["csv"][1].format(tables))
    (tables / "short.txt").write_text("eins\n")
    with pytest.raises(InputError, match=r"rows\.csv#en has 6 lines but .*short\.txt has 1"):
        list(read_sides(NAMES["csv"][0].format(tables), f"{tables}/short.txt"))


def test_a_table_is_known_by_its_files(tables: Path) -> None:
    name = NAMES["parquet"][0].format(tables)
    before = stat_side(name)
    assert before is not None
    assert before[0] == sum(path.stat().st_size for path in tables.glob("rows.*.parquet"))
    os.utime(tables / "rows.1.parquet", ns=(1, before[1] + 5))
    assert stat_side(name) == (before[0], before[1] + 5)
    assert stat_side(f"parquet:{tables}/none.parquet#a") is None
    assert stat_side("hub:someone/corpus:train#a") == (0, 0)


WRONG_NAMES = {
    "csv:file.csv": "expected csv:FILE#COLUMN",
    "hub:wmt14#translation.de": "expected hub:NAME:CONFIG:SPLIT#COLUMN, or without CONFIG",
    "stream:a:b:c:d#x": "expected stream:NAME:CONFIG:SPLIT#COLUMN",
    "tsv:file.tsv#de": "expected the number of a column, from 1",
    "tsv:file.tsv#0": "expected the number of a column, from 1",
}


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_wrong_names_are_explained(name: str) -> None:
    with pytest.raises(InputError, match=WRONG_NAMES[name]):
        parse_column(name)


def test_plain_names_are_text_files() -> None:
    assert parse_column("data/train.de") is None
    assert parse_column("embedded:swmsg_ende/train.de.xz") is None
    assert parse_column("data/a#b.tsv") is None
    column = parse_column("hub:wmt/wmt14@refs/convert/parquet:de-en:train#translation.de")
    assert column is not None
    assert (column.table, column.name) == (
        Table("hub", "wmt/wmt14@refs/convert/parquet:de-en:train"), "translation.de",
    )  # fmt: skip


def spoilt(name: str, content: bytes) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).write_bytes(content)
        return f"{name.rpartition('.')[2]}:{folder}/{name}"

    return write


BAD: dict[str, tuple[Callable[[Path], str], str, str]] = {
    "no such column": (lambda f: f"parquet:{f}/rows.0.parquet", "fr", "has no column fr: expected one of translation"),
    "no such field": (
        lambda f: f"parquet:{f}/rows.0.parquet", "translation.fr", "translation has no field fr: .* one of en, de",
    ),
    "no text": (lambda f: f"parquet:{f}/rows.0.parquet", "id", "expected text in column id, found int64"),
    "no fields": (lambda f: f"parquet:{f}/rows.0.parquet", "id.x", "column id has no field x: it holds int64"),
    "no file": (lambda f: f"jsonl:{f}/none.jsonl", "a", "not found"),
    "no match": (lambda f: f"csv:{f}/none*.csv", "a", "no file matches"),
    "damaged Parquet": (spoilt("bad.parquet", b"PAR1" + b"x" * 60), "a", "cannot be read .*arquet"),
    "damaged JSON": (spoilt("bad.jsonl", b'{"a": 1\n{'), "a", "cannot be read .*JSON parse error"),
    "damaged CSV": (spoilt("bad.csv", b"a,b\n1,2\n1,2,3,4\n"), "a", "cannot be read .*Expected 2 fields in line 3"),
    "CSV encoding": (spoilt("latin.csv", "a,b\nschön,2\n".encode("latin-1")), "a", "expected UTF-8"),
    "few columns": (spoilt("few.tsv", b"a\tb\na\n"), "2", r"few\.tsv, line 2: expected 2 columns at least.* found 1"),
    "TSV encoding": (spoilt("latin.tsv", b"a\tb\n\xe4\tb\n"), "2", r"latin\.tsv, line 2, byte 1 of the line"),
    "no such configuration": (lambda f: f"hub:{f}/hub:fr-en:train", "a", "'fr-en' not found"),
    "no such split": (lambda f: f"stream:{f}/hub:de-en:test", "a", "[Ss]plit.*test"),
    "no such address": (lambda f: "tsv:http://127.0.0.1:9/x.tsv", "1", "not there or cannot be reached"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_tables_are_one_sentence(tables: Path, case: str, capfd: pytest.CaptureFixture[str]) -> None:
    make, column, sentence = BAD[case]
    parsed = parse_column(f"{make(tables)}#{column}")
    assert parsed is not None
    with pytest.raises(InputError, match=sentence) as caught:
        list(read_columns(parsed.table, [parsed.name]))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == "", "what goes wrong is said once"


@pytest.mark.parametrize("kind", ["hub", "stream"])
def test_code_of_a_data_set_is_never_run(tmp_path: Path, kind: str) -> None:
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(InputError, match=r"needs code of its own to be read .* which is never run"):
        list(read_side(f"{kind}:{tmp_path}/evil:train#text"))
    (tmp_path / "evil" / "evil.py").unlink()
    (tmp_path / "evil" / "train.tar").write_bytes(bytes(10240))
    with pytest.raises(InputError, match="is stored as webdataset: expected parquet, arrow, json, csv or text"):
        list(read_side(f"{kind}:{tmp_path}/evil:train#text"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["hub", "stream"])
def test_offline_and_not_cached_says_both(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"is not in the cache and cannot be fetched .* go online, or set HF_HOME"):
        list(read_side(f"{kind}:wmt14:de-en:train#translation.de"))


def test_a_fetch_goes_on_behind_the_last_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.fetched.PAIRS_PER_FILE", 10)
    pairs = [(f"s {n}", f"t {n}\u2028") for n in range(35)]
    asked: list[int] = []

    def read(skip: int, breaks_at: int = 99) -> object:
        asked.append(skip)
        for number in range(skip, len(pairs)):
            if number == breaks_at:
                raise InputError("the line went down")
            yield pairs[number]

    with pytest.raises(InputError, match="went down"):
        fetch(lambda skip: read(skip, 27), tmp_path, lambda _: None)  # type: ignore[arg-type, return-value]
    assert open_fetched(tmp_path) is None
    fetched = fetch(read, tmp_path, lambda _: None)  # type: ignore[arg-type]
    assert asked == [0, 20]
    assert fetched.lines == 35
    assert list(fetched.pairs()) == pairs
    assert fetch(read, tmp_path, lambda _: None) == fetched == open_fetched(tmp_path)  # type: ignore[arg-type]
    assert asked == [0, 20], "what is whole is not fetched again"
    rename_durably(tmp_path / "fetched-000002.zst", tmp_path / "away")
    with pytest.raises(InputError, match="not found"):
        list(fetched.pairs())
