"""The whole of `make quickstart` as the console script runs it, on a very small model: stopped once, then finished."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dist_tfm.config.loading import read_config
from tests.jobs import BIN, checkpoint_steps, read_metrics, run_job, start_job

EVERY = 4
SMALL = (
    *("--model.encoder_layers=1", "--model.decoder_layers=1", "--model.d_model=32", "--model.d_ff=64"),
    *("--tokenizer.vocab_size=600", "--data.batch_tokens=600", "--train.validate_every=0", "--train.seed=7"),
    *(f"--checkpoint.snapshot_every={EVERY}", "--checkpoint.every_steps=0", f"--log.every_steps={EVERY}"),
    *("--decode.max_extra=1", "--decode.exact=false", "--launch.threads=1", "--launch.device=cpu"),
)


def command(folder: Path, steps: int) -> list[str]:
    places = (f"--train.run_dir={folder}/runs/tiny", f"--data.shards={folder}/shards", f"--train.steps={steps}")
    return [str(BIN / "dist-tfm"), "quickstart", *SMALL, *places]


def wait_for_step(job: "subprocess.Popen[bytes]", run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and job.poll() is None:
        if any(line["step"] >= step for line in read_metrics(run)):
            return
        time.sleep(0.05)
    pytest.fail(f"step {step} was not reached")


def stop_once(folder: Path, run: Path) -> int:
    """Starts the long job, asks it to stop, and returns the step that it has saved."""
    log = folder / "log"
    job = start_job(command(folder, 1_000_000), log)
    try:
        wait_for_step(job, run, 5 * EVERY)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 0
    finally:
        job.terminate()
    lines = log.read_text(encoding="utf-8").splitlines()
    assert lines[-1].startswith("training has stopped before step 1,000,000: the same command goes on"), lines
    assert not any(line.startswith("4. ") for line in lines), "the test set was looked at"
    return checkpoint_steps(run)[-1]


def test_it_prepares_trains_stops_goes_on_and_scores(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    stopped = stop_once(tmp_path, run)
    steps = stopped + EVERY
    done = run_job(command(tmp_path, steps))
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert any(line.startswith("already prepared") for line in lines)
    assert any(line.startswith(f"resumed at step {stopped} ") for line in lines)
    assert checkpoint_steps(run) == [stopped, steps]
    assert read_config(run / "config.yaml").train.seed == 7
    last = steps // EVERY * EVERY
    members = ", ".join(f"snapshots/step_{step}" for step in range(last - 4 * EVERY, last + 1, EVERY))
    assert f"{run}/averaged: the mean of {members}" in lines

    assert re.fullmatch(r"test BLEU = \d+\.\d\d", lines[-1])
    report = json.loads((run / "test.json").read_text(encoding="utf-8"))
    assert (report["segments"], report["system"]) == (700, str(run / "averaged"))
    scores = {score["name"]: score for score in report["scores"]}
    assert lines[-1] == f"test BLEU = {scores['BLEU']['value']:.2f}"
    for name in ("BLEU", "chrF2"):
        assert f"{name} = {scores[name]['value']:.2f} ({scores[name]['signature']})" in lines
    columns = next(line.split() for line in lines if line.startswith("BLEU  "))
    assert columns == ["BLEU", f"{scores['BLEU']['value']:.2f}", "18.30"]
    assert sum("--decode.beam=4 --decode.max_extra=1" in line for line in lines) == 1, "the test set is scored once"

    translations = (run / "test.de").read_text(encoding="utf-8").split("\n")
    assert len(translations) == 700 + 1
    warning = f"warning: {translations[:700].count('')} of 700 translations are empty"
    assert (warning in done.stdout) is (translations[:700].count("") > 350)
    shown = [line.removeprefix("  translation ") for line in lines if line.startswith("  translation ")]
    assert shown == translations[0:700:70]
    assert any(line.endswith(f"tensorboard --logdir {run.parent}") for line in lines)
    assert any(line.endswith(f"python dist_tfm/translate.py --checkpoint {run}/averaged") for line in lines)
