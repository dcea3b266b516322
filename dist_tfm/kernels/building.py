"""Compiling the kernels' C++ source on first use, and where the result is kept."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from data_pipeline.files import rename_durably, sync_file
from dist_tfm.errors import ConfigError

SOURCE = "kernels.cpp"
OPTIONS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
PATIENCE = 300
"""Seconds after which a compiler is taken to hang; it needs two."""

CHOICE = "or set train.kernels=torch, which needs no compiler"


def build(variables: Mapping[str, str] = os.environ) -> Path:
    """The shared library, compiled by $CXX (g++) if the cache has none of this source, compiler, options and processor.

    The cache is $XDG_CACHE_HOME/dist_tfm/kernels (~/.cache/dist_tfm/kernels). Processes may build at once, also on
    hosts that share it: each compiles into a file of its own, which takes its place as a whole once it is on the disk:
    a library that is cut short would end whoever loads it by a signal.
    Raises ConfigError where there is no compiler, it fails, or the cache cannot be written.
    """
    source = resources.files(__package__).joinpath(SOURCE).read_bytes()
    asked = variables.get("CXX", "g++")
    if (compiler := shutil.which(asked)) is None:
        raise ConfigError(
            f"train.kernels: native needs a C++ compiler, expected {asked}, found none: install it, name another one "
            f"in the variable CXX, {CHOICE}"
        )
    command = [compiler, *OPTIONS, *_wide_vectors()]
    place = _cache(variables) / _key(source, command) / "kernels.so"
    if place.exists():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=place.parent) as folder:
            made = Path(folder) / place.name
            (Path(folder) / SOURCE).write_bytes(source)
            _compile([*command, str(Path(folder) / SOURCE), "-o", str(made)])
            with made.open("rb") as file:
                sync_file(file)
            rename_durably(made, place)
    except OSError as error:
        raise ConfigError(
            f"train.kernels: cannot keep the compiled kernels in {place.parent}: {error.strerror or error}; name a "
            f"folder that can be written in the variable XDG_CACHE_HOME, {CHOICE}"
        ) from error
    return place


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"train.kernels: {command[0]} has not compiled the kernels in {PATIENCE} s: name another compiler in the "
            f"variable CXX, {CHOICE}"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        said = next((line for line in lines if "error" in line), lines[-1])
        raise ConfigError(
            f"train.kernels: {command[0]} could not compile the kernels (exit code {done.returncode}: {said.strip()}): "
            f"name another compiler in the variable CXX, {CHOICE}"
        )


def _cache(variables: Mapping[str, str]) -> Path:
    base = Path(variables.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # which, as the XDG specification has it, counts as none
        try:
            base = Path("~/.cache").expanduser()
        except RuntimeError:  # a user whom the system does not know, as containers have them
            raise ConfigError(
                "train.kernels: no place for the compiled kernels, since this user has no home directory: name a "
                f"folder that can be written in the variable XDG_CACHE_HOME, {CHOICE}"
            ) from None
    return base / "dist_tfm" / "kernels"


def _key(source: bytes, command: list[str]) -> str:
    """Differs wherever the library would: by source, compiler, options and what the processor can do."""
    compiler = Path(command[0]).resolve()
    identity = (str(compiler), str(compiler.stat().st_mtime_ns), *command[1:], platform.machine(), _processor())
    return hashlib.sha256("\n".join(identity).encode() + source).hexdigest()[:24]


def _processor() -> str:
    """Model and features of the processor, as the kernel tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = {line.partition(":")[0].strip(): line.partition(":")[2] for line in reversed(lines)}
    return "\n".join(told.get(name, "") for name in ("model name", "flags", "Features"))


def _wide_vectors() -> tuple[str, ...]:
    """Compilers prefer half of an AVX-512 register, for processors that are slowed down by a whole one."""
    return ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
