"""DESIGN 2 and 8, kept by machine: imports point one way between the rooms; files and functions stay short."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dpfed

ROOT = Path(dpfed.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# A room may import rooms of a lower number and itself. Rooms of the middle row do not know one another;
# those that put them together (number 3) may.
ROOMS = {
    "cli": 4, "api": 4, "__main__": 4,
    "report": 3, "federation": 3, "engine": 3, "registry": 3, "compare": 3, "bench": 3,
    "algorithms": 2, "privacy": 2, "model": 2, "data": 2,
    "config": 1, "parsing": 1, "kernels": 1,
    "key_history": 0, "errors": 0, "text": 0,
}  # fmt: skip


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
    """Whether a module may not import another, by the rooms they are in; a room without a place is an error."""
    one, two = importer.split(".")[1], imported.split(".")[1]
    if one == two:
        return False
    return ROOMS[two] > ROOMS[one] or (ROOMS[two] == ROOMS[one] == 2)


def test_every_room_has_a_place() -> None:
    assert {module_of(path).split(".")[1] for path in FILES if module_of(path) != "dpfed"} <= set(ROOMS)


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
        ("dpfed.privacy.oracle", "from dpfed.model.space import Space", True),
        ("dpfed.model.lora", "def f():\n    import dpfed.data.tables", True),
        ("dpfed.algorithms.base", "from ..engine import fleet", True),
        ("dpfed.config", "from dpfed import registry", True),
        ("dpfed.errors", "from dpfed.config import Config", True),
        ("dpfed.engine.run", "from dpfed.cli.progress import Watch", True),
        ("dpfed.engine.run", "from dpfed.privacy.plan import Plan", False),
        ("dpfed.model.lora", "from .space import Space", False),
        ("dpfed.data.sources.npz", "from dpfed.config import DataSection\nimport torch", False),
    ],
)
def test_the_import_rule_finds_what_it_should(module: str, source: str, wrong: bool) -> None:
    assert any(forbidden(module, name) for name in dpfed_imports(source, module, is_package=False)) is wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 500
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno + 1 < 60, f"{node.name} is too long"
