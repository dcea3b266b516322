"""Other people's programs to measure beside ours: each in an environment of its own, which shares this one's torch.

A peer works in a process of its own (a script in this folder) and is asked for one piece of work at a time, so that the
two sides take turns: requests and answers are JSON, a line each, on its standard input and output.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.harness import ROOT, say
from dist_tfm.errors import ConfigError, RunError

FOLDER = ROOT / ".venv-peers"
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "huggingface": ("transformers==5.24.0",),
    # An older numpy than ours, and of its many requirements those that reading local files takes.
    "mds": (
        *("mosaicml-streaming==0.13.0", "numpy==2.1.3", "transformers==4.57.6", "tokenizers==0.22.2"),
        *("huggingface-hub==0.36.2", "requests==2.32.5", "certifi", "charset-normalizer", "urllib3"),
        *("catalogue==2.0.10", "brotli==1.2.1", "python-snappy==0.7.3", "cramjam==2.14.0", "zstd==1.5.7.2"),
    ),
}
"""What each peer of decoding and of loading is made of, beside what this environment holds."""
TRAINING_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "torch": (),
    "fairseq": (
        *("setuptools==80.9.0", "wheel==0.48.0", "cython==3.3.1"),  # its source is built with these
        *("hydra-core==1.3.2", "omegaconf==2.3.0", "antlr4-python3-runtime==4.9.3", "bitarray==3.12.3"),
        *("scikit-learn==1.9.1", "scipy==1.17.1", "joblib==1.6.0", "threadpoolctl==3.8.0", "narwhals==2.29.0"),
        "cloudpickle==3.1.3",
        "fairseq-fixed==0.12.3.1",
    ),
    "eole": (
        *("pyonmttok==1.38.1", "rapidfuzz==3.14.6", "configargparse==1.9.0"),
        *("torch-optimi==0.3.3", "pyahocorasick==2.3.1", "eole==0.6.4"),
    ),
}
"""The same of training: all that importing the models takes. What the packages themselves ask for is not followed: it
would take the place of what is shared, torch first of all."""
BUILD_WITHOUT = {"READTHEDOCS": "1"}
"""fairseq's setup then compiles none of its C++, which is for its own data loading and scoring."""


def set_up(peer: str, packages: Sequence[str], options: Sequence[str] = (), constrained: bool = True) -> None:
    """Makes the environment of a peer, or finishes one that was begun. Raises RunError if a package cannot be had.

    constraints.txt holds there too, so that no package replaces the torch that both sides must share, unless a peer
    needs others (`constrained` is False, and `options`, which are pip's, say --no-deps).
    """
    folder = FOLDER / peer
    say(f"setting up {folder.relative_to(ROOT)}: {' '.join(packages) or 'nothing but what is here'}")
    if not _interpreter(peer).is_file():
        venv.create(folder, with_pip=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    command = [str(_interpreter(peer)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    limits = ("--constraint", str(ROOT / "constraints.txt")) if constrained else ()
    for package in packages:  # one by one: the second may be built with the first
        done = subprocess.run(
            [*command, *limits, *options, package],
            env={**os.environ, **BUILD_WITHOUT},
        )
        if done.returncode:
            raise RunError(f"{package} of {peer} could not be installed (pip ended with {done.returncode}): see above")


def _interpreter(peer: str) -> Path:
    return FOLDER / peer / "bin" / "python"


class Peer:
    """A peer's process, from `with` to its end. Raises ConfigError if its environment is missing."""

    def __init__(self, name: str, script: str, threads: int) -> None:
        interpreter = _interpreter(name)
        if not interpreter.is_file():
            raise ConfigError(f"expected {name} in {FOLDER.relative_to(ROOT)}, found nothing: run this with --setup")
        self._name = name
        # Nobody needs the network: weights and inputs come from us.
        offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [str(interpreter), str(ROOT / "benchmarks" / script)],
            env={**os.environ, **offline},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closing its input ends it; a fault of ours ends it at once."""
        if fault is not None:
            self._process.kill()
        self._process.communicate()

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Its answer to one request. Raises RunError if it has died; what it said stands on standard error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RunError(f"the process of {self._name} ended with exit code {self._process.wait()}: see above")
        return json.loads(answer)


def answer_requests(answer: Mapping[str, Any]) -> None:
    """The peer's side: answers each request by the function that `do` names, given its other keys, until input ends.

    What libraries print goes to standard error, where it cannot be taken for an answer.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(answer[request.pop("do")](**request)), file=answers, flush=True)
