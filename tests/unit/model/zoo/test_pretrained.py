"""Weights from folders and from the hub: what is missing or unreachable is one sentence, soon."""

from __future__ import annotations

import io
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_case import vit

from dpfed.errors import DpfedError
from dpfed.model.task import InputSpec
from dpfed.model.zoo import hub
from dpfed.model.zoo.vision import AutoImage

SPEC = InputSpec("image", "pixel_values", (1, 8, 8), 4)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    hub.reach.cache_clear()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)


def answer(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> list[str]:
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> Any:
        asked.append(url)
        assert timeout <= 10
        if isinstance(outcome, Exception):
            raise outcome
        return io.BytesIO(b"{}")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return asked


def http(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("u", code, "no", None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        (urllib.error.URLError("no route to host"), "hub cannot be reached (no route to host)"),
        (TimeoutError("timed out"), "hub cannot be reached (timed out)"),
        (http(404), "neither a folder here nor a public model"),
        (http(401), "neither a folder here nor a public model"),
        (http(503), "the hub answered with error 503"),
    ],
)
def test_the_hub_is_asked_once_and_shortly(
    outcome: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(monkeypatch, outcome)
    with pytest.raises(DpfedError) as error:
        AutoImage(weights="somebody/some-model").build(SPEC)
    assert sentence in str(error.value)
    assert "model.weights = 'somebody/some-model'" in str(error.value)
    assert len(asked) == 1
    assert asked[0].endswith("/api/models/somebody/some-model")


def test_offline_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        DpfedError, match="the configuration of 'somebody/some-model' cannot be used"
    ):
        AutoImage(weights="somebody/some-model").build(SPEC)
    assert asked == []


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing", "a/b/c"])
def test_paths_are_never_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, None)
    with pytest.raises(DpfedError, match="is not a folder"):
        AutoImage(weights=name).build(SPEC)
    assert asked == []


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"has no config\.json"):
        AutoImage(weights=str(tmp_path)).build(SPEC)
    (tmp_path / "config.json").write_text('{"model_type": "nobody-knows"}')
    with pytest.raises(DpfedError, match="cannot be used"):
        AutoImage(weights=str(tmp_path)).build(SPEC)
    vit().save_pretrained(tmp_path)  # type: ignore[operator]
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(DpfedError, match="cannot be loaded") as error:
        AutoImage(weights=str(tmp_path)).build(SPEC)
    assert "\n" not in str(error.value)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DpfedError, match="cannot be loaded"):
        AutoImage(weights=str(tmp_path)).build(SPEC)


def test_half_precision_weights_are_computed_in_single(tmp_path: Path) -> None:
    model = vit()
    model.half().save_pretrained(tmp_path)  # type: ignore[operator]
    built = AutoImage(weights=str(tmp_path)).build(SPEC)
    assert {p.dtype for p in built.model.parameters()} == {torch.float32}
    name = "vit.layers.0.mlp.fc1.weight"
    assert torch.equal(built.model.get_parameter(name), model.get_parameter(name).float())


def test_the_head_is_new_even_where_the_classes_agree(tmp_path: Path) -> None:
    vit(num_labels=4).save_pretrained(tmp_path)  # type: ignore[operator]
    built = AutoImage(weights=str(tmp_path)).build(SPEC)
    assert built.head == ("classifier",)
    assert not built.model.classifier.weight.any()
    assert not built.model.classifier.bias.any()


def test_code_that_comes_with_weights_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config", '
        '"AutoModelForImageClassification": "evil.M"}}'
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(DpfedError, match="cannot be used"):
        AutoImage(weights=str(tmp_path)).build(SPEC)
    assert not (tmp_path / "ran").exists()
