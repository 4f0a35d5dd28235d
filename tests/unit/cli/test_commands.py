"""Commands for users: exit codes, sentences, JSON on the last line, folders that are kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command import dpfed

KEYS = (
    "model.name=linear run.rounds=2 run.local_steps=2 run.participation=0.5 "
    "privacy.batch=32 privacy.sigma=2"
)
QUICK = [word for key in KEYS.split() for word in ("--set", key)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "first"
    assert dpfed("run", *QUICK, "--out", str(out)) == 0
    return out


def test_json_is_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dpfed("run", *QUICK, "--out", str(tmp_path / "r"), "--json") == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.strip().splitlines()[-1])
    assert 0 <= result["test_accuracy"] <= 1
    assert set(result["epsilon"]) == {"server_worst", "server_max", "third_party"}
    assert result["epsilon"]["server_worst"] >= result["epsilon"]["server_max"] > 0
    assert result["rounds"] == 2
    assert {"start_accuracy", "delta", "seconds", "out"} <= set(result)
    assert "round 2/2" in printed.err
    # The guarantee stands beside every epsilon.
    for words in ("delta = 1e-05", "add/remove one record of one client", "poisson", "PLD"):
        assert words in printed.err
        assert words in result["guarantee"]
    assert "round" not in printed.out.splitlines()[-1].split("{")[0]


def test_a_run_folder_holds_everything(finished: Path) -> None:
    assert {p.name for p in finished.iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
        "model.safetensors",
        "run.json",
        "ledger.sqlite",
    }
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2]
    result = json.loads((finished / "run.json").read_text())
    assert result["release"] == "simulation: not for release"
    assert "torch" in result["versions"]


def test_the_trained_vector_is_the_model(finished: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(finished / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "classifier.weight": (10, 64),
        "classifier.bias": (10,),
    }


def test_a_run_is_never_overwritten(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "run.json").read_bytes()
    assert dpfed("run", *QUICK, "--out", str(finished)) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (finished / "run.json").read_bytes() == before


def test_force_replaces_a_run_but_not_a_stranger_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    assert dpfed("run", *QUICK, "--out", str(out)) == 0
    assert dpfed("run", *QUICK, "--out", str(out), "--force") == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert dpfed("run", *QUICK, "--out", str(tmp_path / "mine"), "--force") == 2
    assert (tmp_path / "mine" / "thesis.txt").exists()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--set", "data.clients=100000"], "more than the"),
        (["--set", "privacy.batch=500"], "larger than client"),
        (["--set", "data.partition=natural"], "client_column"),
        (
            ["--set", "data.partition=dirichlet_classwise", "--set", "data.alpha=0.001"],
            "has no records",
        ),
        (["--set", "run.device=warp"], "run.device = 'warp'"),
        (["--set", "algorithm.align=off"], "no longer supported: set algorithm.gamma = 0"),
        (["nowhere.toml"], "there is no configuration"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    assert dpfed("run", *QUICK, *args, "--out", str(tmp_path / "r")) == 2
    err = capsys.readouterr().err.strip()
    assert words in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err
    assert not (tmp_path / "r").exists()


def test_nan_stops_with_a_sentence_and_keeps_what_was_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    huge = ("--set", "algorithm.lr=1e38", "--set", "algorithm.weight_decay=1e38")
    assert dpfed("run", *QUICK, *huge, "--out", str(out)) == 3
    assert "no longer finite" in capsys.readouterr().err
    assert (out / "model.safetensors").exists()
    assert "stopped" in json.loads((out / "run.json").read_text())


def test_without_privacy_every_artefact_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors import safe_open

    out = tmp_path / "r"
    assert dpfed("run", *QUICK, "--set", "privacy.enabled=false", "--out", str(out), "--json") == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.strip().splitlines()[-1])
    assert result["epsilon"] == {"server_worst": None, "server_max": None, "third_party": None}
    assert result["guarantee"] == result["release"] == "no privacy"
    assert "NO PRIVACY" in printed.err
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata()["release"] == "no privacy"
    assert not (out / "ledger.sqlite").exists()


def test_a_budget_leaves_clients_out_and_then_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    args = ["--set", "run.rounds=8", "--set", "privacy.budget=1.3", "--set", "run.min_clients=2"]
    assert dpfed("run", *QUICK, *args, "--out", str(out)) == 3
    assert "within privacy.budget" in capsys.readouterr().err
    result = json.loads((out / "run.json").read_text())
    assert result["epsilon"]["server_max"] <= 1.3
    assert 0 < result["rounds"] < 8
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    assert rows[-1]["eligible"] < 10


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    for what, name in (
        ("algorithms", "dp-fedadamw"),
        ("models", "glyph-vit"),
        ("datasets", "digits"),
        ("presets", "digits"),
    ):
        assert dpfed("list", what, "--json") == 0
        assert name in json.loads(capsys.readouterr().out)["names"]
        assert dpfed("list", what) == 0
        line = next(row for row in capsys.readouterr().out.splitlines() if row.startswith(name))
        assert len(line.split()) > 2
    assert dpfed("list", "nonsense") == 2


PLAN = [
    "--records",
    "1000",
    "--batch",
    "16",
    "--rounds",
    "100",
    "--local-steps",
    "20",
    "--participation",
    "0.1",
]


def test_privacy_prints_known_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert dpfed("privacy", *PLAN, "--sigma", "1", "--delta", "1e-5", "--json") == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed.strip().splitlines()[-1])
    expected = {
        "server_worst": 4.363,
        "server_expected": 1.476,
        "third_party": 1.563,
        "rdp_server_worst": 4.794,
    }
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, rel=0.01)
    for word in ("PLD", "add/remove one record", "poisson", "delta = 1e-05"):
        assert word in printed


def test_privacy_of_a_run_reads_its_ledger(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dpfed("privacy", str(finished), "--json") == 0
    figures = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    result = json.loads((finished / "run.json").read_text())
    for name, value in result["epsilon"].items():
        assert figures[name] == pytest.approx(value, rel=1e-6)
    assert figures["ledger_rows"] == 2 * 5
    assert dpfed("privacy", str(finished), "--public", "--json") == 0
    public = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert "server_max" not in public
    assert "server_median" not in public


def test_privacy_of_an_edited_ledger_names_the_row(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil
    import sqlite3

    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    with sqlite3.connect(copy / "ledger.sqlite") as db:
        sql = db.execute("SELECT sql FROM sqlite_master WHERE name = 'charge_edit'").fetchone()[0]
        db.execute("DROP TRIGGER charge_edit")
        db.execute("UPDATE charge SET steps = 1 WHERE seq = 4")
        db.execute(sql)
    db.close()
    assert dpfed("privacy", str(copy)) == 2
    assert "row 4" in capsys.readouterr().err


def test_privacy_refuses_the_ledger_of_another_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    other = tmp_path / "other"
    assert dpfed("run", *QUICK, "--out", str(other)) == 0
    for file in finished.glob("ledger.sqlite*"):
        shutil.copy(file, other / file.name)
    before = {p.name: p.read_bytes() for p in other.iterdir() if p.is_file()}
    assert dpfed("privacy", str(other)) == 2
    assert "it belongs to run" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in other.iterdir() if p.is_file()} == before


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([*PLAN, "--sigma", "1", "--delta", "1"], "--delta 1"),
        ([*PLAN, "--sigma", "0"], "--sigma 0"),
        ([*PLAN], "exactly one of --sigma and --target-epsilon"),
        (
            [
                "--records",
                "10",
                "--batch",
                "16",
                "--rounds",
                "1",
                "--local-steps",
                "1",
                "--sigma",
                "1",
            ],
            "--batch 16",
        ),
        (["--records", "10"], "--batch"),
        ([*PLAN, "--sigma", "1", "--algorithm", "dp-fedavgg"], "did you mean dp-fedavg"),
        ([*PLAN, "--sigma", "1", "--sampling", "shuffle"], "no other has accounting"),
        ([*PLAN, "--target-epsilon", "-1"], "target"),
        (["runs/nowhere"], "no run, client's folder or configuration runs/nowhere"),
    ],
)
def test_privacy_refuses_in_one_sentence(
    capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    assert dpfed("privacy", *args) == 2
    err = capsys.readouterr().err.strip()
    assert words in err
    assert len(err.splitlines()) == 1


def test_privacy_plot_and_meaning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = [
        "--records",
        "500",
        "--batch",
        "10",
        "--rounds",
        "4",
        "--local-steps",
        "5",
        "--participation",
        "0.5",
    ]
    more = ["--sigma", "1.5", "--meaning", "--tuning-runs", "3", "--asymptotic", "--clients", "10"]
    assert dpfed("privacy", *row, *more, "--plot", str(tmp_path / "e.svg"), "--json") == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed.strip().splitlines()[-1])
    assert (tmp_path / "e.svg").read_text().lstrip().startswith("<?xml")
    assert figures["replace_one"] > figures["server_worst"]
    assert figures["server_worst_with_tuning"] > figures["server_worst"]
    assert 0 < figures["membership_advantage"] < 1
    assert "NOT A GUARANTEE" in printed
    assert dpfed("privacy", *row, "--sigma", "1.5", "--plot", str(tmp_path / "e.doc")) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--rounds", "3"], "there is no option --rounds: write `--set run.rounds=3`"),
        (["run", "--rounds=3"], "write `--set run.rounds=3`"),
        (["compare", "--roundz", "--json"], "write `--set run.rounds=VALUE`"),
        (["run", "--batch-size", "8"], "write `--set privacy.batch=8`"),
        (["run", "--resum", "x"], "Did you mean '--resume'?"),
        (["doctor", "--rounds", "3"], "No such option '--rounds'"),
    ],
)
def test_an_option_named_like_a_key_is_answered_with_set(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert dpfed(*words) == 2
    assert said in capsys.readouterr().err


def test_privacy_of_a_preset_with_a_folder_in_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert dpfed("privacy", "paper/cifar100-swin-base") == 0
    assert "the server, of a client in every round" in capsys.readouterr().out


def test_no_shown_privacy_loss_is_below_the_computed_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server's figure of this plan is 4.36220898, which rounds to nearest as 4.3622."""
    assert dpfed("privacy", *PLAN, "--sigma", "1.00005", "--meaning", "--json") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    figures, text = json.loads(last), "\n".join(lines)
    shown = {
        "server_worst": r"every round +([\d.]+)",
        "server_expected": r"expected number of rounds +([\d.]+)",
        "third_party": r"a third party .* ([\d.]+)",
        "membership_advantage": r"was used: ([\d.]+)",
        "replace_one": r"instead: epsilon ([\d.]+)",
    }
    for key, pattern in shown.items():
        found = re.search(pattern, text)
        assert found is not None
        assert figures[key] <= float(found[1]) < figures[key] + 1e-3


def test_privacy_of_a_run_and_of_its_plan_count_colluding_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dpfed("run", *QUICK, "--out", str(tmp_path / "r")) == 0
    found: dict[str, list[float]] = {}
    for name, target in (("run", [str(tmp_path / "r")]), ("plan", ["digits", *QUICK])):
        for colluding in ("0", "3"):
            capsys.readouterr()
            assert dpfed("privacy", *target, "--colluding", colluding, "--json") == 0
            figures = json.loads(capsys.readouterr().out.splitlines()[-1])
            found.setdefault(name, []).append(figures["third_party"])
    alone, together = found["run"]
    assert alone < together
    assert found["plan"] == found["run"]
