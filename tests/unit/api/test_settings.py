"""Settings, warnings and errors of the Python interface."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpfed
from dpfed.config import load
from dpfed.errors import DpfedError, DpfedWarning
from dpfed.registry import registry

NUMBERS = {"features": np.eye(20), "label": np.arange(20) % 2}
ONE_STEP = {"run.rounds": 1, "run.local_steps": 1, "privacy.batch": 4.0}


def linear(out: Path, data: Any = NUMBERS, **keys: Any) -> dpfed.TrainedModel:
    """A run of one step; settings are added to those of the step."""
    more = keys.pop("settings", {})
    keys.setdefault("progress", False)
    return dpfed.fine_tune(
        "linear", data, dict(data), out=out, settings={**ONE_STEP, **more}, **keys
    )


@pytest.mark.parametrize(
    ("keys", "settings", "words"),
    [
        (
            {"clients": 2},
            {"data.clients": 4},
            r"clients = 2 and settings\['data\.clients'\] = 4 differ",
        ),
        (
            {"delta": 1e-5},
            {"privacy": {"delta": 1e-4}},
            r"delta = 1e-05 and settings\['privacy\.delta'\] = 0\.0001 differ",
        ),
        (
            {"epsilon": 1.0},
            {"privacy.target_epsilon": 2.0},
            r"epsilon = 1\.0 and settings\[.*\] = 2\.0 differ",
        ),
        (
            {"epsilon": 1.0},
            {"privacy.enabled": False},
            r"pass epsilon=None to train without privacy",
        ),
    ],
)
def test_a_keyword_and_a_setting_that_differ_are_refused(
    tmp_path: Path, keys: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(DpfedError, match=words):
        linear(tmp_path / "run", settings=settings, **keys)
    assert list(tmp_path.iterdir()) == []


def test_two_explicit_noise_levels_are_refused_like_those_of_a_file(tmp_path: Path) -> None:
    """The sentences are equal, but Python has its own words."""
    sentences = []
    with pytest.raises(DpfedError) as error:
        linear(tmp_path / "run", epsilon=1.0, settings={"privacy.sigma": 0.3})
    assert "privacy.sigma and epsilon (or privacy.enabled = False)" in str(error.value)
    keys = str(error.value).replace(" epsilon", " privacy.target_epsilon")
    sentences.append(keys.replace("False", "false"))
    with pytest.raises(DpfedError) as error:
        load("digits", ["privacy.target_epsilon=1", "privacy.sigma=0.3"], registry())
    sentences.append(str(error.value))
    (tmp_path / "both.toml").write_text(
        'extends = "digits"\n[privacy]\nsigma = 0.3\ntarget_epsilon = 1.0\n'
    )
    with pytest.raises(DpfedError) as error:
        load(tmp_path / "both.toml", [], registry())
    sentences.append(str(error.value))
    assert len(set(sentences)) == 1


def test_keywords_and_settings_that_agree(tmp_path: Path) -> None:
    settings = {
        "data.clients": np.int64(2),
        "privacy": {"target_epsilon": 3.0},
        "run.device": "cpu",
    }
    tuned = linear(tmp_path / "run", clients=2, epsilon=3.0, settings=settings)
    assert tuned.result["clients"] == 2
    assert tuned.epsilon["server_worst"] == pytest.approx(3.0, rel=0.01)


def test_a_plan_sets_the_size_and_the_privacy_of_a_run(tmp_path: Path) -> None:
    plan = dpfed.plan(10, 8.0, clients=2, rounds=1, local_steps=2)
    tuned = dpfed.fine_tune(
        "linear", NUMBERS, dict(NUMBERS), plan=plan, out=tmp_path / "run", progress=False
    )
    run = load(tmp_path / "run" / "config.toml", [], registry())
    assert (run.data.clients, run.run.rounds, run.run.local_steps) == (2, 1, 2)
    assert run.privacy.batch == plan.recommended.batch
    assert tuned.result["sigma"] == pytest.approx(plan.recommended.sigma)
    for keys in ({"epsilon": 1.0}, {"clients": 3}, {"settings": {"run.rounds": 2}}):
        with pytest.raises(DpfedError, match=r"of the plan = .* differ: give one of them"):
            dpfed.fine_tune("linear", NUMBERS, dict(NUMBERS), plan=plan, **keys)  # type: ignore[arg-type]
    with pytest.raises(DpfedError, match=r"plan must come from dpfed.plan, not from dict"):
        dpfed.fine_tune("linear", NUMBERS, dict(NUMBERS), plan={})  # type: ignore[arg-type]


def test_settings_must_be_a_dictionary_of_texts(tmp_path: Path) -> None:
    for wrong, words in (
        ([("run.rounds", 1)], "not list"),
        ("run.rounds=1", "not str"),
        ({3: 1}, "has the key 3"),
        ({"run..rounds": 1}, "has the key 'run..rounds'"),
    ):
        with pytest.raises(DpfedError, match=words):
            dpfed.fine_tune("linear", NUMBERS, dict(NUMBERS), settings=wrong, out=tmp_path / "run")  # type: ignore[arg-type]


def test_natural_clients_have_the_number_of_their_column(tmp_path: Path) -> None:
    data = {**NUMBERS, "hospital": ["a"] * 10 + ["b"] * 10}
    natural = {"data.partition": "natural", "data.client_column": "hospital"}
    with pytest.raises(
        DpfedError, match=r"clients = 7, but the column 'hospital' names 2: leave clients out"
    ):
        linear(tmp_path / "run", data, clients=7, settings=natural)
    with pytest.raises(DpfedError, match=r"clients = 7, but the column 'hospital' names 2"):
        linear(tmp_path / "run", data, settings={**natural, "data.clients": 7})
    tuned = linear(tmp_path / "run", data, settings=natural)
    assert tuned.result["client_names"] == ["a", "b"]
    assert any("'hospital': a, b" in note for note in tuned.notes)


def test_every_model_reads_its_weights_or_refuses_them(tmp_path: Path) -> None:
    """A model that ignored model.weights would charge what was spent on them and start anew."""
    from dpfed.config import load
    from dpfed.model.build import assemble
    from dpfed.registry import registry

    for name in registry().model.keys() - {"given"}:
        section: Any = load(
            "digits", [f"model.name={name}", "model.weights=no-such-folder"], registry()
        ).model
        with pytest.raises(DpfedError, match="no-such-folder"):
            assemble(section, section.usual_spec())


def test_a_linear_model_goes_on_from_its_export(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4)).astype("float32")
    table = {"features": x, "label": (x[:, 0] > 0).astype(int)}
    train = {name: column[:200] for name, column in table.items()}
    test = {name: column[200:] for name, column in table.items()}
    first = dpfed.fine_tune("linear", train, test, clients=2, out=tmp_path / "one", progress=False)
    first.export(tmp_path / "model")
    more = {**ONE_STEP, "privacy.sigma": 2.0}
    again = dpfed.fine_tune(
        str(tmp_path / "model"),
        train,
        test,
        clients=2,
        out=tmp_path / "two",
        settings=more,
        progress=False,
    )
    assert again.result["start_accuracy"] == first.accuracy > 0.8
    with pytest.raises(DpfedError, match="'nothing-here' is not a file or folder"):
        dpfed.fine_tune(
            "nothing-here", train, test, clients=2, out=tmp_path / "three", progress=False
        )


def test_named_labels_reach_the_result(tmp_path: Path) -> None:
    data = {"features": np.eye(20), "label": ["neg", "pos"] * 10}
    assert linear(tmp_path / "a", data, clients=2).result["classes"] == ["neg", "pos"]
    declared = linear(tmp_path / "b", data, clients=2, classes=["pos", "neg"])
    assert declared.result["classes"] == ["pos", "neg"]
    assert not any("read off the labels" in note for note in declared.notes)


def test_warnings_are_issued_where_fine_tune_is_called(tmp_path: Path) -> None:
    data = {"features": np.eye(20), "label": [0, 7] * 10}
    with pytest.warns(
        DpfedWarning, match="6 of 8 classes have no training record .* declare classes"
    ) as seen:
        tuned = linear(tmp_path / "a", data, clients=2)
    issued = [found for found in seen if issubclass(found.category, DpfedWarning)]
    assert {Path(found.filename).name for found in issued} == {Path(__file__).name}
    assert [str(found.message) for found in issued] == list(tuned.warnings)
    assert not any(
        "classes" in said for said in linear(tmp_path / "b", data, clients=2, classes=8).warnings
    )
    with pytest.warns(DpfedWarning, match=r"^delta = 0\.01 is at least a tenth of 1 / 10"):
        linear(tmp_path / "c", clients=2, delta=0.01)
    with pytest.raises(DpfedError, match=r"^delta = 0\.5 is at least 1 / 10"):
        linear(tmp_path / "d", clients=2, delta=0.5)


def test_a_model_with_one_answer_is_a_warning(tmp_path: Path) -> None:
    data = {"features": np.zeros((20, 3)), "label": ["neg", "pos"] * 10}
    with pytest.warns(DpfedWarning, match="every test record is taken for '(neg|pos)'"):
        tuned = linear(tmp_path / "a", data, clients=2)
    assert tuned.warnings[-1].startswith("every test record is taken for")


def test_notes_are_shown_with_the_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shown in (True, False):
        tuned = linear(tmp_path / str(shown), clients=3, progress=shown)
        note = "2 of 20 training records are not used: all clients have equal sizes"
        assert note in tuned.notes
        said = capsys.readouterr().err
        assert (f"note: {note}" in said) is shown
        assert ("dp-fedadamw on given: 3 clients" in said) is shown


def test_errors_use_the_words_of_python(tmp_path: Path) -> None:
    linear(tmp_path / "run", clients=2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    for folder, words in (
        ("run", "choose another out, or remove that folder"),
        ("other", "choose another out"),
    ):
        with pytest.raises(DpfedError, match=words) as error:
            linear(tmp_path / folder, clients=2)
        assert "--" not in str(error.value)
    with pytest.raises(DpfedError, match=r"^clients = 30 is more than the 20 records"):
        linear(tmp_path / "new", clients=30)
    with pytest.raises(DpfedError, match="declare classes for run"):
        linear(tmp_path / "new", clients=2, settings={"run.noise": "os"})


# Only commands reach the messages of these files that name options.
COMMANDS_ONLY = {
    "cli",
    "studies/pool.py",
    "bench",
    "federation",
    "report",
    "errors.py",
    "config/parsing.py",
    "privacy/accounting/planner.py",
    "training/auditing",
    "training/export.py",
    "training/backends/batched_runs.py",
    "training/run_folder/resume.py",
}


def test_no_message_of_the_library_names_an_option_of_the_command_line() -> None:
    root = Path(dpfed.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise):
                texts = [
                    n.value
                    for n in ast.walk(node)
                    if isinstance(n, ast.Constant) and isinstance(n.value, str)
                ]
                if any(re.search(r"(^|\s)--[a-z]", text) for text in texts):
                    found.add(path.relative_to(root))
    assert Path("cli/server.py") in found
    outside = [p for p in found if not COMMANDS_ONLY & {str(p), p.parts[0], str(p.parent)}]
    assert outside == []
