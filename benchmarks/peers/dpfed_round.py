"""Time a whole round of dpfed: cohort, ledger, 20 steps of 5 clients, aggregation, checkpoint.

    python benchmarks/peers/dpfed_round.py

Every record's gradient is clipped to norm 1 and noised with multiplier 1, by dp-fedadamw.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from common import BATCH, CLIENTS, CLIP, COHORT, LR, SIGMA, STEPS, Rounds, arguments

from dpfed.config import load
from dpfed.registry import registry
from dpfed.training.callbacks.base import Callback
from dpfed.training.rounds import Round
from dpfed.training.run import run

DOES = (
    "each record clipped, noise at the client, one exact ledger on the disk, "
    "checkpoint after every round"
)


def main() -> None:
    given = arguments(__doc__)
    rounds = Rounds(given)
    # The last round evaluates and computes epsilon, which no peer does, so it is not timed.
    last = rounds.total + 1
    settings = (
        f"data.clients={CLIENTS}",
        f"run.participation={COHORT / CLIENTS}",
        f"run.local_steps={STEPS}",
        f"privacy.batch={BATCH}",
        f"privacy.clip={CLIP}",
        f"privacy.sigma={SIGMA}",
        f"algorithm.lr={LR}",
        f"run.rounds={last}",
        f"run.eval_every={last}",
        f"run.threads={given.threads}",
        "run.device=cpu",
    )

    class Observer(Callback):
        def on_round(self, round: Round) -> None:
            if round.t < last:
                rounds.tick()

    with tempfile.TemporaryDirectory() as folder:
        config = load("digits", settings, registry())
        result = run(config, Path(folder) / "run", callbacks=[Observer()])
    rounds.end("dpfed", ("dpfed", "torch", "transformers", "peft"), DOES, result["parameters"])


if __name__ == "__main__":
    main()
