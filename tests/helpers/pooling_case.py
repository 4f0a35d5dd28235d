"""Pooling files in the layout of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MEAN = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}


def state_pooling(folder: Path, pooling: dict[str, Any] | None = None, *more: str) -> str:
    """Write modules.json and 1_Pooling/config.json; `more` are further modules."""
    kinds = ["Transformer", "Pooling", *more]
    paths = ["", "1_Pooling", *(f"{i}_{kind}" for i, kind in enumerate(more, 2))]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or MEAN))
    return str(folder)
