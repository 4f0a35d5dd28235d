"""Time a round of pfl's simulation: FederatedAveraging with local AdamW and central noise.

    python benchmarks/peers/pfl_round.py

The guarantee differs: pfl clips a client's whole update and a trusted server adds noise to the sum
(user-level DP). Its local steps are not private. Batches are 20 fixed ones of 16 records.
"""

from __future__ import annotations

from typing import Any

import torch
from common import (
    BATCH,
    CLIENTS,
    CLIP,
    COHORT,
    LR,
    SIGMA,
    STEPS,
    WEIGHT_DECAY,
    Digits,
    Rounds,
    arguments,
    digits,
)
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch import Tensor, nn

DOES = (
    "each client's update clipped, noise at a trusted server; "
    "records are not protected, local steps are non-private"
)


class Model(nn.Module):
    """The digits model with the two functions that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.inner(pixel_values=pixels).logits, labels)

    @torch.no_grad()
    def metrics(self, pixels: Tensor, labels: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(self.loss(pixels, labels)) * len(labels), len(labels))}


class Watch(TrainingProcessCallback):  # type: ignore[type-arg]
    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.rounds.tick()
        return Metrics()

    def after_central_iteration(
        self, metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.rounds.tick()
        return False, Metrics()


def users(at: Digits) -> FederatedDataset:
    """Return each client's records, repeated for all of its steps, since pfl makes one pass."""

    def repeated(client: int) -> Dataset:
        pixels, labels = at.clients[client]
        passes = 1 + STEPS * BATCH // len(labels)
        rows = torch.cat([torch.randperm(len(labels)) for _ in range(passes)])[: STEPS * BATCH]
        return Dataset(raw_data=[pixels[rows], labels[rows]], user_id=str(client))

    held = [repeated(client) for client in range(CLIENTS)]
    return FederatedDataset(
        lambda client: held[client], get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    )


def main() -> None:
    rounds = Rounds(arguments(__doc__))
    at = digits()
    at.model.train()
    model = PyTorchModel(
        model=Model(at.model),
        local_optimizer_create=lambda all, lr: torch.optim.AdamW(
            [p for p in all if p.requires_grad], lr=lr, weight_decay=WEIGHT_DECAY
        ),
        central_optimizer=torch.optim.SGD(list(at.trained.values()), lr=1.0),
    )
    mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, SIGMA))
    data = users(at)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds.total,
            evaluation_frequency=10**9,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[mechanism]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH
        ),
        callbacks=[Watch(rounds)],
    )
    rounds.end("pfl", ("pfl", "torch", "transformers", "peft"), DOES, at.parameters)


if __name__ == "__main__":
    main()
