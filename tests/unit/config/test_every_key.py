"""Every configuration key has a sentence, a preset or page that mentions it, and a test."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from dpfed.config import all_keys
from dpfed.config.sections import (
    DataSection,
    FederationSection,
    LoraSection,
    ModelSection,
    PrivacySection,
    RunSection,
)
from dpfed.registry import CONFIGS, registry

ROOT = Path(__file__).parents[3]
KEYS = sorted(key for keys in all_keys(registry()).values() for key in keys)
NAMED = [*registry().data.values(), *registry().model.values(), *registry().algorithm.values()]
CLASSES: list[type[Any]] = [
    DataSection,
    ModelSection,
    LoraSection,
    PrivacySection,
    RunSection,
    FederationSection,
    *NAMED,
]
# Tests that treat all keys alike say nothing about one of them.
GENERIC_TESTS = {"test_keys.py", "test_loading.py"}


@cache
def text_of(kind: str) -> str:
    """Return the text of all presets, hand-written pages or tests."""
    files = {
        "presets": CONFIGS.rglob("*.toml"),
        "pages": (p for p in (ROOT / "docs").rglob("*.md") if p.name != "configuration.md"),
        "tests": (p for p in (ROOT / "tests").rglob("*.py") if p.name not in GENERIC_TESTS),
    }[kind]
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))


@pytest.mark.parametrize("key", KEYS)
def test_a_preset_or_a_page_mentions_the_key(key: str) -> None:
    section, _, name = key.rpartition(".")
    assignment = re.compile(rf"^\W*{name}\s*=", re.MULTILINE)
    table = section.split(".")[-1]
    page = re.compile(rf"{re.escape(key)}\b|`{name}`|`{name} = |`{table}\.{name}\b")
    in_preset = assignment.search(text_of("presets"))
    in_page = page.search(text_of("pages")) or assignment.search(text_of("pages"))
    assert in_preset or in_page, "set it in a preset, explain it on a page, or delete it"


@pytest.mark.parametrize("key", KEYS)
def test_a_test_uses_the_key(key: str) -> None:
    name = key.rpartition(".")[2]
    use = re.compile(rf"{re.escape(key)}\b|\b{name}=|[\"']{name}[\"']|\b{name} = ")
    assert use.search(text_of("tests")), "add a test, or delete the key"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_key_has_a_sentence(cls: type[Any]) -> None:
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        sentences = [part for part in get_args(hints[field.name])[1:] if isinstance(part, str)]
        # Subclasses set these to other defaults; the sentences are those of their base.
        assert sentences or field.name in ("lora", "name", "train"), field.name
