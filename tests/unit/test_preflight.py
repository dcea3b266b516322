"""What preflight looks at, check by check; the whole of it runs in tests/slurm and below on two ranks."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.prepare import prepare
from data_pipeline.settings import load_sections
from dist_tfm.config.loading import SECTIONS, make_config
from dist_tfm.config.schema import CheckpointConfig, Config, DataConfig, ParallelConfig, TrainConfig
from dist_tfm.errors import ConfigError, InputError
from dist_tfm.model.counting import parameter_counts
from dist_tfm.parallel.probe import link_rounds, slow_links, slow_nodes
from dist_tfm.training.signals import StopRequest
from launch.findings import Findings
from launch.preflight import check_batches, check_layout, check_room, check_shards, checkpoint_bytes, main
from launch.preflight_nodes import compare
from tests.jobs import ROOT, small_project, start_ranks, wait_for_ranks

CORPUS_KEYS = ("train_source", "train_target", "valid_source", "valid_target")


def small_config(folder: Path) -> Config:
    return make_config(load_sections(str(small_project(folder)), [], SECTIONS))


def batch(tokens: int, micro_batches: int) -> Config:
    return Config(data=DataConfig(batch_tokens=tokens, micro_batches=micro_batches))


@pytest.mark.parametrize(
    ("tokens", "micro_batches", "ranks", "warnings"),
    [
        pytest.param(25_000, 32, 32, ["781 tokens a rank"], id="the paper's batch on 32 GPUs"),
        pytest.param(400_000, 64, 32, [], id="the recipe for 32 GPUs"),
        pytest.param(25_000, 8, 8, [], id="the paper's own machine"),
        pytest.param(25_000, 8, 6, ["33% of their time"], id="8 micro-batches on 6 ranks are two rounds of 6"),
        pytest.param(1_000, 2, 1, [], id="one process communicates with nobody"),
    ],
)
def test_batches_for_so_many_ranks(tokens: int, micro_batches: int, ranks: int, warnings: list[str]) -> None:
    findings = Findings(speaks=False)
    check_batches(batch(tokens, micro_batches), ranks, findings)
    assert len(findings.warnings) == len(warnings)
    assert all(part in found for part, found in zip(warnings, findings.warnings, strict=True))
    assert not findings.faults


def test_processes_that_cannot_be_laid_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopRequest, "install", lambda self, launcher: self)  # pytest keeps its own handlers
    arguments = ["--config", "configs/tiny.yaml", "--parallel.tp=2"]
    with pytest.raises(ConfigError, match="that 2 divides, found 1: start 2 processes"):
        main(arguments)
    with pytest.raises(ConfigError, match="that 2 divides, found 3: start 4 processes"):
        main([*arguments, "--ranks=3"])


def test_the_layout_is_judged_for_the_ranks_that_will_run() -> None:
    config = dataclasses.replace(Config(), parallel=ParallelConfig(tp=4))
    assert "8 replica(s) of parallel.tp=4" in check_layout(config, 32, 8)
    with pytest.raises(ConfigError, match=r"parallel\.tp=4.*found 6"):
        check_layout(config, 6, 6)
    findings = Findings(speaks=False)
    check_batches(dataclasses.replace(batch(400_000, 8), parallel=ParallelConfig(tp=4)), 32, findings)
    assert not findings.warnings, "four ranks of a replica read the same micro-batch: 8 of them keep 32 ranks busy"


def test_a_corpus_from_the_hub_is_not_looked_for_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(load_sections("base_ende", [("data.shards", str(tmp_path / "shards"))], SECTIONS))
    findings = Findings(speaks=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert check_shards(config, findings) == (37_000, None)
    assert len(findings.warnings) == 1
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=r"from the hub \(hub:wmt.*slurm/prepare_data\.sbatch"):
        check_shards(config, findings)
    (tmp_path / "wmt14").mkdir()
    folder = dataclasses.replace(
        config.data, **dict.fromkeys(CORPUS_KEYS, f"hub:{tmp_path}/wmt14:train#translation.de")
    )
    check_shards(dataclasses.replace(config, data=folder), findings)
    assert len(findings.warnings) == 2, "a folder with the data set is no affair of the hub"


def test_the_recipe_for_32_gpus_keeps_them_busy() -> None:
    config = make_config(load_sections("big_enfr_32gpu", [], SECTIONS))
    findings = Findings(speaks=False)
    for ranks in (32, 16, 8):
        check_batches(config, ranks, findings)
    assert not findings.warnings
    assert (config.schedule.kind, config.schedule.peak, config.model.dropout) == ("inverse_sqrt", 1e-3, 0.1)
    assert config.data.shards == make_config(load_sections("big_enfr", [], SECTIONS)).data.shards


def test_shards_missing_then_there_then_of_another_tokenizer(tmp_path: Path) -> None:
    config, findings = small_config(tmp_path), Findings(speaks=False)
    assert check_shards(config, findings) == (500, None)
    assert "rank 0 will prepare them" in findings.warnings[0]
    prepare(config.data, config.tokenizer, lambda _: None)
    findings = Findings(speaks=False)
    assert check_shards(config, findings) == (500, 500)
    assert not findings.warnings
    other = dataclasses.replace(config, tokenizer=dataclasses.replace(config.tokenizer, vocab_size=400))
    with pytest.raises(InputError, match=r"tokenizer\.vocab_size"):
        check_shards(other, findings)
    (tmp_path / "shards" / "train" / "index.json").unlink()
    (tmp_path / "train.de").unlink()
    with pytest.raises(InputError, match=r"train\.de.*prepare"):
        check_shards(config, findings)


def test_room_for_checkpoints(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    parameters = sum(parameter_counts(config.model, 500).values())
    kept = CheckpointConfig(keep=3, snapshot_every=5, keep_snapshots=4)
    wanted = dataclasses.replace(config, checkpoint=kept, train=dataclasses.replace(config.train, ema=0.999))
    assert checkpoint_bytes(config, 500) == parameters * 12 * 5
    assert checkpoint_bytes(wanted, 500) == parameters * (16 * 5 + 4 * 5)
    assert "room" in check_room(config, 500)
    vast = dataclasses.replace(config, checkpoint=CheckpointConfig(keep=10_000_000))
    with pytest.raises(InputError, match=r"GiB free, its checkpoints need.*checkpoint\.keep"):
        check_room(vast, 500)
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def rank_on(node: str, **same: Any) -> dict[str, Any]:
    everything = {"python": "3.11", "torch": "2.13", "deepspeed": "0.19", "shards": "abc"}
    return {"node": node, "device": "cpu", "same": everything | same}


def test_what_differs_between_nodes_is_named() -> None:
    findings = Findings(speaks=False)
    compare([rank_on("a"), rank_on("a"), rank_on("b")], findings)
    assert not findings.faults
    compare([rank_on("a"), rank_on("b", torch="2.12"), rank_on("c", shards=None)], findings)
    assert len(findings.faults) == 2
    assert findings.faults[0].startswith("torch: 2.13 on a (rank 0) but 2.12 on b")
    assert findings.faults[1].startswith("shards: abc on a (rank 0) but None on c")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8])
def test_every_link_of_the_ring_is_measured_with_both_ends_free(count: int) -> None:
    nodes = [f"n{k}" for k in range(count)]
    rounds = link_rounds(nodes)
    for pairs in rounds:
        ends = [name for pair in pairs for name in pair]
        assert len(ends) == len(set(ends)), "a node would be measured while it is busy with another"
    found = {frozenset(pair) for pairs in rounds for pair in pairs}
    expected = {frozenset((nodes[k], nodes[(k + 1) % count])) for k in range(count)} if count > 1 else set()
    assert found == expected


def test_the_slow_node_is_named_and_a_healthy_neighbour_is_not() -> None:
    assert slow_nodes({"a": 1.0, "b": 1.1, "c": 5.0, "d": 0.9}) == ["c"]
    assert slow_nodes({"a": 1.0, "b": 1.9, "c": 1.2}) == []
    assert slow_nodes({"a": 9.0}) == []
    links = {("a", "b"): 1.0, ("b", "c"): 9.0, ("c", "d"): 8.0, ("d", "a"): 1.1}
    assert slow_links(links) == ["c"]
    assert slow_links({("a", "b"): 9.0}) == []


def run_preflight(folder: Path, config: Path, *arguments: str) -> list[tuple[int, str]]:
    logs = [folder / f"{rank}.log" for rank in range(2)]
    for log in logs:
        log.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "launch" / "preflight.py"), "--config", str(config), *arguments]
    return wait_for_ranks(start_ranks([command] * 2, logs), logs)


def test_two_ranks_meet_and_a_fault_of_one_is_a_fault_of_all(tmp_path: Path) -> None:
    config = small_project(tmp_path)
    (code, output), (other, _) = run_preflight(tmp_path, config)
    assert (code, other) == (0, 0), output
    assert "all-reduce of 4 MiB over 2 ranks" in output
    assert "GB/s" in output
    assert "1 node(s)" in output
    (tmp_path / "train.de").unlink()
    (tmp_path / "occupied").write_text("no directory")
    results = run_preflight(tmp_path, config, f"--train.run_dir={tmp_path}/occupied")
    assert [code for code, _ in results] == [2, 2]
    said = results[0][1]
    assert "preflight found 2 faults" in said
    assert "train.de" in said
    assert "expected a directory, found a file" in said
    assert "error:" not in results[1][1], "one of them says it"


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    from launch.preflight import check_run_directory

    config = small_config(tmp_path)
    target = dataclasses.replace(config, train=TrainConfig(run_dir="/proc/run"))
    with pytest.raises(InputError, match=r"train\.run_dir=/proc/run cannot be written"):
        check_run_directory(target)
