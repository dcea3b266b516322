"""Short measurements that tell whether the nodes of a job are fit to train together, and which one is not.

An all-reduce shows how fast all of them are, at the pace of the slowest; so each node's arithmetic and the links
between neighbours are measured by themselves, to name the slow one.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from dist_tfm.parallel.collectives import Json
from dist_tfm.parallel.topology import Topology

SLOWER = 2.0
"""So many times the median's time makes a node slow. Healthy ones differ by a few per cent; what is looked for (a
throttled GPU, a link that fell back to another network) differs by far more."""


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce of `bytes` over `ranks`, in seconds. bandwidth: bytes a second over each link of a ring."""

    ranks: int
    bytes: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        return 2 * (self.ranks - 1) / self.ranks * self.bytes / self.seconds


def measure_all_reduce(topology: Topology, rounds: int = 5) -> AllReduce | None:
    """The median of `rounds` over all ranks' devices, by the slowest rank's clock; None for one process."""
    size = topology.ranks.world_size
    if size == 1:
        return None
    elements = (64 << 20) // 4 if topology.device.type == "cuda" else (4 << 20) // 4
    tensor = torch.ones(elements, device=topology.device)
    times = []
    for warm in range(-1, rounds):
        topology.world.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        _finish(topology.device)
        if warm >= 0:
            times.append(time.perf_counter() - started)
    slowest = max(cast(list[float], topology.world.gather(statistics.median(times))))
    return AllReduce(size, 4 * elements, slowest)


def measure_arithmetic(topology: Topology, rounds: int = 5) -> float:
    """Seconds of a matrix product on this rank's device, the median; all ranks measure at once, as they will train."""
    size = 4096 if topology.device.type == "cuda" else 384
    left = torch.ones(size, size, device=topology.device)
    times = []
    topology.world.barrier()
    for warm in range(-1, rounds):
        started = time.perf_counter()
        for _ in range(4):
            left @ left
        _finish(topology.device)
        if warm >= 0:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_links(topology: Topology, node: str) -> dict[tuple[str, str], float]:
    """Seconds in which the first ranks of two neighbouring nodes exchange a tensor both ways.

    node: this rank's node. Every rank gets all; empty for one node. Over NCCL `measure_all_reduce` must come first: two
    ranks can only talk alone once all have talked together.
    """
    names = cast(list[str], topology.world.gather(node))
    first = {name: names.index(name) for name in dict.fromkeys(names)}
    elements = (64 << 20) // 4 if topology.device.type == "cuda" else (2 << 20) // 4
    links: dict[tuple[str, str], float] = {}
    for pairs in link_rounds(list(first)):
        mine = next((pair for pair in pairs if topology.ranks.rank in (first[pair[0]], first[pair[1]])), None)
        topology.world.barrier()
        record: Json = None
        if mine is not None:
            peer = first[mine[1]] if topology.ranks.rank == first[mine[0]] else first[mine[0]]
            record = [*mine, _exchange(topology, peer, elements)]
        for entry in topology.world.gather(record):
            if isinstance(entry, list):
                one, other, seconds = cast(tuple[str, str, float], tuple(entry))
                links[one, other] = max(seconds, links.get((one, other), 0.0))
    return links


def link_rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """The neighbours of a ring as rounds of pairs in which no node occurs twice."""
    count = len(nodes)
    if count < 3:
        return [[(nodes[0], nodes[1])]] if count == 2 else []
    ring = [(nodes[k], nodes[(k + 1) % count]) for k in range(count)]
    rounds = [ring[0::2], ring[1::2]]
    if count % 2:  # the last pair of an odd ring meets the first one's node
        rounds = [ring[0:-1:2], ring[1::2], [ring[-1]]]
    return rounds


def slow_nodes(seconds: Mapping[str, float], slower: float = SLOWER) -> list[str]:
    """Nodes that take more than `slower` times as long as the median of the others."""
    result = []
    for name, taken in seconds.items():
        others = [value for other, value in seconds.items() if other != name]
        if others and taken > slower * statistics.median_low(others):
            result.append(name)
    return result


def slow_links(links: Mapping[tuple[str, str], float], slower: float = SLOWER) -> list[str]:
    """Nodes all of whose links are slow. Of two nodes with one link between them nobody can say which."""
    if len(links) < 2:
        return []
    best: dict[str, float] = {}
    for pair, seconds in links.items():
        for name in pair:
            best[name] = min(seconds, best.get(name, seconds))
    return slow_nodes(best, slower)


def _exchange(topology: Topology, peer: int, elements: int, rounds: int = 3) -> float:
    sent = torch.ones(elements, device=topology.device)
    received = torch.empty_like(sent)
    times = []
    for warm in range(-1, rounds):
        started = time.perf_counter()
        operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        _finish(topology.device)
        if warm >= 0:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
