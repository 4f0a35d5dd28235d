"""Time a round with Opacus alone: one client after another, then the mean of their updates.

    python benchmarks/peers/opacus_round.py

There is no federation: nothing is sent or stored, and only each client's accountant is charged.
"""

from __future__ import annotations

import numpy as np
import torch
from common import CLIENTS, COHORT, PrivateClient, Rounds, arguments, digits

DOES = (
    "each record clipped, noise at the client, an RDP accountant in memory; "
    "a plain loop, no federation"
)


def main() -> None:
    rounds = Rounds(arguments(__doc__))
    at = digits()
    client = PrivateClient(at)
    server = [t.detach().clone() for t in at.trained.values()]
    rng = np.random.default_rng(0)
    for _ in range(rounds.total):
        rounds.tick()
        answers = [client.train(int(i), server) for i in rng.choice(CLIENTS, COHORT, replace=False)]
        server = [torch.stack(tensors).mean(0) for tensors in zip(*answers, strict=True)]
    rounds.tick()
    rounds.end("opacus", ("opacus", "torch", "transformers", "peft"), DOES, at.parameters)


if __name__ == "__main__":
    main()
