"""A training job in processes of its own, each with its own threads, which takes a step whenever it is asked to."""

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from benchmarks.watching import Record, Watch
from data_pipeline.api import Batch
from dist_tfm.config.schema import Config
from dist_tfm.errors import RunError
from dist_tfm.parallel.environment import Ranks
from dist_tfm.parallel.memory import keep_freed_memory
from dist_tfm.parallel.topology import arrange, shutdown, start
from dist_tfm.training.building import build_engine


@dataclass(frozen=True)
class Job:
    """What all ranks of a world do. batches: a step's micro-batches, the same in every step. threads: of each rank."""

    name: str
    ranks: int
    threads: int
    config: Config
    vocabulary: int
    batches: Sequence[Batch]


class RankWorld:
    """The processes of a job on this machine, from `with` to its end."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.losses: list[float] = []
        context = multiprocessing.get_context("forkserver")  # a fork of this process would inherit torch's threads
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(job.ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, job, rank, port), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    def __enter__(self) -> "RankWorld":
        """Returns when all ranks have built their engines. Raises RunError if one of them could not."""
        self._hear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()  # which ends the process that reads from it
        for process in self._processes:
            if fault is not None:
                process.kill()
            process.join(60)
            process.kill()

    def step(self) -> list[Record]:
        """The next step: what each rank did. Raises RunError if a rank has died; what it said stands above."""
        for connection in self._connections:
            connection.send(len(self.losses) + 1)
        records = self._hear()
        self.losses.append(sum(record.loss for record in records))
        return records

    def _hear(self) -> list[Record]:
        answers: list[Record] = []
        for rank, connection in enumerate(self._connections):
            try:
                answers.append(connection.recv())
            except EOFError:
                raise RunError(f"rank {rank} of {self.job.name} has ended: see above") from None
        return answers


def serve(connection: Connection, job: Job, rank: int, port: int) -> None:
    """One rank: builds its engine, then trains a step for each number that it is sent, until the connection closes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    keep_freed_memory()  # as train.py does
    torch.set_num_threads(job.threads)
    ranks = Ranks(rank, rank, job.ranks, job.ranks, "environment")
    everywhere = start(ranks, job.config.launch, report=lambda line: None)
    topology = arrange(everywhere, job.config.parallel, job.config.launch)
    tokens, watch = sum(batch.target_tokens for batch in job.batches), Watch()
    mine = job.batches[topology.data.rank :: topology.data.size]
    try:
        with watch.installed(), contextlib.suppress(EOFError):
            engine = build_engine(job.config, job.vocabulary, topology)
            connection.send(None)
            while True:
                step = connection.recv()
                watch.take()
                entry = time.perf_counter()
                result = engine.train_batch(mine, step, tokens)
                leave = time.perf_counter()
                connection.send(Record(entry, leave, result.sums.loss / tokens, *watch.take()))
    finally:
        shutdown()
