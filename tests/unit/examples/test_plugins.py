"""The examples as installed packages: an algorithm and a model that entry points add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpfed
from dpfed.algorithms.dp_fedavg import DPFedAvg
from dpfed.errors import DpfedError
from dpfed.registry import algorithms, registry

EXAMPLES = Path(__file__).parents[3] / "examples"
MODEL = '''"""Softmax regression under another name."""
from dataclasses import dataclass
from dpfed.model.zoo.linear import Linear


@dataclass(frozen=True)
class Again(Linear):
    name: str = "again"
'''
RNG = np.random.default_rng(0)
LABELS = np.arange(80) % 2
TRAIN, TABLE = (
    {"features": RNG.normal(size=(80, 4)) + 2 * LABELS[:, None], "label": LABELS} for _ in range(2)
)


class Site:
    """A folder on the path into which small packages are installed."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch

    def install(self, package: str, group: str, entries: dict[str, str], code: str) -> None:
        """Write the files that `pip install` writes for a package with one module."""
        # A new folder on the path for each package, as the cache of entry points needs.
        folder = self.folder / package
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[dpfed.{group}]", *lines]) + "\n")
        (folder / f"{package}.py").write_text(code)
        self.patch.syspath_prepend(str(folder))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path / "site", monkeypatch)


def trained(tmp_path: Path, model: str = "linear", **keys: Any) -> dpfed.TrainedModel:
    return dpfed.fine_tune(
        model, TRAIN, TABLE, clients=2, rounds=4, out=tmp_path / "run", progress=False, **keys
    )


def test_the_algorithm_of_a_package_trains_by_its_name(tmp_path: Path, site: Site) -> None:
    """It trains with its own switch, is listed, is refused without its package, and loads."""
    assert "dp-fedavgm" not in algorithms()
    code = (EXAMPLES / "dp_fedavgm.py").read_text()
    site.install("fedavgm_one", "algorithms", {"dp-fedavgm": "fedavgm_one:DPFedAvgM"}, code)
    run = trained(tmp_path, algorithm="dp-fedavgm", beta=0.5, lr=0.3)
    assert run.result["algorithm"] == "dp-fedavgm"
    assert run.accuracy > 0.7
    assert "beta = 0.5" in (run.out / "config.toml").read_text()
    assert list(registry().algorithm)[-1] == "dp-fedavgm"
    assert np.array_equal(dpfed.load(run.out).predict(TABLE), run.predict(TABLE))
    with pytest.raises(DpfedError, match="bta is no keyword of fine_tune and no switch"):
        trained(tmp_path / "other", algorithm="dp-fedavgm", bta=0.5)
    site.patch.undo()
    with pytest.raises(DpfedError, match="dp-fedavgm"):
        dpfed.load(run.out).predict(TABLE)


def test_the_model_of_a_package_is_built_by_its_name(tmp_path: Path, site: Site) -> None:
    site.install("again_one", "models", {"again": "again_one:Again"}, MODEL)
    run = trained(tmp_path, "again")
    assert 'name = "again"' in (run.out / "config.toml").read_text()
    assert run.predict_proba(TABLE).shape == (80, 2)


@pytest.mark.parametrize(
    ("group", "name", "sentence"),
    [
        ("algorithms", "dp-fedavg", "the package clash adds the algorithm 'dp-fedavg', a name "),
        ("models", "linear", "the package clash adds the model 'linear', a name "),
        ("models", "given", "the package clash adds the model 'given', a name "),
    ],
)
def test_a_plugin_may_not_have_a_name_of_dpfed(
    site: Site, group: str, name: str, sentence: str
) -> None:
    site.install("clash", group, {name: "clash:Thing"}, "raise RuntimeError('never imported')")
    with pytest.raises(DpfedError, match=sentence):
        registry()
    site.patch.undo()
    assert registry().algorithm["dp-fedavg"] is DPFedAvg


def test_two_packages_may_not_add_one_name(site: Site) -> None:
    for package in ("first_one", "second_one"):
        site.install(package, "models", {"again": f"{package}:Again"}, MODEL)
    with pytest.raises(DpfedError, match=r"packages second_one and first_one both add 'again'"):
        registry()


@pytest.mark.parametrize(
    ("value", "code", "sentence"),
    [
        (
            "broken:Thing",
            "import no_such_module",
            "'mine' of the package broken cannot be imported: No module named 'no_such_module': "
            "repair or uninstall the package",
        ),
        ("broken:Thing", "raise ValueError('two\\nlines')", "cannot be imported: two: repair"),
        ("broken:Thing", "x = 1", "cannot be imported: module 'broken' has no attribute 'Thing'"),
        ("broken:x", "x = 1", "gives broken:x as the algorithm 'mine': it must be a complete"),
        (
            "broken:Algorithm",
            "from dpfed.algorithms.base import Algorithm",
            r"a complete subclass of dpfed\.algorithms\.base\.Algorithm with name = 'mine'",
        ),
        (
            "broken:DPFedAvg",
            "from dpfed.algorithms.dp_fedavg import DPFedAvg",
            "with name = 'mine'",
        ),
    ],
)
def test_a_package_that_does_not_work_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, value: str, code: str, sentence: str
) -> None:
    monkeypatch.delitem(__import__("sys").modules, "broken", raising=False)
    site.install("broken", "algorithms", {"mine": value}, code)
    with pytest.raises(DpfedError, match=sentence) as error:
        registry()
    assert "\n" not in str(error.value)
