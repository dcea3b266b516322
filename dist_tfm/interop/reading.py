"""A model's folder as Hugging Face's programs save it: config.json and safetensors. Nothing is ever unpickled."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dist_tfm.errors import InputError

SETTINGS = "config.json"
TENSORS = "model.safetensors"
PARTS = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_settings(folder: Path) -> dict[str, Any]:
    """config.json. Raises InputError."""
    return read_object(folder / SETTINGS, "the configuration of a model")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the model, on the CPU, in the types that they are stored in. Raises InputError."""
    if (folder / TENSORS).is_file():
        return _read_file(folder / TENSORS)
    if (folder / PARTS).is_file():
        listed = read_object(folder / PARTS, "the list of a model's files").get("weight_map")
        if not isinstance(listed, dict) or not all(_is_plain(name) for name in listed.values()):
            raise InputError(
                f"{folder / PARTS}: expected file names of this folder in weight_map, found something else"
            )
        tensors: dict[str, Tensor] = {}
        for name in sorted(set(listed.values())):
            tensors |= _read_file(folder / name)
        return tensors
    if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        raise InputError(
            f"{folder}: expected {TENSORS}, found {', '.join(pickles[:3])} only: such files can run code when they are "
            "read and are not; where you trust them, load the model and call save_pretrained, which writes safetensors"
        )
    raise InputError(f"{folder}: expected {TENSORS} or {PARTS}, found neither")


def read_object(path: Path, what: str) -> dict[str, Any]:
    """A JSON object; what: what it should be, for errors. Raises InputError."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as fault:
        raise InputError(f"{path}: expected {what}, but it cannot be read ({fault.strerror})") from None
    except ValueError as fault:
        raise InputError(f"{path}: expected {what}, found no JSON ({fault})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected {what}, found no JSON object")
    return value


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as fault:
        raise InputError(f"{path} is no safetensors file ({fault})") from None
    except OSError as fault:
        raise InputError(f"{path} cannot be read ({fault.strerror or fault})") from None
