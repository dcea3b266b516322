"""The benchmarks: the format of what they record, that the tables in docs are those rows, that they run to their end.

No test here looks at a time: only at what is measured, and how it is put together.
"""

import json
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import engine_cost, harness, plan_quality, tables
from benchmarks.engine_cost import BareLoop, Contender, Effort, check_agreement
from benchmarks.harness import Recorder, Row, command_line, interleave, paired_ratio, quantity, read_rows, write_rows
from benchmarks.loader_throughput import Store, epoch_positions, stored_bytes, summarise_run, tokens_per_second
from benchmarks.peers import TRAINING_PACKAGES
from benchmarks.synthetic import draw_lengths, write_random_shards
from data_pipeline.api import Batch, DataConfig, Position
from data_pipeline.errors import InputError, RunError
from dist_tfm.config.schema import Config, ModelConfig, PrecisionConfig, ScheduleConfig
from tests import oracle
from tests.batches import VOCABULARY, step_batches
from tests.data_factory import random_lengths
from tests.jobs import run_program, small_project

KEYS = ["name", "value", "unit", "ratio", "peak_fraction", "command", "machine", "commit", "date"]
SCRIPTS = (
    "attention_lengths",
    "decode_throughput",
    "depth",
    "fused_projections",
    "layer_complexity",
    "loader_peers",
    "loader_throughput",
    "parallel_overhead",
    "plan_quality",
    "prepare_speed",
    "step_costs",
    "table3",
    "tiny_trials",
    "train_throughput",
    "train_throughput_native",
)
RECORDED = sorted(tables.RESULTS.glob("*.json"))


def row(name: str = "webdataset", **changes: Any) -> Row:
    values = {"value": 5.0, "unit": "tokens/s", "ratio": 2.0, "peak_fraction": None}
    origin = {"command": "python benchmarks/x.py", "machine": "a CPU, 2 cores", "commit": "abc", "date": "2025-01-31"}
    return Row(name=name, **{**values, **origin, **changes})


def check_rows(rows: Sequence[dict[str, Any]]) -> None:
    """What every consumer of the files relies on."""
    names = [entry["name"] for entry in rows]
    assert len(set(names)) == len(names)
    for entry in rows:
        assert list(entry) == KEYS
        assert isinstance(entry["value"], float | int)
        if re.fullmatch(r"dist_tfm-(fp32|bf16|fp16|int64)(-cpp)?", entry["name"]):
            assert entry["ratio"] is None
        else:
            assert not entry["name"].startswith("dist_tfm")
        assert entry["ratio"] is None or entry["ratio"] > 0
        assert entry["peak_fraction"] is None or entry["peak_fraction"] > 0
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"])
        assert entry["command"].startswith("python benchmarks/")
        assert platform.node() not in entry["machine"]


def test_every_benchmark_has_recorded_rows() -> None:
    assert [path.stem for path in RECORDED] == sorted(SCRIPTS)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_rows_have_the_agreed_format_and_name_no_place(path: Path) -> None:
    rows = json.loads(path.read_text(encoding="utf-8"))
    check_rows(rows)
    assert rows
    for entry in rows:
        script = path.stem.removesuffix("_native")  # the same script with train.kernels=native
        assert entry["command"].startswith(f"python benchmarks/{script}.py")
        assert re.fullmatch(r"[0-9a-f]{12}\+?", entry["commit"])
        for text in entry.values():
            assert not re.search(r"(^|[\s=])[/~]", str(text)), text


def test_the_tables_in_docs_are_those_of_the_recorded_rows() -> None:
    for document in tables.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert "<!-- table: " in text
        assert tables.render(text) == text
    assert tables.main(["--check"]) == 0


def test_every_recorded_row_stands_in_docs() -> None:
    text = tables.DOCUMENT.read_text(encoding="utf-8")
    for path in RECORDED:
        for entry in read_rows(path):
            assert text.count("| " + " | ".join(harness.cells(entry)) + " |") == 1, entry.name


def test_a_number_changed_by_hand_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tables.DOCUMENT.read_text(encoding="utf-8")
    number = re.search(r"\| dist_tfm-fp32 \| ([\d,]+) tokens/s", text)
    assert number is not None
    document = tmp_path / "docs" / "benchmarks.md"
    document.parent.mkdir()
    forged = text[: number.start(1)] + "999,999" + text[number.end(1) :]
    document.write_text(forged, encoding="utf-8")
    monkeypatch.setattr(tables, "DOCUMENTS", (document,))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    with pytest.raises(InputError, match="differs from the recorded rows"):
        tables.main(["--check"])
    assert document.read_text(encoding="utf-8") == forged
    assert tables.main([]) == 0
    assert document.read_text(encoding="utf-8") == text


def test_a_table_shows_the_rows_of_its_prefixes_under_their_origin(tmp_path: Path) -> None:
    rows = [row("webdataset"), row("mds", ratio=None), row("mds-slow", commit="def"), row("other")]
    write_rows(tmp_path / "peers.json", rows)
    text = "before\n<!-- table: peers mds web -->\nold\n<!-- end of table -->\nafter\n"
    rendered = tables.render(text, tmp_path)
    assert tables.render(rendered, tmp_path) == rendered
    assert rendered.startswith("before\n<!-- table: peers mds web -->\n`python benchmarks/x.py` · a CPU, 2 cores · ")
    assert rendered.endswith("<!-- end of table -->\nafter\n")
    assert "old" not in rendered
    assert "other" not in rendered
    assert "| webdataset | 5.00 tokens/s | 2.00 |  |" in rendered
    assert "| mds | 5.00 tokens/s |  |  |" in rendered
    assert rendered.index("commit abc") < rendered.index("| mds |") < rendered.index("commit def")
    with pytest.raises(InputError, match="no row whose name begins with eole"):
        tables.render("<!-- table: peers eole -->\n<!-- end of table -->", tmp_path)


@pytest.mark.parametrize(
    "damage",
    [{"extra": 1}, {"value": "5"}, {"unit": None}, {"value": float("inf")}],
    ids=["unknown key", "text for a number", "missing unit", "infinite"],
)
def test_rows_of_another_format_are_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "rows.json"
    write_rows(path, [row()])
    assert read_rows(path) == [row()]
    path.write_text(json.dumps([{**json.loads(path.read_text())[0], **damage}]))
    with pytest.raises(InputError, match=r"rows\.json: expected benchmark rows"):
        read_rows(path)


def test_a_recorder_stamps_rows_and_rounds_to_what_is_known() -> None:
    recorder = Recorder("c", "m", "abc", "2025-01-31")
    recorder.add("mds", 1 / 3, "tokens/s", ratio=2 / 3, peak_fraction=1e-9 / 3)
    assert recorder.rows == [Row("mds", 0.333333, "tokens/s", 0.666667, 3.33333e-10, "c", "m", "abc", "2025-01-31")]


def test_the_recorded_command_leaves_out_where_rows_went() -> None:
    kept = ["--quick", "--data.shards=a b", "--threads", "2"]
    expected = "python benchmarks/x.py --quick '--data.shards=a b' --threads 2"
    assert command_line("x.py", ["--json", "f.json", *kept]) == expected
    assert command_line("x.py", [*kept, "--json=f.json"]) == expected


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    results = interleave({name: (lambda name=name: run(name)) for name in "ABC"}, 2)
    assert "".join(order) == "ABCABC"
    assert results == {"A": [1, 4], "B": [2, 5], "C": [3, 6]}


def test_a_paired_ratio_sees_through_a_machine_that_slows_down() -> None:
    drift = [1.0, 1.0, 1.0, 3.0, 9.0]
    ours = [1.1 * slow for slow in drift]
    assert paired_ratio(ours, drift) == pytest.approx(1.1)
    with pytest.raises(ValueError, match="argument 2"):
        paired_ratio(ours, drift[:-1])


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.02346, "fraction", "2.35 %"),
        (1234567.0, "tokens/s", "1,234,567 tokens/s"),
        (99.96, "tokens/s", "100 tokens/s"),
        (0.012345, "s", "0.0123 s"),
        (3 * 2**20, "bytes", "3.00 MiB"),
        (4.2e9, "bytes/s", "4.20 GB/s"),
        (-0.0625, "s/step", "-0.0625 s/step"),
    ],
)
def test_quantities_read_well(value: float, unit: str, shown: str) -> None:
    assert quantity(value, unit) == shown


def test_data_wait_is_weighted_by_time_and_leaves_out_the_first_step() -> None:
    lines = [
        {"source_tokens": 50, "target_tokens": 50, "tokens_per_second": 1.0, "data_wait_fraction": 0.99},
        {"source_tokens": 40, "target_tokens": 60, "tokens_per_second": 100.0, "data_wait_fraction": 0.5},
        {"source_tokens": 100, "target_tokens": 200, "tokens_per_second": 100.0, "data_wait_fraction": 0.0},
    ]
    run = summarise_run("fp32", lines)
    assert run.tokens_per_second == pytest.approx(400 / 4)
    assert run.data_wait_fraction == pytest.approx(0.5 / 4)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    lengths = draw_lengths(random_lengths(200), 9000, seed=3)
    reader = write_random_shards(tmp_path / "train", lengths, seed=3)
    return Store("large", reader, DataConfig(batch_tokens=2000, micro_batches=2, window_pairs=4096), passes=2)


def test_random_shards_hold_the_lengths_asked_for(store: Store) -> None:
    lengths = draw_lengths(random_lengths(200), 9000, seed=3)
    assert np.array_equal(store.reader.lengths, lengths)
    assert {tuple(pair) for pair in lengths} <= {tuple(pair) for pair in random_lengths(200)}
    assert store.reader.blocks == 3
    ids = np.concatenate([store.reader.block(number).source for number in range(3)])
    assert len(ids) == lengths[:, 0].sum()
    assert len(np.unique(ids)) > 10_000
    files = sum(path.stat().st_size for path in store.reader.folder.iterdir())
    assert stored_bytes(store.reader) == (files, 2 * int(lengths.sum()))


def test_speed_is_measured_over_whole_epochs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0])  # one second, so that the speed is the number of tokens
    monkeypatch.setattr("benchmarks.loader_throughput.time.perf_counter", lambda: next(clock))
    per_epoch = sum(store.reader.index.tokens)
    # An epoch's first step is another one each time, hence not exactly two epochs.
    assert tokens_per_second(store, workers=0) == pytest.approx(2 * per_epoch, abs=2 * 4000)


def test_resuming_is_measured_far_apart(store: Store) -> None:
    positions = epoch_positions(store)
    with store.loader() as loader:
        for position in positions.values():
            loader.seek(position)
            assert loader.position == position
            loader.next_step()
            if position == positions["end"]:
                assert loader.position == Position(epoch=1)
    assert positions["end"].window == 2
    assert positions["epoch-100"].epoch == 100


def with_oracle_settings(config: Config, recipe: oracle.Recipe) -> Config:
    return replace(
        config,
        train=replace(config.train, seed=recipe.seed, label_smoothing=recipe.smoothing),
        optim=replace(config.optim, clip_norm=recipe.clip, eps=recipe.eps),
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
def test_the_bare_loop_trains_like_the_oracle(precision: str) -> None:
    recipe = oracle.Recipe(precision=precision, micro_batches=2, steps=5)
    config = Config(
        model=recipe.model,
        schedule=ScheduleConfig(kind="noam", warmup=recipe.warmup, factor=recipe.factor),
        precision=PrecisionConfig("fp32" if precision == "fp32" else "bf16"),
    )
    config = with_oracle_settings(config, recipe)
    loop = BareLoop(config, VOCABULARY, precision, torch.device("cpu"))  # type: ignore[arg-type]
    losses = [loop.train(step_batches(step, 2), step) for step in range(1, 6)]
    expected = oracle.train(recipe, lambda step: step_batches(step, 2)).losses
    assert losses == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 5e-3)
    assert losses[0] != losses[-1]


def test_contenders_that_do_other_work_are_not_compared() -> None:
    bare = ("bare-loop-fp32", [5.0, 4.0])
    check_agreement(("engine", [5.0004, 4.0]), bare, 1e-4)
    with pytest.raises(RunError, match="engine and bare-loop-fp32 were expected to train alike, but at step 2"):
        check_agreement(("engine", [5.0, 4.001]), bare, 1e-4)
    with pytest.raises(RunError, match="at step 1"):
        check_agreement(("engine", [float("nan"), 4.0]), bare, 1e-4)


def test_a_profiled_step_is_told_apart_by_kind_of_operator() -> None:
    a = torch.randn(256, 256)

    def train(batches: Sequence[Batch], step: int) -> float:
        return float(torch.mm(a, a).clone().sum())

    contender = Contender("products", train)
    seconds = contender.profiled([])
    assert set(seconds) == {*engine_cost.KINDS, "other", "python"}
    assert seconds["products"] > 0
    assert seconds["copies"] > 0
    assert seconds["other"] > 0
    assert seconds["python"] > 0
    assert seconds["adam"] == 0
    assert len(contender.losses) == 1


def run_benchmark(script: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Runs `benchmarks/SCRIPT.py --quick` on a very small project; its rows."""
    config, rows = small_project(folder), folder / "rows.json"
    command = [sys.executable, f"benchmarks/{script}.py", "--quick", "--config", str(config), "--json", str(rows)]
    done = run_program([*command, *arguments], cwd=harness.ROOT)
    assert done.returncode == 0, done.stderr.decode()
    found: list[dict[str, Any]] = json.loads(rows.read_text(encoding="utf-8"))
    check_rows(found)
    assert done.stdout.decode().count("\n| ") == len(found), done.stdout.decode()
    return found


def test_the_loader_benchmark_runs_to_its_end(tmp_path: Path) -> None:
    rows = {r["name"]: r for r in run_benchmark("loader_throughput", tmp_path, "--pairs", "3000")}
    # The micro-batch budgets of the small configuration and of tiny.yaml.
    assert {r["name"] for r in read_recorded("loader_throughput")} == {n.replace("-200", "-500") for n in rows}
    assert rows["training-fp32"]["ratio"] == pytest.approx(
        rows["loader-embedded-workers-1"]["value"] / rows["training-fp32"]["value"], rel=1e-4
    )
    assert 0 <= rows["data-wait-fraction"]["value"] < 1
    assert 1 < rows["disk-over-ids"]["value"] < 10
    for name, found in rows.items():
        if name.startswith(("padding-", "fill-")):
            assert 0 < found["value"] < 1


def test_the_training_benchmark_runs_to_its_end(tmp_path: Path) -> None:
    rows = {r["name"]: r for r in run_benchmark("train_throughput", tmp_path, "--rounds", "1")}
    compared = ("dist_tfm-", "memory-", *(f"{peer}-" for peer in TRAINING_PACKAGES))  # only with --against
    recorded = {r["name"] for r in read_recorded("train_throughput")}
    assert set(rows) == {name for name in recorded if not name.startswith(compared)}
    assert len({r["command"] for r in rows.values()}) == 1
    for dtype in ("fp32", "bf16"):
        assert rows[f"gemm-peak-{dtype}"]["ratio"] == rows[f"training-{dtype}"]["peak_fraction"]
        assert rows[f"peak-memory-{dtype}"]["value"] > 2**27
        assert rows[f"engine-{dtype}-stage-1"]["peak_fraction"] > 0
    # Of one round both the cost and the ratio are those of the same two times.
    for dtype in ("fp32", "bf16"):
        cost, ratio = rows[f"engine-cost-{dtype}-stage-1"]["value"], rows[f"bare-loop-{dtype}"]["ratio"]
        assert ratio == pytest.approx(1 / (1 + cost), rel=1e-4)
        assert rows[f"engine-cost-processor-{dtype}-stage-1"]["value"] > -1


def test_the_plan_benchmark_runs_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_quality.main(["--quick", "--rounds", "1", "--json", str(tmp_path / "rows.json")]) == 0
    found = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    check_rows(found)
    rows = {row["name"]: row["value"] for row in found}
    assert len(rows) == 2 * (4 * 5 + 2 * 4)
    for corpus in plan_quality.CORPORA:
        assert 0 < rows[f"padding-{corpus}-1024"] < rows[f"padding-{corpus}-3125"] < rows[f"padding-{corpus}-25000"]
        assert rows[f"useful-{corpus}-3125-lanes-8"] < rows[f"useful-{corpus}-3125"] < rows[f"fill-{corpus}-3125"]
    assert "useful-medium_ende-3125" in capsys.readouterr().out


def read_recorded(script: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((tables.RESULTS / f"{script}.json").read_text(encoding="utf-8"))
    return found


def test_an_effort_of_the_recorded_kind_is_the_one_described_in_docs() -> None:
    effort: Effort = engine_cost.PAPERLIKE
    assert effort.model == ModelConfig(encoder_layers=3, decoder_layers=3)
    assert (effort.model.d_model, effort.vocabulary, effort.micro_batch_tokens) == (512, 8000, 2048)
