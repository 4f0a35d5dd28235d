"""Losses and predictions of the tasks: values by hand, and per-record gradients by autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpfed.errors import DpfedError
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.gradients import PerSample, call, trainable
from dpfed.model.task import MULTILABEL, InputSpec, Task, regression, task_of, weighted

YEARS = regression(2000.0, 10.0)
SCORES = torch.tensor([[0.0, math.log(3)], [-1.0, 2.0]])
FLAGS = torch.tensor([[1, 0], [0, 1]], dtype=torch.uint8)


def test_the_loss_of_a_number_is_the_squared_standardised_error() -> None:
    scores = torch.tensor([[0.5], [-1.0]])
    labels = torch.tensor([2010.0, 1990.0], dtype=torch.float64)
    assert YEARS.loss(scores, labels).tolist() == pytest.approx([0.25, 0.0])
    assert YEARS.predict(scores).tolist() == [2005.0, 1990.0]
    # A torch module may return one number for each record, without a column.
    assert torch.equal(YEARS.loss(scores[:, 0], labels), YEARS.loss(scores, labels))
    assert YEARS.correct is None


def test_a_large_center_costs_no_digits() -> None:
    task = regression(1.7e9, 10.0)
    labels = torch.tensor([1.7e9 + 5], dtype=torch.float64)
    assert task.loss(torch.zeros(1, 1), labels).item() == pytest.approx(0.25)


def test_the_loss_of_several_labels_is_their_mean_cross_entropy() -> None:
    """Sigmoid cross-entropies: log 2 and log 4; log(1 + 1/e) and log(1 + 1/e²)."""
    first = (math.log(2) + math.log(4)) / 2
    second = (math.log1p(math.exp(-1)) + math.log1p(math.exp(-2))) / 2
    assert MULTILABEL.loss(SCORES, FLAGS).tolist() == pytest.approx([first, second])
    assert MULTILABEL.correct is not None
    # A score of 0 is a no, so the first record has two wrong answers.
    assert MULTILABEL.correct(SCORES, FLAGS).tolist() == [0.0, 1.0]
    assert MULTILABEL.predict(SCORES)[0].tolist() == pytest.approx([0.5, 0.75])


def test_weights_multiply_the_loss_of_each_label() -> None:
    found = weighted(MULTILABEL, (2.0, 0.5), 2).loss(SCORES, FLAGS)
    assert float(found[0]) == pytest.approx((2 * math.log(2) + 0.5 * math.log(4)) / 2)
    with pytest.raises(DpfedError, match="is for classes"):
        weighted(YEARS, (1.0,), 1)


def test_the_kind_of_label_chooses_the_task() -> None:
    spec = InputSpec("features", "features", (4,), 1, task="regress", center=3.0, scale=2.0)
    assert task_of(spec).predict(torch.ones(1, 1)).tolist() == [5.0]
    assert task_of(InputSpec("text", "input_ids", (4,), 3, task="multilabel")) is MULTILABEL


@pytest.mark.parametrize(("task", "outputs"), [(YEARS, 1), (MULTILABEL, 3)])
def test_per_record_gradients_equal_a_loop_over_records(task: Task, outputs: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs))
    tensors = trainable(model)
    space = space_of(tensors)
    theta = space.flatten(tensors).detach()
    x, labels = torch.randn(6, 5), task.examples(6, outputs)

    def alone(row: int) -> np.ndarray:
        model.zero_grad()
        task.loss(model(x[row : row + 1]), labels[row : row + 1]).sum().backward()
        return np.concatenate([p.grad.flatten().numpy() for p in model.parameters()])

    expected = np.stack([alone(row) for row in range(6)])

    def forward(net: nn.Module, weights: dict[str, Tensor], inputs: object) -> Tensor:
        return call(net, weights, {"input": x})

    ready = PerSample(model, space, forward, task)
    client = torch.zeros(6, dtype=torch.int64)
    found = torch.cat(ready.grads(theta.unsqueeze(0), client, {"x": x}, labels), 1)
    assert found.numpy() == pytest.approx(expected, abs=1e-5)
    assert np.abs(expected).max() > 0.01
