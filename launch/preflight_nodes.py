"""The part of preflight in which all ranks take part: they meet, compare what they have, and measure each other."""

import hashlib
import os
import platform
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch

from data_pipeline.files import read_regular
from data_pipeline.index import INDEX_FILE
from data_pipeline.prepared import TRAIN, corpus_location, locate
from dist_tfm.config.loading import config_to_yaml
from dist_tfm.config.schema import Config, LaunchConfig
from dist_tfm.errors import DistTfmError
from dist_tfm.parallel.environment import Ranks, cores_per_rank
from dist_tfm.parallel.probe import measure_all_reduce, measure_arithmetic, measure_links, slow_links, slow_nodes
from dist_tfm.parallel.topology import Topology, describe_fault, shutdown, start
from dist_tfm.training.run_directory import PACKAGES
from launch.findings import Findings, nearest_existing

MIB = 1 << 20


def check_nodes(config: Config, ranks: Ranks, findings: Findings) -> None:
    """Every rank calls it; afterwards every rank has the faults of all.

    Raises RunError if the ranks cannot meet.
    """
    torch.set_num_threads(config.launch.threads or cores_per_rank(ranks, os.environ))
    topology = start(ranks, config.launch, report=lambda line: findings.good(line))
    try:
        mine = describe_rank(config, topology)
        everyone = cast(list[dict[str, Any]], topology.world.gather(mine))
        compare(everyone, findings)
        _measure(topology, [record["node"] for record in everyone], findings)
        everyones = cast(list[list[str]], topology.world.gather(list(findings.faults)))
        findings.faults[:] = dict.fromkeys(fault for faults in everyones for fault in faults)
    except RuntimeError as fault:
        if (known := describe_fault(fault, ranks)) is None:
            raise
        raise known from fault
    finally:
        shutdown()


def describe_rank(config: Config, topology: Topology) -> dict[str, Any]:
    """What must be the same everywhere, and where this rank is. JSON."""
    data, own = config.data, LaunchConfig()  # a rank's own hardware is its own affair
    locations = [corpus_location(data, corpus) for corpus in data.corpora] or [data.shards]
    try:
        folders = [locate(location, data)[0] for location in locations]
        shards: str | None = hash_of(b"".join(read_regular(folder / TRAIN / INDEX_FILE) for folder in folders))
    except (OSError, DistTfmError):
        shards = None
    run = nearest_existing(Path(config.train.run_dir))
    cuda = topology.device.type == "cuda"
    return {
        "node": node_name(),
        "same": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
            "configuration": hash_of(config_to_yaml(replace(config, launch=own)).encode()),
            "shards": shards,
            "folder of the run": str(run),
        },
        "device": torch.cuda.get_device_name(topology.device) if cuda else "cpu",
    }


def node_name() -> str:
    """Slurm's name of this node; elsewhere the host's."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def hash_of(content: bytes) -> str:
    """A short fingerprint for comparing."""
    return hashlib.sha256(content).hexdigest()[:12]


def compare(everyone: list[dict[str, Any]], findings: Findings) -> None:
    """Adds a fault for each thing that differs between ranks, naming the nodes that differ from rank 0's."""
    first = everyone[0]
    for key, value in first["same"].items():
        odd: dict[str, str] = {}
        for record in everyone:
            if record["same"][key] != value:
                odd.setdefault(record["node"], str(record["same"][key]))
        if odd:
            shown = ", ".join(f"{found} on {node}" for node, found in sorted(odd.items()))
            findings.fault(f"{key}: {value} on {first['node']} (rank 0) but {shown}: all nodes need the same")
    devices = sorted({record["device"] for record in everyone})
    if len(devices) > 1:
        findings.warn(f"devices of different kinds ({', '.join(devices)}): the slowest sets the pace")
    nodes = list(dict.fromkeys(record["node"] for record in everyone))
    versions = first["same"]
    findings.good(
        f"{len(everyone)} rank(s) on {len(nodes)} node(s) ({', '.join(nodes)}), {', '.join(devices)}; "
        f"torch {versions['torch']}, deepspeed {versions['deepspeed']}, python {versions['python']}"
    )


def _measure(topology: Topology, nodes: list[str], findings: Findings) -> None:
    all_reduce = measure_all_reduce(topology)  # first: see measure_links
    links = measure_links(topology, nodes[topology.ranks.rank])
    seconds = cast(list[float], topology.world.gather(measure_arithmetic(topology)))
    if all_reduce is not None:
        findings.good(
            f"all-reduce of {all_reduce.bytes / MIB:.0f} MiB over {all_reduce.ranks} ranks: "
            f"{1000 * all_reduce.seconds:.1f} ms, {all_reduce.bandwidth / 1e9:.2f} GB/s"
        )
    slowest = {name: max(s for n, s in zip(nodes, seconds, strict=True) if n == name) for name in dict.fromkeys(nodes)}
    for name in slow_nodes(slowest):
        findings.warn(
            f"{name} is slow: its arithmetic takes {1000 * slowest[name]:.1f} ms, the others' "
            f"{1000 * min(slowest.values()):.1f} ms; leave it out with sbatch --exclude={name}"
        )
    for name in slow_links(links):
        findings.warn(
            f"{name} is slow: both its links need {_range(links, name)} for what others do in "
            f"{1000 * min(links.values()):.1f} ms; leave it out with sbatch --exclude={name}"
        )
    if links:
        fastest, slowest_link = 1000 * min(links.values()), 1000 * max(links.values())
        findings.good(f"links between neighbours: {fastest:.1f} to {slowest_link:.1f} ms")


def _range(links: dict[tuple[str, str], float], name: str) -> str:
    own = [1000 * seconds for pair, seconds in links.items() if name in pair]
    return f"{min(own):.1f} to {max(own):.1f} ms"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
