"""Metrics: the file that is cut back, JSON without NaN, FLOPs against torch's own counter."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.api import Batch, Position, zero_weight_batch
from dist_tfm.config.schema import DecodeConfig, ModelConfig
from dist_tfm.engine.base import EngineFacts, LossSums, StepResult
from dist_tfm.metrics.flops import (
    forward_flops,
    length_sums,
    measured_gemm_peak,
    model_flops_utilisation,
    training_flops,
)
from dist_tfm.metrics.meter import Meter, global_counts, local_counts
from dist_tfm.metrics.writers import Console, JsonLinesWriter, TensorBoardWriter, cut_back, finite, last_step
from dist_tfm.model.transformer import Transformer
from dist_tfm.training.loss import TranslationLoss
from dist_tfm.training.progress import Progress
from dist_tfm.training.randomness import SeededRunner
from dist_tfm.training.recomputation import recomputation, recompute_inside
from dist_tfm.training.validation import HeldOut, Validator
from tests.batches import VOCABULARY, make_batch


def batch(pairs: int, source: int, target: int, first_id: int = 0) -> Batch:
    return Batch(
        source=np.full((pairs, source), 5),
        target_in=np.full((pairs, target), 5),
        labels=np.full((pairs, target), 5),
        source_lengths=np.full(pairs, source),
        target_lengths=np.full(pairs, target),
        pair_ids=np.arange(first_id, first_id + pairs),
        index=0,
    )


def write_lines(path: Path, steps: list[int], tail: str = "") -> None:
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in steps) + tail)


def test_cutting_back_keeps_bytes_and_inode_of_what_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [1, 2, 2, 3, 4], tail='{"step": 5, "lo')
    before, inode = path.read_bytes(), path.stat().st_ino
    cut_back(path, 2)
    assert path.stat().st_ino == inode, "in place: a reader that follows the file keeps following it"
    assert before.startswith(path.read_bytes())
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 2]


@pytest.mark.parametrize("tail", ['{"step": 3', "\0\0\0\0", "[1]\n"])
def test_a_line_broken_by_a_kill_is_cut_off(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [1, 2], tail)
    cut_back(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    cut_back(tmp_path / "absent.jsonl", 2)


def test_lines_are_flushed_at_once_and_exact(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "m.jsonl")
    value = 1 / 3
    writer.write({"step": 1, "loss": value, "ppl": math.inf, "nll": math.nan})
    record = json.loads((tmp_path / "m.jsonl").read_text())
    writer.close()
    assert record == {"step": 1, "loss": value, "ppl": None, "nll": None}
    assert finite({"a": -math.inf}) == {"a": None}


@pytest.mark.parametrize("show", [0, 2])
def test_samples_of_a_validation_have_a_heading_and_are_cut(show: int, capsys: pytest.CaptureFixture[str]) -> None:
    sources, references = ["s" * 120, "unseen", "s" * 121, "unseen"], ["r", "unseen", "r" * 9999, "unseen"]
    decode = DecodeConfig(valid_sentences=4, show=show)
    nothing: Any = None  # no model is asked
    validator = Validator(nothing, HeldOut([], 4, sources, references), nothing, nothing, decode, Console(enabled=True))
    validator._show(70, ["", "unseen", "wort " * 80, "unseen"], references)
    expected = [
        "held-out samples at step 70:",
        f"  source      {'s' * 120}",
        "  translation ",
        "  reference   r",
        f"  source      {'s' * 119}…",
        f"  translation {('wort ' * 80)[:119]}…",
        f"  reference   {'r' * 119}…",
    ]
    assert capsys.readouterr().out.splitlines() == (expected if show else [])


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(encoder_layers=2, decoder_layers=3, d_model=32, d_ff=48, heads=4),
        ModelConfig(encoder_layers=1, decoder_layers=1, d_model=32, d_ff=48, heads=4, d_k=6, d_v=10, norm="pre"),
        ModelConfig(encoder_layers=2, decoder_layers=1, d_model=32, d_ff=48, heads=4, activation="swiglu"),
        ModelConfig(encoder_layers=1, decoder_layers=2, d_model=32, d_ff=48, heads=4, kv_heads=2, tied="none"),
    ],
)
def test_flops_equal_the_count_of_torchs_own_counter(config: ModelConfig) -> None:
    config = ModelConfig(**{**config.__dict__, "attention": "reference", "dropout": 0.0})
    data = batch(3, 7, 5)
    model = Transformer(config, vocab_size=50)
    with FlopCounterMode(display=False) as counter:
        model.logits(model(torch.from_numpy(data.source), torch.from_numpy(data.target_in)))
    expected = counter.get_total_flops()
    assert forward_flops(config, 50, length_sums([data])) == expected
    with FlopCounterMode(display=False) as counter:
        model.logits(model(torch.from_numpy(data.source), torch.from_numpy(data.target_in))).sum().backward()
    # The first products' inputs, embeddings, take a gradient too: nothing is left out of the backward pass.
    assert training_flops(config, 50, length_sums([data])) == counter.get_total_flops() == 3 * expected


@pytest.mark.parametrize("recomputed", ["none", "attention", "full"])
def test_a_packed_training_step_runs_the_flops_that_are_counted(recomputed: str) -> None:
    """Sentences of different lengths, through the loss: torch's counter sees the products of real tokens and no other,
    and more of them only where activations are computed again."""
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "d_model": 32, "d_ff": 48, "heads": 4, "dropout": 0.0}
    config = ModelConfig(**sizes, attention="matmul")  # type: ignore[arg-type]
    data = make_batch(np.random.default_rng(3), [5, 1, 9, 9], index=0)
    model = Transformer(config, vocab_size=VOCABULARY)
    model.packed = True
    asked = recomputation(recomputed)
    recompute_inside(model, asked.inside)
    inputs = (torch.from_numpy(array) for array in (data.source, data.target_in, data.labels))
    with FlopCounterMode(display=False) as counter:
        TranslationLoss(model, 0.1)(*inputs, SeededRunner(1, 1, 0, asked.layers))[0].backward()
    flops = training_flops(config, VOCABULARY, length_sums([data]))
    if recomputed == "none":
        assert counter.get_total_flops() == flops
    else:
        assert flops < counter.get_total_flops() < 4 / 3 * flops


def test_utilisation_is_the_models_share_of_the_peak_and_flops_add_up() -> None:
    assert model_flops_utilisation(6e12, 3.0, 4e12) == 0.5
    config, facts = ModelConfig(d_model=32, d_ff=48, heads=4), EngineFacts("sdpa", "fp32", 1, 1, 1, 1, "cpu", "torch")
    peak = 1e12
    meter = Meter(config, 50, facts, torch.device("cpu"), peak, flops=1000)
    parts = [batch(2, 4, 3), batch(3, 5, 2)]
    result = StepResult(LossSums(1.0, 1.0, 6), 1.0, True, 0.1)
    for part in parts:
        meter.begin_step()
        meter.data_ready()
        meter.end_step(global_counts(local_counts([part])))
    line = meter.line(2, 1, 1.0, 1.0, result, global_counts(local_counts(parts[1:])), 0)
    flops = training_flops(config, 50, length_sums(parts))
    assert line["flops"] == meter.flops == 1000 + flops
    tokens = sum(part.source_tokens + part.target_tokens for part in parts)
    seconds = tokens / line["tokens_per_second"]
    assert line["mfu"] == pytest.approx(model_flops_utilisation(flops, seconds, peak))
    assert Progress().after_step(Position(), True, meter.flops).to_json()["flops"] == meter.flops


def test_counts_add_up_over_ranks_and_tell_pairs_apart() -> None:
    parts = [[batch(2, 4, 3)], [batch(3, 5, 2, first_id=2), zero_weight_batch()]]
    whole = global_counts(local_counts([b for part in parts for b in part]))
    summed = global_counts([sum(v) for v in zip(*(local_counts(part) for part in parts), strict=True)])
    assert whole == summed
    assert (whole.sums.source, whole.sums.target) == (2 * 4 + 3 * 5, 2 * 3 + 3 * 2)
    assert whole.padding_fraction == 0.0
    other = global_counts(local_counts([batch(2, 4, 3), batch(3, 5, 2, first_id=3)]))
    assert other.pair_hash != whole.pair_hash
    assert 0 <= whole.pair_hash < 2**53


def test_curves_that_cannot_be_written_do_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    writer = TensorBoardWriter(tmp_path / "tensorboard", 0, warn=said.append)
    writer.write({"step": 1, "loss": 1.0})

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fail)
    for step in (2, 3):
        writer.write({"step": step, "loss": 1.0})
    writer.sync()
    writer.close()
    assert len(said) == 1
    assert "No space left" in said[0]


def test_a_line_broken_by_hand_does_not_take_the_rest_with_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n#"step": 2}\n{"step": "3"}\n{"step": 4}\n{"step": 5}\n{"step": 6')
    cut_back(path, 4)
    assert path.read_text().splitlines()[-1] == '{"step": 4}'
    assert len(path.read_text().splitlines()) == 4
    assert last_step(path) == 4
    assert last_step(tmp_path / "absent") == 0


def test_the_measured_peak_is_a_rate() -> None:
    assert measured_gemm_peak(torch.device("cpu"), torch.float32, size=128, seconds=0.0) > 1e6
