"""Time a round of Flower's simulation on ray: FedAvg with Opacus in the clients.

    python benchmarks/peers/flower_round.py

Each actor builds the model once, unlike in Flower's own examples; this saves tenths of a second per
client. The accountant is new in every call, as in Flower's example with Opacus.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = str(Path(__file__).parent)
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A lower priority would make the actors wait on a busy machine.
    "RAY_worker_niceness": "0",
}
# Flower and ray read these on import. The actors inherit them and find the modules beside this
# file.
PATHS = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
os.environ.update(QUIET, OMP_NUM_THREADS="1", PYTHONPATH=PATHS)

from common import CLIENTS, COHORT, Rounds, arguments, digits  # noqa: E402
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402

DOES = (
    "each record clipped, noise at the client (Opacus), messages between processes on ray; "
    "an RDP accountant in memory"
)


def clients() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        import common
        import torch

        # An actor keeps its client in this module.
        own: Any = vars(common).get("own_client")
        if own is None:
            torch.set_num_threads(1)
            own = common.own_client = common.PrivateClient(common.digits())  # type: ignore[attr-defined]
        names = list(own.at.trained)
        start = message.content["arrays"].to_torch_state_dict()
        client = int(context.node_config["partition-id"])
        trained = own.train(client, [start[name] for name in names])
        arrays = ArrayRecord(dict(zip(names, trained, strict=True)))
        counts = MetricRecord({"num-examples": len(own.at.clients[client][1])})
        return Message(content=RecordDict({"arrays": arrays, "metrics": counts}), reply_to=message)

    return app


def server(rounds: Rounds) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        # Flower calls this before the first round and after each.
        def between(t: int, arrays: ArrayRecord) -> None:
            rounds.tick()

        start = ArrayRecord({name: t.detach().clone() for name, t in digits().trained.items()})
        strategy = FedAvg(
            COHORT / CLIENTS, 0.0, min_train_nodes=COHORT, min_available_nodes=CLIENTS
        )
        strategy.start(grid, start, num_rounds=rounds.total, evaluate_fn=between)

    return app


def main() -> None:
    given = arguments(__doc__)
    rounds = Rounds(given)
    with TemporaryDirectory() as folder:
        os.environ["FLWR_HOME"] = folder
        resources = {
            "init_args": {"num_cpus": given.threads},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        }
        run_simulation(server(rounds), clients(), num_supernodes=CLIENTS, backend_config=resources)
    if len(rounds.seen) < rounds.total:
        sys.exit("Flower's simulation ended early: what it said is on stderr")
    rounds.end(
        "flower",
        ("flwr", "ray", "opacus", "torch", "transformers", "peft"),
        DOES,
        digits().parameters,
    )


if __name__ == "__main__":
    main()
