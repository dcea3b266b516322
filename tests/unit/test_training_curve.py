"""The picture of training is made of what runs have written, and of nothing else."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dist_tfm.config.loading import config_to_yaml
from dist_tfm.config.schema import Config, TrainConfig
from dist_tfm.errors import ConfigError, InputError
from docs.figures import training_curve
from docs.figures.training_curve import main, read_run, smoothed


def write_run(folder: Path, seed: int, bleu: float, validated: bool = True) -> Path:
    folder.mkdir()
    config = Config(train=replace(TrainConfig(), seed=seed))
    (folder / "config.yaml").write_text(config_to_yaml(config), encoding="utf-8")
    lines = [{"step": step, "loss": 10.0 / step} for step in range(1, 41)]
    if validated:
        lines += [{"step": s, "valid_loss": 5.0, "valid_bleu": bleu * s / 40} for s in (20, 40)]
    text = "".join(json.dumps(line) + "\n" for line in sorted(lines, key=lambda line: line["step"]))
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_a_run_is_read_whole(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", seed=7, bleu=24.0))
    assert run.name == "seed 7"
    assert list(run.training) == list(range(1, 41))
    assert run.training[1] == 10.0
    assert run.training[40] == pytest.approx(sum(10.0 / s for s in range(36, 41)) / 5)
    assert run.validation == {20: 5.0, 40: 5.0}
    assert run.bleu == {20: 12.0, 40: 24.0}
    assert smoothed({3: 1.0, 9: 3.0, 12: 8.0}, 2) == {3: 1.0, 9: 2.0, 12: 5.5}


def test_runs_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", seed=1, bleu=1.0, validated=False)
    with pytest.raises(InputError, match="has no valid_loss and no valid_bleu: expected a run that was validated"):
        main([str(run), "--output", str(tmp_path / "x.svg")])
    with pytest.raises(InputError, match=r"metrics\.jsonl cannot be read"):
        main([str(tmp_path / "none"), "--output", str(tmp_path / "x.svg")])
    with pytest.raises(ConfigError, match="at most 5 runs, found 6"):
        main([*["r"] * 6, "--output", "x"])


def test_the_picture_shows_every_run_and_is_the_same_each_time(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / str(seed), seed, bleu)) for seed, bleu in ((1, 24.04), (2, 25.0))]
    for name in ("a.svg", "b.svg"):
        assert main([*runs, "--output", str(tmp_path / name)]) == 0
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for label in ("training, seed 1", "validation, seed 2", "seed 1: 24.0 at the end", "seed 2: 25.0 at the end"):
        assert text.count(f">{label}<") == 1, label
    assert all(re.search(f"stroke: {colour}", text) for colour in training_curve.COLOURS[:2])
    assert text == (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
