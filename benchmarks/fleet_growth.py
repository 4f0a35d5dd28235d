"""How one private local step grows with the cohort and with what is trained: milliseconds, per client, and GiB at the peak.

ViT-Base/224, LoRA on every linear layer, 16 records a client, bf16, captured, not compiled (a compilation for each size would
take longer than all else). Where a cohort does not fit it is computed in several fleets, as `fleet_size = "auto"` does.
Run: python benchmarks/fleet_growth.py [--device cuda] [--out growth.json]; a CPU takes a small ViT and small cohorts.
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

COHORTS, RANKS = (1, 2, 5, 10, 20, 50), (4, 16, 64)


def row_of(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """One cohort in as few fleets as fit, halved as a run would halve it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    fleet = case.clients
    while True:
        part = replace(case, clients=fleet)
        found = measure(
            "private", partial(private, part, device, dtype, False, part.union), device, repeats, 3
        )
        if (
            found.milliseconds is not None
            or fleet == 1
            or "OutOfMemory" not in (found.failed or "")
        ):
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
    cases += [replace(base, rank=r) for r in RANKS if r != base.rank] + [
        replace(base, train="full")
    ]
    rows = []
    for case in cases:
        rows.append(row_of(case, device, args.repeats))
        r = rows[-1]
        if r["ms"] is None:
            print(
                f"S={r['clients']:3} {r['trained']:7} P={r['P']:>11,} failed: {r['failed']}",
                flush=True,
            )
            continue
        peak = "" if r["peak_gib"] is None else f"  peak {r['peak_gib']:6.1f} GiB"
        print(
            f"S={r['clients']:3} {r['trained']:7} P={r['P']:>11,} fleets {r['fleets']}: {r['ms']:8.1f} ms, "
            f"{r['ms_per_client']:7.2f} a client{peak}",
            flush=True,
        )
    if args.out:
        name = torch.cuda.get_device_name(device) if cuda else "CPU"
        args.out.write_text(
            json.dumps({"device": name, "model": base.model, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
