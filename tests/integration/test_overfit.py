"""The whole system learns: 500 real pairs are recited by greedy decoding."""

from pathlib import Path

from tests.jobs import read_metrics, run_job, small_project, train_command


def test_five_hundred_pairs_are_recited(tmp_path: Path) -> None:
    config = small_project(tmp_path, pairs=500)
    for language in ("en", "de"):  # validate on the training pairs themselves
        (tmp_path / f"valid.{language}").write_text((tmp_path / f"train.{language}").read_text())
    done = run_job(
        train_command(
            1,
            *("--config", str(config), "--model.d_model=128", "--model.d_ff=256", "--model.dropout=0"),
            *("--tokenizer.vocab_size=1200", "--data.batch_tokens=1500", "--data.micro_batches=1"),
            *("--schedule.peak=4.0e-3", "--schedule.warmup=40", "--train.label_smoothing=0", "--train.steps=200"),
            *("--train.validate_every=200", "--checkpoint.every_steps=0", "--decode.valid_sentences=500"),
            *("--log.every_steps=40", "--decode.max_extra=50"),
        )
    )
    assert done.returncode == 0, done.stdout
    final = [line for line in read_metrics(tmp_path / "run") if "valid_loss" in line][-1]
    assert final["valid_decoded"] >= 480
    assert final["valid_bleu"] > 80, final
