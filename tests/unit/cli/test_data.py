"""`dpfed data describe`: the table, the plot, and the warning about private labels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import dpfed


def describe(*keys: str) -> list[str]:
    return ["data", "describe", *[word for key in keys for word in ("--set", key)]]


def test_the_table_is_that_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    from dpfed.config import load
    from dpfed.data.sources.digits import Digits
    from dpfed.privacy.noise import Streams
    from dpfed.registry import DEFAULT, registry
    from dpfed.training.job.data import shards_for

    keys = ["data.clients=7", "data.alpha=0.1", "run.seed=3"]
    assert dpfed(*describe(*keys), "--json") == 0
    out = capsys.readouterr().out
    found = json.loads(out.strip().splitlines()[-1])
    source = Digits().load()
    shards = shards_for(load(DEFAULT, keys, registry()), source, Streams(3))
    expected = [
        [int((source.train.labels[shards.of(i)] == c).sum()) for c in range(10)] for i in range(7)
    ]
    assert found["table"] == expected
    assert found["sizes"] == {"min": 204, "median": 204.0, "max": 204}
    assert found["unused"] == 1433 - 7 * 204
    assert found["train"] == 1433
    assert found["classes"] == list("0123456789")
    assert "never for release" in found["release"]


def test_the_printed_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert dpfed(*describe("data.clients=30", "data.alpha=0.1")) == 0
    out = capsys.readouterr().out
    for words in (
        "digits: 1,433 training records",
        "364 of the test set",
        "uint8[1, 8, 8]",
        "dirichlet_equal (alpha = 0.1), seed 0",
        "30 clients of 47 to 47 (median 47) protected units, each one record",
        "and 10 more clients",
        "23 of 1433 training records are not used",
        "private labels",
        "never for release",
    ):
        assert words in out
    rows = [
        line
        for line in out.splitlines()
        if len(line.split()) == 12 and all(word.isdigit() for word in line.split())
    ]
    assert len(rows) == 20
    assert all(sum(map(int, row.split()[1:-1])) == int(row.split()[-1]) == 47 for row in rows)


def test_columns_that_do_not_fit_are_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    from dpfed.cli.data import table

    counts = np.arange(2 * 15).reshape(2, 15)
    lines = table(counts, tuple(f"c{i}" for i in range(15)))
    assert "+3 more" in lines[0]
    assert lines[1].split()[-2:] == [str(12 + 13 + 14), str(sum(range(15)))]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    path = tmp_path / f"table{suffix}"
    assert dpfed(*describe(), "--plot", str(path)) == 0
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert str(path) in capsys.readouterr().out


def test_the_plot_shows_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    from dpfed.report.figures.plots import label_table

    shown = []
    real = Axes.imshow
    monkeypatch.setattr(
        Axes, "imshow", lambda self, x, **k: shown.append((x, k)) or real(self, x, **k)
    )
    counts = np.array([[1, 2], [3, 4]])
    label_table(counts, ("a", "b$"), "title", tmp_path / "x.png")
    assert np.array_equal(shown[0][0], counts)
    # The colour of an empty cell does not depend on the others.
    assert shown[0][1]["vmin"] == 0


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dpfed(*describe(), "--plot", str(tmp_path / "x.pdf")) == 2
    assert "must end in .png or .svg" in capsys.readouterr().err
    assert dpfed(*describe(), "--plot", str(tmp_path / "no" / "x.png")) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert dpfed(*describe("data.name=cifar10")) == 2
    assert "cs.toronto.edu" in capsys.readouterr().err
    assert dpfed("data", "describe", "nothing.toml") == 2
    assert "there is no configuration" in capsys.readouterr().err


def test_text_with_natural_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "text,label,site\n" + "".join(f"t{i},{i % 2},{'xy'[i % 3 == 0]}\n" for i in range(9))
    (tmp_path / "t.csv").write_text(rows)
    (tmp_path / "u.csv").write_text("text,label\nq,1\n")
    keys = [
        "data.name=text-table",
        f"data.path={tmp_path / 't.csv'}",
        f"data.test_path={tmp_path / 'u.csv'}",
    ]
    assert (
        dpfed(*describe(*keys, "data.partition=natural", "data.client_column=site"), "--json") == 0
    )
    out = capsys.readouterr().out
    found = json.loads(out.strip().splitlines()[-1])
    assert found["table"] == [[3, 3], [2, 1]]
    assert found["kind"] == "text"
    assert "natural partition by site" in out
    assert "(read off the labels)" in out


def test_every_source_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert dpfed("list", "datasets", "--json") == 0
    names = json.loads(capsys.readouterr().out)["names"]
    expected = (
        "digits npz mnist fashion-mnist cifar10 cifar100 tiny-imagenet image-folder "
        "sst2 qqp qnli mnli rte text-table hub"
    )
    assert set(expected.split()) <= set(names)


def natural(path: Path, labels: list[int]) -> list[str]:
    x = np.zeros((len(labels), 3), dtype=np.float32)
    owners = ["north", "south clinic"] * (len(labels) // 2)
    np.savez(path, x_train=x, y_train=labels, x_test=x, y_test=labels, train_hospital=owners)
    keys = (
        "data.name=npz",
        f"data.path={path}",
        "data.partition=natural",
        "data.client_column=hospital",
    )
    return describe(*keys)


def test_natural_clients_are_shown_by_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = natural(tmp_path / "a.npz", [0, 1, 1, 0])
    assert dpfed(*command, "--json", "--plot", str(tmp_path / "a.svg")) == 0
    out = capsys.readouterr().out
    assert any(line.split() == ["south", "clinic", "1", "1", "2"] for line in out.splitlines())
    found = json.loads(out.strip().splitlines()[-1])
    assert found["client_names"] == ["north", "south clinic"]
    assert found["warnings"] == []
    assert any("data.clients = 10 has no effect" in note for note in found["notes"])
    assert "south clinic" in (tmp_path / "a.svg").read_text()


def test_classes_without_records_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = natural(tmp_path / "a.npz", [0, 7, 7, 0])
    assert dpfed(*command) == 0
    assert (
        "warning: 6 of 8 classes have no training record (1, 2, 3, 4, 5, ...)"
        in capsys.readouterr().out
    )
    assert dpfed(*command, "--set", "data.classes=8") == 0
    assert "warning:" not in capsys.readouterr().out
