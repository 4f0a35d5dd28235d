"""Presets: those of the paper have its settings and figures; `llm` trains a language model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from command import dpfed
from language_case import chat, chat_model
from typer.testing import CliRunner

from dpfed.algorithms.base import Facts
from dpfed.cli.main import app
from dpfed.config import Config, load
from dpfed.model.build import AssembledModel, describe_space
from dpfed.privacy.accounting.guarantee import Planned
from dpfed.registry import CONFIGS, registry
from dpfed.training.budget.spending import budget_of
from dpfed.training.job.data import published_spec
from dpfed.training.job.model import block_rules
from dpfed.training.job.plan import plan_of

PRESETS = [name for name in registry().presets if name.startswith("paper/")]
NINE = [
    "dp-fedavg",
    "dp-scaffold",
    "dp-fedavg-ls",
    "dp-fedsam",
    "dp-local-adamw",
    "dp-fedopt",
    "dp-fafed",
    "dp-fedlada",
    "dp-fedadamw",
]


def config_of(preset: str, *overrides: str) -> Config:
    return load(preset, overrides, registry())


@cache
def shape_of(preset: str) -> AssembledModel:
    config = config_of(preset)
    spec = published_spec(config.data.published, config.model)  # type: ignore[attr-defined]
    return describe_space(config.model, spec, **block_rules(config))


@cache
def planned(preset: str, *overrides: str) -> Planned:
    config = config_of(preset, *overrides)
    plan, schedule = plan_of(config)
    return budget_of(plan, schedule, config.privacy.delta).planned


def test_every_cell_of_the_tables_is_there() -> None:
    vision = [
        f"paper/cifar{n}-{m}"
        for n in (10, 100)
        for m in ("resnet18", "vit-base", "swin-tiny", "swin-base")
    ]
    vision += [f"paper/tiny-imagenet-{m}" for m in ("swin-tiny", "swin-base")]
    assert set(PRESETS) == {
        *vision,
        *(f"paper/{task}-roberta-base" for task in ("sst2", "qqp", "qnli", "mnli")),
    }


def test_the_list_names_each_with_a_sentence() -> None:
    text = CliRunner().invoke(app, ["list", "presets"]).stdout
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert lines["paper/cifar100-swin-base"] == "The paper's Swin-Base on CIFAR-100."
    assert "extends" not in text
    names = json.loads(CliRunner().invoke(app, ["list", "presets", "--json"]).stdout)["names"]
    assert set(names) == {*PRESETS, *(p.stem for p in CONFIGS.glob("*.toml"))}
    assert not any(name.rpartition("/")[2].startswith("_") for name in names)


@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_the_appendix(preset: str) -> None:
    """Tables of federated configurations: N, T, K, l, sR, sigma, delta, LoRA, dropout, length."""
    config = config_of(preset)
    cnn, text = "resnet" in preset, "roberta" in preset
    want = (
        (50, 300, 50, 0.2, 50) if cnn else (4, 100, 20, 1.0, 16) if text else (50, 100, 20, 0.1, 16)
    )
    run, privacy, lora = config.run, config.privacy, config.model.lora
    assert (
        config.data.clients,
        run.rounds,
        run.local_steps,
        run.participation,
        privacy.batch,
    ) == want
    large = any(name in preset for name in ("tiny-imagenet", "qqp", "mnli"))
    assert (privacy.sigma, privacy.delta, privacy.clip) == (1.0, 1e-6 if large else 1e-5, 0.1)
    assert (config.model.train, lora.r, lora.alpha, lora.dropout) == ("lora", 16, 32.0, 0.1)
    assert (config.data.partition, config.data.alpha) == ("dirichlet_equal", 0.8 if text else 0.1)
    assert (config.algorithm.name, config.algorithm.lr, config.algorithm.weight_decay) == (
        "dp-fedadamw",
        3e-4,
        0.01,
    )
    assert config.algorithm.gamma == 0.5
    assert config_of(preset, "data.alpha=0.6").data.alpha == 0.6
    if text:
        assert config.model.max_length == 128  # type: ignore[attr-defined]


# Counts by torch and timm for the same networks without their head (RoBERTa: its encoder).
BODIES = {
    "resnet18": (11_168_832, 512),
    "vit-base": (85_798_656, 768),
    "swin-tiny": (27_519_354, 768),
    "swin-base": (86_743_224, 1024),
    "roberta-base": (124_055_040 + 768 * 769, 768),
}
R = 16


def swin(width: int, depths: tuple[int, ...]) -> int:
    """q, k, v, o: r(d + d); fc1, fc2: r(d + 4d); d doubles from stage to stage."""
    return sum(n * R * (4 * 2 + 2 * 5) * width * 2**i for i, n in enumerate(depths))


def resnet() -> int:
    """A is r x in x 3 x 3 and B is out x r, on both convolutions of eight blocks."""
    pairs = [
        (a, b)
        for w, a in ((64, 64), (128, 64), (256, 128), (512, 256))
        for a, b in ((a, w), (w, w), (w, w), (w, w))
    ]
    return sum(R * (9 * a + b) for a, b in pairs)


ADAPTERS = {
    "resnet18": resnet(),
    "vit-base": 12 * R * (4 * 2 + 2 * 5) * 768,
    "swin-tiny": swin(96, (2, 2, 6, 2)),
    "swin-base": swin(128, (2, 2, 18, 2)),
    # Its head has another layer before the last one.
    "roberta-base": 12 * R * (4 * 2 + 2 * 5) * 768 + 768 * 769,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_shapes_without_weights(preset: str) -> None:
    parts, config = shape_of(preset), config_of(preset)
    name = next(name for name in BODIES if preset.endswith(name))
    classes = config.data.published.classes  # type: ignore[attr-defined]
    body, width = BODIES[name]
    head = (width + 1) * classes
    assert all(p.is_meta for p in parts.adapted.model.parameters())
    assert parts.total == body + head
    assert parts.space.size == ADAPTERS[name] + head
    assert parts.space.num_blocks > 0
    assert len(set(parts.space.blocks.tolist())) == parts.space.num_blocks


def test_blocks_by_hand() -> None:
    """A is one block. B of q, k, v has one per head, other Bs have one, and so has the head."""
    assert shape_of("paper/cifar10-vit-base").space.num_blocks == 12 * (3 * (1 + 12) + 3 * 2) + 1
    heads = [(2, 4), (2, 8), (18, 16), (2, 32)]
    assert (
        shape_of("paper/cifar100-swin-base").space.num_blocks
        == sum(n * (3 * (1 + h) + 3 * 2) for n, h in heads) + 1
    )
    assert shape_of("paper/cifar10-resnet18").space.num_blocks == 16 * 2 + 1
    assert shape_of("paper/sst2-roberta-base").space.num_blocks == 12 * (3 * (1 + 12) + 3 * 2) + 2


# Epsilon: server worst, server at l T rounds, third party, RDP.
TABLE = {
    "paper/cifar10-vit-base": (4.363, 1.476, 1.563, 4.794),
    "paper/cifar100-swin-base": (4.363, 1.476, 1.563, 4.794),
    "paper/tiny-imagenet-swin-base": (2.325, 0.930, 0.961, 2.590),
    "paper/cifar10-resnet18": (63.14, 21.18, 22.24, 73.17),
    "paper/sst2-roberta-base": (0.1973, 0.1973, 0.1973, 0.687),
    "paper/qnli-roberta-base": (0.1214, 0.1214, 0.1214, 0.62),
    "paper/mnli-roberta-base": (0.0355, 0.0355, 0.0355, 0.63),
    "paper/qqp-roberta-base": (0.0385, 0.0385, 0.0385, 0.63),
}


@pytest.mark.parametrize("preset", TABLE)
def test_epsilon_is_the_specification_s(preset: str) -> None:
    found = planned(preset)
    got = (found.server_worst, found.server_expected, found.third_party, found.rdp_server_worst)
    assert got == pytest.approx(TABLE[preset], rel=0.01)


@pytest.mark.parametrize("preset", PRESETS)
def test_epsilon_of_both_views_without_any_file(preset: str) -> None:
    found = planned(preset)
    assert 0 < found.third_party <= found.server_worst
    assert config_of(preset).data.path is None


@pytest.mark.parametrize("name", NINE)
def test_every_method_takes_a_cell(name: str) -> None:
    """Another method keeps the preset's other sections; DP-FedSAM spends more."""
    config = config_of("paper/cifar100-swin-base", f"algorithm.name={name}")
    assert config.algorithm.name == name
    assert config.privacy == config_of("paper/cifar100-swin-base").privacy
    config.algorithm.check(
        Facts(equal_phi=True, private=True, allow_nan=False, calibrated=False, varying_phi=False)
    )
    found = planned("paper/cifar100-swin-base", f"algorithm.name={name}").server_worst
    # Two releases of one batch.
    factor = 2.26 if name == "dp-fedsam" else 1
    assert found == pytest.approx(4.363 * factor, rel=0.01)


def test_a_target_is_for_a_client_in_every_round() -> None:
    """Epsilon 2 for the server on CIFAR needs sigma 1.619."""
    config = config_of("paper/cifar100-swin-base", "privacy.target_epsilon=2")
    plan, _ = plan_of(config)
    assert float(plan.multipliers[0]) == pytest.approx(1.619, rel=0.005)


def test_the_preset_of_language_models_needs_a_model_and_a_folder_of_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [{"messages": chat("a b", "c")}, {"messages": chat("d", "e f", "g", "h")}]
    for name, records in (("train", chats * 200), ("test", chats)):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(text)
    model = chat_model(tmp_path / "model")
    given = {"model.weights": model, "data.path": tmp_path}
    quick = {"model.max_length": 14, "run.rounds": 2, "run.local_steps": 1}
    words = [w for key, value in {**given, **quick}.items() for w in ("--set", f"{key}={value}")]
    assert dpfed("run", "llm", *words, "--out", str(tmp_path / "out"), "--json") == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["task"] == "causal"
    assert 7.5 < result["epsilon"]["server_worst"] <= 8.0
    assert result["test_perplexity"] > 1
    assert len(result["examples"]) == 2
    # LoRA is in every linear layer but the output layer: seven in a block of a Llama.
    assert load(tmp_path / "out" / "config.toml", [], registry()).model.lora.targets == "auto"
    assert result["blocks"] > 7
