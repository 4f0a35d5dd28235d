"""The Python interface, including the lines of the README."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_case import base
from PIL import Image

import dpfed
from dpfed import api
from dpfed.config import load
from dpfed.errors import DpfedError, DpfedWarning
from dpfed.registry import registry

README = Path(__file__).parents[2] / "README.md"
WORDS = ["good film", "bad film", "so good", "so bad"]
QUICK = {
    "run.rounds": 1,
    "run.local_steps": 1,
    "run.participation": 1.0,
    "privacy.batch": 4.0,
    "model.max_length": 5,
    "model.liveness": False,
}


def texts(count: int = 24) -> dict[str, list[Any]]:
    chosen = [WORDS[i % 4] for i in range(count)]
    return {"text": chosen, "label": [int("bad" in t) for t in chosen]}


def tune(model: Any, train: Any, test: Any, **keys: Any) -> dpfed.Tuned:
    keys.setdefault("epsilon", None)
    more = {} if keys["epsilon"] else {"privacy.sigma": 1.0}
    return dpfed.fine_tune(
        model,
        train,
        test,
        clients=2,
        **{**keys, "settings": {**QUICK, **more, **keys.get("settings", {})}},
    )


def test_the_lines_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines run as shown, with a small model, small data and one round."""
    block = next(
        b for b in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "fine_tune" in b
    )
    lines = [line for line in block.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 5
    monkeypatch.chdir(tmp_path)
    base("bert", tmp_path / "my-model-folder")
    usual = api._defaults

    def fewer(*args: Any) -> dict[str, Any]:
        made = usual(*args)
        return {
            **made,
            "run": {**made["run"], "rounds": 1, "local_steps": 1},
            "model": {"max_length": 5, "liveness": False},
        }

    monkeypatch.setattr(api, "_defaults", fewer)
    place: dict[str, Any] = {"train": texts(20 * 17), "test": texts(8)}
    exec(block, place)
    assert 0 < place["tuned"].epsilon["server_worst"] <= 4.0
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").is_file()
    assert "## Privacy" in (tmp_path / "my-adapter" / "README.md").read_text()


def test_a_folder_and_what_comes_back(tmp_path: Path) -> None:
    model = base("roberta", tmp_path / "base")
    tuned = tune(Path(model), texts(), texts(8), out=tmp_path / "run")
    assert tuned.out == tmp_path / "run"
    assert tuned.accuracy == tuned.result["test_accuracy"]
    assert set(tuned.epsilon) == {"server_worst", "server_max", "third_party"}
    stored = json.loads((tmp_path / "run" / "run.json").read_text())
    assert stored["epsilon"] == tuned.epsilon
    assert tuned.export(tmp_path / "whole", merge=True) == tmp_path / "whole"
    assert (tmp_path / "whole" / "config.json").is_file()


def test_a_named_architecture_keeps_the_weights_of_the_folder(tmp_path: Path) -> None:
    model = base("roberta", tmp_path / "base")
    with pytest.raises(DpfedError, match="the weights for roberta-base have hidden_size = 8"):
        tune(
            model, texts(), texts(8), out=tmp_path / "run", settings={"model.name": "roberta-base"}
        )
    with pytest.raises(
        DpfedError, match=r"settings\['model\.weights'\] = 'elsewhere' is not model = "
    ):
        tune(
            model,
            texts(),
            texts(8),
            out=tmp_path / "other",
            settings={"model.weights": "elsewhere"},
        )


def test_a_model_in_memory_is_kept_beside_its_run(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = base("bert", tmp_path / "elsewhere")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    out = tmp_path / "run"
    with pytest.raises(DpfedError, match=r"fine_tune\(model, \.\.\., tokenizer=tokenizer\)"):
        tune(model, texts(), texts(8), out=out)
    with pytest.raises(DpfedError, match="larger than client"):
        tune(
            model,
            texts(),
            texts(8),
            tokenizer=tokenizer,
            out=out,
            settings={"privacy.batch": 1000.0},
        )
    assert not (tmp_path / "run-base").exists()  # so that the next attempt may use the same place
    tuned = tune(model, texts(), texts(8), tokenizer=tokenizer, out=out)
    assert (tmp_path / "run-base" / "model.safetensors").is_file()
    again = tune(folder, texts(), texts(8), out=tmp_path / "again")
    assert again.result["test_loss"] == tuned.result["test_loss"]  # the same model, the same run
    with pytest.raises(DpfedError, match="already holds a run"):
        tune(model, texts(), texts(8), tokenizer=tokenizer, out=out)
    assert (tmp_path / "run-base").exists()
    with pytest.raises(DpfedError, match="already holds a run"):
        tune(model, texts(), texts(8), tokenizer=tokenizer, out=tmp_path / "again")
    assert not (tmp_path / "again-base").exists()
    (tmp_path / "other-base").mkdir()
    with pytest.raises(DpfedError, match="other-base exists: choose another out"):
        tune(model, texts(), texts(8), tokenizer=tokenizer, out=tmp_path / "other")
    assert (tmp_path / "other-base").exists()
    tuned.export(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_pictures_and_a_model_by_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)) for _ in range(12)]
    data = {"image": pictures, "label": [i % 3 for i in range(12)]}
    for model in (base("vit", tmp_path / "base"), "gn-resnet18"):
        small = {"model.width": 4, "model.groups": 2} if model == "gn-resnet18" else {}
        quick = {k: v for k, v in QUICK.items() if k != "model.max_length"}
        tuned = dpfed.fine_tune(
            model,
            data,
            dict(data),
            clients=2,
            epsilon=None,
            out=tmp_path / f"run{len(small)}",
            settings={**quick, **small, "privacy.sigma": 1.0},
        )
        assert tuned.result["classes"] == ["0", "1", "2"]


def test_rows_of_numbers_and_natural_clients(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = {
        "features": rng.normal(size=(30, 4)),
        "label": np.arange(30) % 2,
        "hospital": ["a"] * 10 + ["b"] * 20,
    }
    tuned = dpfed.fine_tune(
        "linear",
        data,
        dict(data),
        epsilon=None,
        out=tmp_path / "run",
        settings={
            "data.partition": "natural",
            "data.client_column": "hospital",
            "privacy.rate": 0.3,
            "privacy.sigma": 1.0,
            "run.rounds": 1,
            "run.local_steps": 1,
        },
    )
    assert tuned.result["clients"] == 2
    assert "rate 0.3" in tuned.result["guarantee"]


def test_rounds_are_shown_as_they_pass_unless_not_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"features": np.eye(20), "label": np.arange(20) % 2}
    keys = {"run.rounds": 2, "run.local_steps": 1, "privacy.batch": 4.0}
    for shown in (True, False):
        dpfed.fine_tune(
            "linear",
            data,
            dict(data),
            clients=2,
            settings=keys,
            out=tmp_path / str(shown),
            progress=shown,
        )
        said = capsys.readouterr()
        assert ("round 2/2  accuracy" in said.err) == shown
        assert said.out == ""


def test_a_target_and_the_absence_of_privacy(tmp_path: Path) -> None:
    data = {"features": np.eye(20), "label": np.arange(20) % 2}
    keys = {"run.rounds": 1, "run.local_steps": 1, "privacy.batch": 4.0}
    aimed = dpfed.fine_tune(
        "linear", data, dict(data), clients=2, epsilon=3.0, settings=keys, out=tmp_path / "a"
    )
    assert aimed.epsilon["server_worst"] == pytest.approx(3.0, rel=0.01)
    sigma = dpfed.fine_tune(
        "linear",
        data,
        dict(data),
        clients=2,
        settings={**keys, "privacy.sigma": 5.0},
        out=tmp_path / "b",
    )
    assert sigma.result["sigma"] == 5.0  # the default epsilon is no explicit one
    none = dpfed.fine_tune(
        "linear",
        data,
        dict(data),
        clients=2,
        epsilon=None,
        settings={**keys, "privacy.enabled": False},
        out=tmp_path / "c",
    )
    assert none.epsilon["server_worst"] is None
    with pytest.raises(DpfedError, match=r"privacy\.sigma and privacy\.target_epsilon"):
        dpfed.fine_tune(
            "linear", data, dict(data), clients=2, epsilon=None, settings=keys, out=tmp_path / "d"
        )


@pytest.mark.parametrize(
    ("model", "keys", "words"),
    [
        (3, {}, "must be a name, a folder or a Hugging Face model, not int"),
        (torch.nn.Linear(2, 2), {}, "must be a name, a folder or a Hugging Face model, not Linear"),
        ("no-such-folder/at/all", {}, "is not a folder"),
        (
            "linear",
            {"settings": {"algorithm.learning_rate": 1}},
            r"algorithm\.learning_rate is not a key",
        ),
        (
            "linear",
            {"settings": {"rounds": 1}},
            r"\[rounds\] is not a section .*: write run\.rounds",
        ),
        (
            "linear",
            {"settings": {"model.name": "auto-text"}},
            r"'model\.name'\] = 'auto-text' is not model = 'linear'",
        ),
        ("linear", {"settings": {"data": {"name": "digits"}}}, r"'data\.name'\] has no effect"),
        ("linear", {"settings": {"data.path": "x.npz"}}, r"'data\.path'\] has no effect"),
        ("linear", {"settings": {"data.classes": 3}}, r"has no effect: pass classes to fine_tune"),
        (
            "linear",
            {"settings": {"privacy.target_epsilon": 2.0}},
            "give exactly one of privacy.sigma and",
        ),
        ("linear", {"settings": {"privacy.rate": 0.5}}, "give exactly one of privacy.batch"),
        ("linear", {"tokenizer": object()}, "tokenizer is for a model in memory"),
        ("linear", {"settings": {"model.max_length": 5}}, r"model\.max_length is not a key"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, model: Any, keys: dict[str, Any], words: str
) -> None:
    quick = {k: v for k, v in QUICK.items() if not k.startswith("model.")}
    keys = dict(keys)
    settings = {**quick, "privacy.sigma": 1.0, **keys.pop("settings", {})}
    data = {"features": np.eye(20), "label": np.arange(20) % 2} if model == "linear" else texts()
    with pytest.raises(DpfedError, match=words) as error:
        dpfed.fine_tune(
            model,
            data,
            dict(data),
            clients=2,
            epsilon=None,
            settings=settings,
            out=tmp_path / "run",
            **keys,
        )
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_importing_is_cheap_and_typing_finds_the_names() -> None:
    assert set(dpfed.__all__) == {"DpfedError", "DpfedWarning", "Tuned", "fine_tune"}
    assert set(dpfed.__all__) <= set(dir(dpfed))
    code = "import sys, dpfed; dir(dpfed); print('torch' in sys.modules, 'fine_tune' in dir(dpfed))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]
    with pytest.raises(AttributeError, match="no attribute 'fine_tuna'"):
        dpfed.fine_tuna  # noqa: B018


NUMBERS = {"features": np.eye(20), "label": np.arange(20) % 2}
ONE_STEP = {"run.rounds": 1, "run.local_steps": 1, "privacy.batch": 4.0}


def linear(out: Path, data: Any = NUMBERS, **keys: Any) -> dpfed.Tuned:
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
    sentences = []
    with pytest.raises(DpfedError) as error:
        linear(tmp_path / "run", epsilon=1.0, settings={"privacy.sigma": 0.3})
    sentences.append(str(error.value))
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

    for name in registry().model:
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
    assert {Path(found.filename).name for found in issued} == {"test_api.py"}
    assert [str(found.message) for found in issued] == list(tuned.warnings)
    assert not any(
        "classes" in said for said in linear(tmp_path / "b", data, clients=2, classes=8).warnings
    )
    with pytest.warns(DpfedWarning, match=r"privacy\.delta = 0\.01 is at least a tenth of 1 / 10"):
        linear(tmp_path / "c", clients=2, delta=0.01)
    with pytest.raises(DpfedError, match=r"privacy\.delta = 0\.5 is at least 1 / 10"):
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
    "studies",
    "bench",
    "federation",
    "report",
    "errors.py",
    "config/parsing.py",
    "privacy/accounting/planner.py",
    "training/audit.py",
    "training/export.py",
    "training/backends/batched_runs.py",
    "training/run_folder/resume.py",
    "training/budget/spending.py",
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
    assert [
        str(p) for p in found if str(p) not in COMMANDS_ONLY and p.parts[0] not in COMMANDS_ONLY
    ] == []
