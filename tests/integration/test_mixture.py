"""Training on a mixture: shares and epochs are logged, and a run continues on other ranks with the same pairs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_pipeline.api import CorpusConfig, DataConfig, TokenizerConfig
from data_pipeline.errors import ConfigError, InputError
from data_pipeline.prepare import prepare
from data_pipeline.prepared import TOKENIZER_FILE, corpus_location, held_out_parts, open_corpora, training_parts
from data_pipeline.settings import load_sections
from tests.jobs import read_metrics, run_job, run_ranks, small_project, train_command, training_lines

CORPORA = (CorpusConfig("all", weight=3.0, tag="<2de>"), CorpusConfig("short", weight=1.0))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small project as a mixture: all of its corpus, and its short pairs, which take over its tokenizer."""
    folder = tmp_path_factory.mktemp("mixture")
    config = small_project(folder)
    sections = load_sections(str(config), [], {"data": DataConfig, "tokenizer": TokenizerConfig}, lambda _: True)
    taken_over = TokenizerConfig(kind="sentencepiece", model=str(folder / "shards" / "all" / TOKENIZER_FILE))
    for name, longest, tokenizer in (("all", 250, sections["tokenizer"]), ("short", 8, taken_over)):
        data: Any = sections["data"]
        one = {"shards": str(folder / "shards" / name), "max_length": longest, "pairs_per_block": 16}
        prepare(DataConfig(**{**vars(data), **one}), tokenizer, lambda _: None)
    tree = yaml.safe_load(config.read_text())
    tree["data"]["corpora"] = [{"name": c.name, "weight": c.weight, "tag": c.tag} for c in CORPORA]
    tree["data"] |= {"micro_batches": 4, "lanes": 2}
    tree["train"]["validate_every"] = 24
    config.write_text(yaml.safe_dump(tree))
    return folder


def test_a_mixture_trains_the_same_on_any_ranks_and_says_what_it_saw(project: Path, tmp_path: Path) -> None:
    common = ("--config", str(project / "small.yaml"), "--checkpoint.every_steps=0")
    whole = run_job(train_command(1, *common, "--train.steps=24", f"--train.run_dir={tmp_path}/whole"))
    assert whole.returncode == 0, whole.stdout
    assert "mixture: all 75.00% (300 pairs), short 25.00% (" in whole.stdout
    assert "each part of the shards is read by" not in whole.stdout
    for ranks, steps in ((3, 15), (1, 24)):
        changed = (f"--train.steps={steps}", f"--train.run_dir={tmp_path}/elastic")
        results = run_ranks(ranks, tmp_path, *common, *changed)
        assert [code for code, _ in results] == [0] * ranks, results
        if ranks == 3:
            assert "each part of the shards is read by 2 ranks on average" in results[0][1]
            assert "(a new run with data.lanes=4 reads it once)" in results[0][1]
    expected, found = training_lines(tmp_path / "whole"), training_lines(tmp_path / "elastic")
    keys = ("pair_hash", "target_tokens", "epoch", "epoch_all", "epoch_short", "share_all", "share_short")
    assert [[line[key] for key in keys] for line in found] == [[line[key] for key in keys] for line in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert theirs["share_all"] + theirs["share_short"] == pytest.approx(1)
        assert 0.5 < theirs["share_all"] < 1
    # Three of four micro-batches; those of so small a corpus are not as full as the others.
    assert 0.72 < sum(line["share_all"] for line in expected) / len(expected) < 0.9
    last = expected[-1]
    assert last["epoch_short"] > last["epoch_all"] == last["epoch"], "an exhausted corpus begins again alone"
    validations = [
        line for run in ("whole", "elastic") for line in read_metrics(tmp_path / run) if "valid_loss" in line
    ]
    for line in validations:
        assert line["valid_pairs"] == 48, "the held-out pairs of both"
        assert min(line["valid_nll_all"], line["valid_nll_short"]) < line["valid_nll"]
        assert max(line["valid_nll_all"], line["valid_nll_short"]) > line["valid_nll"]
    assert validations[-1]["valid_nll_short"] == pytest.approx(validations[0]["valid_nll_short"], rel=1e-5)
    assert len(validations) >= 2
    counters = json.loads((tmp_path / "whole" / "checkpoints" / "step_24" / "counters.json").read_text())
    assert len(json.dumps(counters["position"])) < 300, "a mixture's state is small"
    assert counters["position"]["step"] == 24


def test_what_the_corpora_of_a_mixture_must_have_in_common(project: Path, tmp_path: Path) -> None:
    data = DataConfig(shards=str(project / "shards"), corpora=CORPORA)
    opened = open_corpora(data)
    assert [Path(corpus_location(data, corpus)) for corpus in CORPORA] == [prepared.folder for prepared in opened]
    (all_of_it, short), held_out = training_parts(data, opened), held_out_parts(data, opened)
    assert opened[0].tokenizer.decode(all_of_it.tag) == "<2de>"
    assert (short.tag, short.first_id, short.number) == ((), 300, 1)
    assert [part.first_id for part in held_out] == [0, 24]
    (one,) = held_out_parts(
        DataConfig(shards=data.shards, corpora=(CORPORA[0], CorpusConfig("short", valid=False))), opened
    )
    assert one.name == "all"
    # A tag and a text are encoded apart in training, together in translation: the same ids.
    tokenizer = opened[0].tokenizer
    for text in ("Hello, world", "2de", "<2de> again", "\u00e9t\u00e9"):
        assert tokenizer.encode([f"<2de> {text}"]) == [[*all_of_it.tag, *tokenizer.encode([text])[0]]]
    other = small_project(tmp_path, pairs=200)
    sections = load_sections(str(other), [], {"data": DataConfig, "tokenizer": TokenizerConfig}, lambda _: True)
    prepare(sections["data"], sections["tokenizer"], lambda _: None)
    foreign = CorpusConfig("other", shards=sections["data"].shards)
    with pytest.raises(InputError, match="the corpora of a mixture need one tokenizer"):
        open_corpora(DataConfig(shards=data.shards, corpora=(CORPORA[0], foreign)))
    with pytest.raises(InputError, match=r"index\.json not found: expected prepared shards, run prepare first"):
        open_corpora(DataConfig(shards=data.shards, corpora=(CORPORA[0], CorpusConfig("missing"))))
    with pytest.raises(ConfigError, match=r"data\.corpora names corpora that are prepared each by itself"):
        prepare(data, sections["tokenizer"], lambda _: None)
