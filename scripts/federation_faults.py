"""Faults of a federation with real processes on this machine, TLS and keys on: what was tried, what was survived.

    python scripts/federation_faults.py            all of it, in a few minutes
    python scripts/federation_faults.py wire       one part: wire, kills

After each part: the run has all its rounds, the offender is named in the server's log, and every ledger holds what its
client has spent, each round once. Processes are ended by their ids. A full disk is a small one in memory, which only root
can mount; without that it is left out, and said.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from faulty_client import SECRET, YEARS
from loopback_trial import DPFED, Trial, done

from dpfed.privacy.ledger.charge import Row
from dpfed.privacy.ledger.ledger import Ledger

FAULTY = str(Path(__file__).with_name("faulty_client.py"))
LIMIT = 150.0
TIMEOUT = 18.0
TABLE: list[tuple[str, str]] = []


def survived(fault: str, how: str) -> None:
    TABLE.append((fault, how))
    print(f"  {fault}: {how}", flush=True)


def check(holds: bool, what: str, trial: Trial) -> None:
    if not holds:
        logs = "\n".join(
            f"--- {name}\n{trial.log(name)[-3000:]}" for name in ("server", *trial.names)
        )
        raise SystemExit(f"NOT SURVIVED: {what}\n{logs}")


def faulty(trial: Trial, name: str, faults: str) -> subprocess.Popen[bytes]:
    """A client with faults; its log goes on where an earlier process of its name has left it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [
        sys.executable,
        FAULTY,
        faults,
        str(trial.folder),
        str(trial.folder / name / "client.toml"),
    ]
    with (trial.folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    trial.running.append(process)
    return process


def rows_of(trial: Trial, name: str) -> list[Row]:
    with Ledger.open(trial.ledger(name), client=name, readonly=True) as ledger:
        ledger.verify()
        return list(ledger.rows())


def rounds_of(trial: Trial, name: str) -> list[int]:
    return [row.charge.round for row in rows_of(trial, name)]


def left_out(trial: Trial, name: str) -> dict[int, str]:
    """Round -> why, as the server's log has it."""
    found: dict[int, str] = {}
    for line in trial.log("server").splitlines():
        start, _, why = line.partition(f": client '{name}' is left out: ")
        if why and start.startswith("round "):
            found[int(start.removeprefix("round "))] = why
    return found


def finished_rounds(trial: Trial) -> int:
    path = trial.folder / "served" / "metrics.jsonl"
    with suppress(OSError, ValueError):
        return max(int(json.loads(line)["round"]) for line in path.read_text().splitlines())
    return -1


def checkpoint(trial: Trial) -> int:
    found = (trial.folder / "served" / "checkpoint").glob("round-*.json")
    return max((int(path.stem.removeprefix("round-")) for path in found), default=0)


def until(trial: Trial, what: str, holds: object, limit: float = 60.0) -> None:
    assert callable(holds)
    end = time.monotonic() + limit
    while not holds():
        check(time.monotonic() < end, f"waited {limit:g} s for: {what}", trial)
        time.sleep(0.05)


def whole(trial: Trial, rounds: int, honest: list[str]) -> None:
    """The run has all its rounds, and who was honest was charged for each of them, once."""
    result = trial.result()
    check(
        result["state"] == "finished" and result["rounds"] == rounds,
        f"the run ended as {result}",
        trial,
    )
    for name in honest:
        found = rounds_of(trial, name)
        check(found == list(range(1, rounds + 1)), f"{name} was charged for {found}", trial)


def wire(folder: Path) -> None:
    """One client sends what it should not, with the right key and the wrong one; one has a clock of its own, one no room."""
    faults = ["nan", "shape", "old", "header", "pickle", "norm", "raise", "slow"]
    rounds = len(faults) + 6
    more = {
        "run": {"rounds": rounds, "min_clients": 2},
        "federation": {"server": "hub", "timeout": TIMEOUT},
    }
    with small_disk(folder / "clinic-3" / "state") as mounted, Trial(folder, 4, **more) as trial:
        wrong = trial.folder / "wrong"
        done([*DPFED, "keys", str(wrong), "--server", "127.0.0.1", "--clients", "clinic-2"])
        (trial.folder / "stranger").mkdir()
        toml = (trial.folder / "clinic-2" / "client.toml").read_text()
        right, other = (
            str(place / "clinic-2" / "client.key") for place in (trial.folder / "keys", wrong)
        )
        check(right in toml, "the key is not where it was thought", trial)
        (trial.folder / "stranger" / "client.toml").write_text(toml.replace(right, other))
        server, stranger = trial.server(), trial.client("stranger")
        trial.client("clinic-0")
        faulty(trial, "clinic-1", "clock")
        faulty(trial, "clinic-2", ",".join(["gate", *faults]))
        trial.client("clinic-3")
        until(trial, "round 1 without clinic-2", lambda: 1 in left_out(trial, "clinic-2"), 90)
        until(
            trial,
            "the stranger turned away",
            lambda: "Failed to activate" in trial.log("stranger"),
            60,
        )
        (trial.folder / "gate").touch()
        check(not trial.ledger("stranger").exists(), "a stranger was asked", trial)
        stranger.terminate()
        stranger.wait(20)
        survived(
            "a client with a wrong key", f"turned away; round 1: {left_out(trial, 'clinic-2')[1]}"
        )
        until(trial, "clinic-3 taking part", lambda: trial.ledger("clinic-3").exists())
        missed = fill(trial, "clinic-3") if mounted else set()
        trial.wait(server, LIMIT)
        whole(trial, rounds, ["clinic-0", "clinic-1"])
        why = left_out(trial, "clinic-2")
        charged = rounds_of(trial, "clinic-2")
        wanted = {
            "nan": "not finite",
            "shape": "shape",
            "old": "the reply is for round",
            "header": "claims a header of 2147483648",
            "pickle": "claims a header of",
            "norm": "no honest one passes",
            "raise": "it failed, and its own log says why",
            "slow": "no answer within",
        }
        named: set[int] = set()
        for fault in faults:
            those = [
                t
                for t, text in why.items()
                if wanted[fault] in text and (t in charged) == (fault != "raise")
            ]
            found = [t for t in those if t not in named]
            check(bool(found), f"{fault} is not in {why}", trial)
            named.add(found[0])
            survived(f"a client that sends: {fault}", f"round {found[0]}: {why[found[0]]}")
        check(charged == sorted(set(charged)), f"clinic-2 was charged for {charged}", trial)
        check(
            any(t in charged and t not in why for t in range(1, rounds + 1)),
            "clinic-2 was never used again",
            trial,
        )
        check(not (trial.folder / "trapped").exists(), "something was unpickled", trial)
        everything = trial.log("server") + (
            trial.folder / ".served.flower" / "superlink.log"
        ).read_text(errors="replace")
        check(SECRET not in everything, "a client's private words reached the server", trial)
        ahead = min(row.time for row in rows_of(trial, "clinic-1"))
        check(ahead > time.time() + YEARS / 2, "the clock was not ahead", trial)
        survived(
            "a client whose clock is ten years ahead",
            f"{len(rows_of(trial, 'clinic-1'))} rounds, each charged once",
        )
        if mounted:
            disk(trial, "clinic-3", missed, rounds)
        else:
            TABLE.append(
                ("a full disk at a client's ledger", "not tried: only root can mount a small disk")
            )


@contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    path.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True
    )
    try:
        yield made.returncode == 0
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", str(path)], check=True)


def fill(trial: Trial, name: str) -> set[int]:
    """No room on the disk of a client's ledger until two rounds have gone on without it; which rounds it had missed before."""
    filler, missed = trial.folder / name / "state" / "filler", set(left_out(trial, name))
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    until(trial, f"{name} left out", lambda: len(left_out(trial, name).keys() - missed) >= 2, 60)
    filler.unlink()
    return missed


def disk(trial: Trial, name: str, missed: set[int], rounds: int) -> None:
    why, charged = left_out(trial, name), rounds_of(trial, name)
    used = [t for t in range(1, rounds + 1) if t not in why]
    full = {t: text for t, text in why.items() if t not in missed}
    check(
        all("its own log says why" in text or "refused" in text for text in full.values()),
        str(full),
        trial,
    )
    check(set(used) <= set(charged), f"used {used}, charged {charged}", trial)
    check(charged == sorted(set(charged)), f"{name} was charged for {charged}", trial)
    check(max(used) == rounds, f"{name} did not come back: {why}", trial)
    survived(
        "a full disk at a client's ledger",
        f"rounds {sorted(full)} go on without it, then it is back; all in its ledger",
    )


def kills(folder: Path) -> None:
    """A client killed in mid-round; the server killed between rounds, and within one."""
    rounds = 6
    more = {
        "algorithm": {"name": "dp-scaffold", "lr": 0.05},
        "run": {"rounds": rounds, "min_clients": 2},
        "federation": {"server": "hub", "timeout": 60.0},
    }
    with Trial(folder, **more) as trial:
        server = trial.server()
        for name in ("clinic-0", "clinic-1"):
            trial.client(name)
        victim = faulty(trial, "clinic-2", "ok,hang")
        until(trial, "a charge of clinic-2 without a message", (folder / "hanging").exists, 90)
        victim.kill()
        victim.wait()
        t = finished_rounds(trial) + 1
        spent = rounds_of(trial, "clinic-2")
        check(spent[-1] == t, f"the charge of round {t} is not in {spent}", trial)
        faulty(trial, "clinic-2", "ok,wait")
        until(trial, f"round {t} without clinic-2", lambda: t in left_out(trial, "clinic-2"), 90)
        check(
            "not after round" in left_out(trial, "clinic-2")[t],
            str(left_out(trial, "clinic-2")),
            trial,
        )
        survived(
            "a client killed in mid-round",
            f"round {t} goes on; started anew: {left_out(trial, 'clinic-2')[t]}",
        )
        until(trial, "clinic-2 in the next round", (folder / "waiting").exists, 60)
        cut = finished_rounds(trial) + 1
        until(
            trial,
            "the others' answers",
            lambda: all(rounds_of(trial, n)[-1] == cut for n in ("clinic-0", "clinic-1")),
            30,
        )
        server.send_signal(signal.SIGKILL)
        server.wait()
        (folder / "go").touch()
        until(
            trial,
            "clinic-2 storing its message",
            lambda: rounds_of(trial, "clinic-2")[-1] == cut,
            30,
        )
        server = trial.server("--resume")
        until(trial, f"round {cut} after all", lambda: checkpoint(trial) >= cut, 120)
        check(
            cut not in left_out(trial, "clinic-2"), f"clinic-2 was left out of round {cut}", trial
        )
        for name in trial.names:
            check(
                rounds_of(trial, name).count(cut) == 1, f"{name} paid twice for round {cut}", trial
            )
        survived(
            "a server killed within a round",
            f"round {cut} is asked for again, three stored messages, none paid twice",
        )
        until(trial, "another round", lambda: checkpoint(trial) >= cut + 1, 60)
        server.send_signal(signal.SIGKILL)
        server.wait()
        after = checkpoint(trial)
        server = trial.server("--resume")
        trial.wait(server, LIMIT)
        whole(trial, rounds, ["clinic-0", "clinic-1"])
        found = rounds_of(trial, "clinic-2")
        check(found == list(range(1, rounds + 1)), f"clinic-2 was charged for {found}", trial)
        survived(
            "a server killed between rounds",
            f"goes on after round {after}; {rounds} rounds, each charged once to each",
        )


def main() -> None:
    parts = {"wire": wire, "kills": kills}
    wanted = sys.argv[1:] or list(parts)
    began = time.monotonic()
    for name in wanted:
        start = time.monotonic()
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory(prefix="dpfed-faults-") as folder:
            parts[name](Path(folder))
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
    print(
        f"\nfaults tried: {len(TABLE)}, survived: {sum('not tried' not in how for _, how in TABLE)}, ",
        end="",
    )
    print(f"{time.monotonic() - began:.0f} s\n\n| fault | what happened |\n|---|---|")
    for fault, how in TABLE:
        print(f"| {fault} | {how} |")


if __name__ == "__main__":
    main()
