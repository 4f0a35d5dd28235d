"""Certificates and site folders: what has expired or is used twice is named and refused."""

from __future__ import annotations

import datetime
import json
from datetime import UTC, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpfed.cli.main import app
from dpfed.errors import DpfedError
from dpfed.federation import keys
from dpfed.federation.certificates import check_server, check_valid, validity
from dpfed.federation.client.storage import claim
from dpfed.federation.client_config import LinkSection, load_client
from dpfed.federation.links import check_link
from dpfed.registry import registry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.make_all(tmp_path / "keys", "hub.example.org", ["clinic-a"], days=40, server="hub")
    return tmp_path / "keys"


@pytest.fixture
def expired(tmp_path: Path) -> Path:
    """Return a folder of keys that are no longer valid."""
    keys.make_all(tmp_path / "old", "hub.example.org", ["clinic-a"], days=0)
    return tmp_path / "old"


def test_valid_certificates_are_accepted(folder: Path) -> None:
    check_server(folder)
    check_valid(folder / "clinic-a" / "ca.crt")
    now = datetime.datetime.now(UTC)
    assert "in 39 days" in validity(folder / "ca.crt").sentence(now)
    assert "renew it soon" in validity(folder / "ca.crt").sentence(now + timedelta(days=20))


def test_expired_certificates_are_refused_at_both_ends(expired: Path) -> None:
    with pytest.raises(DpfedError, match=r"ca\.crt expired on .*dpfed keys"):
        check_server(expired)
    site = expired / "clinic-a"
    link = LinkSection("hub:1", str(site / "ca.crt"), str(site / "client.key"))
    with pytest.raises(DpfedError, match=r"ca\.crt expired on"):
        check_link(link, insecure=False)


def test_a_certificate_of_the_future_and_no_certificate_are_named(folder: Path) -> None:
    before = datetime.datetime.now(UTC) - timedelta(days=3)
    assert "is valid from" in str(validity(folder / "ca.crt").problem(before))
    with pytest.raises(DpfedError, match="not a certificate"):
        validity(folder / "server.key")
    (folder / "server.crt").unlink()
    with pytest.raises(DpfedError, match=r"server\.crt is not there"):
        check_server(folder)


def test_the_doctor_says_when_certificates_expire(folder: Path, expired: Path) -> None:
    found = CliRunner().invoke(app, ["doctor", "--keys", str(folder), "--json"])
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout.splitlines()[-1])
    assert [each["days_left"] for each in result["certificates"]] == [39, 39]
    assert "server.crt expires on" in found.stdout
    old = CliRunner().invoke(app, ["doctor", "--keys", str(expired)])
    assert "server.crt expired on" in old.stdout


def test_a_site_folder_has_what_its_site_needs(folder: Path) -> None:
    site = folder / "clinic-a"
    assert {path.name for path in site.iterdir()} == {
        "README",
        "ca.crt",
        "client.key",
        "client.toml",
    }
    for readme in (site / "README", folder / "README"):
        assert len(readme.read_text().splitlines()) == 2
    text = (site / "client.toml").read_text()
    with pytest.raises(DpfedError, match=r"lacks policy\.records"):
        load_client(site / "client.toml", registry())
    for old, new in (
        ("# records = 470", "records = 470"),
        ("# max_epsilon", "max_epsilon"),
        ('# name = "csv"', 'name = "digits"'),
        ('# name = "glyph', 'name = "glyph'),
    ):
        assert old in text
        text = text.replace(old, new)
    (site / "client.toml").write_text(text)
    config, link = load_client(site / "client.toml", registry())
    assert (config.client.name, config.client.servers) == ("clinic-a", ("hub",))
    assert str(check_link(link, insecure=False)) == "hub.example.org:8000"
    assert Path(config.client.state) == site / "state"


def test_a_site_folder_is_used_by_one_client_at_a_time(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with claim(state), pytest.raises(DpfedError, match="in use by another `dpfed client`"):
        claim(state).__enter__()
    with claim(state):
        assert (state / "in-use.lock").stat().st_mode & 0o777 == 0o600
