"""The page of a running run: changes arrive, other hosts are refused, no other file is served."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpfed.errors import DpfedError
from dpfed.report.live_page import open_server
from dpfed.report.page import read_report, render


@pytest.fixture
def live(runs: list[Path], tmp_path: Path) -> Path:
    """Return a running run that has completed round 1."""
    run = shutil.copytree(runs[0], tmp_path / "live")
    name = json.loads((run / "run.json").read_text())["run"]
    (run / "run.json").write_text(
        json.dumps({"run": name, "state": "running", "release": "simulation: not for release"})
    )
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    (tmp_path / "rest").write_text("".join(lines[2:]))
    return run


@pytest.fixture
def port(live: Path) -> Iterator[int]:
    with open_server([live], 0, lambda: read_report([live])) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()


def get(port: int, path: str, host: str | None = None, method: str = "GET") -> tuple[int, bytes]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    link.request(method, path, headers={"Host": host} if host else {})
    answer = link.getresponse()
    content = answer.read()
    link.close()
    return answer.status, content


def test_a_new_line_of_metrics_changes_the_page(port: int, live: Path) -> None:
    status, page = get(port, "/")
    assert status == 200
    assert b"round 1 of 3" in page
    version = page.split(b'data-version="', 1)[1].split(b'"', 1)[0].decode()
    assert get(port, f"/state.json?seen={version}") == (204, b"")
    with (live / "metrics.jsonl").open("a") as file:
        file.write((live.parent / "rest").read_text())
    status, content = get(port, f"/state.json?seen={version}")
    state = json.loads(content)
    assert status == 200
    assert state["version"] != version
    assert "round 3 of 3" in state["html"]
    assert state["figures"]["accuracy"]["data"][0]["x"] == [0, 1, 2, 3]
    assert get(port, f"/state.json?seen={state['version']}")[0] == 204


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1:1", ""]
)
def test_a_request_for_another_host_is_refused(port: int, host: str) -> None:
    assert get(port, "/", host or "x")[0] == 403


def test_localhost_is_answered(port: int) -> None:
    assert get(port, "/state.json?seen=", f"localhost:{port}")[0] == 200


@pytest.mark.parametrize(
    "path", ["/run.json", "/../run.json", "/ledger.sqlite", "/static/", "/%2e%2e/x"]
)
def test_no_other_file_is_served(port: int, path: str) -> None:
    assert get(port, path)[0] == 404


def test_only_get_requests_are_answered(port: int) -> None:
    assert get(port, "/", method="POST")[0] == 501


def test_a_port_in_use_is_one_sentence(port: int, live: Path) -> None:
    with pytest.raises(DpfedError, match="choose another --port"):
        open_server([live], port, lambda: read_report([live]))


def cards_of(page: str) -> dict[str, tuple[str, str]]:
    """Return value and note of each number of the headline, by its name."""
    found = re.findall(
        r'<dt>(.*?)</dt><dd class="value">(.*?)</dd><dd class="under">(.*?)</dd>', page
    )
    return {name: (value, note) for name, value, note in found}


@pytest.mark.parametrize("public", [False, True])
def test_a_running_run_shows_spent_and_planned_epsilon(
    live: Path, runs: list[Path], public: bool
) -> None:
    page = render(read_report([live], public))
    shown = cards_of(page)
    value, note = shown["Epsilon spent so far"]
    rows = [json.loads(line) for line in (live / "metrics.jsonl").read_text().splitlines()]
    planned = json.loads((runs[0] / "run.json").read_text())["epsilon"]["server_worst"]
    assert "after round 1 of 3" in note
    assert float(value) < planned
    assert public or float(value) == pytest.approx(rows[-1]["epsilon_server_max"], abs=0.02)
    assert ("the client that spent most" in note) is not public
    assert float(shown["Epsilon planned, server"][0]) == pytest.approx(planned, abs=0.02)
    assert "Epsilon planned, third party" in shown
    assert "Epsilon, server" not in shown
    assert "What the planned epsilon means" in page


def test_a_finished_run_has_spent_its_epsilon(runs: list[Path]) -> None:
    shown = cards_of(render(read_report([runs[0]])))
    assert "Epsilon, server" in shown
    assert not any("planned" in name or "so far" in name for name in shown)


def test_the_table_of_runs_says_which_epsilon_is_planned(live: Path, runs: list[Path]) -> None:
    page = render(read_report([live, runs[2]]))
    assert re.search(
        r"epsilon in the table is the planned one; [\d.]+ is spent after round 1 of 3", page
    )
