"""The documentation: its blocks run, its references are up to date, its links resolve.

Every block of shell commands or Python in the README and the pages runs here, in a folder per page,
unless a comment names another test or script that runs it. Comments directly before a block:

    <!-- runs: tests/... or scripts/... or .ci/run -->   another test or script runs the block
    <!-- quick: ARGUMENTS -->     added to `dpfed run`, `compare` and `model`; for Python, a
                                  dictionary of settings of fine_tune
    <!-- saved as: FILE -->       the block is a file that later commands use
    <!-- before: CODE -->         Python to run first
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import typer.main
import yaml

import dpfed
from dpfed import api
from dpfed.algorithms import REGISTRY
from dpfed.cli.main import app, main
from dpfed.privacy.published import show_loss
from dpfed.registry import registry

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)
BEFORE = re.compile(r"^<!-- before:\n(.*?)-->", re.M | re.S)
NAMED = re.compile(r"(?:tests|scripts|experiments|benchmarks|docs)/[\w./-]+\.(?:py|ipynb)|\.ci/run")
COMMANDS = re.compile(r"^(dpfed|python|pip|pytest|torchrun|mkdocs|ruff|mypy)\b", re.M)


@dataclass(frozen=True)
class Block:
    kind: str
    mark: str
    text: str

    @property
    def elsewhere(self) -> str | None:
        """The tests or scripts that run the block instead of this test."""
        return self.mark.removeprefix("runs: ") if self.mark.startswith("runs: ") else None


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(m["kind"], m["mark"] or "", m["text"]) for m in found]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name)


def script(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file, ROOT / "docs" / "tools" / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file] = module
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------ blocks


def runs(block: Block) -> bool:
    return (
        block.kind in ("sh", "python")
        and block.elsewhere is None
        and not block.mark.startswith("text of: ")
    )


@each_page
def test_every_block_of_commands_runs_somewhere(page: Path) -> None:
    for block in blocks(page):
        plain = block.kind in ("", "text") and page.parent.name != "reference"
        if plain and not block.mark.startswith(("saved as: ", "output of: ")):
            assert not COMMANDS.search(block.text), (
                f"{name(page)}: commands belong into ```sh, where they are run:\n{block.text}"
            )
        if block.elsewhere is not None:
            named = NAMED.findall(block.elsewhere)
            assert named, (
                f"{name(page)}: `runs:` must name a test, a script or .ci/run, "
                f"not {block.elsewhere!r}"
            )
            assert all((ROOT / file).exists() for file in named), f"{name(page)}: {named}"


@each_page
def test_every_command_parses(page: Path) -> None:
    """No command names an option or an argument that does not exist."""
    screen = typer.main.get_command(app)
    for block in blocks(page):
        for line in block.text.replace("\\\n", " ").splitlines() if block.kind == "sh" else ():
            for part in line.split(" && "):
                words = shlex.split(part, comments=True)
                if words[:1] == ["dpfed"]:
                    parsed(screen, words[1:])


def parsed(command: click.Command, words: list[str]) -> None:
    """Parse a command line without running it."""
    inner = getattr(command, "commands", None)
    if inner is not None and not words[0].startswith("-"):
        parsed(inner[words[0]], words[1:])
    elif inner is None:
        command.make_context("dpfed", words)


@pytest.mark.parametrize("page", [p for p in PAGES if any(map(runs, blocks(p)))], ids=name)
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    place: dict[str, Any] = {}
    registered = dict(REGISTRY)
    try:
        for code in BEFORE.findall(page.read_text(encoding="utf-8")):
            exec(code, place)
        for block in blocks(page):
            if block.mark.startswith("saved as: "):
                (tmp_path / block.mark.removeprefix("saved as: ")).write_text(
                    block.text, encoding="utf-8"
                )
            elif runs(block) and block.kind == "python":
                with monkeypatch.context() as patch:
                    shorten(block, patch)
                    exec(block.text, place)
            elif runs(block):
                for command in commands(block):
                    assert called(command, monkeypatch) == 0, f"{name(page)}: {shlex.join(command)}"
    finally:
        REGISTRY.clear()
        REGISTRY.update(registered)


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the `dpfed` commands of a block, one per line or continued with a backslash."""
    more = []
    if block.mark.startswith("quick: "):
        more = shlex.split(block.mark.removeprefix("quick: "))
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        assert words[0] == "dpfed", (
            f"mark this block with who runs it, it cannot be run here: {line}"
        )
        assert not {"&&", "|", ";", ">"} & set(words), f"one command on a line: {line}"
        yield words + (more if words[1] in ("run", "compare", "model") else [])


def called(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", words)
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def shorten(block: Block, patch: pytest.MonkeyPatch) -> None:
    """Add the settings of a `quick` comment to every call of `fine_tune` and `compare`."""
    if not block.mark.startswith("quick: "):
        return
    keys = ast.literal_eval(block.mark.removeprefix("quick: "))

    def shorter(usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            return usual(*args, **{**given, "settings": {**given.get("settings", {}), **keys}})

        return call

    for function in ("fine_tune", "compare", "tune"):
        patch.setattr(dpfed, function, shorter(getattr(api, function)), raising=False)


def test_blocks_are_found() -> None:
    page = (
        "<!-- quick: --set a=1 -->\n```sh\ndpfed run \\\n  --json\n```\n\n"
        "```python\n1\n```\n\n<!-- runs: .ci/run -->\n```sh\nx\n```\n"
    )
    found = [Block(m["kind"], m["mark"] or "", m["text"]) for m in BLOCK.finditer(page)]
    assert [b.kind for b in found] == ["sh", "python", "sh"]
    assert [runs(b) for b in found] == [True, True, False]
    assert list(commands(found[0])) == [["dpfed", "run", "--json", "--set", "a=1"]]
    with pytest.raises(AssertionError, match="mark this block"):
        list(commands(Block("sh", "", "rm -rf /\n")))
    assert sum(runs(b) for page in PAGES for b in blocks(page)) >= 12


# ------------------------------------------------------------------ generated parts


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return script("make_docs")


AGAIN = "run python docs/tools/make_docs.py"


@pytest.mark.parametrize("page", ["configuration", "command-line"])
def test_references_are_up_to_date(page: str, maker: ModuleType) -> None:
    key = f"reference/{page}.md"
    assert (DOCS / key).read_text(encoding="utf-8") == maker.GENERATED[key](), AGAIN


def test_every_name_of_the_api_page_exists() -> None:
    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^::: (\S+)$", text, re.M)
    assert {"dpfed.api.fine_tune", "dpfed.api.TrainedModel", "dpfed.errors.DpfedError"} <= set(
        names
    )
    for full_name in names:
        module, _, attribute = full_name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), full_name


def test_every_key_and_every_command_is_in_the_references() -> None:
    page = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    known = registry()
    for cls in (*known.algorithm.values(), *known.model.values(), *known.data.values()):
        for field in dataclasses.fields(cls):
            assert f"| `{field.name}` |" in page or field.name == "lora", field.name
    line = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")
    for command in ("run", "compare", "privacy", "data describe", "model describe", "doctor"):
        assert f"## dpfed {command}\n" in line


def test_outputs_in_pages_are_what_the_commands_print(maker: ModuleType) -> None:
    """The first output of each page; `make_docs.py --check` compares all of them."""
    seen = 0
    for page in sorted(DOCS.rglob("*.md")):
        found = maker.OUTPUT.search(page.read_text(encoding="utf-8"))
        if found:
            seen += 1
            assert maker.printed(found[2]) == found[3], AGAIN
    assert seen >= 1


def test_files_in_pages_are_the_files(maker: ModuleType) -> None:
    text = (DOCS / "guides" / "add-an-algorithm.md").read_text(encoding="utf-8")
    found = maker.FILE.findall(text)
    assert [file for _, file, _, _ in found] == [
        "examples/dp_fedavgm.py",
        "tests/unit/examples/test_dp_fedavgm.py",
    ]
    for _, file, shown, _ in found:
        assert shown == (ROOT / file).read_text(encoding="utf-8"), AGAIN


def test_two_cells_of_the_epsilon_table(maker: ModuleType) -> None:
    text = (DOCS / "guides" / "choose-epsilon.md").read_text(encoding="utf-8")
    rows = {
        line.split("|")[1].strip(): line for line in text.splitlines() if re.match(r"\| \d", line)
    }
    for sigma, column in ((1.0, 1), (2.0, 3)):
        shown = rows[f"{sigma:g}"].split("|")[2 + column].strip()
        assert shown == show_loss(maker.cell(sigma, maker.RECORDS[column]), 2), AGAIN


# ------------------------------------------------------------------ the site, links, pictures


def navigation(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    if isinstance(entry, dict):
        entry = list(entry.values())
    for inner in entry if isinstance(entry, list) else ():
        yield from navigation(inner)


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """A loader that ignores the functions of the theme that mkdocs.yml names."""

    Loader.add_multi_constructor(
        "tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix
    )
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=Loader)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    index = (DOCS / "results" / "index.md").read_text(encoding="utf-8")
    # The index of all studies leads to the pages of single studies.
    studies = {f"results/{name}" for name in re.findall(r"\]\(([\w-]+\.md)\)", index)}
    assert set(navigation(settings["nav"])) | studies == pages
    assert settings["theme"]["font"] is False
    assert settings["strict"] is True


@each_page
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(
        r"(?:src|srcset)=\"([^\"]+)\"", text
    )
    targets += re.findall(r"^\[[^\]]+\]: (\S+?)(?:#\S*)?$", text, re.M)
    for target in targets:
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{name(page)}: {target}"


def test_the_site_may_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    check = script("check_site")
    page = tmp_path / "page.html"
    page.write_text(
        '<link rel="canonical" href="https://a.b"><a href="https://a.b">x</a>'
        '<img src="c.svg"><svg xmlns="http://d">'
    )
    assert check.elsewhere(page) == []
    for bad in (
        '<script src="https://a.b/c.js"></script>',
        '<link rel="preconnect" href="//fonts.example">',
        '<img srcset="a.png 1x, https://a.b/c.png 2x">',
        "<style>@import 'https://a.b/c.css';</style>",
        '<p style="background: url(http://a.b/c.png)">',
    ):
        page.write_text(bad)
        assert len(check.elsewhere(page)) == 1, bad
    style = tmp_path / "a.css"
    style.write_text("@font-face { src: url('https://a.b/c.woff2') } b { background: url(c.png) }")
    assert check.elsewhere(style) == ["https://a.b/c.woff2"]


def test_the_pictures_show_the_measured_numbers(tmp_path: Path) -> None:
    numbers = json.loads((DOCS / "images" / "numbers.json").read_text(encoding="utf-8"))
    last = 100 * sum(run["accuracy"][-1] for run in numbers["run"]) / len(numbers["run"])
    for theme in ("light", "dark"):
        for picture in ("run", "compare"):
            path = DOCS / "images" / f"{picture}-{theme}.svg"
            assert path.stat().st_size < 40_000
        picture = (DOCS / "images" / f"run-{theme}.svg").read_text(encoding="utf-8")
        assert f"round 30: {last:.1f} %" in picture
    assert f"{last:.1f} %" in (DOCS / "index.md").read_text(encoding="utf-8")
    assert f"{last:.1f} %" in (ROOT / "README.md").read_text(encoding="utf-8")
    cells = {(c["method"], c["epsilon"]): c["accuracies"] for c in numbers["compare"]}
    table = (DOCS / "compare.md").read_text(encoding="utf-8")
    for values in cells.values():
        assert f"{100 * sum(values) / len(values):.2f} ±" in table


def test_the_notebook_is_whole() -> None:
    """The stored outputs come from a run without errors and name no absolute path."""
    text = (DOCS / "notebooks" / "walkthrough.ipynb").read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert "error" not in kinds
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    assert not re.search(r"[\"' ]/(home|root|tmp|opt|Users)/", text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("# Title\n\n" + " ".join(["word"] * 36) + ".", "over 35 words"),
        ("\n".join([" ".join(["word"] * 19) + "."] * 30), "19.0 words on average"),
        ("A short line.\n" + "long " * 25, "lines over 120 columns: 2"),
        ("This is plain.\n\nWhether it holds is unknown.", "begins like a riddle: Whether"),
        ("- **What it does** is unclear.", "begins like a riddle: What"),
    ],
)
def test_prose_that_breaks_a_limit_is_found(text: str, fault: str) -> None:
    assert any(fault in found for found in script("check_prose").figures(text).faults)


def test_code_tables_and_headings_are_not_prose() -> None:
    words = " ".join(["word"] * 40)
    code = f"```sh\n{words[:100]}\n```"
    text = f"# What it does\n\n| {words} |\n\n{code}\n\n[a]: {words}\n\nIt is short.\n"
    found = script("check_prose").figures(text)
    assert found.words == (3,)
    assert not found.faults


def test_only_the_output_of_commands_may_be_wide() -> None:
    wide = "long " * 25
    output = f"<!-- output of: dpfed list -->\n```text\n{wide}\n```\n"
    assert script("check_prose").figures(output).wide == ()
    assert script("check_prose").figures(f"{output}\n```sh\n{wide}\n```\n").wide == (7,)


# ------------------------------------------------------------------ files of the repository


def test_the_readme_can_be_read_in_three_minutes_and_names_its_sources() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```|<[^>]+>|\]\([^)]*\)", " ", text, flags=re.S)
    assert len(prose.split()) < 900
    assert "pip install -e '.[dev]' && pytest" in text
    for words in ("2602.19945", "CITATION.cff", "docs/images/run-dark.svg", "docs/peers.md"):
        assert words in text


def test_the_files_of_a_well_kept_repository_are_there() -> None:
    for file in (
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "CITATION.cff",
        "SECURITY.md",
        "LICENSE",
        ".pre-commit-config.yaml",
        ".github/PULL_REQUEST_TEMPLATE.md",
        ".github/ISSUE_TEMPLATE/bug.yml",
        ".github/ISSUE_TEMPLATE/feature.yml",
        ".github/ISSUE_TEMPLATE/config.yml",
        ".github/ISSUE_TEMPLATE/privacy-bug.md",
    ):
        assert (ROOT / file).exists(), file
    for file in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"):
        assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    assert {hook["id"] for repo in hooks["repos"] for hook in repo["hooks"]} >= {
        "ruff",
        "ruff-format",
        "mypy",
    }
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cff["references"][0]["authors"][0] == {"family-names": "Liu", "given-names": "Jin"}
