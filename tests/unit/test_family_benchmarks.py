"""The benchmarks of the family: what they measure is what they say, and they run to their ends."""

import json
import math
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import depth, layer_complexity, table3
from benchmarks.harness import start_recording
from benchmarks.layers import KERNEL, LAYERS, WINDOW
from benchmarks.small_runs import mean_and_spread, prepare_quietly, unigram_nll
from data_pipeline.prepared import open_prepared
from data_pipeline.settings import load_sections
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.errors import RunError
from dist_tfm.model.counting import parameter_counts
from tests.jobs import small_project
from tests.unit.test_benchmarks import check_rows

torch.set_num_threads(1)


def test_layers_connect_what_the_table_says_and_others_are_noticed() -> None:
    for name, kind in LAYERS.items():
        layer_complexity.check_structure(name, kind)
    for name, reach in (("restricted", WINDOW - 1), ("restricted", WINDOW + 1), ("convolutional", None), ("linear", 3)):
        with pytest.raises(RunError, match="to depend on positions"):
            layer_complexity.check_structure(name, LAYERS[name]._replace(reach=reach))
    paths = {name: [kind.path(n) for n in (2, 1025)] for name, kind in LAYERS.items()}
    assert paths["self-attention"] == [1, 1]
    assert paths["restricted"] == [1, 1024 // WINDOW]
    assert paths["convolutional"] == [1, 1024 // (KERNEL // 2)]
    assert paths["recurrent"] == [2, 1025]


def test_layer_complexity_runs_and_sees_what_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "rows.json", tmp_path / "plot.svg"
    assert layer_complexity.main(["--quick", "--json", str(file), "--plot", str(plot)]) == 0
    rows = json.loads(file.read_text())
    check_rows(rows)
    assert "| time-recurrent-70 |" in capsys.readouterr().out
    assert "<svg" in plot.read_text()
    values = {row["name"]: row["value"] for row in rows}
    kept = {name: values[f"memory-{name}-70"] / values[f"memory-{name}-8"] for name in LAYERS}
    assert kept["self-attention-scores-kept"] > 3, "of every pair of positions"
    assert kept["self-attention"] < 1.2, "of every position"
    assert kept["convolutional"] == pytest.approx(1, abs=0.05)
    assert [values[f"growth-table-{name}"] for name in ("self-attention", "recurrent")] == [1.0, 0.0]
    assert {row["ratio"] is None for row in rows if row["name"].startswith("time-self-attention-7")} == {True}


def test_rows_of_table_3_change_what_the_papers_rows_change() -> None:
    base = load_sections("tiny", [*table3.BASE.items()], SECTIONS)["model"]
    assert (base.encoder_layers, base.heads * base.key_width, base.d_ff) == (2, base.d_model, 4 * base.d_model)
    counts = {}
    for name, row in table3.ROWS.items():
        sections = load_sections("tiny", [*table3.BASE.items(), *row.keys.items()], SECTIONS)
        check_sections(sections)
        counts[name] = sum(parameter_counts(sections["model"], 1000).values())
    for name, count in counts.items():
        if name.startswith(("a-", "d-")):
            assert count == counts["base"], name
        elif name not in ("base", "e-learned"):
            # As the paper's column: smaller rows have a worse perplexity, larger ones a better one.
            assert (count > counts["base"]) == (table3.ROWS[name].perplexity < table3.ROWS["base"].perplexity), name


def test_table_3_runs_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, before = tmp_path / "rows.json", dict(os.environ)
    assert table3.main(["--quick", "--only", "c-1-layer", "--json", str(file)]) == 0
    assert dict(os.environ) == before
    rows = json.loads(file.read_text())
    check_rows(rows)
    values = {row["name"]: row["value"] for row in rows}
    assert 100 < values["ppl-c-1-layer"] < 5000
    assert values["ppl-spread-c-1-layer"] == 0
    assert "| c-1-layer | " in (said := capsys.readouterr().out)
    assert "| 6.11 | 23.7 |" in said
    assert "epoch" not in said, "what the runs say is not printed"


def test_a_table_of_diverged_runs_is_refused_and_spreads_are_those_of_seeds() -> None:
    scores = table3.summary("x", [(math.log(4), 20.0), (math.log(8), 26.0)], 7)
    assert scores.perplexity == (pytest.approx(6), pytest.approx(8**0.5))
    assert scores.bleu == (23.0, pytest.approx(18**0.5))
    assert mean_and_spread([3.0]) == (3.0, 0.0)
    with pytest.raises(RunError, match="x: 1 of 2 runs diverged"):
        table3.summary("x", [(1.0, 1.0), (None, None)], 7)


def test_depth_tells_training_from_being_stuck_and_from_diverging() -> None:
    recorder = start_recording("depth.py", [])
    depth.record(recorder, "post-24", [4.0, 5.49, None, None], unigram=5.5)
    depth.record(recorder, "pre-6", [4.0, 3.0], unigram=5.5)
    depth.record(recorder, "post-48", [None], unigram=5.5)
    values = {row.name: row.value for row in recorder.rows}
    assert (values["trained-post-24"], values["diverged-post-24"]) == (0.25, 0.5)
    assert (values["nll-pre-6"], values["trained-pre-6"], values["diverged-pre-6"]) == (3.5, 1.0, 0.0)
    assert (values["trained-post-48"], values["diverged-post-48"]) == (0.0, 1.0)
    assert "nll-post-48" not in values


def test_unigrams_are_counted_over_the_training_targets(tmp_path: Path) -> None:
    config = make_config(load_sections(str(small_project(tmp_path, pairs=80, valid=10)), [], SECTIONS))
    prepare_quietly(config)
    prepared = open_prepared(tmp_path / "shards")
    counts: list[Counter[int]] = []
    for reader in (prepared.train, prepared.valid):
        counts.append(Counter())
        for number in range(reader.blocks):
            block = reader.block(number)
            counts[-1].update([*block.target.tolist(), *[2] * block.pairs])
    size, total = prepared.tokenizer.vocab_size, sum(counts[0].values())
    expected = [-n * math.log((counts[0][piece] + 1) / (total + size)) for piece, n in counts[1].items()]
    assert unigram_nll(tmp_path / "shards") == pytest.approx(sum(expected) / sum(counts[1].values()))
