"""The structure of the package: imports point one way, files and functions stay short."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import dpfed

ROOT = Path(dpfed.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# A package may import packages of a lower level, and itself. Packages of one level are independent.
LEVELS = {
    "__main__": 10,
    "cli": 9,
    "api": 9,
    "report": 8,
    "bench": 8,
    "studies": 7,
    "federation": 6,
    "training": 5,
    "registry": 4,
    "algorithms": 3,
    "privacy": 3,
    "model": 3,
    "data": 3,
    "config": 2,
    "accel": 2,
    "errors": 1,
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def dpfed_imports(source: str, module: str, is_package: bool) -> set[str]:
    """Every dpfed module that this source imports, at the top, inside functions or for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + (1 if is_package else 0)
                base = ".".join([*parts[:keep], *([base] if base else [])])
            found |= {f"dpfed.{alias.name}" for alias in node.names} if base == "dpfed" else {base}
    return {name for name in found if name.split(".")[0] == "dpfed" and name != "dpfed"}


def forbidden(importer: str, imported: str) -> bool:
    """Return True if the first module may not import the second."""
    importing_package = importer.split(".")[1]
    imported_package = imported.split(".")[1]
    if importing_package == imported_package:
        return False
    return LEVELS[imported_package] >= LEVELS[importing_package]


def test_every_package_has_a_level() -> None:
    assert {module_of(path).split(".")[1] for path in FILES if module_of(path) != "dpfed"} <= set(
        LEVELS
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    module = module_of(path)
    names = dpfed_imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    if module == "dpfed":
        assert names == set(), "the package itself imports nothing, so that `import dpfed` is fast"
    else:
        assert [name for name in sorted(names) if forbidden(module, name)] == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("dpfed.privacy.oracle", "from dpfed.model.parameter_vector import Space", True),
        ("dpfed.model.lora", "def f():\n    import dpfed.data.tables", True),
        ("dpfed.algorithms.base", "from ..training import run", True),
        ("dpfed.config", "from dpfed import registry", True),
        ("dpfed.errors", "from dpfed.config import Config", True),
        ("dpfed.training.run", "from dpfed.cli.progress import Watch", True),
        ("dpfed.training.run", "from dpfed.privacy.plan import Plan", False),
        ("dpfed.model.lora", "from .space import Space", False),
        ("dpfed.data.sources.npz", "from dpfed.config import DataSection\nimport torch", False),
    ],
)
def test_the_import_rule_finds_what_it_should(module: str, source: str, wrong: bool) -> None:
    assert (
        any(forbidden(module, name) for name in dpfed_imports(source, module, is_package=False))
        is wrong
    )


MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_FOLDER_FILES = 14
# One file per command, one file per optimizer.
OPEN_FOLDERS = {"cli", "algorithms"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_folders_are_small() -> None:
    counts = Counter(path.parent for path in FILES if path.parent.name not in OPEN_FOLDERS)
    assert {
        str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > MAX_FOLDER_FILES
    } == {}
