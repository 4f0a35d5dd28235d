"""`dpfed model`: shapes, counts and blocks, with and without data; a head on all layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import ViTConfig, ViTModel
from typer.testing import CliRunner

from dpfed.cli.main import app
from dpfed.cli.model import gather
from dpfed.errors import DpfedError
from dpfed.registry import registry


def describe(*args: str) -> tuple[str, dict[str, Any]]:
    result = CliRunner().invoke(app, ["model", "describe", *args, "--json"])
    if result.exception:
        raise result.exception
    return result.stdout, json.loads(result.stdout.splitlines()[-1])


def test_the_demonstration() -> None:
    text, found = describe()
    assert found["model"] == "glyph-vit"
    assert found["trainable"] == sum(found["blocks"].values())
    assert found["trainable"] == sum(_size(s) for s in found["tensors"].values())
    assert found["uplink"] == found["trainable"] + len(found["blocks"])
    assert f"P = {found['trainable']:,}" in text
    assert "3 x  vit.layers.*.attention.q_proj.lora_A  128" in text
    assert "12 x  vit.layers.*.attention.q_proj.lora_B.head*  32" in text


def _size(shape: list[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def test_keys_of_algorithm_and_model_count() -> None:
    cnn = (
        "--set",
        "model.name=gn-resnet18",
        "--set",
        "model.width=8",
        "--set",
        "model.groups=2",
        "--classes",
        "4",
    )
    assert len(describe(*cnn)[1]["blocks"]) == 41
    frozen = describe("--set", "model.lora.freeze_a=true")[1]
    assert not any(".lora_A" in name for name in frozen["tensors"])
    tensors = describe("--set", "algorithm.granularity=tensor")[1]
    assert list(tensors["blocks"]) == list(tensors["tensors"])


def test_options_replace_the_data() -> None:
    cnn = ("--set", "model.name=gn-resnet18", "--set", "model.width=8", "--set", "model.groups=2")
    found = describe(*cnn, "--classes", "7", "--channels", "2", "--image-size", "16")[1]
    assert found["tensors"]["conv.weight"] == [8, 2, 3, 3]
    assert found["tensors"]["classifier.bias"] == [7]
    with pytest.raises(DpfedError, match="roberta-base reads text"):
        describe(
            "--set", "model.name=roberta-base", "--set", "model.weights=random", "--channels", "3"
        )


def test_without_data_the_usual_shapes_are_taken_and_said() -> None:
    text, found = describe("--set", "data.name=npz", "--set", "data.path=nothing.npz")
    assert found["model"] == "glyph-vit"
    assert any("nothing.npz cannot be read" in note for note in found["notes"])
    assert "note: the data cannot be read" in text


def test_published_data_need_not_be_downloaded() -> None:
    cnn = ("--set", "model.name=gn-resnet18", "--set", "model.width=8", "--set", "model.groups=2")
    found = describe(*cnn, "--set", "data.name=cifar100")[1]
    assert found["tensors"]["classifier.bias"] == [100]
    assert found["tensors"]["conv.weight"] == [8, 3, 3, 3]
    found = describe(
        "--set",
        "data.name=mnli",
        "--set",
        "model.name=roberta-base",
        "--set",
        "model.weights=random",
    )[1]
    assert found["tensors"]["classifier.modules_to_save.default.out_proj.bias"] == [3]


def test_roberta_base() -> None:
    targets = 'model.lora.targets=["query", "key", "value"]'
    name = ("--set", "model.name=roberta-base", "--set", "model.weights=random")
    text, found = describe(*name, "--set", targets, "--classes", "2")
    assert found["total"] == 124_647_170
    assert len(found["blocks"]) == 470
    assert "144 x  roberta.encoder.layer.*.attention.self.query.lora_B.head*  1,024" in text


@pytest.mark.parametrize(
    "name", [n for n in registry().presets if n.startswith("paper/") and "/_" not in n]
)
def test_every_preset_of_the_paper_is_described_without_data_hub_or_weights(name: str) -> None:
    found = describe(name)[1]
    totals = {"roberta": 124e6, "resnet": 11e6, "vit": 85e6, "swin-tiny": 27e6, "swin-base": 86e6}
    (want,) = (total for part, total in totals.items() if part in name)
    assert want < found["total"] < 1.02 * want + 1e6
    assert 0 < found["trainable"] < 0.15 * found["total"]
    assert sum(found["blocks"].values()) == found["trainable"]


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["model.name=swin-tiny"], r"needs model\.weights"),
        (
            ["model.name=swin-tiny", "model.weights=random", "model.image_size=32"],
            "less than its window of 7",
        ),
        (
            ["model.name=swin-tiny", "model.weights=random", "model.windw=4"],
            r"model\.windw is not a key.*window",
        ),
        (["model.qkv_layout=2HD"], r"model\.qkv_layout = '2HD' is not allowed"),
        (["model.attention=['nothing']"], "has no module called 'nothing'"),
    ],
)
def test_mistakes_are_one_sentence(sets: list[str], sentence: str) -> None:
    args = [part for item in sets for part in ("--set", item)]
    with pytest.raises(DpfedError, match=sentence):
        describe(*args, "--classes", "3")


def test_gather_counts_what_differs_only_in_numbers() -> None:
    table = {
        "a.0.b.head0": 2,
        "a.0.b.head1": 2,
        "a.1.b.head0": 2,
        "a.1.b.head1": 3,
        "conv1": 5,
        "conv2": 5,
    }
    assert gather(table) == {
        ("a.*.b.head*", 2): 3,
        ("a.*.b.head*", 3): 1,
        ("conv1", 5): 1,
        ("conv2", 5): 1,
    }


def test_a_head_on_all_layers_trains_like_other_weights(tmp_path: Path) -> None:
    shape = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 2}
    sizes = {"num_attention_heads": 2, "intermediate_size": 8}
    ViTModel(ViTConfig(**shape, **sizes)).save_pretrained(tmp_path / "base")
    x = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8)).astype(np.uint8)
    data = {"x_train": x, "x_test": x[:9], "y_train": np.arange(60) % 3, "y_test": np.arange(9) % 3}
    np.savez(tmp_path / "data.npz", **data)
    toml = f'''
[data]
name = "npz"
path = "{tmp_path / "data.npz"}"
clients = 2
[model]
name = "auto-image"
weights = "{tmp_path / "base"}"
train = "head"
[privacy]
sigma = 1.0
batch = 4
[run]
rounds = 1
local_steps = 1
'''
    (tmp_path / "my.toml").write_text(toml)
    out = tmp_path / "all-layers"
    mine = str(tmp_path / "my.toml")
    weights = ("--set", f"model.weights={out}")
    commands = (
        ["model", "layers", mine, "--out", str(out)],
        ["run", mine, *weights, "--out", str(tmp_path / "run")],
    )
    found = []
    for command in commands:
        result = CliRunner().invoke(app, [*command, "--json"])
        assert result.exception is None, result.output
        found.append(json.loads(result.stdout.splitlines()[-1]))
    assert found[0] == {"out": str(out), "widths": [8, 8], "records": 9}
    assert (tmp_path / "run" / "model.safetensors").is_file()
