"""--dry-run: everything is built, the largest batches are run, and nothing is left behind."""

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch

from data_pipeline.api import Batch, Position, zero_weight_batch
from data_pipeline.prepare import is_prepared
from data_pipeline.remote import is_remote
from dist_tfm.config.schema import Config
from dist_tfm.engine.base import Engine
from dist_tfm.errors import RunError
from dist_tfm.metrics.flops import length_sums, model_flops_utilisation, peak_flops, training_flops
from dist_tfm.metrics.meter import peak_memory_bytes
from dist_tfm.metrics.writers import Console
from dist_tfm.model.counting import parameter_counts
from dist_tfm.parallel.collectives import together
from dist_tfm.parallel.memory import give_back_freed_memory
from dist_tfm.parallel.topology import Topology
from dist_tfm.parallel.traffic import pipeline_traffic, tensor_traffic
from dist_tfm.training.building import build_engine, describe_layout, stage_plan
from dist_tfm.training.corpus import open_corpus
from dist_tfm.training.session import prepare_shards

MIB = 1 << 20

LARGEST = ("most positions", "longest pairs")
"""What each of the loader's largest batches has most of: the first asks most of logits and feed-forward layers, the
second of attention."""


def rehearse(config: Config, topology: Topology) -> int:
    """Runs the largest training step and validation batch that the data can give; reports memory and speed.

    Every rank calls it. Returns the exit code; raises DistTfmError.
    """
    console = Console(enabled=topology.is_main)
    with contextlib.ExitStack() as stack:
        shards = config.data.shards
        config = stack.enter_context(_with_shards(config, topology, console))
        corpus = together(topology.world, "opening the shards", lambda: open_corpus(config, topology.data, Position()))
        stack.callback(corpus.loader.close)
        counts = parameter_counts(config.model, *corpus.tokenizer.sizes)
        console.say(f"parameters: {sum(counts.values()):,}")
        console.say(corpus.description)
        for line in describe_layout(config, corpus.tokenizer.sizes[0], topology):
            console.say(line)
        vocab_size, source_vocab_size = corpus.tokenizer.sizes
        engine = build_engine(config, vocab_size, topology, source_vocab_size)
        stack.callback(engine.close)
        give_back_freed_memory()
        facts = engine.facts
        console.say(
            f"running on {facts.world_size} process(es), {facts.device}, {facts.precision}, ZeRO stage "
            f"{facts.zero_stage}, attention {facts.attention}, kernels {facts.kernels}, activation checkpointing "
            f"{config.train.activation_checkpointing}"
        )
        for kind, batch in zip(LARGEST, corpus.loader.largest_batches(), strict=True):
            _training_step(engine, batch, kind, config, vocab_size, topology, console)
        _validation_batch(engine, corpus.validation.largest(), topology, console)
        _report_memory(topology, console)
    console.say(f"dry run passed; nothing was {'written' if config.data.shards == shards else 'kept'}")
    return 0


@contextlib.contextmanager
def _with_shards(config: Config, topology: Topology, console: Console) -> Iterator[Config]:
    """The configuration; where its shards are missing, with shards in a temporary folder, gone at the end."""

    def place() -> str | None:
        elsewhere = bool(config.data.corpora) or is_remote(config.data.shards)  # never prepared by training
        if not topology.is_main or elsewhere or is_prepared(config.data, config.tokenizer):
            return None
        return tempfile.mkdtemp(prefix="dist_tfm-dry-run-")

    folder = cast(str | None, topology.world.broadcast(together(topology.world, "looking for shards", place)))
    if folder is None:
        yield config
        return
    try:
        console.say(
            f"{config.data.shards} holds no complete shards of this configuration: the whole corpus is prepared into "
            f"{folder}, a temporary folder that is deleted at the end; `python data_pipeline/prepare.py` with the same "
            "options first keeps it"
        )
        shards = str(Path(folder) / "shards")
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, shards=shards))
        prepare_shards(config, topology, console)
        yield config
    finally:
        if topology.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def _training_step(
    engine: Engine, batch: Batch, kind: str, config: Config, vocab_size: int, topology: Topology, console: Console
) -> None:
    """Two steps (the first one warms up) in which every micro-batch is `batch`, each rank taking its share.

    kind: what `batch` has most of, for the report.
    """
    rank, size, count = topology.data.rank, topology.data.size, config.data.micro_batches
    mine = [
        dataclasses.replace(batch, index=index) if index < count else zero_weight_batch()
        for index in range(rank, -(-count // size) * size, size)
    ]
    seconds: list[float] = []
    for step in (1, 2):
        topology.world.barrier()
        started = time.perf_counter()
        result = engine.train_batch(mine, step, count * batch.target_tokens)
        if topology.device.type == "cuda":
            torch.cuda.synchronize(topology.device)
        seconds.append(time.perf_counter() - started)
        if not result.applied and config.precision.dtype != "fp16":  # whose loss scale is being looked for
            raise RunError("the loss or gradient of the largest training batch is not finite at initialisation")
    tokens = count * (batch.source_tokens + batch.target_tokens)
    dtype = torch.float32 if engine.facts.precision == "fp32" else torch.bfloat16
    peak = topology.world.sum_floats([peak_flops(topology.device, dtype)])[0]
    flops = training_flops(config.model, vocab_size, length_sums([batch] * count))
    share = model_flops_utilisation(flops, seconds[1], peak)
    pairs, width = batch.source.shape
    console.say(
        f"largest training step ({kind}): {count} micro-batches of {pairs} pairs, {width} source and "
        f"{batch.labels.shape[1]} target positions: {seconds[1]:.2f} s, {tokens / seconds[1]:,.0f} tokens/s, "
        f"MFU {share:.1%}"
    )
    if config.train.compile:
        console.say(f"the first such step, which compiles what is not compiled yet, took {seconds[0]:.2f} s")
    _say_traffic(engine, batch, config, vocab_size, console)


def _say_traffic(engine: Engine, batch: Batch, config: Config, vocab_size: int, console: Console) -> None:
    item_bytes = 2 if engine.facts.precision == "bf16" else 4  # autocast: some of a layer's activations have 2
    source, target = batch.source.size, batch.labels.size
    if config.data.packing:
        source, target = batch.source_tokens, batch.target_tokens
    if (ranks := engine.facts.tensor_parallel) > 1:
        traffic = tensor_traffic(config.model, source, target, batch.target_tokens, item_bytes)
        console.say(
            f"tensor parallelism: {ranks} ranks add up {traffic.total / MIB:,.1f} MiB for this micro-batch (forward "
            f"{traffic.forward / MIB:,.1f}, loss {traffic.loss / MIB:,.1f}, backward {traffic.backward / MIB:,.1f})"
        )
    if (plan := stage_plan(config, vocab_size)) is not None:
        cuts = ", ".join(f"{sent / MIB:,.1f}" for sent in pipeline_traffic(plan, source, target, item_bytes))
        console.say(f"pipeline: {cuts} MiB cross its cuts forward for this micro-batch, and as many backward")


def _validation_batch(engine: Engine, batch: Batch, topology: Topology, console: Console) -> None:
    topology.world.barrier()
    started = time.perf_counter()
    engine.evaluate(batch)
    topology.world.barrier()  # the first pipeline stage is done long before the last
    seconds = time.perf_counter() - started
    pairs, width = batch.source.shape
    console.say(
        f"largest validation batch: {pairs} pairs, {width} source and {batch.labels.shape[1]} target positions: "
        f"{seconds:.2f} s"
    )


def _report_memory(topology: Topology, console: Console) -> None:
    used = cast(list[int], topology.world.gather(peak_memory_bytes(topology.device)))
    kind = "allocated" if topology.device.type == "cuda" else "resident"
    peak = f"peak of {kind} memory of a process: {max(used) / MIB:,.0f} MiB"
    console.say(peak if len(used) == 1 else f"{peak} at most, {min(used) / MIB:,.0f} MiB at least")
