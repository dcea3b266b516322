"""The decoding benchmark: what it compares is comparable, and it runs to its end."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import decode_throughput, peers
from benchmarks.decoding_speed import QUICK, Ours, Setting, check_lengths, compare_outputs, random_model
from benchmarks.peers import Peer
from data_pipeline.api import EOS
from dist_tfm.errors import ConfigError, RunError
from dist_tfm.inference.beam_search import Hypothesis, SearchResult
from dist_tfm.interop.marian import marian_settings, marian_weights
from dist_tfm.model.transformer import Transformer
from tests.jobs import small_project
from tests.unit.test_benchmarks import check_rows

LENGTHS = np.array([[source, source + 3] for source in range(1, 41)], dtype=np.uint16)


def result(tokens: list[int], close: bool = False) -> SearchResult:
    return SearchResult([Hypothesis(tokens, -1.0, -1.0)], close)


def test_settings_take_sentences_of_all_lengths_in_batches_of_like_length() -> None:
    effort = replace(QUICK, sentences=8, singly=3)
    for batch, sizes in ((3, [3, 3, 2]), (1, [1, 1, 1])):
        setting = effort.setting(LENGTHS, 4, batch)
        assert [len(b) for b in setting.batches] == sizes
        drawn = [sentence for b in setting.batches for sentence in b]
        assert (len(drawn[0].source), len(drawn[-1].source)) == (1, 40)
        assert [s.length for s in drawn] == sorted(len(s.source) + 3 for s in drawn)
        assert setting.tokens == sum(s.length + 1 for s in drawn)
        assert all(EOS < token < QUICK.vocabulary for s in drawn for token in s.source)
    assert Setting(4, 32, []).row("ours-bf16") == "dist_tfm-bf16"
    assert Setting(1, 32, []).row("ours-bf16") == "greedy-batch-32-ours-bf16"


@pytest.mark.parametrize("beam", [1, 4])
def test_outputs_end_where_they_are_told_to(beam: int) -> None:
    ours = Ours(QUICK, ("fp32",))
    setting = QUICK.setting(LENGTHS, beam, 3)
    found = [r.hypotheses[0].tokens for r in ours.search(setting)]
    check_lengths("ours", found, setting)
    assert len(set(map(tuple, found))) == len(found), "different sentences have different translations"
    with pytest.raises(RunError, match="the peer was to give outputs of"):
        check_lengths("the peer", [*found[:-1], found[-1][:-1]], setting)


def test_nothing_is_compared_with_a_peer_that_translates_otherwise() -> None:
    ours = [result([5, 6]), result([7], close=True)]
    assert compare_outputs(ours, [[5, 6], [7]]) == 1.0
    assert compare_outputs(ours, [[5, 6], [8]]) == 0.5, "rounding may have chosen"
    with pytest.raises(RunError, match="of 1 sentences without a close decision 1 differ"):
        compare_outputs(ours, [[5, 7], [7]])
    with pytest.raises(RunError, match="of 0 sentences"):
        compare_outputs([result([7], close=True)], [[7]])


def test_marian_gets_every_weight_once_and_zeros_for_the_biases_that_we_have_not() -> None:
    model = random_model(QUICK.model, 50)
    weights = marian_weights(model)
    ours = {id(p): p for p in model.parameters()}
    added = {name: value for name, value in weights.items() if name.endswith("_proj.bias")}
    assert len(weights) - len(added) == len(ours)
    assert len(added) == 4 + 8
    assert all(not value.any() for value in added.values())
    layer = model.decoder.layers[0]
    for name, value in (
        ("encoder_attn.out_proj.weight", layer.cross_attention.output.weight),
        ("self_attn.q_proj.weight", layer.self_attention.query.weight),
        ("fc2.bias", layer.feed_forward.down.bias),
        ("final_layer_norm.weight", layer.feed_forward_norm.weight),
    ):
        assert torch.equal(weights[f"model.decoder.layers.0.{name}"], value)
    assert (marian_settings(model)["vocab_size"], marian_settings(model)["d_model"]) == (50, 64)
    for key, value in (("norm", "pre"), ("positions", "sinusoidal"), ("kv_heads", 2), ("d_k", 8), ("tied", "none")):
        other = Transformer(replace(QUICK.model, **{key: value}), 50)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="Marian cannot express"):
            marian_settings(other)


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A peer that answers how many it was given, says things beside, and dies when told to."""
    (tmp_path / ".venv-peers" / "echo" / "bin").mkdir(parents=True)
    interpreter = tmp_path / ".venv-peers" / "echo" / "bin" / "python"
    interpreter.write_text(f'#!/bin/sh\nexec "{peers.sys.executable}" "$@"\n')
    interpreter.chmod(0o755)
    script = tmp_path / "benchmarks" / "echo.py"
    script.parent.mkdir()
    script.write_text(
        f"import os, sys\nsys.path[0] = {str(peers.ROOT)!r}\n"
        "from benchmarks.peers import answer_requests\n"
        "def count(items):\n    print('noise')\n    return {'count': len(items)}\n"
        "answer_requests({'count': count, 'die': lambda: os._exit(9)})\n"
    )
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "FOLDER", tmp_path / ".venv-peers")
    return "echo.py"


def test_a_peer_answers_in_its_own_process_and_its_death_is_one_sentence(
    echo: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"huggingface in \.venv-peers, found nothing: run this with --setup"):
        Peer("huggingface", echo, 1)
    with Peer("echo", echo, 1) as peer:
        assert peer.ask({"do": "count", "items": [1, 2, 3]}) == {"count": 3}
        assert peer.ask({"do": "count", "items": []}) == {"count": 0}
        with pytest.raises(RunError, match="the process of echo ended with exit code 9"):
            peer.ask({"do": "die"})
    assert "noise" in capfd.readouterr().err


def test_the_decoding_benchmark_runs_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "8")  # leaves the memory settings of this process alone
    rows = tmp_path / "rows.json"
    config = small_project(tmp_path)
    assert decode_throughput.main(["--quick", "--config", str(config), "--json", str(rows)]) == 0
    found = json.loads(rows.read_text(encoding="utf-8"))
    check_rows(found)
    names = {row["name"] for row in found}
    assert {"dist_tfm-fp32", "dist_tfm-bf16", "greedy-batch-1-ours-fp32", "beam-4-batch-1-ours-bf16"} <= names
    assert len(names) == 8
    assert all(row["unit"] == "tokens/s" and row["value"] > 0 for row in found)
    assert capsys.readouterr().out.count("\n| ") == 8
