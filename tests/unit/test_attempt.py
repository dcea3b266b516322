"""What becomes of an attempt: queued again, done, or failed for good with the error that came first."""

import dataclasses
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dist_tfm.errors import ConfigError, RunError
from dist_tfm.parallel import attempt as records
from dist_tfm.parallel.attempt import Failure, read_failures, recorded
from dist_tfm.parallel.collectives import SingleProcess, first_rank_alone
from launch.attempt import AGAIN, Facts, describe_failure, judge, main
from tests.jobs import ROOT, clean_environment, small_project

CRASH = Failure(time=5.0, rank=1, host="b", exit_code=1, secondhand=False, message="RuntimeError: boom")
ECHO = Failure(time=1.0, rank=0, host="a", exit_code=1, secondhand=True, message="rank 0 lost another process")
BAD_INPUT = dataclasses.replace(CRASH, exit_code=2)
DIVERGED = dataclasses.replace(CRASH, exit_code=3)
START = Facts(
    exit_code=1,
    done=False,
    step_before=10,
    step_now=10,
    signalled=False,
    stopped=False,
    node_lost=False,
    failures=(),
    restarts=0,
    most_restarts=50,
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"done": True, "exit_code": 1, "failures": (CRASH,)}, 0, id="DONE decides, not the exit code"),
        pytest.param({"exit_code": 0, "stopped": True}, AGAIN, id="preempted: ranks end with 0"),
        pytest.param({"exit_code": 0, "stopped": True, "step_now": 12}, AGAIN, id="warned before the limit"),
        pytest.param({"exit_code": 143, "signalled": True}, AGAIN, id="signalled, and killed before it could save"),
        pytest.param({"exit_code": 0}, 1, id="ended with 0, neither done nor stopped: it would never end"),
        pytest.param({"failures": (CRASH,)}, 1, id="a crash without progress fails once"),
        pytest.param({"failures": (CRASH,), "step_now": 15}, AGAIN, id="a crash after progress"),
        pytest.param({"failures": (CRASH,), "step_now": 5}, 1, id="a damaged checkpoint moved aside is no progress"),
        pytest.param({"failures": (), "exit_code": 137}, 1, id="killed without a word and without progress"),
        pytest.param({"failures": (ECHO,), "node_lost": True}, AGAIN, id="a lost node"),
        pytest.param({"failures": (ECHO,)}, 1, id="all nodes answer: the dead process was killed by something else"),
        pytest.param(
            {"failures": (BAD_INPUT,), "step_now": 15, "signalled": True}, 2, id="bad input never mends itself"
        ),
        pytest.param({"failures": (DIVERGED,), "step_now": 15}, 3, id="nor does divergence"),
        pytest.param({"stopped": True, "exit_code": 0, "restarts": 49}, AGAIN, id="the last attempt but one"),
        pytest.param({"stopped": True, "exit_code": 0, "restarts": 50}, 1, id="attempts are bounded"),
        pytest.param({"failures": (BAD_INPUT,), "exit_code": 2}, 2, id="the code says what kind of failure it was"),
    ],
)
def test_the_verdict(changes: dict[str, object], expected: int) -> None:
    assert judge(dataclasses.replace(START, **changes)).exit_code == expected  # type: ignore[arg-type]


def test_the_first_error_is_the_earliest_that_has_a_reason_of_its_own(tmp_path: Path) -> None:
    later = dataclasses.replace(CRASH, time=9.0, rank=2, message="later")
    for failure in (later, ECHO, CRASH):
        (tmp_path / f"7.0.{failure.rank}").write_text(json.dumps(dataclasses.asdict(failure)))
    (tmp_path / "7.0.3").write_text('{"time": 1')  # cut short by a kill
    (tmp_path / "7.0.begin").write_text("{}")
    (tmp_path / "7.01.1").write_text(json.dumps(dataclasses.asdict(later)))  # another attempt's
    found = read_failures(str(tmp_path / "7.0"))
    assert found == [CRASH, later, ECHO]
    text = "\n".join(describe_failure(dataclasses.replace(START, failures=tuple(found)), "p/7.0"))
    assert "rank 1 on b ended with 1" in text
    assert "boom" in text
    assert "later" not in text


def test_ranks_leave_their_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "errors" / "7.0"))
    lost = RunError("gone")
    lost.secondhand = True
    expected = []
    for rank, fault in enumerate((ConfigError("bad key"), lost, ValueError("bug"), SystemExit(2))):
        monkeypatch.setenv("RANK", str(rank))

        def fail(fault: BaseException = fault) -> int:
            raise fault

        with pytest.raises(type(fault)):
            recorded(fail)()
        expected.append((rank, 1 if rank in (1, 2) else 2, rank == 1))
    found = sorted(read_failures(str(tmp_path / "errors" / "7.0")), key=lambda failure: failure.rank)
    assert [(f.rank, f.exit_code, f.secondhand) for f in found] == expected
    assert "bug" in found[2].message
    assert "Traceback" in found[2].message
    monkeypatch.delenv(records.VARIABLE)
    with pytest.raises(ConfigError):
        recorded(fail_with_config)()
    assert len(list((tmp_path / "errors").iterdir())) == 4


def fail_with_config() -> int:
    raise ConfigError("not recorded: nobody asked")


def test_begin_and_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run = small_project(tmp_path), tmp_path / "run"
    name = ["--name", "42.0"]
    assert main(["begin", *name, "--config", str(config), "--train.steps=20"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(run),
        str(run / "errors" / "42.0"),
        str(tmp_path / "shards"),
    ]
    ended = ["end", *name, "--run", str(run)]
    assert main([*ended, "--exit-code", "1"]) == 1
    assert "no rank has left an error" in capsys.readouterr().out
    (run / "checkpoints" / "step_5").mkdir(parents=True)
    assert main([*ended, "--exit-code", "1"]) == AGAIN
    assert "step 5 of 20 is saved" in capsys.readouterr().out
    (run / "DONE").write_text("10\n")
    assert main([*ended, "--exit-code", "0", "--restarts", "50"]) == 1, "DONE of an earlier, shorter run"
    (run / "DONE").write_text("20\n")
    assert main([*ended, "--exit-code", "0"]) == 0


def test_a_wrong_configuration_is_said_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.stepz.*nearest known key is train\.steps"):
        main(["begin", "--name", "1.0", "--config", str(small_project(tmp_path)), "--train.stepz=3"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_during_imports_is_held_back_until_it_can_be_answered(number: signal.Signals, tmp_path: Path) -> None:
    """The imports are stood for by a wait for the signal itself to have been sent."""
    program = (
        "import pathlib, time\n"
        "pathlib.Path('ready').touch()\n"
        "while not pathlib.Path('sent').exists(): time.sleep(0.01)\n"
        "from dist_tfm.training.signals import StopRequest\n"
        "stop = StopRequest(speaks=False).install()\n"
        "print(stop.signal_name)\n"
    )
    command = [sys.executable, str(ROOT / "launch" / "hold_signals.py"), sys.executable, "-c", program]
    variables = clean_environment() | {"PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "ready").exists():
            assert job.poll() is None
        job.send_signal(number)
        (tmp_path / "sent").touch()
        output, _ = job.communicate(timeout=30)
    finally:
        job.kill()
    assert output.strip() == number.name
    assert job.returncode == 0


def test_a_request_to_stop_ends_the_wait_for_long_work_of_the_first_rank() -> None:
    release, asked = threading.Event(), threading.Event()
    threading.Timer(0.2, asked.set).start()
    try:
        stopped = first_rank_alone(SingleProcess(), "waiting", lambda: wait_for(release), asked.is_set, 0.05)
        assert stopped is False, "the work was not done"
    finally:
        release.set()
    done: list[int] = []
    assert first_rank_alone(SingleProcess(), "working", lambda: done.append(1), lambda: False, 0.05) is True
    assert done == [1]
    with pytest.raises(ConfigError, match="bad key"):
        first_rank_alone(SingleProcess(), "failing", fail_in_work, lambda: False, 0.05)


def wait_for(event: threading.Event) -> None:
    event.wait(60)


def fail_in_work() -> None:
    raise ConfigError("bad key")
