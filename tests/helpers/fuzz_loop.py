"""Tries changed files on every reader of foreign bytes, for so many minutes: python tests/helpers/fuzz_loop.py --minutes 8

Each input follows from the reader's name and a number, from 0 on; what is found can be tried again with --only and --from.
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

PATIENCE = 60  # seconds for one input
ROOM = (
    6 << 30
)  # bytes beyond what is mapped at the start: a size in a file must not end the machine


def generator(name: str, number: int) -> Random:
    return Random(int.from_bytes(hashlib.sha256(f"{name}:{number}".encode()).digest()[:8], "big"))


def limit_memory() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, resource.RLIM_INFINITY))


def tried(name: str, number: int, one: Any) -> str | None:
    """What went wrong with an input, as the last lines of its traceback."""
    signal.alarm(PATIENCE)
    try:
        one(generator(name, number))
    except KeyboardInterrupt:
        raise
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", default="", help="readers whose name has this in it")
    parser.add_argument(
        "--from", dest="first", type=int, default=0, help="number of the first input"
    )
    parser.add_argument(
        "--count", type=int, default=0, help="inputs of each reader, whatever the time"
    )
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    from fuzz_cases import CASES, attempt, override

    readers: dict[str, Any] = {
        name: lambda rng, case=case: attempt(case, rng) for name, case in CASES.items()
    }
    readers = {
        name: one for name, one in {**readers, "overrides": override}.items() if given.only in name
    }
    counts, found = dict.fromkeys(readers, 0), []
    limit_memory()
    signal.signal(
        signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError(f"more than {PATIENCE} s"))
    )
    end = time.monotonic() + 60 * given.minutes
    share = 60 * given.minutes / max(1, len(readers)) / 20
    with tempfile.TemporaryDirectory() as cache, contextlib.suppress(KeyboardInterrupt):
        os.environ["DPFED_CACHE"] = cache
        more = True
        while more:
            more = False
            for (
                name,
                one,
            ) in (
                readers.items()
            ):  # in turns of equal time, so that slow readers do not starve the others
                turn = time.monotonic() + share
                while (
                    time.monotonic() < min(turn, end)
                    if not given.count
                    else counts[name] < given.count
                ):
                    trace = tried(name, given.first + counts[name], one)
                    if trace is not None:
                        found.append((name, given.first + counts[name]))
                        print(
                            f"--- {name}, input {found[-1][1]}\n{trace}",
                            file=sys.stderr,
                            flush=True,
                        )
                    counts[name] += 1
                    more = not given.count
    print(json.dumps({"inputs": counts, "all": sum(counts.values()), "found": found}, indent=1))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
