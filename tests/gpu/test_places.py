"""On a GPU, too, nothing at a place depends on the other places, with every kernel."""

from __future__ import annotations

import pytest
import torch
from test_equality import CASES, Setting

from dpfed.bench.cases import Case
from dpfed.model.per_sample.gradients import PerSample
from dpfed.model.per_sample.places import failing_part, settle_places
from dpfed.training.job.device import device_of

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def ready(case: Case, dtype: torch.dtype) -> tuple[PerSample, torch.Tensor]:
    setting = Setting(case, device_of("cuda"))
    task = setting.parts.built.task
    model = PerSample(setting.model, setting.space, setting.forward, task)
    model.to(dtype)
    return model, setting.theta[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-{case.train}")
def test_places_are_isolated(case: Case, dtype: str) -> None:
    """Without this, exact isolation computes the model one record at a time."""
    model, theta = ready(case, DTYPES[dtype])
    generator = torch.Generator().manual_seed(0)
    for places in (4, 16):
        assert failing_part(model, theta, case.spec, (places, 1), generator) is None
    settle_places(model, theta, case.spec, 1, 512, generator)
    assert model.places > 1
