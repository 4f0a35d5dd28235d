"""Fuzz every reader of foreign files: python tests/helpers/fuzz_loop.py --minutes 8

The reader's name and a number determine each input, so --only and --from repeat a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

SECONDS_PER_INPUT = 60
# Memory beyond that at the start: a size in a file must not exhaust the machine.
MEMORY_BYTES = 6 << 30


def generator(name: str, number: int) -> Random:
    return Random(int.from_bytes(hashlib.sha256(f"{name}:{number}".encode()).digest()[:8], "big"))


def limit_memory() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, resource.RLIM_INFINITY))


def tried(name: str, number: int, one: Any) -> str | None:
    """Return the traceback of an input, or None if the reader handled it."""
    signal.alarm(SECONDS_PER_INPUT)
    try:
        one(generator(name, number))
    except KeyboardInterrupt:
        raise
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    return None


def timed_out(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS_PER_INPUT} s")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", default="", help="readers whose name has this in it")
    parser.add_argument(
        "--from", dest="first", type=int, default=0, help="number of the first input"
    )
    parser.add_argument(
        "--count", type=int, default=0, help="inputs of each reader, whatever the time"
    )
    return parser.parse_args()


def readers(only: str) -> dict[str, Any]:
    from fuzz_cases import CASES, attempt, override

    found: dict[str, Any] = {
        name: lambda rng, case=case: attempt(case, rng) for name, case in CASES.items()
    }
    return {name: one for name, one in {**found, "overrides": override}.items() if only in name}


def main() -> int:
    given = options()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    chosen = readers(given.only)
    counts = dict.fromkeys(chosen, 0)
    found: list[tuple[str, int]] = []
    limit_memory()
    signal.signal(signal.SIGALRM, timed_out)
    end = time.monotonic() + 60 * given.minutes
    # Readers take turns of equal time, so that slow ones do not starve the others.
    turn_seconds = 60 * given.minutes / max(1, len(chosen)) / 20

    def more(name: str, turn_end: float) -> bool:
        if given.count:
            return counts[name] < given.count
        return time.monotonic() < min(turn_end, end)

    with tempfile.TemporaryDirectory() as cache, contextlib.suppress(KeyboardInterrupt):
        os.environ["DPFED_CACHE"] = cache
        while any(more(name, end) for name in chosen):
            for name, one in chosen.items():
                turn_end = time.monotonic() + turn_seconds
                while more(name, turn_end):
                    number = given.first + counts[name]
                    trace = tried(name, number, one)
                    if trace is not None:
                        found.append((name, number))
                        print(f"--- {name}, input {number}\n{trace}", file=sys.stderr, flush=True)
                    counts[name] += 1
    print(json.dumps({"inputs": counts, "all": sum(counts.values()), "found": found}, indent=1))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
