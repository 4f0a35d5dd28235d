"""client.toml: its sections, its relative paths, and one sentence for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from dpfed.errors import DpfedError
from dpfed.federation.client_config import LinkSection, build, load_client
from dpfed.registry import registry

RAW: dict[str, dict[str, Any]] = {
    "client": {"name": "clinic-0", "state": "state", "servers": ["hub"]},
    "policy": {"records": 100, "max_epsilon": 5.0},
    "data": {"name": "digits"},
    "model": {"name": "linear"},
}


@pytest.mark.parametrize(
    ("section", "key", "value", "what"),
    [
        ("policy", "max_epsilon", None, "lacks policy.max_epsilon"),
        ("policy", "records", None, "lacks policy.records"),
        ("client", "servers", None, "lacks client.servers"),
        ("client", "servers", [], "client.servers"),
        ("client", "name", "a\nb", "client.name"),
        ("policy", "max_epsilon", -1.0, "policy.max_epsilon"),
        ("policy", "delta", 1e-12, "delta"),
        ("policy", "delta", 0.5, "policy.delta = 0.5 is at least 1 / .*policy.allow_large_delta"),
        ("policy", "max_distance", float("inf"), "policy.max_distance"),
        ("policy", "algorithms", ["dp-fedavgg"], "did you mean dp-fedavg"),
        ("policy", "max_eps", 1.0, "max_eps"),
        ("data", "name", "nothing", "data.name"),
        ("data", "clients", 3, "data.clients deals records"),
        ("model", "name", None, "model.name"),
    ],
)
def test_a_mistake_in_client_toml_is_one_sentence(
    section: str, key: str, value: Any, what: str
) -> None:
    raw = {name: dict(table) for name, table in RAW.items()}
    raw[section].pop(key, None)
    if value is not None:
        raw[section][key] = value
    with pytest.raises(DpfedError, match=what):
        build(raw, registry())


def test_a_mistyped_key_is_named_before_the_one_that_is_lacking_for_it() -> None:
    with pytest.raises(
        DpfedError, match=r"policy\.max_epsilonn is not a key .* did you mean max_epsilon"
    ):
        build({**RAW, "policy": {"records": 10, "max_epsilonn": 3.0}}, registry())


def test_other_sections_and_values_that_are_no_tables_are_refused() -> None:
    with pytest.raises(DpfedError, match="polcy"):
        build({**RAW, "polcy": {}}, registry())
    with pytest.raises(DpfedError, match="must be a table"):
        build({**RAW, "policy": 3}, registry())


def written(folder: Path, link: str = "") -> Path:
    path = folder / "client.toml"
    path.write_text(tomli_w.dumps(RAW) + link)
    return path


def test_relative_paths_start_at_the_folder_of_the_file(tmp_path: Path) -> None:
    link_text = '[link]\naddress = "hub:8000"\nca = "own/ca.crt"\nkey = "/etc/k"\n'
    config, link = load_client(written(tmp_path, link_text), registry())
    assert config.client.state == str(tmp_path / "state")
    assert (config.policy.records, config.client.allow_seeded) == (100, False)
    assert link == LinkSection("hub:8000", str(tmp_path / "own" / "ca.crt"), "/etc/k")


@pytest.mark.parametrize(
    ("link", "sentence"),
    [
        ('[link]\nadress = "x"\n', "adress"),
        ('[lnk]\naddress = "x"\n', "lnk"),
        ("[client", "not valid TOML"),
    ],
)
def test_mistakes_in_the_file_are_named(link: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=sentence):
        load_client(written(tmp_path, link), registry())


def test_a_link_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "client.toml"
    path.write_text("link = 3\n")
    with pytest.raises(DpfedError, match="must be a table"):
        load_client(path, registry())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match="cannot be read"):
        load_client(tmp_path / "none.toml", registry())
