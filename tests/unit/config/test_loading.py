"""A mistake in a configuration is one sentence and exit code 2, never a traceback."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpfed import config as module
from dpfed.config import load, to_dict, to_toml
from dpfed.config.parsing import overrides_layer
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
        ("privacy.sampling=shuffle", ["privacy.sampling = 'shuffle'", "no accounting"]),
        ("privacy.sampling=uniform", ["privacy.sampling = 'uniform'", "'poisson', 'fixed_wor'"]),
        ("privacy.clip_mode=batch_tensor", ["privacy.clip_mode = 'batch_tensor'", "use flat"]),
        ("privacy.quantile=0.5", ["privacy.quantile has no effect", 'clip_mode = "quantile"']),
        (
            "privacy.clip_stability=1.0",
            ["privacy.clip_stability has no effect", 'clip_mode = "automatic"'],
        ),
        ("privacy.accounting=none", ["privacy.accounting = 'none'", "privacy.enabled = false"]),
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
        ("run.fleet_size=0", ["run.fleet_size = 0", ">= 1", "auto"]),
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


PAIRS = [("sigma", "target_epsilon"), ("batch", "rate")]


@pytest.mark.parametrize(("one", "other"), [*PAIRS, *((b, a) for a, b in PAIRS)])
def test_one_key_of_a_pair_replaces_the_other_of_the_file(
    one: str, other: str, tmp_path: Path
) -> None:
    (tmp_path / "base.toml").write_text(f'extends = "digits"\n[privacy]\n{other} = 0.5\n')
    assert getattr(load(tmp_path / "base.toml", [], REGISTRY).privacy, other) == 0.5
    changed = load(tmp_path / "base.toml", [f"privacy.{one}=0.25"], REGISTRY).privacy
    assert (getattr(changed, one), getattr(changed, other)) == (0.25, None)
    (tmp_path / "child.toml").write_text(f'extends = "base.toml"\n[privacy]\n{one} = 0.25\n')
    assert load(tmp_path / "child.toml", [], REGISTRY).privacy == changed


@pytest.mark.parametrize(("one", "other"), [*PAIRS, *((b, a) for a, b in PAIRS)])
def test_both_keys_of_a_pair_in_one_place_are_refused_alike(
    one: str, other: str, tmp_path: Path
) -> None:
    (tmp_path / "both.toml").write_text(
        f'extends = "digits"\n[privacy]\n{one} = 0.5\n{other} = 0.25\n'
    )
    sentences = []
    for source, overrides in (
        (tmp_path / "both.toml", []),
        (DEFAULT, [f"privacy.{one}=0.5", f"privacy.{other}=0.25"]),
        (DEFAULT, [f"privacy={{{one} = 0.5, {other} = 0.25}}"]),
    ):
        with pytest.raises(DpfedError, match="exactly one") as caught:
            load(source, overrides, REGISTRY)
        sentences.append(str(caught.value))
    assert len(set(sentences)) == 1


OVERRIDES = [
    "algorithm.name=dp-fedavg",
    "algorithm.lr=0.123",
    "data.name=npz",
    "data.path=x.npz",
    "data.classes=3",
    "model.name=linear",
    "model.train=head",
    "model.lora.r=3",
    "model.lora={alpha = 7.0}",
    "privacy.rate=0.1",
    "privacy.sigma=2.0",
    "run.rounds=3",
    "federation.clients={b = 4, a = 3}",
    "federation.clients.c=5",
]


@given(st.permutations(OVERRIDES), st.integers(0, len(OVERRIDES)))
def test_the_order_of_overrides_has_no_effect(items: list[str], count: int) -> None:
    def outcome(items: list[str]) -> str:
        try:
            return to_toml(settings(*items))
        except DpfedError as error:
            return str(error)

    chosen = items[:count]
    assert outcome(chosen) == outcome(sorted(chosen))


def test_the_last_override_of_a_key_wins() -> None:
    assert settings("run.rounds=3", "run.seed=1", "run.rounds=5").run.rounds == 5
    assert settings("run={rounds = 3}", "run.rounds=5").run.rounds == 5
    assert settings("run.rounds=5", "run={rounds = 3}").run.rounds == 3


@pytest.mark.parametrize("items", [["run=3", "run.rounds=2"], ["run.rounds=2", "run=3"]])
def test_a_value_and_a_table_at_one_key_exclude_each_other(items: list[str]) -> None:
    with pytest.raises(DpfedError, match=r"^run = 3 and run\.rounds exclude each other"):
        settings(*items)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rounds=2", "[rounds] is not a section of the configuration: write run.rounds"),
        ("lr=0.1", "write algorithm.lr"),
        ("epsilon=2", "write privacy.target_epsilon"),
        ("batch_size=2", "write privacy.batch"),
        ("clients=4", "write data.clients"),
        ("r=4", "write model.lora.r"),
    ],
)
def test_a_key_without_its_section_is_named_in_full(override: str, words: str) -> None:
    with pytest.raises(DpfedError) as caught:
        settings(override)
    assert words in str(caught.value)


def test_a_budget_cannot_go_with_a_third_party_target() -> None:
    with pytest.raises(DpfedError, match="third_party"):
        settings("privacy.budget=4", "privacy.view=third_party")
    settings("privacy.budget=4", "privacy.view=server_worst")


def test_several_views_need_views_that_differ() -> None:
    with pytest.raises(
        DpfedError, match=r"^data\.views = 4 needs views that differ: give data\.augment"
    ):
        settings("data.views=4")
    assert settings("data.views=4", "data.augment=flip").data.views == 4
    with pytest.raises(DpfedError, match=r"data\.views = 0 is not allowed"):
        settings("data.views=0", "data.augment=flip")


def test_another_algorithm_drops_the_keys_of_the_old_one() -> None:
    changed = settings("algorithm.name=dp-fedavg")
    assert (changed.algorithm.name, changed.algorithm.lr) == ("dp-fedavg", 0.1)
    for items in itertools.permutations(["algorithm.name=dp-fedavg", "algorithm.lr=0.123"]):
        assert settings(*items).algorithm.lr == 0.123
    for items in itertools.permutations(["algorithm.name=dp-fedavg", "algorithm.gamma=0.3"]):
        with pytest.raises(DpfedError, match=r"algorithm\.gamma is not a key"):
            settings(*items)


def test_a_configuration_survives_its_own_toml(tmp_path: Path) -> None:
    first = settings(
        "algorithm.bc_floor=0.25", 'model.lora.targets=["q_proj"]', "privacy.sigma=0.7"
    )
    path = tmp_path / "again.toml"
    path.write_text(to_toml(first), encoding="utf-8")
    assert load(path, [], REGISTRY) == first
    assert to_dict(load(path, [], REGISTRY)) == to_dict(first)


def test_files_extend_files(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('extends = "digits"\n[run]\nrounds = 7\n', encoding="utf-8")
    (tmp_path / "child.toml").write_text(
        'extends = "base.toml"\n[run]\nseed = 3\n', encoding="utf-8"
    )
    child = load(tmp_path / "child.toml", [], REGISTRY)
    assert (child.run.rounds, child.run.seed) == (7, 3)
    (tmp_path / "loop.toml").write_text('extends = "loop.toml"\n', encoding="utf-8")
    with pytest.raises(DpfedError, match="extends itself"):
        load(tmp_path / "loop.toml", [], REGISTRY)


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "absent.toml", "there is no configuration"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(DpfedError, match=words):
            load(path, [], REGISTRY)
    with pytest.raises(DpfedError, match="did you mean digits"):
        load("digitz", [], REGISTRY)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_configuration_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.toml"
    path.write_bytes(data)
    with pytest.raises(DpfedError):
        # No bytes of this length hold a sigma and a batch.
        load(path, [], REGISTRY)


_TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=30)


@given(
    st.sampled_from(
        [
            "privacy.sigma",
            "run.rounds",
            "algorithm.lr",
            "data.alpha",
            "model.train",
            "run.x",
            "a.b.c",
        ]
    ),
    _TEXT,
)
def test_any_override_gives_a_configuration_or_one_sentence(key: str, value: str) -> None:
    with contextlib.suppress(DpfedError):
        settings(f"{key}={value}")


def test_overrides_read_toml_values_and_plain_strings() -> None:
    items = ["a.number=1e-3", "a.flag=true", "a.path=some/where", 'a.list=["x", "y"]']
    expected = {"number": 1e-3, "flag": True, "path": "some/where", "list": ["x", "y"]}
    assert overrides_layer(items) == {"a": expected}
