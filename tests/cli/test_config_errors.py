"""A mistake in a configuration is one sentence and exit code 2, never a traceback."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpfed import config as module
from dpfed.config import apply_override, build, load, read, to_dict, to_toml
from dpfed.errors import DpfedError
from dpfed.registry import DEFAULT, registry

REGISTRY = registry()


def settings(*overrides: str) -> module.Config:
    return load(DEFAULT, list(overrides), REGISTRY)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.gama=1", ["algorithm.gama", "did you mean gamma"]),
        ("algorithm.gamma=1.5", ["algorithm.gamma = 1.5", "<= 1"]),
        ("algorithm.gamma=often", ["algorithm.gamma = 'often'", "a number"]),
        ("algorithm.name=dp-fedadam", ["dp-fedadam", "did you mean dp-fedadamw"]),
        ("algorithm.agg=meen", ["algorithm.agg", "'mean', 'full_v', 'off'"]),
        ("algorithm.bc=1", ["algorithm.bc = 1", "true or false"]),
        ("privacy.sigma=-1", ["privacy.sigma = -1", ">= 0"]),
        ("privacy.sigma=nan", ["privacy.sigma = nan", "a number"]),
        ("privacy.clip=0", ["privacy.clip = 0", "> 0"]),
        ("privacy.clip=inf", ["privacy.clip = inf", "sigma = 0"]),
        ("privacy.delta=1", ["privacy.delta = 1", "< 1"]),
        ("privacy.delta=0", ["privacy.delta = 0", "> 0"]),
        ("privacy.sampling=shuffle", ['privacy.sampling = "shuffle"', "no accounting"]),
        ("privacy.sampling=uniform", ["privacy.sampling = 'uniform'", "'poisson', 'fixed_wor'"]),
        ("privacy.clip_mode=batch_tensor", ['privacy.clip_mode = "batch_tensor"', "no accounting"]),
        ("privacy.quantile=0.5", ["privacy.quantile has no effect", 'clip_mode = "quantile"']),
        ("privacy.clip_stability=1.0", ["privacy.clip_stability has no effect", 'clip_mode = "automatic"']),
        ("privacy.accounting=none", ['privacy.accounting = "none"', "privacy.sigma"]),
        ("data.alpha=0", ["data.alpha = 0", "> 0"]),
        ("data.clients=0", ["data.clients = 0", ">= 1"]),
        ("data.name=digit", ["data.name = 'digit'", "did you mean digits"]),
        ("model.name=glyf-vit", ["model.name", "did you mean glyph-vit"]),
        ("model.lora.r=0", ["model.lora.r = 0", ">= 1"]),
        ("model.lora=3", ["model.lora = 3", "table"]),
        ("run.participation=0", ["run.participation = 0", "> 0"]),
        ("run.participation=1.5", ["run.participation = 1.5", "<= 1"]),
        ("run.rounds=1.5", ["run.rounds = 1.5", "whole number"]),
        ("run.rounds=true", ["run.rounds = True", "whole number"]),
        ("run.fleet_size=0", ["run.fleet_size = 0", "at least 1"]),
        ("runn.rounds=1", ["[runn]", "did you mean run"]),
        ("run=3", ["run = 3", "table"]),
        ("rounds", ["rounds", "section.key=value"]),
    ],
)
def test_one_sentence_names_key_value_and_what_is_allowed(override: str, words: list[str]) -> None:
    with pytest.raises(DpfedError) as caught:
        settings(override)
    sentence = str(caught.value)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence


def test_sigma_and_target_exclude_each_other_but_the_later_word_wins() -> None:
    assert settings("privacy.sigma=1.5").privacy.target_epsilon is None
    assert settings("privacy.sigma=1.5", "privacy.target_epsilon=3").privacy.sigma is None
    raw = read(DEFAULT, REGISTRY)
    raw["privacy"] |= {"sigma": 1.0, "target_epsilon": 2.0}
    with pytest.raises(DpfedError, match="exactly one"):
        build(raw, REGISTRY)
    assert settings("privacy.rate=0.1").privacy.batch is None


def test_a_budget_cannot_go_with_a_third_party_target() -> None:
    with pytest.raises(DpfedError, match="third_party"):
        settings("privacy.budget=4", "privacy.view=third_party")
    settings("privacy.budget=4", "privacy.view=server_worst")


def test_several_views_need_views_that_differ() -> None:
    with pytest.raises(DpfedError, match=r"^data\.views = 4 needs views that differ: give data\.augment"):
        settings("data.views=4")
    assert settings("data.views=4", "data.augment=flip").data.views == 4
    with pytest.raises(DpfedError, match=r"data\.views = 0 is not allowed"):
        settings("data.views=0", "data.augment=flip")


def test_another_algorithm_drops_the_keys_of_the_old_one() -> None:
    changed = settings("algorithm.gamma=0.3", "algorithm.name=dp-fedavg")
    assert changed.algorithm.name == "dp-fedavg"
    assert changed.algorithm.lr == 0.1
    changed = settings("algorithm.name=dp-fedavg", "algorithm.lr=0.3")
    assert changed.algorithm.lr == 0.3


def test_a_configuration_survives_its_own_toml(tmp_path: Path) -> None:
    first = settings("algorithm.bc_floor=none", 'model.lora.targets=["q_proj"]', "privacy.sigma=0.7")
    path = tmp_path / "again.toml"
    path.write_text(to_toml(first), encoding="utf-8")
    assert load(path, [], REGISTRY) == first
    assert to_dict(load(path, [], REGISTRY)) == to_dict(first)


def test_files_extend_files(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('extends = "digits"\n[run]\nrounds = 7\n', encoding="utf-8")
    (tmp_path / "child.toml").write_text('extends = "base.toml"\n[run]\nseed = 3\n', encoding="utf-8")
    child = load(tmp_path / "child.toml", [], REGISTRY)
    assert (child.run.rounds, child.run.seed) == (7, 3)
    (tmp_path / "loop.toml").write_text('extends = "loop.toml"\n', encoding="utf-8")
    with pytest.raises(DpfedError, match="extends itself"):
        load(tmp_path / "loop.toml", [], REGISTRY)


def test_files_that_are_none(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "absent.toml", "there is no configuration"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(DpfedError, match=words):
            load(path, [], REGISTRY)
    with pytest.raises(DpfedError, match="did you mean digits"):
        load("digitz", [], REGISTRY)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_configuration_or_one_sentence(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.toml"
    path.write_bytes(data)
    with pytest.raises(DpfedError):
        load(path, [], REGISTRY)  # no bytes of this length hold a sigma and a batch


_TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=30)


@given(
    st.sampled_from(["privacy.sigma", "run.rounds", "algorithm.lr", "data.alpha", "model.train", "run.x", "a.b.c"]),
    _TEXT,
)
def test_any_override_gives_a_configuration_or_one_sentence(key: str, value: str) -> None:
    with contextlib.suppress(DpfedError):
        settings(f"{key}={value}")


def test_overrides_read_toml_values_and_plain_strings() -> None:
    raw: dict[str, object] = {}
    apply_override(raw, "a.number=1e-3")
    apply_override(raw, "a.flag=true")
    apply_override(raw, "a.path=some/where")
    apply_override(raw, 'a.list=["x", "y"]')
    assert raw == {"a": {"number": 1e-3, "flag": True, "path": "some/where", "list": ["x", "y"]}}


def test_every_key_has_a_sentence() -> None:
    classes = [module.DataSection, module.ModelSection, module.LoraSection, module.PrivacySection, module.RunSection]
    for cls in [*classes, *REGISTRY.algorithm.values()]:
        for name, sentence, _ in module.keys(cls):
            assert re.search(r"\w", sentence) or name == "lora", (cls, name)
