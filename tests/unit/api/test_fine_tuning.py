"""The Python interface, including the lines of the README."""

from __future__ import annotations

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
from language_case import chat, chat_model
from PIL import Image

import dpfed
from dpfed.api import configuring
from dpfed.errors import DpfedError

README = Path(__file__).parents[3] / "README.md"
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


def tune(model: Any, train: Any, test: Any, **keys: Any) -> dpfed.TrainedModel:
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
    """The lines run as shown, with a small language model, small data and one round."""
    block = next(
        b for b in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "fine_tune" in b
    )
    lines = [line for line in block.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 6
    monkeypatch.chdir(tmp_path)
    chat_model(tmp_path / "my-model-folder", positions=128)
    usual = configuring.defaults

    def fewer(*args: Any) -> dict[str, Any]:
        made = usual(*args)
        return {
            **made,
            "run": {**made["run"], "rounds": 1, "local_steps": 1},
            "model": {"max_length": 14, "liveness": False},
        }

    monkeypatch.setattr(configuring, "defaults", fewer)
    place: dict[str, Any] = {
        "private_chats": [chat("a b", "c"), chat("d", "e f")] * 170,
        "public_chats": [chat("a", "c")] * 4,
    }
    exec(block, place)
    assert 0 < place["tuned"].epsilon["server_worst"] <= 4.0
    assert {"perplexity", "epsilon_server_worst"} <= set(place["tuned"].history)
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").is_file()
    assert "## Privacy" in (tmp_path / "my-adapter" / "README.md").read_text()


def test_a_model_folder_gives_a_tuned_model(tmp_path: Path) -> None:
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
    # The next attempt can use the same folder.
    assert not (tmp_path / "run-base").exists()
    tuned = tune(model, texts(), texts(8), tokenizer=tokenizer, out=out)
    assert (tmp_path / "run-base" / "model.safetensors").is_file()
    again = tune(folder, texts(), texts(8), out=tmp_path / "again")
    # The model and the run are the same.
    assert again.result["test_loss"] == tuned.result["test_loss"]
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


def test_progress_is_shown_unless_disabled(
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


def test_a_target_epsilon_and_no_privacy(tmp_path: Path) -> None:
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
    # The default epsilon is not an explicit one.
    assert sigma.result["sigma"] == 5.0
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
    with pytest.raises(DpfedError, match=r"^epsilon = None needs settings=.*privacy\.sigma"):
        dpfed.fine_tune(
            "linear", data, dict(data), clients=2, epsilon=None, settings=keys, out=tmp_path / "d"
        )


@pytest.mark.parametrize(
    ("model", "keys", "words"),
    [
        (3, {}, "must be a name, a folder, a Hugging Face model or a torch module, not int"),
        (torch.nn.Linear(2, 2), {}, "does not read text: choose a language model"),
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
    assert set(dpfed.__all__) == {
        "Callback",
        "Comparison",
        "DpfedError",
        "DpfedWarning",
        "TrainedModel",
        "Tuning",
        "compare",
        "fine_tune",
        "load",
        "plan",
        "tune",
    }
    assert set(dir(dpfed)) == {*dpfed.__all__, "__version__"}
    assert all(getattr(dpfed, name).__doc__ for name in dpfed.__all__)
    code = "import sys, dpfed; dir(dpfed); print('torch' in sys.modules, 'fine_tune' in dir(dpfed))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]
    with pytest.raises(AttributeError, match="no attribute 'fine_tuna'"):
        dpfed.fine_tuna  # noqa: B018


def test_a_function_of_the_user_chooses_the_round(tmp_path: Path) -> None:
    """It gets labels and probabilities of the test set; an error in it is one sentence."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def metric(labels: np.ndarray, probabilities: np.ndarray) -> float:
        seen.append((labels.shape, probabilities.shape))
        return -len(seen)

    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    table = {"features": rng.normal(size=(40, 3)), "label": labels}
    test = {"features": table["features"][:10] + 1, "label": labels[:10]}
    keys = {"epsilon": 8.0, "rounds": 4, "progress": False, "settings": {"run.local_steps": 1}}
    found = dpfed.fine_tune(
        "linear",
        table,
        test,
        clients=2,
        out=tmp_path / "run",
        metric=metric,
        early_stopping=2,
        keep="best",
        class_weights=[1.0, 2.0],
        **keys,
    )
    assert set(seen) == {((10,), (10, 2))}
    assert (found.result["kept_round"], found.result["rounds"]) == (0, 2)
    assert found.history["score"].tolist() == [-1, -2, -3]
    assert dpfed.load(tmp_path / "run").accuracy == found.accuracy

    def broken(labels: np.ndarray, probabilities: np.ndarray) -> float:
        raise KeyError("no such column")

    with pytest.raises(DpfedError, match=r"^metric failed on the test set: 'no such column'"):
        dpfed.fine_tune("linear", table, test, clients=2, out=tmp_path / "b", metric=broken, **keys)
    with pytest.raises(DpfedError, match=r"^metric = 'f1' must be one of .*, or a function"):
        dpfed.fine_tune("linear", table, test, clients=2, out=tmp_path / "c", metric="f1", **keys)
