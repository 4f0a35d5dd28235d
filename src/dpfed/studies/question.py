"""The user's options for a study: methods, number of seeds, and first learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from dpfed.config import Config, Registry, build, overlay, to_dict
from dpfed.config.parsing import overrides_layer
from dpfed.errors import DpfedError, phrase
from dpfed.studies.arms import Arm, parse_arms, parse_grids, parse_names
from dpfed.studies.presets import Grids, preset_arms
from dpfed.studies.study import Study

# In these presets each arm sets the noise itself. The methods that `all` means depend on how noise
# is set, so they are found with this override of the configuration.
NOISE_OF_PRESET = {"sigma": ["privacy.sigma=1"], "epsilon": ["privacy.target_epsilon=1"]}


@dataclass(frozen=True)
class Question:
    """The question that a study answers: the options of `dpfed compare`.

    algorithms    methods and variants, separated by commas; None for all methods
    rates         texts METHOD=v1,v2: learning rates that the search tries first
    preset        name of an experiment of the DP-FedAdamW paper, or None
    seeds         number of runs of each method that are reported in the table
    search_seeds  number of seeds over which the search averages the score of a rate
    about         the model and the data in words, for the title; None for their names
    """

    algorithms: str | None = None
    rates: tuple[str, ...] = ()
    preset: str | None = None
    seeds: int = 3
    search_seeds: int = 1
    about: str | None = None


def study_from(base: Config, question: Question, known: Registry, given: str = "") -> Study:
    """Return the study that `question` describes; its methods change the configuration `base`.

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
    """Raise DpfedError if `grids` has learning rates for a method that is not among the arms."""
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
