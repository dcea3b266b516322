"""The rules of the house, read from the source: import directions, sizes, names, safety."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("data_pipeline", "dist_tfm", "launch")
FILES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))

# High to low: a module imports from its own layer and from those below it.
LAYERS = [
    "launch",
    "dist_tfm.<entry>",
    "dist_tfm.training",
    "dist_tfm.inference",
    "dist_tfm.interop",
    "dist_tfm.metrics",
    "dist_tfm.checkpoint",
    "dist_tfm.engine",
    "dist_tfm.parallel",
    "dist_tfm.model",
    "dist_tfm.kernels",
    "dist_tfm.config",
    "dist_tfm.errors",
    "data_pipeline",
]


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] in ("launch", "data_pipeline"):
        return parts[0]
    if parts[0] != "dist_tfm" or len(parts) == 1:
        return None
    if parts[1] in ("train", "translate", "evaluate", "average", "import_model"):
        return "dist_tfm.<entry>"
    return ".".join(parts[:2])


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_from_high_to_low_only(path: Path) -> None:
    mine = layer(module_name(path))
    for name in imports(path):
        theirs = layer(name)
        if mine is None or theirs is None:
            continue
        assert LAYERS.index(theirs) >= LAYERS.index(mine), f"{module_name(path)} imports {name}, which stands above it"


def test_one_module_imports_deepspeed() -> None:
    users = {module_name(p) for p in FILES if any(n.split(".")[0] == "deepspeed" for n in imports(p))}
    assert users == {"dist_tfm.engine.deepspeed_engine"}


def test_model_code_knows_nothing_of_distribution() -> None:
    for path in (ROOT / "dist_tfm" / "model").glob("*.py"):
        for name in imports(path):
            assert not name.startswith("torch.distributed"), path
        assert "distributed" not in path.read_text(encoding="utf-8"), path


def test_the_data_pipeline_needs_no_torch() -> None:
    for path in (ROOT / "data_pipeline").rglob("*.py"):
        assert all(name.split(".")[0] != "torch" for name in imports(path)), path


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"
            assert len(node.args.args) + len(node.args.kwonlyargs) <= 11, f"{path}: {node.name}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_nothing_from_outside_is_unpickled_or_run(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in (
                "eval",
                "exec",
                "pickle.load",
                "pickle.loads",
                "torch.load",
                "torch.save",
                "yaml.load",
            )
            assert not any(k.arg == "shell" for k in node.keywords), f"{path}: shell"
            if called == "np.load":
                assert "allow_pickle=False" in ast.unparse(node), f"{path}: np.load may unpickle"
    assert not any(name.split(".")[0] in ("pickle", "dill", "cloudpickle") for name in imports(path)), path


def test_no_module_hides_one_of_the_standard_library() -> None:
    for path in FILES:
        assert path.stem not in sys.stdlib_module_names or path.stem.startswith("__"), path
        assert path.stem not in ("torch", "numpy", "yaml", "datasets", "webdataset"), path


def test_the_entry_script_stays_thin() -> None:
    assert (ROOT / "dist_tfm" / "train.py").read_text(encoding="utf-8").count("\n") <= 80
