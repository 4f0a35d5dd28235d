"""Kernels are used where triton works, and nothing depends on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from dpfed import kernels


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    works = kernels.works
    works.cache_clear()
    yield
    works.cache_clear()


def test_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreted", False)
    monkeypatch.setattr(kernels, "works", lambda device: pytest.fail("it was tried"))
    assert not kernels.usable(torch.zeros(1))


def test_without_triton_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "dpfed.kernels.lora", None)  # type: ignore[arg-type]
    monkeypatch.delattr("dpfed.kernels.lora", raising=False)
    assert not kernels.works(torch.device("cpu"))
    assert not kernels.works(torch.device("cpu"))
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    assert "longer" in caplog.text


def test_a_kernel_that_fails_or_errs_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    from dpfed.kernels import lora

    assert kernels.works(torch.device("cpu")) is not torch.cuda.is_available()  # by the interpreter, where no GPU is
    kernels.works.cache_clear()
    monkeypatch.setattr(lora, "two_products", lambda x, *rest: 2 * x)
    assert not kernels.works(torch.device("cpu"))
    kernels.works.cache_clear()

    def fail(*args: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(lora, "two_products", fail)
    assert not kernels.works(torch.device("cpu"))
    assert "Failed to find C compiler." in caplog.text
    assert "specify" not in caplog.text


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFED_KERNELS", "0")
    assert not kernels.works(torch.device("cpu"))
