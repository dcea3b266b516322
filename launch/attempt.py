"""What the batch scripts ask before and after an attempt at a run: `python -m launch.attempt begin|end ...`.

begin notes where the run stands and says where its directory is; end says what became of the attempt, whether the job
should be put into the queue again, and why not if not. launch/slurm.sh acts on the answer. Nothing here needs torch.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from data_pipeline.command_line import parse_command_line
from data_pipeline.settings import run_main
from dist_tfm.checkpoint.layout import list_steps
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.errors import InputError
from dist_tfm.parallel.attempt import VARIABLE, Failure, has_stopped, read_failures
from dist_tfm.training.run_directory import RunDirectory

DESCRIPTION = """Used by the batch scripts around an attempt at a run (launch/slurm.sh).
begin --name JOB.RESTART [the arguments of train.py]: checks them; prints the run directory, the path under which ranks
leave their errors, and where the shards are. end --name ... says what became of the attempt.
Exit codes of end: 0 done, 75 to be queued again, else failed for good: 1 fault, 2 configuration, 3 diverged."""

AGAIN = 75
"""Exit code that asks for another attempt (EX_TEMPFAIL of sysexits.h)."""

SHOWN_LINES = 40
"""Lines of a rank's error that are shown; the file holds all."""


@dataclass(frozen=True)
class Beginning:
    """Where a run stood before an attempt. steps: train.steps; step: of the newest checkpoint, -1 without any."""

    run: str
    steps: int
    step: int


@dataclass(frozen=True)
class Facts:
    """What is known at the end of an attempt.

    signalled: the script was asked to stop; stopped: the ranks stopped on request, after a checkpoint. failures: what
    ranks have reported, first the one to show. node_lost: a node of the job does not answer any more.
    """

    exit_code: int
    done: bool
    step_before: int
    step_now: int
    signalled: bool
    stopped: bool
    node_lost: bool
    failures: tuple[Failure, ...]
    restarts: int
    most_restarts: int


@dataclass(frozen=True)
class Verdict:
    """exit_code: 0 done, AGAIN, or that of a job which has failed for good."""

    exit_code: int
    reason: str


def judge(facts: Facts) -> Verdict:
    """What to do after an attempt. DONE decides, never the exit code: preempted ranks end with 0, too."""
    if facts.done:
        return Verdict(0, "done")
    first = facts.failures[0] if facts.failures else None
    hopeless = first is not None and not first.secondhand and first.exit_code in (2, 3)
    if first is not None and hopeless:
        return Verdict(first.exit_code, "failed: another attempt would end in the same way")
    code = 1 if first is None or first.exit_code not in (1, 2, 3) else first.exit_code
    progress = facts.step_now > facts.step_before
    if facts.stopped or facts.signalled:
        why = "stopped on request"
    elif facts.node_lost:
        why = "a node was lost"
    elif progress:
        why = f"it ended before it was done, but step {facts.step_now} was reached"
    elif facts.exit_code == 0:
        return Verdict(1, "failed: it ended without an error and without being done, and no step was saved")
    else:
        return Verdict(code, "failed: no step was saved since the attempt began, so another one would fail as well")
    if facts.restarts >= facts.most_restarts:
        return Verdict(
            code,
            f"{why}; failed: it was queued again {facts.restarts} times already (DIST_TFM_MAX_RESTARTS="
            f"{facts.most_restarts}); the same sbatch command goes on from step {max(facts.step_now, 0)}",
        )
    return Verdict(AGAIN, why)


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    if argv[:1] == ["begin"]:
        return begin(argv[1:])
    if argv[:1] == ["end"]:
        return end(argv[1:])
    parser = argparse.ArgumentParser(prog="attempt", description=DESCRIPTION)
    parser.add_argument("verb", choices=("begin", "end"))
    parser.parse_args(argv[:1])
    return 2


def begin(argv: Sequence[str]) -> int:
    """Prints, a line each, the run directory, the path of the attempt's records, the shards; checks what is cheap."""
    sections, options = parse_command_line(
        "attempt begin", DESCRIPTION, SECTIONS, "configs/tiny.yaml", argv, add_options=_add_name, check=check_sections
    )
    config = make_config(sections)
    run = Path(config.train.run_dir)
    RunDirectory(run).check(config)
    for folder in (run / "errors", run / "logs"):
        _make(folder)
    _write(_beginning(run, options.name), Beginning(str(run), config.train.steps, _newest(run)))
    print(run)
    print(run / "errors" / options.name)
    print(config.data.shards)
    return 0


def end(argv: Sequence[str]) -> int:
    """Prints the first error, if there was one, and what happens next. Returns the exit code that asks for it."""
    options = _end_options(argv)
    run = Path(options.run)
    try:
        before = Beginning(**json.loads(_beginning(run, options.name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as fault:
        raise InputError(f"{_beginning(run, options.name)} cannot be read ({fault}): was `begin` run?") from None
    prefix = str(run / "errors" / options.name)
    facts = Facts(
        exit_code=options.exit_code,
        done=_done_at(run) >= before.steps,
        step_before=before.step,
        step_now=_newest(run),
        signalled=options.signalled,
        stopped=has_stopped(prefix),
        node_lost=options.node_lost,
        failures=tuple(read_failures(prefix)),
        restarts=options.restarts,
        most_restarts=options.most_restarts,
    )
    verdict = judge(facts)
    if verdict.exit_code != 0 and facts.exit_code != 0:
        for line in describe_failure(facts, prefix):
            print(line, flush=True)
    newest = f"step {facts.step_now} of {before.steps} is saved" if facts.step_now >= 0 else "no step is saved"
    print(f"attempt {options.name}: {verdict.reason} ({newest})", flush=True)
    return verdict.exit_code


def describe_failure(facts: Facts, prefix: str) -> list[str]:
    """The error that came first, as its rank has written it, and how many others there are."""
    if not facts.failures:
        return [
            f"no rank has left an error (the step ended with {facts.exit_code}): either the lines above say it, or "
            "something killed them: out of memory, or a node's end"
        ]
    first = facts.failures[0]
    lines = first.message.splitlines()
    if len(lines) > SHOWN_LINES:
        lines = [*lines[: SHOWN_LINES // 2], f"... ({len(lines) - SHOWN_LINES} lines)", *lines[-SHOWN_LINES // 2 :]]
    kind = "every error left says that another process has gone, which says nothing itself" if first.secondhand else ""
    others = f"; {len(facts.failures)} ranks have left an error: {prefix}.RANK" if len(facts.failures) > 1 else ""
    head = f"rank {first.rank} on {first.host} ended with {first.exit_code}{others}" + (f" ({kind})" if kind else "")
    return [f"the first error: {head}", *(f"  {line}" for line in lines)]


def _end_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="attempt end", description=DESCRIPTION)
    _add_name(parser)
    parser.add_argument("--run", required=True, metavar="DIR", help="the run directory, as begin has printed it")
    parser.add_argument("--exit-code", type=int, required=True, help="of the attempt's srun")
    parser.add_argument("--signalled", action="store_true", help="the script was asked to stop")
    parser.add_argument("--node-lost", action="store_true", help="a node of the job does not answer")
    parser.add_argument("--restarts", type=int, default=0, help="how often the job was queued again before")
    parser.add_argument("--most-restarts", type=int, default=50, help="how often it may be at most (default 50)")
    return parser.parse_args(argv)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True, help="of the attempt: JOB.RESTART")


def _beginning(run: Path, name: str) -> Path:
    return run / "errors" / f"{name}.begin"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise InputError(f"{folder} cannot be made ({fault.strerror}): choose another train.run_dir") from None


def _write(path: Path, record: Beginning) -> None:
    try:
        path.write_text(json.dumps(asdict(record)), encoding="utf-8")
    except OSError as fault:
        raise InputError(f"{path} cannot be written ({fault.strerror}): choose another train.run_dir") from None


def _newest(run: Path) -> int:
    return max(list_steps(run), default=-1)


def _done_at(run: Path) -> int:
    """The step that DONE holds, -1 without one."""
    try:
        return int((run / "DONE").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return -1


if __name__ == "__main__":
    os.environ.pop(VARIABLE, None)
    run_main(lambda: main(sys.argv[1:]))
