"""What is trained: LoRA adapters (placed by peft), the head, or everything. Frozen weights never enter the vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpfed.config import ModelSection
from dpfed.errors import DpfedError


@dataclass(frozen=True)
class Adapted:
    """`model` is what is computed with; `peft` is the same modules in peft's wrapper, for its export format."""

    model: nn.Module
    peft: Any | None


def adapt(model: nn.Module, section: ModelSection, head: str, seed: int) -> Adapted:
    """Marks what is trainable. The initial adapters are public: they follow from `seed` alone."""
    if section.train == "full":
        return Adapted(model.requires_grad_(True), None)
    model.requires_grad_(False)
    if section.train == "head":
        model.get_submodule(head).requires_grad_(True)
        return Adapted(model, None)
    return _with_lora(model, section, head, seed)


def _with_lora(model: nn.Module, section: ModelSection, head: str, seed: int) -> Adapted:
    from peft import LoraConfig, get_peft_model

    lora = section.lora
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear" if lora.targets == "auto" else list(lora.targets),
        exclude_modules=rf"(.*\.)?{head}(\..*)?",  # the head is trained whole, never adapted as well
        modules_to_save=[head],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            wrapped = get_peft_model(model, config)
        except ValueError as error:
            names = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
            raise DpfedError(
                f"model.lora.targets = {lora.targets} fits nothing in {type(model).__name__} ({str(error)[:80]}); "
                f"its linear layers are called {', '.join(names)}"
            ) from None
    return Adapted(wrapped.get_base_model(), wrapped)
