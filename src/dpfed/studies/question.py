"""The question of a study: which methods are compared, how often, and from which rates on."""

from __future__ import annotations

from dataclasses import dataclass

from dpfed.config import Config, Registry, build, overlay, to_dict
from dpfed.config.parsing import overrides_layer
from dpfed.errors import DpfedError, phrase
from dpfed.studies.arms import Arm, parse_arms, parse_grids, parse_names
from dpfed.studies.presets import Grids, preset_arms
from dpfed.studies.study import Study

# These presets set the noise in their arms. The word `all` stands for other methods with sigma than
# with a target epsilon, so `all` is expanded for this example of the preset's noise.
NOISE_OF_PRESET = {"sigma": ["privacy.sigma=1"], "epsilon": ["privacy.target_epsilon=1"]}


@dataclass(frozen=True)
class Question:
    """The options of `dpfed compare` as texts and numbers.

    algorithms    methods and variants, separated by commas; None for all of them
    rates         NAME=v1,v2: values with which the search of a method begins
    preset        name of an ablation or grid of the paper
    seeds         number of reported seeds
    search_seeds  number of seeds over which the search averages the score of a rate
    about         the model and the data in words; None for their names
    """

    algorithms: str | None = None
    rates: tuple[str, ...] = ()
    preset: str | None = None
    seeds: int = 3
    search_seeds: int = 1
    about: str | None = None


def study_from(base: Config, question: Question, known: Registry, given: str = "") -> Study:
    """Return the study that the options `question` describe, with the configuration `base`.

    given  hash of the data and the model that a program holds in memory; "" if none
    """
    grids = parse_grids(question.rates, known)
    title = question.about or f"{base.model.name} on {base.data.name}"
    axis = ""
    if question.preset is None:
        names = "all" if question.algorithms is None else question.algorithms
        arms = parse_arms(names, base, known, grids)
    else:
        noise = overrides_layer(NOISE_OF_PRESET.get(question.preset, []))
        changed = build(overlay(to_dict(base), noise), known)
        named = question.algorithms and parse_names(question.algorithms, changed, known)
        chosen, arms = preset_arms(question.preset, named or None, base, known, grids)
        title = f"{chosen.title}: {title}"
        axis = chosen.axis
    _refuse_other_rates(arms, grids)
    return Study(
        to_dict(base),
        tuple(arms),
        question.seeds,
        title,
        axis,
        search_seeds=question.search_seeds,
        given=given,
    )


def _refuse_other_rates(arms: list[Arm], grids: Grids) -> None:
    """Raise DpfedError if a grid is for a method that is not among the arms."""
    labels = [arm.label for arm in arms]
    first = [override for arm in arms for override in arm.overrides[:1]]
    methods = [override.removeprefix("algorithm.name=") for override in first]
    for name in grids:
        method = name.removesuffix(".server_lr")
        if method not in [*labels, *methods]:
            raise DpfedError(
                f"{phrase('rates')} names {method}, which is not among the arms: "
                f"{', '.join(labels)}"
            )
