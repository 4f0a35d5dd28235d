"""A round of dpfed beside a round of its peers: all are started, then each computes one round in turn, again and again.

So whatever else the machine has to do disturbs all alike. Wall time and processor time (of the process and all that it has
started) are medians; ratios are those of the medians, with the smallest and largest ratio within one turn.
Run: python benchmarks/peers/run.py --venv opacus=PATH --venv flower=PATH --venv pfl=PATH [--rounds 10] [--threads 1] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODEL = "'torch>=2.6,<2.14' 'transformers>=5.17,<6' 'peft>=0.20,<0.22' safetensors numpy scipy pydantic scikit-learn tomli-w pillow"
PEERS = {
    "opacus": "'opacus>=1.6,<1.7'",
    "flower": "'flwr[simulation]>=1.41,<1.42' 'opacus>=1.6,<1.7'",
    "pfl": "'pfl==0.6.0' 'dp-accounting<0.6'",
}
Line = dict[str, Any]


def install(peer: str) -> list[str]:
    """The commands that make a peer's environment. dpfed itself is handed over by the driver."""
    return [f"python -m venv .venvs/{peer}", f".venvs/{peer}/bin/pip install {MODEL} {PEERS[peer]}"]


class Tool:
    """A script that computes a round whenever it is told to."""

    def __init__(self, name: str, command: list[str], paths: str) -> None:
        self.name = name
        self.result: Line | None = None
        self.failed: str | None = None
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the tool)
        environment = {**os.environ, "PYTHONPATH": paths}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
        )
        self._listen()

    def round(self) -> None:
        if self.failed is None and self.result is None:
            with contextlib.suppress(BrokenPipeError):  # what it said last is read below
                print(file=self._process.stdin, flush=True)
            self._listen()

    def _listen(self) -> None:
        """Until it is ready for the next round, has its result, or is gone."""
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = json.loads(text)
            if "tool" in line:
                self.result = line
            return
        self._process.wait()
        self._said.seek(0)
        last = [line for line in self._said.read().splitlines() if line.strip()][-1:]
        self.failed = (
            last[0].strip()[:200] if last else f"it ended with code {self._process.returncode}"
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._said.close()


def measure(commands: dict[str, list[str]], turns: int, paths: str = "") -> dict[str, Tool]:
    """Starts one after another; then a round of each, and who begins changes."""
    tools: list[Tool] = []
    try:
        for name, command in commands.items():
            started = time.perf_counter()
            tools.append(Tool(name, command, paths))
            say(
                f"{name}: {tools[-1].failed or f'ready after {time.perf_counter() - started:.0f} s'}"
            )
        for turn in range(turns):
            first = turn % len(tools)
            for tool in tools[first:] + tools[:first]:
                tool.round()
            say(f"turn {turn + 1} of {turns}")
        return {tool.name: tool for tool in tools}
    finally:
        for tool in tools:
            tool.close()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def ratios(mine: Line, other: Line, which: int) -> tuple[float, float, float]:
    """How many times dpfed's: ratio of the medians, and the smallest and largest within one turn. 0: wall, 1: processor."""
    key = ("seconds", "cpu_seconds")[which]
    each = [
        theirs[which] / ours[which]
        for ours, theirs in zip(mine["each"], other["each"], strict=True)
    ]
    return other[key] / mine[key], min(each), max(each)


def table(found: dict[str, Line], failed: dict[str, str]) -> list[str]:
    mine = found["dpfed"]
    lines = [
        "| tool | wall time, x dpfed | CPU time, x dpfed | what it does |",
        "|---|---|---|---|",
    ]
    for name, line in found.items():
        version = next(iter(line["versions"].items()))
        cells = ["1", "1"]
        if name != "dpfed":
            cells = [
                "{:.2f} ({:.2f} to {:.2f})".format(*ratios(mine, line, which)) for which in (0, 1)
            ]
        lines.append(f"| {version[0]} {version[1]} | {' | '.join(cells)} | {line['does']} |")
    lines += [f"| {name} | - | - | {why} |" for name, why in failed.items()]
    versions = {k: v for line in reversed(found.values()) for k, v in line["versions"].items()}
    lines += [
        "",
        f"one round of dpfed: {mine['seconds']:.3f} s, {mine['cpu_seconds']:.3f} s of the processor",
    ]
    lines += [", ".join(f"{k} {v}" for k, v in sorted(versions.items()))]
    return lines


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--venv", action="append", default=[], metavar="PEER=PATH", help="a peer's own environment"
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="timed rounds, of which the median counts"
    )
    parser.add_argument("--warm", type=int, default=2, help="rounds before those that are timed")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch; Flower: actors of one thread each"
    )
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    given = parser.parse_args()
    given.pythons = {}
    for item in given.venv:
        name, _, path = item.partition("=")
        python = Path(path, "bin", "python")
        if name not in PEERS or not python.exists():
            parser.error(
                f"--venv {item}: give one of {', '.join(PEERS)} and a folder with bin/python, as pfl=.venvs/pfl"
            )
        given.pythons[name] = str(python.absolute())
    return given


def main() -> None:
    given = parsed()
    import dpfed

    options = [
        "--in-turn",
        "--rounds",
        str(given.rounds),
        "--warm",
        str(given.warm),
        "--threads",
        str(given.threads),
    ]
    pythons = {"dpfed": sys.executable, **given.pythons}
    commands = {
        name: [python, str(HERE / f"{name}_round.py"), *options] for name, python in pythons.items()
    }
    tools = measure(commands, given.warm + given.rounds, str(Path(dpfed.__file__).parents[1]))
    found = {name: tool.result for name, tool in tools.items() if tool.result}
    failed = {name: tool.failed or "no result" for name, tool in tools.items() if not tool.result}
    if "dpfed" not in found:
        sys.exit(f"dpfed's own round failed: {failed['dpfed']}")
    sizes = {name: line["parameters"] for name, line in found.items()}
    if len(set(sizes.values())) > 1:
        sys.exit(f"the tools do not train the same numbers, so nothing can be compared: {sizes}")
    print("\n".join(table(found, failed)))
    for peer in PEERS:
        if peer not in pythons:
            print(
                "\n    ".join(
                    [
                        f"{peer} is not measured; with these, and --venv {peer}=.venvs/{peer}, it is:",
                        *install(peer),
                    ]
                )
            )
    if given.out is not None:
        given.out.write_text(
            json.dumps({"threads": given.threads, "tools": found, "failed": failed}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
