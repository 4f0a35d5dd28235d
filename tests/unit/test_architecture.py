"""The structure of the package: imports point one way; files, functions and folders stay small."""

from __future__ import annotations

import ast
import graphlib
from collections import Counter
from pathlib import Path

import pytest

import dpfed

ROOT = Path(dpfed.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

# A package may import packages of a lower level, and itself. Packages of one level are independent.
LEVELS = {
    "__main__": 11,
    "cli": 10,
    "api": 10,
    "studies": 9,
    "bench": 9,
    "report": 8,
    "federation": 7,
    "training": 6,
    "registry": 5,
    "plugins": 4,
    "algorithms": 4,
    "privacy": 4,
    "model": 4,
    "data": 4,
    "config": 3,
    "accel": 3,
    "errors": 1,
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_FOLDER_FILES = 13
# These have one file per command, and one per optimizer.
OPEN_FOLDERS = {"cli", "algorithms"}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imported_modules(source: str, module: str, is_package: bool = False) -> set[str]:
    """Return every dpfed module that the source imports: at the top, in functions, for types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, module, is_package)
            found |= {_module_or_member(base, alias.name) for alias in node.names}
    return {name for name in found if name.startswith("dpfed.")}


def absolute_base(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    base = node.module or ""
    if not node.level:
        return base
    parts = module.split(".")
    kept = len(parts) - node.level + (1 if is_package else 0)
    return ".".join([*parts[:kept], *([base] if base else [])])


def _module_or_member(base: str, name: str) -> str:
    full = f"{base}.{name}"
    return full if base == "dpfed" or full in MODULES else base


def without_type_checking(text: str) -> str:
    """Return the program without its blocks `if TYPE_CHECKING:`, which never run."""
    tree = ast.parse(text)
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return ast.unparse(tree)


def is_forbidden(importer: str, imported: str) -> bool:
    """Return True if the first module may not import the second."""
    importing_package = importer.split(".")[1]
    imported_package = imported.split(".")[1]
    if importing_package == imported_package:
        return False
    return LEVELS[imported_package] >= LEVELS[importing_package]


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle, or an empty list."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_package_has_a_level() -> None:
    packages = {name.split(".")[1] for name in MODULES if name != "dpfed"}
    assert packages <= set(LEVELS)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_point_one_way(path: Path) -> None:
    module = module_of(path)
    text = path.read_text(encoding="utf-8")
    imported = imported_modules(text, module, path.name == "__init__.py")
    if module == "dpfed":
        at_run_time = imported_modules(without_type_checking(text), module, True)
        assert at_run_time == set(), "the package imports nothing, so that `import dpfed` is fast"
    else:
        assert [name for name in sorted(imported) if is_forbidden(module, name)] == []


def test_modules_import_one_another_without_cycles() -> None:
    graph = {
        module: imported_modules(
            path.read_text(encoding="utf-8"), module, path.name == "__init__.py"
        )
        - {module}
        for module, path in MODULES.items()
    }
    assert find_cycle(graph) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("dpfed.privacy.oracle", "from dpfed.model.parameter_vector import Space", True),
        ("dpfed.model.lora", "def f():\n    import dpfed.data.tables", True),
        ("dpfed.algorithms.base", "from ..training import run", True),
        ("dpfed.config", "from dpfed import registry", True),
        ("dpfed.errors", "from dpfed.config import Config", True),
        ("dpfed.report.page", "from dpfed.studies.study import Study", True),
        ("dpfed.training.run", "from dpfed.cli.run import run", True),
        ("dpfed.training.run", "from dpfed.privacy.plan import Plan", False),
        ("dpfed.model.lora", "from .parameter_vector import Space", False),
        ("dpfed.data.sources.npz", "from dpfed.config import DataSection\nimport torch", False),
    ],
)
def test_the_import_rule_finds_forbidden_imports(module: str, source: str, expected: bool) -> None:
    found = any(is_forbidden(module, name) for name in imported_modules(source, module))
    assert found is expected


def test_a_lazy_import_closes_a_cycle() -> None:
    lazy = "def f():\n    from dpfed.training.run import run\n"
    graph = {
        "dpfed.training.run": {"dpfed.training.open_run"},
        "dpfed.training.open_run": imported_modules(lazy, "dpfed.training.open_run"),
    }
    assert set(find_cycle(graph)) == set(graph)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_and_functions_are_short(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_folders_are_small() -> None:
    counts = Counter(path.parent for path in FILES if path.parent.name not in OPEN_FOLDERS)
    large = {str(folder.relative_to(ROOT)): n for folder, n in counts.items()}
    assert {folder: n for folder, n in large.items() if n > MAX_FOLDER_FILES} == {}


def test_kernels_are_in_one_folder() -> None:
    outside = [path for path in FILES if path.parent.name != "accel"]
    importing = [
        module_of(path) for path in outside if "import triton" in path.read_text(encoding="utf-8")
    ]
    assert importing == []
