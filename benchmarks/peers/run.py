"""Compare a round of dpfed with a round of its peers, which compute one round in turn.

    python benchmarks/peers/run.py --venv opacus=PATH --venv flower=PATH --venv pfl=PATH

Other work on the machine therefore disturbs all of them alike. Wall time and processor time (with
all child processes) are medians. Ratios are those of the medians, with the smallest and the
largest ratio within one turn.
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
MODEL = (
    "'torch>=2.6,<2.14' 'transformers>=5.17,<6' 'peft>=0.20,<0.22' "
    "safetensors numpy scipy pydantic scikit-learn tomli-w pillow"
)
PEERS = {
    "opacus": "'opacus>=1.6,<1.7'",
    "flower": "'flwr[simulation]>=1.41,<2' 'opacus>=1.6,<1.7'",
    "pfl": "'pfl==0.6.0' 'dp-accounting<0.6'",
}
Line = dict[str, Any]


def install(peer: str) -> list[str]:
    """Return the commands that make a peer's environment; PYTHONPATH adds dpfed."""
    return [f"python -m venv .venvs/{peer}", f".venvs/{peer}/bin/pip install {MODEL} {PEERS[peer]}"]


class Tool:
    """A script that computes a round for each line that it gets."""

    def __init__(self, name: str, command: list[str], paths: str) -> None:
        self.name = name
        self.result: Line | None = None
        self.failed: str | None = None
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = {**os.environ, "PYTHONPATH": paths}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment,
        )
        self._listen()

    def round(self) -> None:
        if self.failed is None and self.result is None:
            with contextlib.suppress(BrokenPipeError):
                print(file=self._process.stdin, flush=True)
            self._listen()

    def _listen(self) -> None:
        """Wait until the tool is ready for the next round, has its result, or has ended."""
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = json.loads(text)
            if "tool" in line:
                self.result = line
            return
        self._process.wait()
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr if line.strip()]
        self.failed = f"it ended with code {self._process.returncode}"
        if lines:
            self.failed = lines[-1][:200]

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._stderr.close()


def measure(commands: dict[str, list[str]], turns: int, paths: str = "") -> dict[str, Tool]:
    """Start the tools, then compute rounds in turn; each turn another tool begins."""
    tools: list[Tool] = []
    try:
        for name, command in commands.items():
            started = time.perf_counter()
            tool = Tool(name, command, paths)
            tools.append(tool)
            seconds = time.perf_counter() - started
            say(f"{name}: {tool.failed or f'ready after {seconds:.0f} s'}")
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
    """Return the ratio to dpfed of the medians, and the smallest and largest within one turn.

    which  0: wall time, 1: processor time
    """
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
        f"one round of dpfed: {mine['seconds']:.3f} s, "
        f"{mine['cpu_seconds']:.3f} s of the processor",
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
                f"--venv {item}: give one of {', '.join(PEERS)} "
                "and a folder with bin/python, as pfl=.venvs/pfl"
            )
        given.pythons[name] = str(python.absolute())
    return given


def main() -> None:
    given = parsed()
    import dpfed

    options = ["--in-turn"]
    for name in ("rounds", "warm", "threads"):
        options += [f"--{name}", str(getattr(given, name))]
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
            hint = f"{peer} is not measured; with these, and --venv {peer}=.venvs/{peer}, it is:"
            print("\n    ".join([hint, *install(peer)]))
    if given.out is not None:
        figures = {"threads": given.threads, "tools": found, "failed": failed}
        given.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
