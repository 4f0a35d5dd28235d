"""One set of runs for all tests of reports; they are read, never written to."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_case import make_runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_runs(tmp_path_factory.mktemp("runs"))
