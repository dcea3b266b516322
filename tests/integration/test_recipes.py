"""The data sections of the bundled recipes, as they are, over small local files of the formats that they name."""

import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from data_pipeline.api import DataConfig, Position, TokenizerConfig
from data_pipeline.errors import ConfigError, DamagedError, InputError
from data_pipeline.prepare import check_prepared, prepare
from data_pipeline.prepared import PreparedData, open_prepared
from data_pipeline.ragged import starts_of
from data_pipeline.settings import load_sections
from data_pipeline.shards import ShardReader
from data_pipeline.sources import read_pairs, resolve
from data_pipeline.validation import read_texts
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.inference.forced import forced_scores
from dist_tfm.inference.translator import Translator, load_models
from dist_tfm.parallel.collectives import SingleProcess
from dist_tfm.training.corpus import open_corpus
from tests.data_factory import CHECKSUM, VOCABULARY, make_reader, random_lengths
from tests.jobs import run_job, train_command

SPLITS = {"train": 400, "validation": 20, "test": 30}
COUNTS = {"base_ende": 4_508_785, "big_ende": 4_508_785, "base_enfr": 40_836_715, "big_enfr": 40_836_715}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that lies where `wmt14` is looked for first, with the layout that the hub's data set has."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    names = ("embedded:swmsg_ende/train.en.xz", "embedded:swmsg_ende/train.de.xz")
    pairs = list(read_pairs(*map(resolve, names)))
    card = ["configs:"]
    for pair, languages in (("de-en", ("en", "de")), ("fr-en", ("en", "fr"))):
        folder = tmp_path / "wmt14" / pair
        folder.mkdir(parents=True)
        card += [f"- config_name: {pair}", "  data_files:"]
        first = 0
        for split, count in SPLITS.items():
            chosen = pairs[first : first + count]
            # The last pairs of the training text are pairs of the other splits: they must not be trained on.
            chosen = chosen if split != "train" else [*chosen, *pairs[400:405], *pairs[420:427]]
            rows = [dict(zip(languages, row, strict=True)) for row in chosen]
            pyarrow.parquet.write_table(pyarrow.table({"translation": rows}), folder / f"{split}-0.parquet")
            card += [f"  - split: {split}", f"    path: {pair}/{split}-*"]
            first += count
    (tmp_path / "wmt14" / "README.md").write_text("---\n" + "\n".join(card) + "\n---\n")
    return tmp_path


def prepare_recipe(name: str, *overrides: tuple[str, str]) -> tuple[DataConfig, PreparedData, list[str]]:
    small = [("data.shards", "shards"), ("tokenizer.vocab_size", "700")]
    sections = load_sections(name, [*small, *overrides], SECTIONS)
    check_sections(sections)
    data, tokenizer = sections["data"], sections["tokenizer"]
    said: list[str] = []
    prepare(data, tokenizer, said.append)
    check_prepared(data, tokenizer)
    return data, open_prepared(Path("shards")), said


def texts_of(reader: ShardReader, prepared: PreparedData) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for number in range(reader.blocks):
        block = reader.block(number)
        sides = []
        for flat, lengths in ((block.source, block.source_lengths), (block.target, block.target_lengths)):
            starts = starts_of(lengths).tolist()
            sides.append([prepared.tokenizer.decode(flat[a:b].tolist()) for a, b in itertools.pairwise(starts)])
        found += list(zip(*sides, strict=True))
    return found


@pytest.mark.parametrize("name", ["base_ende", "base_enfr"])
def test_wmt14_recipes_read_the_hub_s_layout(hub: Path, name: str) -> None:
    data, prepared, said = prepare_recipe(name)
    report = json.loads(Path("shards/report.json").read_bytes())["train"]
    assert report["read"] == 412
    assert report["rejected"]["held_out"] == 12, "of the validation and of the test set"
    assert report["kept"] == prepared.train.index.pairs == len(texts_of(prepared.train, prepared))
    sources, references = read_texts(prepared.valid.folder, prepared.valid.index)
    assert (len(sources), len(references)) == (20, 20)
    pairs = list(read_pairs(*map(resolve, ("embedded:swmsg_ende/train.en.xz", "embedded:swmsg_ende/train.de.xz"))))
    assert (sources[0], references[0]) == pairs[400]
    (warning,) = [line for line in said if line.startswith("warning")]
    assert f"has 412 pairs, data.expected_pairs says {COUNTS[name]:,}" in warning
    # The hub need not be there any more.
    (hub / "wmt14").rename(hub / "away")
    check_prepared(data, TokenizerConfig(vocab_size=700))


@pytest.mark.parametrize("name", COUNTS)
def test_recipes_write_their_expected_counts_down(name: str) -> None:
    assert load_sections(name, [], SECTIONS)["data"].expected_pairs == COUNTS[name]


def test_the_paracrawl_recipe_streams_and_cleans(hub: Path) -> None:
    pairs = list(read_pairs(*map(resolve, ("embedded:swmsg_ende/train.en.xz", "embedded:swmsg_ende/train.de.xz"))))
    rows = [
        *pairs[:300],
        *pairs[10:20],
        (pairs[405][0], pairs[405][1] + " anders"),
        ("page 1234", "Seite 5678"),
        ("Same one", "same one"),
    ]
    (hub / "en-de.txt").write_text("".join(f"{s}\t{t}\n" for s, t in rows), encoding="utf-8")
    url = f"tsv:file://{hub}/en-de.txt"
    overrides = [("data.train_source", f"{url}#1"), ("data.train_target", f"{url}#2")]
    _, prepared, said = prepare_recipe("paracrawl_ende", *overrides)
    assert "fetched 313 pairs" in said
    report = json.loads(Path("shards/report.json").read_bytes())["train"]
    assert report["read"] == 313
    assert report["rejected"]["held_out"] == report["rejected"]["identical"] == 1
    assert report["rejected"]["digits"] >= 1
    assert report["rejected"]["duplicates"] >= 10
    found = texts_of(prepared.train, prepared)
    assert len({pair[0] for pair in found}) == len(found) == report["kept"]
    assert not Path("shards/.work").exists()


def test_the_nllb_recipe_reads_columns_in_the_order_of_its_release(hub: Path) -> None:
    """Score, German, English; the best scores first. A cut line and a quotation mark are text like any other."""
    pairs = list(read_pairs(*map(resolve, ("embedded:swmsg_ende/train.en.xz", "embedded:swmsg_ende/train.de.xz"))))
    rows = [*pairs[:300], pairs[400], ("Only 3 of them", "Nur 4 davon"), ("the same", "the same"), pairs[0]]
    rows.append(('an "unclosed mark', "ein „offenes Zeichen"))
    table = "".join(f"{1.25 - i / 1000}\t{target}\t{source}\n" for i, (source, target) in enumerate(rows))
    with gzip.open("de-en.bitextf.tsv.gz", "wt", encoding="utf-8") as file:
        file.write(table)
    data = load_sections("nllb_ende", [], SECTIONS)["data"]
    assert data.train_source == "tsv:http://data.statmt.org/cc-matrix/de-en.bitextf.tsv.gz#3"
    assert data.train_target == data.train_source.replace("#3", "#2")
    url = f"tsv:file://{Path.cwd()}/de-en.bitextf.tsv.gz"
    overrides = [("data.train_source", f"{url}#3"), ("data.train_target", f"{url}#2")]
    _, prepared, said = prepare_recipe("nllb_ende", *overrides)
    assert "fetched 305 pairs" in said
    report = json.loads(Path("shards/report.json").read_bytes())["train"]
    assert report["read"] == 305
    assert report["rejected"]["held_out"] == report["rejected"]["identical"] == 1
    assert report["rejected"]["digits"] >= 1
    assert report["rejected"]["duplicates"] >= 1
    found = texts_of(prepared.train, prepared)
    assert ('an "unclosed mark', "ein „offenes Zeichen") in found, "English is the source"
    assert len(found) == report["kept"]


def test_separate_vocabularies_are_prepared_and_need_two_matrices(tmp_path: Path) -> None:
    texts = {"source": "the cat\nthe dog\n", "target": "die Katze\nder Hund\n"}
    settings = {"data.shards": tmp_path / "shards", "tokenizer.kind": "words", "tokenizer.shared": "false"}
    for side, text in texts.items():
        (tmp_path / side).write_text(text)
        settings |= {f"data.{split}_{side}": tmp_path / side for split in ("train", "valid")}
    sections = load_sections("tiny", [(key, str(value)) for key, value in settings.items()], SECTIONS)
    prepare(sections["data"], sections["tokenizer"], lambda _: None)
    prepared = open_prepared(tmp_path / "shards")
    assert (prepared.tokenizer.source.vocab_size, prepared.tokenizer.target.vocab_size) == (7, 8)
    block = prepared.valid.block(0)
    assert prepared.tokenizer.source.decode(block.source.tolist()) == "the cat the dog"
    assert prepared.tokenizer.target.decode(block.target.tolist()) == "die Katze der Hund"
    with pytest.raises(ConfigError, match=r"model\.tied: expected decoder or none .*cannot embed the tokens of two"):
        check_sections(sections)
    config = make_config({**sections, "tokenizer": TokenizerConfig()})
    with pytest.raises(InputError, match=r"has a vocabulary for each side, which one matrix \(model\.tied=all\)"):
        open_corpus(config, SingleProcess(), Position())
    untied = make_config({**sections, "model": replace(config.model, tied="decoder")})
    check_sections(vars(untied))
    corpus = open_corpus(untied, SingleProcess(), Position())
    assert "vocabularies 7 (source) and 8 (target)" in corpus.description
    short = replace(untied.model, positions="learned", max_positions=2)  # two words and EOS
    with pytest.raises(InputError, match=r"model\.max_positions: expected at least the 3 tokens of the longest pair"):
        open_corpus(replace(untied, model=short), SingleProcess(), Position())


def test_separate_vocabularies_are_trained_validated_saved_and_translated_with(tmp_path: Path) -> None:
    """Forty source words and six target ones, so that an id on the wrong side would be out of range."""
    words = ["a b", "c d e", "f"]
    sources = [" ".join(f"s{(7 * i + j) % 40}" for j in range(1 + i % 5)) for i in range(60)]
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in sources))
    (tmp_path / "target").write_text("".join(f"{words[i % 3]}\n" for i in range(60)))
    settings = {
        f"data.{split}_{side}": tmp_path / side for split in ("train", "valid") for side in ("source", "target")
    }
    small = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "d_ff": 16, "heads": 2, "tied": "decoder"}
    settings |= {f"model.{key}": value for key, value in small.items()}
    settings |= {"tokenizer.kind": "words", "tokenizer.shared": "false", "data.shards": tmp_path / "shards"}
    settings |= {"train.steps": 4, "train.validate_every": 4, "train.run_dir": tmp_path / "run", "decode.beam": 2}
    done = run_job(train_command(1, *(f"--{key}={value}" for key, value in settings.items())))
    assert done.returncode == 0, done.stdout
    assert "vocabularies 44 (source) and 10 (target)" in done.stdout
    models, tokenizer, config = load_models([tmp_path / "run"], torch.device("cpu"), torch.float32)
    shapes = {name: tuple(p.shape) for name, p in models[0].named_parameters() if "embedding" in name}
    assert shapes == {"embedding.weight": (10, 16), "source_embedding.weight": (44, 16)}
    (translated,) = Translator(models, tokenizer, config.decode).translate(["s39 s38 s1"])
    assert set(translated[0].text.split()) <= set("abcdef")
    scores = forced_scores(
        models, tokenizer.source.encode(["s39"]), tokenizer.target.encode(["f a"]), torch.device("cpu")
    )
    assert scores[0].log_probability < 0


def test_ids_of_the_other_vocabulary_are_refused(tmp_path: Path) -> None:
    """A block whose source ids only the target's vocabulary has, with a right checksum."""
    reader = make_reader(tmp_path, random_lengths(50))
    assert reader.block(0).pairs
    limited = ShardReader(reader.folder, reader.index, CHECKSUM, sizes=(VOCABULARY, VOCABULARY - 100))
    with pytest.raises(DamagedError, match=rf"source ids lie outside \[3, {VOCABULARY - 100}\)"):
        limited.block(0)
    other = ShardReader(reader.folder, reader.index, CHECKSUM, sizes=(VOCABULARY - 100, VOCABULARY))
    with pytest.raises(DamagedError, match="target ids lie outside"):
        other.block(0)


def test_segmented_text_and_ids_are_prepared_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "segmented").write_text("the un@@ know@@ able cat\nthe dog\n" * 5)
    (tmp_path / "numbers").write_text("4 5 600\n7 3\n" * 5)
    (tmp_path / "vocab").write_text("the 9\nun@@ 5\nknow@@ 5\nable 5\ncat 5\n")
    for kind, text, back, more in (
        ("words", "segmented", {"the unknowable cat", "the"}, ("model", tmp_path / "vocab")),
        ("ids", "numbers", {"4 5 600", "7"}, ("vocab_size", 601)),
    ):
        names = {f"data.{s}_{t}": tmp_path / text for s in ("train", "valid") for t in ("source", "target")}
        settings = {**names, "data.shards": tmp_path / kind, "tokenizer.kind": kind, f"tokenizer.{more[0]}": more[1]}
        sections = load_sections("tiny", [(key, str(value)) for key, value in settings.items()], SECTIONS)
        prepare(sections["data"], sections["tokenizer"], lambda _: None)
        prepared = open_prepared(tmp_path / kind)
        assert {side for pair in texts_of(prepared.train, prepared) for side in pair} == back
        (tmp_path / "vocab").write_text("other\n")
        if kind == "words":
            with pytest.raises(InputError, match=r"tokenizer\.model was .* there and is"):
                check_prepared(sections["data"], sections["tokenizer"])
            (tmp_path / "vocab").unlink()
            check_prepared(sections["data"], sections["tokenizer"])
