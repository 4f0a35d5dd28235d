"""`dpfed doctor`: describe an installation, its devices and its missing packages.

If a check fails, the command reports this and continues with the other checks. With a client.toml,
it also compares the numbers of records that the client declares with the client's data. It then
shows the client's remaining privacy budget, and when certificates expire.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfed.cli.options import AsJson, show
from dpfed.errors import counted

PURPOSE = {
    "text": "the small language model `minilm`",
    "parquet": "tables in Parquet",
    "hub": "data sets from the Hugging Face hub",
    "quant": "language models in 8 or 4 bits (`model.quantize`)",
    "flower": "federations over a network",
    "mlflow": 'run.trackers = ["mlflow"]',
    "tensorboard": 'run.trackers = ["tensorboard"]',
    "wandb": 'run.trackers = ["wandb"]',
}
# Extras for developers of dpfed, which users do not need.
DEVELOPER_EXTRAS = frozenset({"dev", "docs"})


def doctor(
    client: Annotated[
        Path | None,
        typer.Argument(help="a client.toml whose declared numbers are compared with its data"),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="folder of `dpfed keys`: when its certificates expire")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show versions, devices and missing packages of this installation. Example: dpfed doctor"""
    # `guarded` runs each check separately, so that a failed check does not stop the others.
    parts: dict[str, Callable[[], Any]] = {
        "versions": own_versions,
        "devices": devices,
        "packages": packages,
        "extras": extras,
        "cache": cache,
        "advice": advice,
    }
    if client is not None:
        parts["client"] = lambda: declared(client)
        parts["budget"] = lambda: budget(client)
    if client is not None or keys is not None:
        parts["certificates"] = lambda: certificates(client, keys)
    found = {name: guarded(part) for name, part in parts.items()}
    show(lines(found), found, as_json)


def guarded(part: Callable[[], Any]) -> Any:
    """Run a check and return its result; if it raises an error, return {"failed": short text}."""
    try:
        return part()
    # Catch all errors, because a broken installation can raise any error.
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        return {"failed": f"{type(error).__name__}: {first_line}"}


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
    """Return (package, extra) of each dependency; the extra is "" for packages always needed."""
    if version_of("dpfed") is None:
        return []
    parts = r"([A-Za-z0-9._-]+)(?:.*extra\s*==\s*['\"]([^'\"]+))?"
    found = (re.match(parts, line) for line in metadata.requires("dpfed") or [])
    return [(match[1], match[2] or "") for match in found if match]


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
    """Return the numbers of records that a client.toml declares and the exact ones, with advice."""
    from dpfed.federation.client.declared_counts import compared
    from dpfed.federation.client_config import load_client
    from dpfed.registry import registry

    config, _ = load_client(path, registry())
    return [{**asdict(number), "advice": number.advice} for number in compared(config)]


def budget(path: Path) -> dict[str, Any]:
    """Return how much privacy budget a client has spent, and how many rounds it can afford."""
    from dpfed.federation.client.budget_left import budget_left
    from dpfed.federation.client_config import load_client
    from dpfed.registry import registry

    left = budget_left(load_client(path, registry())[0])
    return {**asdict(left), "sentence": str(left)}


def certificates(client: Path | None, keys: Path | None) -> list[dict[str, Any]]:
    """Return when the certificates in a folder of keys, and that of a client.toml, expire."""
    from dpfed.federation.certificates import validity
    from dpfed.federation.client_config import load_client
    from dpfed.federation.keys import AUTHORITY, SERVER
    from dpfed.registry import registry

    paths = [] if keys is None else [keys / AUTHORITY, keys / SERVER]
    if client is not None:
        link = load_client(client, registry())[1]
        paths += [Path(link.ca)] if link.ca else []
    now = datetime.now(UTC)
    found = [validity(path) for path in paths]
    return [
        {
            "path": str(each.path),
            "expires": each.end.isoformat(),
            "days_left": each.days_left(now),
            "sentence": each.sentence(now),
        }
        for each in found
    ]


def advice() -> list[str]:
    """Return sentences on how to repair or complete the installation."""
    out = []
    if version_of("dpfed") is None:
        out.append(
            "dpfed is run from its source and not installed, so what it needs is not known: "
            "pip install ."
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
        # Catch all errors: a torchvision for another version of torch raises errors of many types.
        except Exception:
            out.append(
                "torchvision does not fit this torch and breaks transformers' models: "
                "pip uninstall torchvision"
            )
    import torch

    if not torch.cuda.is_available():
        out.append("no GPU that torch can use: runs use the CPU, which is enough for small models")
    elif not torch.backends.cuda.is_flash_attention_available():
        out.append(
            "this torch was built without flash attention, so that ViT and BERT take longer: "
            "install its usual wheel"
        )
    return out


def lines(found: dict[str, Any]) -> list[str]:
    """Return the results of all checks as lines of text, failed checks first."""
    failed = [name for name, part in found.items() if isinstance(part, dict) and "failed" in part]
    out = []
    for name in failed:
        out.append(f"{name}: could not be found out ({found[name]['failed']})")
    for name, part in found.items():
        if name not in failed:
            out += SHOWN[name](part)
    return out


def extra_lines(extras: dict[str, dict[str, str | None]]) -> list[str]:
    return [
        f"extra    {extra:22} "
        + ", ".join(f"{name} {version or '(not installed)'}" for name, version in needed.items())
        for extra, needed in extras.items()
    ]


def client_lines(numbers: list[dict[str, Any]]) -> list[str]:
    """Return text lines that compare a client's declared numbers with its private exact numbers.

    Only the operator of the client may see these lines.
    """
    out = []
    for number in numbers:
        out.append(
            f"client   {number['key']} = {number['declared']} declared, "
            f"{number['held']} held (unit: {number['unit']})"
        )
        if number["advice"]:
            out.append(f"note: {number['advice']}")
    return [*out, "note: the numbers held are private: keep this output on this machine"]


# For each check, the function that turns its result into lines of text.
SHOWN: dict[str, Callable[[Any], list[str]]] = {
    "versions": lambda part: [", ".join(f"{name} {version}" for name, version in part.items())],
    "devices": lambda part: [f"device   {device}" for device in part],
    "packages": lambda part: [f"package  {n:22} {v or 'MISSING'}" for n, v in part.items()],
    "extras": extra_lines,
    "cache": lambda part: [f"cache    {part}"],
    "advice": lambda part: [f"note: {sentence}" for sentence in part],
    "client": client_lines,
    "budget": lambda part: [f"budget   {part['sentence']}"],
    "certificates": lambda part: [f"expiry   {each['sentence']}" for each in part],
}
