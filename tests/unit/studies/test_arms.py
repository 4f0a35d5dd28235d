"""Arms from the command line (names, variants, grids) and from the paper's presets."""

from __future__ import annotations

import dataclasses

import pytest

from dpfed.config import Config, load, to_dict
from dpfed.errors import DpfedError
from dpfed.registry import registry
from dpfed.studies.arms import EQUAL_EPS, Arm, everything, parse_arms, parse_grids
from dpfed.studies.presets import PRESETS, preset_arms

KNOWN = registry()


def base(*sets: str) -> Config:
    return load("digits", list(sets), KNOWN)


def configured(arm: Arm, config: Config) -> Config:
    return arm.configure(to_dict(config), tuple(grid[0] for grid in arm.space), KNOWN)


def test_a_variant_changes_its_keys_and_keeps_the_base() -> None:
    config = base("algorithm.weight_decay=0.5", "data.alpha=0.2")
    plain, variant, other = parse_arms(
        "dp-fedadamw, dp-fedadamw:gamma=0;privacy.clip=3 ,dp-fedavg",
        config,
        KNOWN,
        {"dp-fedavg": (0.7, 0.9)},
    )
    assert variant.label == "dp-fedadamw:gamma=0;privacy.clip=3"
    assert configured(plain, config).algorithm.weight_decay == 0.5, (
        "the base's own method keeps its keys"
    )
    assert (
        configured(variant, config).algorithm.gamma,
        configured(variant, config).privacy.clip,
    ) == (0, 3)
    assert configured(other, config).algorithm == dataclasses.replace(
        KNOWN.algorithm["dp-fedavg"](), lr=0.7
    )
    assert configured(other, config).data.alpha == 0.2
    assert other.grids == {"lr": (0.7, 0.9)}


def test_a_fixed_rate_is_not_tuned() -> None:
    (arm,) = parse_arms("dp-fedavg:lr=0.3", base(), KNOWN, {})
    assert arm.grids == {}
    assert arm.configure(to_dict(base()), (), KNOWN).algorithm.lr == 0.3


def test_a_second_rate_is_tuned_where_a_method_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOWN.algorithm["dp-fedavg"], "server_lr_grid", (0.1, 1.0), raising=False)
    grids = parse_grids(["dp-fedavg.server_lr=2,3", "dp-fedavg=0.5"], KNOWN)
    (arm,) = parse_arms("dp-fedavg", base(), KNOWN, grids)
    assert arm.grids == {"lr": (0.5,), "server_lr": (2.0, 3.0)}
    assert arm.configure(to_dict(base()), (0.5, 3.0), KNOWN).algorithm.server_lr == 3.0


def test_all_are_all_methods_with_the_reference_last() -> None:
    names = everything(base("privacy.sigma=1"), KNOWN)
    assert set(KNOWN.algorithm) <= set(names)
    assert names[-1] == "dp-fedadamw"
    assert len(names) == len(set(names))
    assert EQUAL_EPS in names
    assert EQUAL_EPS not in everything(base(), KNOWN), (
        "a target epsilon is reached by every method alike"
    )
    for arm in parse_arms("all", base("privacy.sigma=1"), KNOWN, {}):
        configured(arm, base("privacy.sigma=1"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp-fedavgg", "did you mean dp-fedavg"),
        ("", "names no method"),
        ("dp-fedavg,dp-fedavg", "twice"),
        ("all,dp-fedavg", "twice"),
        ("dp-fedavg:gamma", "key=value"),
    ],
)
def test_mistakes_in_algorithms(text: str, words: str) -> None:
    with pytest.raises(DpfedError, match=words):
        parse_arms(text, base(), KNOWN, {})


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("0.1,0.2", "NAME=v1,v2"),
        ("dp-fedavg=", "NAME=v1,v2"),
        ("dp-fedavg=0.1,x", "NAME=v1,v2"),
        ("dp-fedavg=0,1", "above 0"),
        ("dp-fedavg=inf", "above 0"),
        ("dp-fedav=1", "did you mean dp-fedavg"),
        ("dp-fedadamw.gamma=1", "no rate 'gamma'"),
    ],
)
def test_mistakes_in_lr(item: str, words: str) -> None:
    with pytest.raises(DpfedError, match=words):
        parse_grids([item], KNOWN)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_valid_and_different_configurations(name: str) -> None:
    config = base("privacy.sigma=1")
    _, arms = preset_arms(name, None, config, KNOWN, {})
    found = [configured(arm, config) for arm in arms]
    assert all(one != two for i, one in enumerate(found) for two in found[:i])
    assert len({arm.label for arm in arms}) == len(arms)
    assert {arm.reference for arm in arms} <= {arm.label for arm in arms} | {None}
    assert all(arm.grids for arm in arms), "every arm tunes its own rate"


def test_sigma_and_epsilon_are_methods_by_values() -> None:
    config = base()
    preset, arms = preset_arms(
        "sigma", {"dp-fedavg": "dp-fedavg", "dp-fedadamw": "dp-fedadamw"}, config, KNOWN, {}
    )
    assert [(a.row, a.column) for a in arms[:4]] == [
        ("dp-fedavg", c) for c in ("0.5", "1", "1.5", "2")
    ]
    assert preset.axis == "sigma"
    assert configured(arms[2], config).privacy.sigma == 1.5
    assert configured(arms[2], config).privacy.target_epsilon is None
    assert arms[2].reference == "dp-fedadamw | 1.5", "against the reference at the same noise"
    _, arms = preset_arms("epsilon", None, base("privacy.sigma=1"), KNOWN, {})
    assert {configured(a, base("privacy.sigma=1")).privacy.target_epsilon for a in arms} == {
        1,
        2,
        3,
    }


def test_ablations_switch_what_they_say() -> None:
    _, arms = preset_arms("ablation-components", None, base(), KNOWN, {})
    switches = {a.row: configured(a, base()).algorithm for a in arms}
    assert {row: (x.agg, x.bc, x.gamma > 0) for row, x in switches.items()} == {
        "none": ("off", False, False),
        "w/o Agg": ("off", True, True),
        "w/o BC": ("mean", False, True),
        "w/o Align": ("mean", True, False),
        "full": ("mean", True, True),
    }
    assert {a.reference for a in arms} == {"full"}
    _, arms = preset_arms("gamma", None, base(), KNOWN, {})
    assert [configured(a, base()).algorithm.gamma for a in arms] == [0, 0.25, 0.5, 0.75, 1]
    assert {a.reference for a in arms} == {"dp-fedadamw | 0.5"}, "the configuration as it stands"
    _, arms = preset_arms(
        "alpha", {"dp-fedavg": "dp-fedavg"}, base("data.partition=iid"), KNOWN, {}
    )
    assert [configured(a, base()).data.partition for a in arms] == ["dirichlet_equal"] * 3 + ["iid"]


def test_mistakes_in_presets() -> None:
    with pytest.raises(DpfedError, match="did you mean gamma"):
        preset_arms("gama", None, base(), KNOWN, {})
    with pytest.raises(DpfedError, match="leave out --algorithms"):
        preset_arms("gamma", {"dp-fedavg": "dp-fedavg"}, base(), KNOWN, {})


def test_the_help_names_every_preset() -> None:
    from dpfed.cli.compare import PRESET_HELP

    assert PRESET_HELP.partition(": ")[2].split(", ") == list(PRESETS)
