"""Print a hash of the trained vector for one short seeded run of each algorithm.

python experiments/run_hashes.py            print the hashes as JSON
python experiments/run_hashes.py --write    store them in experiments/run_hashes.json
python experiments/run_hashes.py --check    compare with the stored ones; exit code 1 if any differs

A change of structure must keep all hashes. They hold for one machine and one version of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from dpfed.algorithms import REGISTRY
from dpfed.config import load
from dpfed.registry import DEFAULT, registry
from dpfed.training.run import run

STORED = Path(__file__).with_name("run_hashes.json")
COMMON = ["run.device=cpu", "run.threads=1"]
SHORT = ["run.rounds=3", "run.local_steps=2"]
CASES = {
    "default": ["run.rounds=5"],
    "unequal clients": ["data.partition=dirichlet_classwise", *SHORT],
    "exact isolation": ["privacy.isolation=exact", *SHORT],
    "grid noise": ["privacy.grid=true", *SHORT],
    "automatic clipping": ["privacy.clip_mode=automatic", *SHORT],
    "quantile clipping": ["privacy.clip_mode=quantile", *SHORT],
    "fixed batches": ["privacy.sampling=fixed_wor", *SHORT],
    "head": ["model.train=head", *SHORT],
    "full": ["model.train=full", *SHORT],
    "augmentations": ["data.augment=crop_flip", "data.views=2", *SHORT],
}


def trained_hash(settings: list[str]) -> str:
    """Return the SHA-256 of the vector that a seeded run with these settings trains."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        config = load(DEFAULT, [*COMMON, *settings], registry())
        run(config, out=out)
        tensors = load_file(out / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def all_hashes() -> dict[str, str]:
    cases = dict(CASES)
    for name in REGISTRY:
        cases[name] = [f"algorithm.name={name}", *SHORT]
    found = {}
    for name, settings in cases.items():
        try:
            found[name] = trained_hash(settings)
        except Exception as error:
            found[name] = type(error).__name__
        print(f"{name}: {found[name][:60]}", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    found = all_hashes()
    if options.write:
        STORED.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if not options.check:
        print(json.dumps(found, indent=2))
        return 0
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    different = [name for name in found if found[name] != stored.get(name)]
    print(f"{len(different)} of {len(found)} hashes differ: {', '.join(different) or 'none'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
