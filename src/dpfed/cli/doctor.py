"""`dpfed doctor`: what is installed, what it can compute on, what is missing and how to get it. It never fails.

With a client.toml it also compares the declared numbers of records with the data, for the operator.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfed.text import counted

PURPOSE = {
    "text": "the small language model `minilm`",
    "parquet": "tables in Parquet",
    "hub": "data sets from the Hugging Face hub",
    "flower": "federations over a network",
    "mlflow": 'run.trackers = ["mlflow"]',
    "tensorboard": 'run.trackers = ["tensorboard"]',
    "wandb": 'run.trackers = ["wandb"]',
}
# Tools to change dpfed itself: no user misses them.
DEVELOPER_EXTRAS = frozenset({"dev", "docs"})


def doctor(
    client: Annotated[
        Path | None,
        typer.Argument(help="a client.toml whose declared numbers are compared with its data"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object on the last line of stdout")
    ] = False,
) -> None:
    """Versions, devices and optional packages of this installation, and what is missing. Example: dpfed doctor"""
    found = examine()
    if client is not None:
        found["client"] = guarded(lambda: declared(client))
    for line in lines(found):
        print(line)
    if as_json:
        print(json.dumps(found))


def examine() -> dict[str, Any]:
    """Each part by itself: one that cannot be found out says why and does not hide the others."""
    parts: dict[str, Callable[[], Any]] = {
        "versions": own_versions,
        "devices": devices,
        "packages": packages,
        "extras": extras,
        "cache": cache,
        "advice": advice,
    }
    return {name: guarded(part) for name, part in parts.items()}


def guarded(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception as error:  # a broken installation is what this command is for
        return {
            "failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        }


def own_versions() -> dict[str, str]:
    import dpfed

    return {
        "dpfed": dpfed.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def devices() -> list[str]:
    import torch

    found = [f"cpu: {counted(os.cpu_count() or 1, 'core')}"]
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        found.append(
            f"cuda:{i}: {facts.name}, {facts.total_memory / 2**30:.0f} GiB, kernels {kernels_on(i)}"
        )
    return found


def kernels_on(gpu: int) -> str:
    import torch

    from dpfed.accel import works

    if os.environ.get("DPFED_KERNELS") == "0":
        return "are switched off"
    try:
        return "work" if works(torch.device("cuda", gpu)) else "do not work"
    except torch.OutOfMemoryError:
        return "were not tried, as its memory is full"


def requirements() -> list[tuple[str, str]]:
    """(package, extra) of everything that is declared; the extra is empty for what is always needed."""
    out = []
    declared = metadata.requires("dpfed") if version_of("dpfed") else None
    for line in declared or []:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", line)
        if name:
            out.append((name.group(), extra.group(1) if extra else ""))
    return out


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def packages() -> dict[str, str | None]:
    return {package: version_of(package) for package, extra in requirements() if not extra}


def extras() -> dict[str, dict[str, str | None]]:
    out: dict[str, dict[str, str | None]] = {}
    for package, extra in requirements():
        if extra and extra not in DEVELOPER_EXTRAS:
            out.setdefault(extra, {})[package] = version_of(package)
    return out


def cache() -> str:
    from dpfed.data.cache import cache_folder

    where = cache_folder()
    return "none is kept (DPFED_CACHE=off, or there is no home)" if where is None else str(where)


def declared(path: Path) -> list[dict[str, Any]]:
    """Return the declared and exact numbers of a client.toml, with advice."""
    from dpfed.federation.client.declared_counts import compared
    from dpfed.federation.client_config import load_client
    from dpfed.registry import registry

    config, _ = load_client(path, registry())
    return [{**asdict(number), "advice": number.advice} for number in compared(config)]


def advice() -> list[str]:
    """What to do, one sentence each."""
    out = []
    if version_of("dpfed") is None:
        out.append(
            "dpfed is run from its source and not installed, so what it needs is not known: pip install ."
        )
    missing = [package for package, version in packages().items() if version is None]
    if missing:
        out.append(f"{', '.join(missing)} is missing, though dpfed needs it: pip install dpfed")
    for extra, needed in extras().items():
        absent = [package for package, version in needed.items() if version is None]
        if absent:
            purpose = f" for {PURPOSE[extra]}" if extra in PURPOSE else ""
            out.append(f"optional: {', '.join(absent)}{purpose}: pip install 'dpfed[{extra}]'")
    if find_spec("torchvision") is not None:
        try:
            import_module("torchvision")
        except Exception:  # it fails in many ways beside a torch that it was not built for
            out.append(
                "torchvision does not fit this torch and breaks transformers' models: pip uninstall torchvision"
            )
    import torch

    if torch.cuda.is_available() and not torch.backends.cuda.is_flash_attention_available():
        out.append(
            "this torch was built without flash attention, so that ViT and BERT take longer: install its usual wheel"
        )
    if not torch.cuda.is_available():
        out.append("no GPU that torch can use: runs use the CPU, which is enough for small models")
    return out


def lines(found: dict[str, Any]) -> list[str]:
    out = []
    for name, part in found.items():
        if isinstance(part, dict) and "failed" in part:
            out.append(f"{name}: could not be found out ({part['failed']})")
    if "failed" not in found["versions"]:
        out.append(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    if isinstance(found["devices"], list):
        out += [f"device   {device}" for device in found["devices"]]
    if "failed" not in found["packages"]:
        out += [
            f"package  {name:22} {version or 'MISSING'}"
            for name, version in found["packages"].items()
        ]
    if "failed" not in found["extras"]:
        for extra, needed in found["extras"].items():
            said = ", ".join(
                f"{name} {version or '(not installed)'}" for name, version in needed.items()
            )
            out.append(f"extra    {extra:22} {said}")
    if isinstance(found["cache"], str):
        out.append(f"cache    {found['cache']}")
    if isinstance(found["advice"], list):
        out += [f"note: {sentence}" for sentence in found["advice"]]
    return out + client_lines(found.get("client"))


def client_lines(numbers: Any) -> list[str]:
    """Return what a client's operator should know; the server must not see it."""
    if not isinstance(numbers, list):
        return []
    out = []
    for number in numbers:
        key, unit = number["key"], number["unit"]
        out.append(
            f"client   {key} = {number['declared']} declared, {number['held']} held (unit: {unit})"
        )
        if number["advice"]:
            out.append(f"note: {number['advice']}")
    return [*out, "note: the numbers held are private: keep this output on this machine"]
