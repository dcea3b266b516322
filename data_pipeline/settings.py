"""Layered settings: YAML files with `extends:`, then dotted overrides, checked as a whole into frozen dataclasses.

All faults are reported at once, each with its dotted path, where it was set, what was expected, what was found and, for
an unknown key, the nearest known one.
"""

import dataclasses
import difflib
import os
import re
import sys
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import TypeAdapter, ValidationError

from data_pipeline.errors import ConfigError, DistTfmError, InputError, shorten, shown
from data_pipeline.plain_yaml import MOST_LEVELS, NotPlainError, load_plain_yaml

Tree = dict[str, Any]
OVERRIDE = re.compile(r"--([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
COMMAND_LINE = "on the command line"


@dataclasses.dataclass
class Layers:
    """Values merged so far, and for each dotted path the place that set it."""

    values: Tree = dataclasses.field(default_factory=dict)
    origins: dict[str, str] = dataclasses.field(default_factory=dict)

    def merge(self, tree: Mapping[str, Any], origin: str) -> None:
        """Lays `tree` over what is there, key by key."""
        self._merge(self.values, tree, origin, "")

    def _merge(self, into: Tree, tree: Mapping[str, Any], origin: str, prefix: str) -> None:
        for key, value in tree.items():
            path = f"{prefix}{key}"
            if isinstance(value, Mapping):
                if not isinstance(into.get(key), dict):
                    into[key] = {}
                self._merge(into[key], value, origin, path + ".")
            else:
                into[key] = value
            self.origins[path] = origin


def find_config(name: str) -> Path:
    """The file called `name`; a bundled configuration if there is no such file (`tiny`, `configs/tiny.yaml`)."""
    path = Path(name)
    if path.is_file():
        return path
    here = Path(__file__).resolve().parents[1]
    bundled = [folder for folder in (here / "configs", here / "dist_tfm" / "configs") if folder.is_dir()]
    if path.parent in (Path("."), Path("configs")):
        for folder in bundled:
            if (found := folder / f"{path.stem}.yaml").is_file():
                return found
    known = sorted(f"configs/{f.name}" for folder in bundled[:1] for f in folder.glob("*.yaml"))
    raise ConfigError(f"configuration file {name} not found; bundled ones are: {', '.join(known)}")


def read_yaml_layers(path: Path, layers: Layers, seen: tuple[Path, ...] = ()) -> None:
    """Merges the file's `extends:` chain (relative to the file), then the file itself."""
    resolved = path.resolve()
    if resolved in seen:
        raise ConfigError(f"{path}: `extends` goes in a circle: {' -> '.join(p.name for p in (*seen, resolved))}")
    try:
        tree = load_plain_yaml(path.read_text(encoding="utf-8"))
    except NotPlainError as fault:
        line = "" if fault.line is None else f", line {fault.line}"
        raise ConfigError(f"{path}{line}: {fault}") from None
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path}: expected UTF-8, found byte 0x{fault.object[fault.start]:02x}") from None
    except OSError as fault:
        raise ConfigError(f"configuration file {path} cannot be read: {fault.strerror}") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections with keys, found {type(tree).__name__}")
    parent = tree.pop("extends", None)
    if parent is not None:
        if not isinstance(parent, str):
            raise ConfigError(f"{path}: expected the name of a file after `extends:`, found {shown(parent)}")
        parent_path = path.parent / parent
        if not parent_path.is_file():
            raise ConfigError(f"{path}: `extends: {shorten(parent)}` names {parent_path}, which does not exist")
        read_yaml_layers(parent_path, layers, (*seen, resolved))
    layers.merge(tree, f"in {path}")


def split_overrides(argv: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Separates `--section.key=value` and `--section.key value` from the other arguments.

    A value of its own that begins with `--` is more likely a forgotten value than meant: raises ConfigError.
    """
    overrides: list[tuple[str, str]] = []
    rest: list[str] = []
    position = 0
    while position < len(argv):
        match = OVERRIDE.fullmatch(argv[position])
        if match is None:
            rest.append(argv[position])
        elif match[2] is not None:
            overrides.append((match[1], match[2]))
        elif position + 1 < len(argv) and not argv[position + 1].startswith("--"):
            overrides.append((match[1], argv[position + 1]))
            position += 1
        else:
            found = f"the option {shorten(argv[position + 1])}" if position + 1 < len(argv) else "nothing"
            name = shorten(argv[position])
            raise ConfigError(f"{name}: expected a value, found {found}: give it as {name}=VALUE")
        position += 1
    return overrides, rest


def override_tree(path: str, text: str) -> Tree:
    """{section: {key: value}} of one override. Scalars stay text: the field's type decides what they become.

    Text that is no plain YAML stays text too. Raises ConfigError for a path of more levels than a file may have.
    """
    if path.count(".") >= MOST_LEVELS:
        raise ConfigError(f"--{shorten(path)}: expected --section.key=VALUE")
    try:
        parsed = load_plain_yaml(text)
    except NotPlainError:
        parsed = text
    value: Any = parsed if parsed is None or isinstance(parsed, list | dict) else text
    for key in reversed(path.split(".")):
        value = {key: value}
    return typing.cast(Tree, value)


def known_paths(sections: Mapping[str, type]) -> list[str]:
    """All keys, as section.key."""
    return [f"{name}.{f.name}" for name, kind in sections.items() for f in dataclasses.fields(kind)]


def _nearest(path: str, known: Sequence[str]) -> str:
    """The known key most like `path`: one of the same name in another section, else by its spelling."""
    same = [key for key in known if key.partition(".")[2] == path.partition(".")[2]]
    return difflib.get_close_matches(path, same or known, n=1, cutoff=0.0)[0]


def _unknown(path: str, value: object, origin: str, known: Sequence[str]) -> str:
    # Shortened first: comparing takes time in proportion.
    path = shorten(path)
    found = "" if isinstance(value, dict) else f" (found {shown(value)})"
    hint = f"; the nearest known key is {_nearest(path, known)}" if known else ""
    return f"{path}: unknown key{found}, set {origin}{hint}"


def foreign_to(*sections: str) -> Callable[[str], bool]:
    """Tells which section names belong to another program: all that could not be one of `sections`, misspelt."""

    def foreign(name: str) -> bool:
        return not difflib.get_close_matches(shorten(name).lower(), sections, n=1)

    return foreign


def _accepts_bool(annotation: object) -> bool:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return any(_accepts_bool(arm) for arm in typing.get_args(annotation))
    return annotation is bool


def _section_faults(name: str, kind: type, tree: object, layers: Layers, known: Sequence[str]) -> tuple[list[str], Any]:
    origin = layers.origins.get(name, "in the configuration")
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        return [f"{name}: expected keys below it, found {shown(tree)}, set {origin}"], None
    faults: list[str] = []
    hints = typing.get_type_hints(kind)
    usable: Tree = {}
    for key, value in tree.items():
        path = f"{name}.{key}"
        where = layers.origins.get(path, origin)
        if key not in hints or key.startswith("__"):
            faults.append(_unknown(path, value, where, known))
        elif isinstance(value, bool) and not _accepts_bool(hints[key]):
            faults.append(f"{path}: expected no truth value, found {shown(value)}, set {where}")
        else:
            usable[key] = value
    try:
        return faults, TypeAdapter(kind).validate_python(usable)
    except ValidationError as error:
        for fault in error.errors():
            path = f"{name}.{fault['loc'][0]}" if fault["loc"] else name
            where = layers.origins.get(path, origin)
            faults.append(f"{path}: expected {_expected(fault)}, found {shown(fault['input'])}, set {where}")
        return list(dict.fromkeys(faults)), None


def _expected(fault: Mapping[str, Any]) -> str:
    """What pydantic says was expected; of a value inside a list or a structure also where it stands."""
    inside = ".".join(str(part + 1 if isinstance(part, int) else part) for part in fault["loc"][1:])
    known = {
        "union_tag_invalid": "one of {expected_tags}",
        "union_tag_not_found": "{discriminator}: NAME",
        "unexpected_keyword_argument": "no such key",
        "tuple_type": "a list",
        "string_pattern_mismatch": "text that matches {pattern}",
        "dataclass_type": "keys with values",
        "model_attributes_type": "a name, or keys with values",
    }.get(fault["type"])
    said = known.format(**fault.get("ctx", {})) if known else str(fault["msg"])
    said = said.removeprefix("Input should be ").removeprefix("a valid ")
    return f"{said} (at {shorten(inside)})" if inside else said


def build_sections(
    layers: Layers, sections: Mapping[str, type], foreign: Callable[[str], bool] = lambda _: False
) -> dict[str, Any]:
    """One checked instance for each of `sections`. Others are faults, unless `foreign` says of their name that they
    belong to another program, which will check them.

    Raises ConfigError with all faults.
    """
    known = known_paths(sections)
    faults: list[str] = []
    built: dict[str, Any] = {}
    for name, tree in layers.values.items():
        if name not in sections and not foreign(name):
            keys = tree if isinstance(tree, dict) and tree else {None: tree}
            for key, value in keys.items():
                path = name if key is None else f"{name}.{key}"
                candidates = known if key is not None else list(sections)
                faults.append(_unknown(path, value, layers.origins.get(path, "in the configuration"), candidates))
    for name, kind in sections.items():
        section_faults, built[name] = _section_faults(name, kind, layers.values.get(name), layers, known)
        faults.extend(section_faults)
    if faults:
        raise faults_error(faults)
    return built


def faults_error(faults: Sequence[str]) -> ConfigError:
    """One ConfigError that lists every fault."""
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return ConfigError(f"the configuration has {count}:\n" + "\n".join(f"  {fault}" for fault in faults))


def load_sections(
    config: str,
    overrides: Sequence[tuple[str, str]],
    sections: Mapping[str, type],
    foreign: Callable[[str], bool] = lambda _: False,
) -> dict[str, Any]:
    """Reads the configuration called `config` and the overrides into checked sections. Raises ConfigError."""
    layers = Layers()
    read_yaml_layers(find_config(config), layers)
    for path, text in overrides:
        layers.merge(override_tree(path, text), COMMAND_LINE)
    return build_sections(layers, sections, foreign)


def to_yaml(sections: Mapping[str, Any]) -> str:
    """The sections as YAML that `load_sections` reads back to the same values."""
    return yaml.safe_dump({name: dataclasses.asdict(value) for name, value in sections.items()}, sort_keys=False)


def _type_name(annotation: object) -> str:
    if typing.get_origin(annotation) is tuple:
        return "list"
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "").replace("NoneType", "null").replace("None", "null")


def describe_sections(sections: Mapping[str, type]) -> str:
    """Every key with its type and default, for --help."""
    lines: list[str] = []
    for name, kind in sections.items():
        lines.append(f"\n{(kind.__doc__ or name).strip()}")
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            default = "null" if field.default is None else field.default
            lines.append(f"  --{name}.{field.name}={default!s}  ({_type_name(hints[field.name])})")
    return "\n".join(lines)


def read_saved_sections(path: Path, sections: Mapping[str, type]) -> dict[str, Any]:
    """Sections from a config.yaml that a run has written."""
    if not path.is_file():
        raise InputError(f"{path} not found: expected the configuration of a run")
    layers = Layers()
    read_yaml_layers(path, layers)
    return build_sections(layers, sections)


HEAD_START = 5.0
"""Seconds by which a process that leaves an error to another one ends later, unless its launcher ends it before."""


def run_main(main: Callable[[], int], announce: Callable[[DistTfmError], bool] = lambda _: True) -> NoReturn:
    """Runs a program's main and exits with its code; a user's error is shown as one sentence, without a traceback.

    `announce` says whether this process is the one to print an error (several ranks raise the same one).
    """
    try:
        code = main()
        sys.stdout.flush()
    except DistTfmError as error:
        if announce(error):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:  # launchers kill all processes when the first one fails: the one that speaks must have spoken by then
            time.sleep(HEAD_START)
        code = error.exit_code
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing is left to say, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    sys.exit(code)
