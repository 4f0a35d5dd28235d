"""Typed configuration: turn TOML files and overrides into one frozen `Config`."""

from dpfed.config.checks import refuse_idle_augmentations
from dpfed.config.loading import (
    SYNONYMS,
    Registry,
    all_keys,
    build,
    load,
    overlay,
    to_dict,
    to_toml,
)
from dpfed.config.parsing import nearest, parse, refuse_unknown
from dpfed.config.sections import (
    Config,
    DataSection,
    FederationSection,
    LabelTask,
    LoraSection,
    MessageFormat,
    ModelSection,
    PrivacySection,
    RunSection,
)

__all__ = [
    "SYNONYMS",
    "Config",
    "DataSection",
    "FederationSection",
    "LabelTask",
    "LoraSection",
    "MessageFormat",
    "ModelSection",
    "PrivacySection",
    "Registry",
    "RunSection",
    "all_keys",
    "build",
    "load",
    "nearest",
    "overlay",
    "parse",
    "refuse_idle_augmentations",
    "refuse_unknown",
    "to_dict",
    "to_toml",
]
