"""An imported model from the command line on: translated, scored, trained on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dist_tfm.inference.forced import forced_scores
from dist_tfm.inference.loading import load_models
from tests.jobs import BIN, run_job, train_command, training_lines
from tests.unit.test_interop import saved

ROWS = [[9, 17, 301, 44], [8, 8], [250, 12, 31, 77, 5, 6], [100, 300]]


def test_an_imported_model_translates_is_scored_and_trained_on(tmp_path: Path) -> None:
    saved(tmp_path / "theirs")
    run = tmp_path / "run"
    done = run_job([str(BIN / "dist-tfm"), "import", str(tmp_path / "theirs"), "--output", str(run)])
    assert done.returncode == 0, done.stdout
    lines = "".join(" ".join(map(str, row)) + "\n" for row in ROWS)
    for side in ("source", "target"):
        (tmp_path / side).write_text(lines)
    translate = [sys.executable, "dist_tfm/translate.py", "--checkpoint", str(run), "--decode.max_extra=3"]
    with (tmp_path / "source").open() as text:
        out = subprocess.run(translate, stdin=text, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("\n") == 4
    assert all(token.isdecimal() for token in out.stdout.split())
    [model], _, _ = load_models([run], torch.device("cpu"), torch.float32)
    scores = forced_scores([model], ROWS, ROWS, torch.device("cpu"))
    expected = sum(-s.log_probability for s in scores) / sum(s.tokens for s in scores)
    texts = ["--source", str(tmp_path / "source"), "--reference", str(tmp_path / "target"), "--forced"]
    scored = run_job(
        [sys.executable, "dist_tfm/evaluate.py", "--checkpoint", str(run), *texts, "--json", str(tmp_path / "r")]
    )
    assert scored.returncode == 0, scored.stdout
    assert json.loads((tmp_path / "r").read_text())["nll"] == pytest.approx(expected, rel=1e-5)
    corpus = [
        f"--data.{split}_{side}={tmp_path}/{side}" for split in ("train", "valid") for side in ("source", "target")
    ]
    small = ["--data.batch_tokens=600", "--data.micro_batches=1", "--data.max_length=50", "--launch.device=cpu"]
    small += [f"--data.shards={tmp_path}/shards", "--model.dropout=0", "--train.steps=1", "--train.validate_every=0"]
    place = [f"--train.init_from={run}", f"--train.run_dir={tmp_path}/new"]
    config = str(run / "checkpoints" / "step_0" / "config.yaml")
    trained = run_job(train_command(1, "--config", config, *corpus, *small, *place))
    assert trained.returncode == 0, trained.stdout
    # One step over all pairs, before its update: the model as it was imported.
    assert training_lines(tmp_path / "new")[0]["nll"] == pytest.approx(expected, rel=1e-5)
