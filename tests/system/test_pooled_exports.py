"""The code of a sentence encoder's model card reproduces the run's scores."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from export_case import own_logits, settings, texts
from pooled_encoder_case import encoder

from dpfed.config import Config
from dpfed.errors import DpfedError
from dpfed.report.model_card import write_export
from dpfed.training.job.job import prepare
from dpfed.training.run import run

PLAIN = {"privacy": {"enabled": False}, "algorithm": {"lr": 0.1}}
ASK = """
import json, sys
texts, classes = json.loads(sys.argv[1])
answers = model(texts, top_k=None, truncation=True)
rows = [[{a["label"]: a["score"] for a in each}[name] for name in classes] for each in answers]
assert "dpfed" not in sys.modules
print(json.dumps(rows))
"""


def elsewhere(code: str, *given: Any) -> subprocess.CompletedProcess[str]:
    """Run code in another process without dpfed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", code, *(json.dumps(x) for x in given)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def card_code(folder: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    return str(code).replace("this folder", str(folder))


def pooled(tmp: Path, train: str, **changes: Any) -> Config:
    section = {"name": "auto-text", "weights": encoder(tmp / "base"), "max_length": 5}
    return settings({**section, "train": train}, **{**PLAIN, **changes})


@pytest.mark.parametrize(
    ("train", "merge"),
    [("head", False), ("full", False), ("lora", False), ("lora", True)],
    ids=["head", "full", "adapter", "merged"],
)
def test_the_code_of_the_card_reproduces_the_scores(
    train: str, merge: bool, tmp_path: Path
) -> None:
    source = texts()
    run(pooled(tmp_path, train), tmp_path / "run", source=source)
    write_export(tmp_path / "run", tmp_path / "out", merge)
    _, scores = own_logits(tmp_path / "run", source)
    words = [str(text) for text in source.test.inputs["text"]]
    code = f"base_model = {str(tmp_path / 'base')!r}\n{card_code(tmp_path / 'out')}{ASK}"
    done = elsewhere(code, [words, source.classes])
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    torch.testing.assert_close(found, scores.softmax(1), atol=1e-5, rtol=0)
    assert float(found.std(0).min()) > 1e-3
    shipped = (tmp_path / "out" / "modeling_pooled.py").read_text()
    assert "dpfed" not in re.findall(r"^\s*(?:from|import) (\w+)", shipped, re.M)


def test_without_its_code_the_export_is_refused(tmp_path: Path) -> None:
    """BERT's own classifier would load the encoder with a random head."""
    run(pooled(tmp_path, "head"), tmp_path / "run", source=texts())
    write_export(tmp_path / "run", tmp_path / "out")
    load = "AutoModelForSequenceClassification.from_pretrained"
    code = f"from transformers import *\n{load}({str(tmp_path / 'out')!r}, trust_remote_code=False)"
    done = elsewhere(code)
    assert done.returncode != 0
    assert "trust_remote_code=True" in done.stderr


@pytest.mark.parametrize("merge", [False, True], ids=["adapter", "merged"])
def test_training_continues_from_an_export(merge: bool, tmp_path: Path) -> None:
    """The second run starts with the final scores of the first one."""
    config = pooled(tmp_path, "lora")
    run(config, tmp_path / "run", source=texts())
    write_export(tmp_path / "run", tmp_path / "out", merge)
    start: dict[str, Any] = {"weights": str(tmp_path / "out"), "head": "kept"}
    if not merge:
        start = {"weights": str(tmp_path / "base"), "adapter": str(tmp_path / "out")}
    section = {"name": "auto-text", "max_length": 5, "train": "lora", **start}
    job = prepare(settings(section, **PLAIN), texts())
    _, before = own_logits(tmp_path / "run", texts())
    after = job.model.scores(job.theta, job.public.test.inputs)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)


def test_a_pooled_adapter_needs_a_pooled_base(tmp_path: Path) -> None:
    config = pooled(tmp_path, "lora")
    run(config, tmp_path / "run", source=texts())
    write_export(tmp_path / "run", tmp_path / "out")
    section = {"name": "auto-text", "weights": str(tmp_path / "base"), "max_length": 5}
    own = settings({**section, "adapter": str(tmp_path / "out"), "pooling": "none"}, **PLAIN)
    with pytest.raises(DpfedError, match="does not fit BertForSequenceClassification"):
        run(own, tmp_path / "second", source=texts())
