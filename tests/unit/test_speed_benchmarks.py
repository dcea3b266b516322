"""The benchmarks of speed: what they compare is the same work, and they run to their end. No test looks at a time."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import (
    attention_lengths,
    fused_projections,
    gpu_training,
    prepare_speed,
    step_costs,
    train_throughput,
    training_peers,
)
from benchmarks.harness import ROOT, Recorder, Row
from benchmarks.training_peers import MEMORY_UPDATES, QUICK, measure_against
from benchmarks.training_worker import Worker
from data_pipeline.api import Batch, TokenizerConfig
from dist_tfm.config.schema import Config, LaunchConfig
from dist_tfm.engine.base import LossSums, StepResult
from dist_tfm.errors import RunError
from dist_tfm.parallel.environment import read_ranks
from dist_tfm.parallel.topology import shutdown, start
from tests.batches import make_batch
from tests.unit.test_benchmarks import check_rows

torch.set_num_threads(1)
SIZES = {"layers": 1, "d_model": 16, "heads": 2, "d_ff": 32, "vocabulary": 100, "dropout": 0.1}


class PeerHere:
    """A peer that answers in this process."""

    def __init__(self, name: str, script: str, threads: int) -> None:
        assert (ROOT / "benchmarks" / script).is_file()
        self._worker = Worker()

    def __enter__(self) -> "PeerHere":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, request: Mapping[str, Any]) -> Any:
        assert json.loads(json.dumps(request)) == request
        rest = {key: value for key, value in request.items() if key != "do"}
        return json.loads(json.dumps(getattr(self._worker, request["do"])(**rest)))


class OwnEngine:
    """Stands for the engine: notes its micro-batches."""

    trained: list[Batch] = []  # noqa: RUF012 (of the last test)

    def train_batch(self, batches: Sequence[Batch], step: int, tokens: int) -> StepResult:
        (batch,) = batches
        assert tokens == batch.target_tokens
        self.trained.append(batch)
        assert step == len(self.trained)
        return StepResult(LossSums(1.0, 1.0, tokens), 1.0, True, 0.1)

    def close(self) -> None:
        pass


def compare(dtype: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, dict[str, Any]]:
    OwnEngine.trained = []
    monkeypatch.setattr(training_peers, "Peer", PeerHere)
    monkeypatch.setattr(training_peers, "build_engine", lambda *_: OwnEngine())
    recorder = Recorder("python benchmarks/train_throughput.py", "a CPU", "abc", "2026-11-30")
    config = Config(**changes)
    object.__setattr__(config.precision, "dtype", dtype)
    topology = start(read_ranks({}), LaunchConfig(device="cpu"), report=lambda line: None)
    try:
        measure_against(config, ("torch",), QUICK, topology, 1, recorder)
    finally:
        shutdown()
    rows = [vars(row) for row in recorder.rows]
    check_rows(rows)
    return {row["name"]: row for row in rows}


def test_both_sides_train_on_the_same_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Batch] = []
    train = Worker.train

    def noted(self: Worker, batches: str) -> dict[str, Any]:
        with np.load(batches, allow_pickle=False) as stored:
            given.extend(stored[f"labels_{i}"] for i in range(len(stored.files) // 3))
        return train(self, batches)

    monkeypatch.setattr(Worker, "train", noted)
    rows = compare("bf16", monkeypatch)
    assert set(rows) == {"dist_tfm-bf16", "torch-bf16", "memory-512-ours-bf16", "memory-512-torch-bf16"}
    assert rows["torch-bf16"]["ratio"] > 0
    assert rows["dist_tfm-bf16"]["ratio"] is None
    assert rows["torch-bf16"]["peak_fraction"] > 0
    assert len(given) == len(OwnEngine.trained) == (1 + QUICK.rounds) * QUICK.chunk + MEMORY_UPDATES
    for theirs, ours in zip(given, OwnEngine.trained, strict=True):
        assert np.array_equal(theirs, ours.labels)
    assert OwnEngine.trained[0].labels.size > QUICK.budget


def test_a_peer_of_other_dimensions_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Worker.load

    def wider(self: Worker, sizes: dict[str, Any], **rest: Any) -> dict[str, Any]:
        return load(self, sizes=sizes | {"d_model": 2 * sizes["d_model"]}, **rest)

    monkeypatch.setattr(Worker, "load", wider)
    with pytest.raises(RunError, match=r"torch has .* parameters where ours has .*: not the same model"):
        compare("fp32", monkeypatch)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_torch_peer_learns_what_it_is_given(dtype: str, tmp_path: Path) -> None:
    worker = Worker()
    loaded = worker.load("torch", dtype, SIZES, 1, "cpu")
    assert loaded["settings"] == ("bf16 autocast, fused Adam" if dtype == "bf16" else "fp32, fused Adam")
    batch = make_batch(np.random.default_rng(1), [7, 3, 9], index=0)
    file = training_peers._write([batch] * 20, tmp_path / "b.npz")
    worker._adam.param_groups[0]["lr"] = 1e-2
    first, last = worker.train(file)["losses"][0], worker.train(file)["losses"][-1]
    assert last < first - 1


def test_names_of_peers_are_checked() -> None:
    assert train_throughput._peers("torch,eole") == ("torch", "eole")
    with pytest.raises(argparse.ArgumentTypeError, match="expected names of torch, fairseq, eole, found 'marian'"):
        train_throughput._peers("torch,marian")


def test_the_length_sweep_runs_to_its_end_and_is_drawn(tmp_path: Path) -> None:
    rows, plot = tmp_path / "rows.json", tmp_path / "lengths.svg"
    arguments = ["--quick", "--tokens", "64", "--json", str(rows), "--plot", str(plot)]
    assert attention_lengths.main(arguments) == 0
    found = json.loads(rows.read_text(encoding="utf-8"))
    check_rows(found)
    values = {row["name"]: row["value"] for row in found}
    assert len(values) == 2 * 2 * 2 * (len(attention_lengths.BACKENDS) - 1), "flex has no backward pass on a CPU"
    # Inputs and output alone, or also scores: what the sweep is there to show.
    sides = 64 * attention_lengths.HEADS * attention_lengths.WIDTH * 4
    assert values["kept-sdpa-fp32-64"] < 4.2 * sides < values["kept-reference-fp32-64"]
    assert "<svg" in plot.read_text(encoding="utf-8")


def test_joined_projections_give_the_models_gradients_and_are_measured(tmp_path: Path) -> None:
    runs = fused_projections.step(16, 64, torch.float32)
    torch.manual_seed(0)
    for one, other in zip(*(run() for run in runs.values()), strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(one, other)
    found = fused_projections.products(3, 16, 8, torch.float32)
    apart, joined, stored = (found[name]() for name in ("apart", "joined", "stored"))
    torch.testing.assert_close(joined, apart)
    torch.testing.assert_close(stored[1], torch.cat(apart[1:]))  # type: ignore[index]
    assert fused_projections.main(["--quick", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    check_rows(rows)
    assert len(rows) == 2 * (3 + 3 + 2)


def test_what_would_not_fit_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--lengths",
        "32768",
        "--backends",
        "reference",
        "--dtypes",
        "fp32",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert attention_lengths.main(arguments) == 0
    assert json.loads((tmp_path / "r.json").read_text()) == []
    assert "reference, fp32, 32768 tokens: left out, since it needs 128.0 GiB" in capsys.readouterr().err


def test_the_gpu_benchmark_trains_on_the_bare_loop_without_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    rows = tmp_path / "rows.json"
    assert gpu_training.main(["--device", "cpu", "--quick", "--json", str(rows)]) == 0
    found = json.loads(rows.read_text(encoding="utf-8"))
    check_rows(found)
    names = ["bare-small-auto-256", "bare-small-packed-auto-256"]
    assert {row["name"] for row in found} == {name for case in names for name in (case, f"memory-{case}")}
    assert "DeepSpeed is not installed: the bare loop" in capsys.readouterr().err


HIDE = """
import sys
stand_in = any(path.endswith("bare_host") for path in sys.path)
sys.modules.update(dict.fromkeys(("deepspeed", "matplotlib", *(() if stand_in else ("pydantic", "pydantic_core")))))
"""


def run_gpu_script(folder: Path, python: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """gpu.sh as far as a CPU can run it."""
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), str(folder), "--device", "cpu", "--quick"]
    environment = {**os.environ, "PYTHON": python, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_script_for_a_gpu_runs_on_a_host_with_torch_and_little_else(tmp_path: Path) -> None:
    """No DeepSpeed, no pydantic, no matplotlib."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    done = run_gpu_script(tmp_path / "rows", sys.executable, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    trained, attention = (
        json.loads((tmp_path / "rows" / f"{name}.json").read_text()) for name in ("gpu_training", "attention_lengths")
    )
    check_rows(trained)
    check_rows(attention)
    assert {row["name"] for row in trained} >= {"bare-small-auto-256", "memory-bare-small-packed-auto-256"}
    for said in ("DeepSpeed is not installed: the bare loop", "settings are not checked", "no plot will be drawn"):
        assert said in done.stderr
    assert not (tmp_path / "rows" / "attention_lengths.svg").exists()


def test_the_script_for_a_gpu_names_the_package_that_it_cannot_do_without(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    done = run_gpu_script(tmp_path / "rows", sys.executable, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected the package torch" in done.stderr
    assert not (tmp_path / "rows").exists()


def test_the_cases_of_the_gpu_benchmark_have_names_of_their_own() -> None:
    assert len({case.name for case in gpu_training.CASES}) == len(gpu_training.CASES)
    assert {case.size for case in gpu_training.CASES} == {"base", "big"}


def test_the_benchmark_of_preparing_runs_to_its_end(tmp_path: Path) -> None:
    assert prepare_speed.main(["--quick", "--pairs", "300", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    check_rows(rows)
    ours, theirs = rows
    assert ours["value"] > 0
    assert theirs["ratio"] == pytest.approx(ours["value"] / theirs["value"], rel=1e-4)


def test_preparing_that_loses_pairs_is_no_measurement(tmp_path: Path) -> None:
    data = prepare_speed.write_corpus(tmp_path, 400)
    lines = (tmp_path / "train.en").read_text(encoding="utf-8").split("\n")
    (tmp_path / "train.en").write_text("\n".join(["", *lines[1:390], *[""] * 10, ""]), encoding="utf-8")
    with pytest.raises(RunError, match=r"of 400 pairs 38. were kept"):
        prepare_speed.seconds_to_prepare(data, TokenizerConfig(vocab_size=500), tmp_path / "shards", 400)


@pytest.mark.parametrize("name", ["checkpointing-full", "loss-chunked", "loss-whole"])
def test_a_step_and_a_loss_are_measured_in_a_process_of_their_own(name: str, tmp_path: Path) -> None:
    assert step_costs.main(["--quick", "--only", name, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    check_rows(rows)
    assert [row["name"] for row in rows] == ["first-step", "step", "peak-memory"]
    assert all(row["value"] > 0 for row in rows)


def test_options_are_compared_with_the_plain_step_and_losses_with_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By numbers made up for each round: the first has nothing compiled."""
    calls: dict[str, int] = {}

    def measured(name: str, *_: object) -> dict[str, Row]:
        calls[name] = turn = calls.get(name, 0) + 1
        size = {"plain": 8.0, "native": 4.0, "compile": 2.0, "loss-chunked": 6.0, "loss-whole": 12.0}[name]
        values = {"first-step": 100.0 / turn, "step": turn * size, "peak-memory": 2 * size}
        origin = {
            "command": "python benchmarks/step_costs.py",
            "machine": "a CPU",
            "commit": "abc",
            "date": "2026-11-30",
        }
        return {what: Row(what, value, "s/step", None, None, **origin) for what, value in values.items()}

    monkeypatch.setattr(step_costs, "_elsewhere", measured)
    arguments = ["--rounds", "3", "--options", "native", "compile", "loss-whole", "--json", str(tmp_path / "rows.json")]
    assert step_costs.main(arguments) == 0
    assert calls == dict.fromkeys(("plain", "native", "compile", "loss-chunked", "loss-whole"), 3)
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))}
    check_rows(list(rows.values()))
    assert (rows["step-plain"]["value"], rows["step-plain"]["ratio"]) == (16, None)
    assert (rows["step-native"]["value"], rows["step-native"]["ratio"]) == (8, 2)
    assert (rows["peak-memory-native"]["value"], rows["peak-memory-native"]["ratio"]) == (8, 2)
    assert (rows["step-loss-whole"]["ratio"], rows["step-loss-chunked"]["ratio"]) == (0.5, None)
    assert rows["first-step-compile-cold"]["value"] == 100
    assert rows["first-step-compile-warm"]["value"] == pytest.approx((50 + 100 / 3) / 2, rel=1e-5)


def test_a_kernel_for_which_memory_is_short_is_left_out_and_a_fault_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = attention_lengths.build

    def breaking(backend: str, *rest: Any) -> Any:
        def fail() -> float:
            raise faults[backend]

        return fail if backend in faults else build(backend, *rest)

    monkeypatch.setattr(attention_lengths, "build", breaking)
    rows = tmp_path / "rows.json"
    arguments = ["--quick", "--dtypes", "fp32", "--json", str(rows), "--backends", "sdpa"]
    faults: dict[str, Exception] = {"matmul": torch.OutOfMemoryError("too large")}
    assert attention_lengths.main([*arguments, "matmul"]) == 0
    assert {row["name"].split("-")[1] for row in json.loads(rows.read_text())} == {"sdpa"}
    assert (
        "matmul, fp32, 32 tokens: left out, since it failed: OutOfMemoryError('too large')" in capsys.readouterr().err
    )
    faults = {"matmul": RuntimeError("a fault of ours")}
    with pytest.raises(RuntimeError, match="a fault of ours"):
        attention_lengths.main([*arguments, "matmul"])
