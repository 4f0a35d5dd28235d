"""Measure time and memory of one private local step for several cohorts and sizes of adapters.

    python benchmarks/fleet_growth.py [--device cuda] [--out growth.json]

ViT-Base/224, LoRA on every linear layer, 16 records a client, bf16, captured, not compiled, since
one compilation per size would take too long. A cohort that does not fit is computed in several
fleets, as `fleet_size = "auto"` does. A CPU takes a small ViT and small cohorts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpfed.bench.cases import CPU, GPU, Case
from dpfed.bench.run import measure
from dpfed.bench.steps import private
from dpfed.training.job.device import device_of

COHORTS = (1, 2, 5, 10, 20, 50)
RANKS = (4, 16, 64)


def row_of(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """Measure one cohort in as few fleets as fit; the fleet is halved as in a run."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    fleet = case.clients
    while True:
        part = replace(case, clients=fleet)
        step = partial(private, part, device, dtype, False, part.union)
        found = measure("private", step, device, repeats, 3)
        too_large = found.milliseconds is None and "OutOfMemory" in (found.failed or "")
        if fleet == 1 or not too_large:
            break
        fleet = -(-fleet // 2)
    fleets = -(-case.clients // fleet)
    total = None if found.milliseconds is None else fleets * found.milliseconds
    return {
        "clients": case.clients,
        "trained": case.train if case.train == "full" else f"r = {case.rank}",
        "P": case.build().space.size,
        "fleets": fleets,
        "ms": None if total is None else round(total, 2),
        "ms_per_client": None if total is None else round(total / case.clients, 2),
        "peak_gib": None if found.peak is None else round(found.peak, 2),
        "failed": found.failed,
    }


def line(row: dict[str, Any]) -> str:
    start = f"S={row['clients']:3} {row['trained']:7} P={row['P']:>11,}"
    if row["ms"] is None:
        return f"{start} failed: {row['failed']}"
    peak = "" if row["peak_gib"] is None else f"  peak {row['peak_gib']:6.1f} GiB"
    times = f"{row['ms']:8.1f} ms, {row['ms_per_client']:7.2f} a client"
    return f"{start} fleets {row['fleets']}: {times}{peak}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = device_of(args.device)
    cuda = device.type == "cuda"
    base = (GPU if cuda else CPU)[0]
    cases = [replace(base, clients=s) for s in (COHORTS if cuda else COHORTS[:3])]
    cases += [replace(base, rank=r) for r in RANKS if r != base.rank]
    cases.append(replace(base, train="full"))
    rows = []
    for case in cases:
        rows.append(row_of(case, device, args.repeats))
        print(line(rows[-1]), flush=True)
    if args.out:
        name = torch.cuda.get_device_name(device) if cuda else "CPU"
        found = {"device": name, "model": base.model, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
