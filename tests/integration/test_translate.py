"""translate.py as users run it: files, pipes, a terminal, several processes, ensembles, wrong input."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dist_tfm.config.schema import Config, DecodeConfig, ModelConfig, PrecisionConfig
from dist_tfm.errors import DistTfmError
from dist_tfm.inference.packing import PackedTransformer, can_pack
from dist_tfm.inference.translator import load_models
from dist_tfm.translate import main
from tests.jobs import ROOT, clean_environment, head, run_program, start_program
from tests.saved_models import save_model, small_tokenizer, talkative_model
from tests.warm import Streams

SCRIPT = str(ROOT / "dist_tfm" / "translate.py")
INPUT = head("test.en.xz", 14).replace("\n", "\n\n", 2) + "日本語\u2028の文 🙂\n" + "server " * 400 + "\nlast line"
LINES = 14 + 2 + 1 + 1 + 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of two models, the newer one at step 30."""
    run = tmp_path_factory.mktemp("translate") / "run"
    model = ModelConfig(encoder_layers=2, decoder_layers=2, d_model=32, d_ff=64, heads=4)
    config = Config(model=model, decode=DecodeConfig(max_extra=5, max_source=60), precision=PrecisionConfig("bf16"))
    tokenizer = small_tokenizer()
    for step, seed in ((20, 2), (30, 1)):
        save_model(run, step, talkative_model(config, tokenizer, seed), tokenizer, config)
    return run


def translate(
    run: Path, text: str | bytes, *arguments: str, launcher: Sequence[str] = (), cwd: Path = ROOT
) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, *launcher, SCRIPT, "--checkpoint", str(run), "--launch.threads=1", *arguments]
    return run_program(command, text.encode() if isinstance(text, str) else text, cwd)


@pytest.fixture(scope="module")
def translated(run: Path) -> bytes:
    """What one process makes of INPUT, from a pipe, three best of each line."""
    done = translate(run, INPUT, "--n-best=3")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr.decode().count("warning: line 18 has ") == 1
    return done.stdout


def best(n_best_list: bytes) -> list[str]:
    """The best translation of each line, checking the numbers."""
    found: list[str] = []
    for entry in n_best_list.decode().split("\n")[:-1]:
        number, text, score = entry.split(" ||| ")
        assert float(score) <= 0.0
        if int(number) == len(found):
            found.append(text)
        assert int(number) == len(found) - 1
    return found


def test_one_line_out_for_each_line_in(run: Path, translated: bytes, tmp_path: Path) -> None:
    """Blank, very long, strange and unterminated lines included; a file gives what a pipe gives, from any folder."""
    expected = best(translated)
    assert len(expected) == LINES
    assert expected[1] == expected[3] == ""
    assert len(set(expected)) > 5, "the model must say different things for this test to mean something"
    path, newest = tmp_path / "in.txt", str(run / "checkpoints" / "step_30")
    path.write_bytes(INPUT.encode())
    with path.open("rb") as file:  # Python itself is started, as a user would
        done = subprocess.run(
            [sys.executable, SCRIPT, "--checkpoint", newest, "--decode.window=5", "--launch.threads=1"],
            stdin=file,
            capture_output=True,
            env=clean_environment(),
            cwd=tmp_path,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split("\n") == [*expected, ""]


def test_several_processes_print_the_same_lines_once(run: Path, translated: bytes) -> None:
    """Three, which share windows of four lines; two are in test_a_reader_that_leaves_is_no_fault."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    done = translate(run, INPUT, "--n-best=3", "--decode.window=4", "--decode.batch_tokens=100", launcher=launcher)
    assert done.returncode == 0, done.stderr.decode()
    texts = [line.rsplit(" ||| ", 1)[0] for line in done.stdout.decode().split("\n")]
    assert texts == [line.rsplit(" ||| ", 1)[0] for line in translated.decode().split("\n")]
    assert done.stderr.decode().count("warning: line 18 has ") == 1


def test_an_ensemble_and_options_by_dotted_keys(run: Path, translated: bytes) -> None:
    older = str(run / "checkpoints" / "step_20")
    twice = translate(run, INPUT, "--checkpoint", str(run))
    assert twice.stdout.decode().split("\n")[:-1] == best(translated), "a model with itself is the model"
    mixed = translate(run, INPUT, "--checkpoint", older)
    assert mixed.returncode == 0
    assert mixed.stdout != twice.stdout
    assert len(mixed.stdout.decode().split("\n")) == LINES + 1
    short = translate(
        run, "save file\n", "--decode.beam=2", "--decode.min_length=7", "--decode.max_extra=5", "--n-best=2"
    )
    assert short.returncode == 0
    assert [line.split(" ||| ")[0] for line in short.stdout.decode().split("\n")] == ["0", "0", ""]


def test_bf16_and_the_resolved_configuration(run: Path) -> None:
    done = translate(run, "save file\n\n", "--precision.dtype=bf16")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(b"\n") == 2
    shown = translate(run, "", "--print-config", "--decode.beam=7")
    assert shown.returncode == 0
    text = shown.stdout.decode()
    assert "beam: 7" in text
    assert "max_extra: 5" in text, "what the run was configured with is where section decode starts"
    assert "dtype: fp32" in text


def test_nothing_in_nothing_out(run: Path) -> None:
    done = translate(run, "")
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"Ctrl-D" not in done.stderr, "nobody sits at a pipe"


def test_wrong_input_is_one_sentence_and_exit_2(run: Path, tmp_path: Path) -> None:
    done = translate(run, b"fine\nb\xff\n")
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.decode().startswith("error: line 2 of the input: expected UTF-8, found byte 0xff at byte 2")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = translate(run, "a\n", "--decode.beem=3", launcher=launcher)
    assert done.returncode == 1, "torchrun's own"
    assert done.stderr.decode().count("decode.beem: unknown key") == 1, "said once, not by every process"
    damaged = shutil.copytree(run / "checkpoints" / "step_30", tmp_path / "step_30")
    [state] = damaged.glob("*.safetensors")
    content = bytearray(state.read_bytes())
    content[-5] ^= 1
    state.write_bytes(content)
    for path, arguments, sentence in (
        (run, ["--decode.beem=3"], "decode.beem: unknown key .* nearest known key is decode.beam"),
        (run, ["--model.heads=3"], "model.heads: unknown key"),
        (run, ["--decode.beam=2", "--n-best=5"], "decode.n_best: expected at most decode.beam=2, found 5"),
        (run, ["--n-best=many"], "decode.n_best: expected integer"),
        (tmp_path, [], "expected a checkpoint or a run directory that holds one"),
        (damaged, ["--launch.device=cpu"], "expected a complete checkpoint"),
    ):
        with pytest.raises(DistTfmError, match=sentence) as fault:
            main(["--checkpoint", str(path), *arguments])
        assert fault.value.exit_code == 2


def test_models_of_different_tokenizers_are_no_ensemble(run: Path, tmp_path: Path) -> None:
    config = Config(model=ModelConfig(encoder_layers=1, decoder_layers=1, d_model=16, d_ff=16, heads=2))
    tokenizer = small_tokenizer(lines=290)
    other = save_model(tmp_path / "other", 1, talkative_model(config, tokenizer), tokenizer, config)
    with pytest.raises(DistTfmError, match="trained with another tokenizer"):
        load_models([run, other], torch.device("cpu"), torch.float32)
    [model, smaller], _, _ = load_models([run, run], torch.device("cpu"), torch.bfloat16)
    assert model.embedding.weight.dtype == smaller.embedding.weight.dtype == torch.bfloat16
    assert isinstance(model, PackedTransformer) == can_pack(model.embedding.weight)


def test_a_reader_that_leaves_is_no_fault(run: Path) -> None:
    """`translate < long | head -1`, in one process and in two: no traceback, no waiting."""
    for launcher in ("", "-m torch.distributed.run --standalone --nproc-per-node 2"):
        program = f"{sys.executable} {launcher} {SCRIPT} --checkpoint {run} --launch.threads=1 --decode.window=20"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"yes 'save file' | head -3000 | {program} | head -1"],
            capture_output=True,
            env=clean_environment(),
            timeout=120,
        )
        assert done.stdout.count(b"\n") == 1
        assert b"Traceback" not in done.stderr
        assert b"rror" not in done.stderr, done.stderr.decode()


def test_a_pipe_that_pauses_is_answered_at_once(run: Path) -> None:
    (reading, mine), (answers_from, theirs) = os.pipe(), os.pipe()
    job = start_program(interactive(run), Streams(reading, theirs, 2))
    os.close(reading)
    os.close(theirs)
    try:
        answers = []
        with open(answers_from, "rb") as told:
            for line in (b"save file\n", b"\n", b"open the server\n"):
                os.write(mine, line)
                assert select.select([told], [], [], 90)[0], "no answer while the pipe was open"
                answers.append(told.readline())
            os.close(mine)
            assert job.wait(60) == 0
    finally:
        job.kill()
    assert all(answer.endswith(b"\n") for answer in answers)
    assert answers[1] == b"\n"


def interactive(run: Path) -> list[str]:
    return [sys.executable, SCRIPT, "--checkpoint", str(run), "--launch.threads=1"]


def test_a_terminal_is_prompted_and_answered_line_by_line(run: Path) -> None:
    expected = translate(run, "save file\nopen the server\n").stdout.decode().split("\n")
    mine, theirs = pty.openpty()
    job = start_program(interactive(run), Streams(theirs, theirs, theirs))
    os.close(theirs)
    try:
        greeting = f"{run / 'checkpoints' / 'step_30'}, beam 4: one sentence a line, Ctrl-D ends\n> "
        assert read_until(mine, "> ").replace("\r\n", "\n") == greeting, "once, and before the first prompt"
        os.write(mine, b"save file\n")
        answer = read_until(mine, "\n> ").replace("\r\n", "\n")
        assert answer == f"save file\n{expected[0]}\n> "
        os.write(mine, b"open the server\n")
        answer = read_until(mine, "\n> ").replace("\r\n", "\n")
        assert answer == f"open the server\n{expected[1]}\n> "
        os.write(mine, b"\x04")  # Ctrl-D
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.wait()
        os.close(mine)


def read_until(terminal: int, end: str, patience: float = 90) -> str:
    text, deadline = "", time.monotonic() + patience
    while not text.endswith(end) and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1.0)[0]:
            text += os.read(terminal, 4096).decode()
    assert text.endswith(end), text
    return text


def test_help_is_complete_and_needs_no_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0
    for key in (
        "--checkpoint",
        "--n-best",
        "--weights",
        "--decode.beam=4",
        "--decode.length_penalty=gnmt",
        "--launch.",
    ):
        assert key in done.stdout
