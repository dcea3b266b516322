"""Checkpoint cases: other layouts, damage, failures; each runs on all ranks of a test world."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dist_tfm.checkpoint import files
from dist_tfm.checkpoint.canonical import StateReader
from dist_tfm.checkpoint.restore import load_weights_only
from dist_tfm.checkpoint.weights import read_index
from dist_tfm.engine.base import STATE_KINDS
from dist_tfm.errors import DistTfmError
from dist_tfm.parallel.topology import Topology
from tests.distributed.build import build_engine, gather_state, train_steps
from tests.distributed.cases import GO_ON, SAVE_STEP, manager_of, save
from tests.oracle import Recipe

OTHER_SEED = 99


def loading(topology: Topology, folder: Path, source: str, stage: int, recipe: Recipe, name: str) -> dict[str, Any]:
    """Loads a checkpoint of `source` (a run of any layout) into an engine with other initial weights, exports it again,
    and goes on training."""
    engine = build_engine(topology, stage, recipe, initial_seed=OTHER_SEED)
    manager = manager_of(folder / f"run_{source}", topology)
    checkpoint = manager.newest_valid()
    assert checkpoint is not None
    counters = manager.load(checkpoint, engine)
    again = save(engine, manager_of(folder / f"again_{topology.world.size}_{name}", topology), SAVE_STEP, folder)
    identical = same_state(checkpoint, again) if topology.is_main else True
    steps = train_steps(engine, topology, recipe, SAVE_STEP + 1, SAVE_STEP + GO_ON)
    engine.close()
    return {"identical": identical, "counters": counters, "steps": steps}


def same_state(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold bit for bit the same tensors, however they are cut."""
    with StateReader(one, read_index(one)) as a, StateReader(other, read_index(other)) as b:
        return set(a.index) == set(b.index) and all(
            torch.equal(a.read_whole(kind, name), b.read_whole(kind, name)) for name in a.index for kind in STATE_KINDS
        )


def damage(topology: Topology, folder: Path, recipe: Recipe, how: str) -> dict[str, Any]:
    """Three checkpoints, the newest then damaged by rank 0: which one do the ranks agree on?"""
    run = folder / f"damage_{topology.world.size}_{how}"
    engine = build_engine(topology, 1, recipe)
    manager = manager_of(run, topology)
    for step in (1, 2, 3):
        train_steps(engine, topology, recipe, step, step)
        save(engine, manager, step, folder)
    newest = run / "checkpoints" / "step_3"
    if topology.is_main:
        damage_checkpoint(newest, how)
    topology.world.barrier()
    chosen = manager.newest_valid()
    assert chosen is not None
    counters = manager.load(chosen, engine)
    steps = train_steps(engine, topology, recipe, 3, 3)  # the run goes on, and the damaged step is written anew
    save(engine, manager, 3, folder) if not newest.exists() else None
    engine.close()
    warnings = run.with_suffix(".warnings")
    return {
        "chosen": chosen.name,
        "step": counters["step"],
        "names": sorted(os.listdir(run / "checkpoints")),
        "warnings": warnings.read_text() if warnings.exists() else "",
        "applied": steps[0]["applied"],
    }


def damage_checkpoint(checkpoint: Path, how: str) -> None:
    state = sorted(checkpoint.glob("state-*.safetensors"))[-1]
    if how == "flipped_byte":
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 1
        state.write_bytes(data)
    elif how == "truncated":
        os.truncate(state, state.stat().st_size - 1)
    elif how == "missing_file":
        (checkpoint / "tokenizer.model").unlink()
    elif how == "edited_manifest":
        path = checkpoint / "COMPLETE"
        path.write_bytes(path.read_bytes().replace(b'"step":3', b'"step":4'))
    elif how == "no_marker":
        (checkpoint / "COMPLETE").unlink()
    elif how == "unfinished":
        checkpoint.rename(checkpoint.with_name("step_3.tmp"))
    else:
        raise ValueError(how)


def all_damaged(topology: Topology, folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Every checkpoint is damaged: the run must stop, now and when it is started again."""
    run = folder / f"all_damaged_{topology.world.size}"
    engine = build_engine(topology, 2, recipe)
    manager = manager_of(run, topology)
    none_yet = manager.newest_valid() is None
    for step in (1, 2):
        save(engine, manager, step, folder)
    if topology.is_main:
        for step in (1, 2):
            damage_checkpoint(run / "checkpoints" / f"step_{step}", "truncated")
    topology.world.barrier()
    errors = [caught(manager.newest_valid), caught(manager.newest_valid)]
    engine.close()
    return {"none_yet": none_yet, "errors": errors, "names": sorted(os.listdir(run / "checkpoints"))}


def wrong_architecture(topology: Topology, folder: Path, source: str, stage: int, recipe: Recipe) -> dict[str, Any]:
    """Another vocabulary, and pre-norm where the checkpoint is post-norm: refused by all, nothing changed."""
    outcomes = []
    for other in (replace(recipe, vocabulary=recipe.vocabulary + 8), replace(recipe, norm="pre")):
        engine = build_engine(topology, stage, other)
        manager = manager_of(folder / f"run_{source}", topology)
        checkpoint = manager.newest_valid()
        assert checkpoint is not None
        before = gather_state(engine)
        error = caught(lambda c=checkpoint, m=manager, e=engine: m.load(c, e))
        after = gather_state(engine)
        outcomes.append({"error": error, "untouched": all(torch.equal(before[k], after[k]) for k in before)})
        engine.close()
    return {"outcomes": outcomes}


def no_space(topology: Topology, folder: Path, stage: int, recipe: Recipe, victim: int) -> dict[str, Any]:
    """The disk fills up while rank `victim` writes: all ranks say so, what was there stays and loads."""
    run = folder / f"no_space_{topology.world.size}_{victim}_{stage}"
    engine = build_engine(topology, stage, recipe)
    manager = manager_of(run, topology)
    save(engine, manager, 1, folder)
    train_steps(engine, topology, recipe, 1, 1)
    with full_disk(topology.world.rank == victim):
        error = caught(lambda: save(engine, manager, 2, folder))
    names = sorted(os.listdir(run / "checkpoints"))
    valid = manager.newest_valid()
    save(engine, manager, 2, folder)  # with space again
    newest = manager.newest_valid()
    engine.close()
    return {
        "error": error,
        "names": names,
        "valid": valid.name if valid else None,
        "newest": newest.name if newest else None,
    }


@contextmanager
def full_disk(full: bool) -> Iterator[None]:
    """While it is entered, no file takes more than 4,000 bytes, as on a full disk."""
    real_open = open

    def limited(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        file = real_open(path, mode, *arguments, **named)
        if "x" not in mode:
            return file
        write = file.write

        def refuse(data: Any) -> int:
            if file.tell() + len(data) > 4000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return int(write(data))

        wrapped = mock.MagicMock(wraps=file)
        wrapped.__enter__.return_value = wrapped
        wrapped.__exit__.side_effect = lambda *a: file.close()
        wrapped.write.side_effect = refuse
        return wrapped

    if full:
        with mock.patch.object(files, "open", limited, create=True):
            yield
    else:
        yield


def initializing(topology: Topology, folder: Path, source: str, stage: int, recipe: Recipe) -> dict[str, Any]:
    """train.init_from: the weights of another run, no moments, update 0."""
    engine = build_engine(topology, stage, recipe, initial_seed=OTHER_SEED)
    run = folder / f"run_{source}"
    load_weights_only(run, engine, topology.world)
    state = gather_state(engine)
    checkpoint = run / "checkpoints" / f"step_{SAVE_STEP}"
    with StateReader(checkpoint, read_index(checkpoint)) as reader:
        weights = all(torch.equal(reader.read_whole("fp32", n), state[f"fp32/{n}"]) for n in reader.index)
    moments = all(not state[key].any() for key in state if not key.startswith("fp32/"))
    record = train_steps(engine, topology, recipe, 1, 1)[0]
    engine.close()
    missing = caught(lambda: load_weights_only(folder / "nowhere", engine, topology.world))
    return {"weights": weights, "no_moments": moments, "rate": record["rate"], "missing": missing}


def rotating(topology: Topology, folder: Path, recipe: Recipe) -> dict[str, Any]:
    """keep=2 with the best at step 2: what is left after each of six saves; a writer's leftover goes too."""
    run = folder / f"rotation_{topology.world.size}"
    engine = build_engine(topology, 3, recipe)
    manager = manager_of(run, topology, keep=2)
    listings = []
    for step in range(1, 7):
        if step == 4 and topology.is_main:
            (run / "checkpoints" / "step_9.tmp").mkdir()
        save(engine, manager, step, folder, best=2 if step >= 2 else None)
        topology.world.barrier()
        listings.append(sorted(os.listdir(run / "checkpoints")))
        topology.world.barrier()
    twice = caught(lambda: save(engine, manager, 6, folder))
    engine.close()
    return {"listings": listings, "twice": twice}


def caught(action: Callable[[], Any]) -> list[Any]:
    """[class, exit code, message] of the user-facing error that `action` raises; fails if it raises none."""
    try:
        action()
    except DistTfmError as error:
        return [type(error).__name__, error.exit_code, str(error)]
    raise AssertionError("expected an error, found none")
