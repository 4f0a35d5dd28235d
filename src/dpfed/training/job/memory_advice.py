"""Recognise out-of-memory errors, and name settings that need less memory."""

from __future__ import annotations

from typing import Any

from dpfed.config import Config
from dpfed.privacy.oracle import out_of_memory


def caused_by_memory(error: BaseException | None) -> bool:
    """Return True if the error, or an error that caused it, says that no memory is left."""
    while error is not None:
        if out_of_memory(error):
            return True
        error = error.__cause__
    return False


def less_memory_advice(config: Config) -> str:
    """Return the end of an error message: settings that need less memory than the run's settings.

    A smaller batch is not advised, because it saves no memory: a batch of any size can be computed
    one record at a time.
    """
    model: Any = config.model
    ways = []
    if hasattr(model, "max_length"):
        ways.append(f"a model.max_length below {model.max_length}")
    if config.run.precision == "float32":
        ways.append('run.precision = "bf16"')
    if not model.gradient_checkpointing:
        ways.append("model.gradient_checkpointing = true")
    if model.train == "full":
        ways.append('model.train = "lora"')
    elif getattr(model, "quantize", "4bit") != "4bit":
        ways.append('model.quantize = "4bit"')
    last = "a smaller model or another run.device"
    return f"take {', '.join(ways)}, or {last}" if ways else f"take {last}"
