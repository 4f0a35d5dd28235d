"""What is trained: LoRA adapters (placed by peft), the head, or everything. Frozen weights never enter the vector.

`model.lora.freeze_a` is FFA-LoRA (Sun, Li, Li, Ding, ICLR 2024): A keeps its public random start, so that the mean of
the clients' products B·A is the product of the means.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpfed.config import LoraSection, ModelSection
from dpfed.errors import DpfedError

PREFIX = "base_model.model."
# They read the weights of these layers without calling them, so that an adapter there is dead.
DEAD_IN_MAMBA = ("out_proj", "dt_proj")
MAMBA = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")


@dataclass(frozen=True)
class Adapted:
    """`model` is what is computed with; `peft` is the same modules in peft's wrapper, for its export format."""

    model: nn.Module
    peft: Any | None
    notes: tuple[str, ...] = ()


def adapt(
    model: nn.Module, section: ModelSection, head: str | tuple[str, ...], seed: int
) -> Adapted:
    """Marks what is trainable. The initial adapters are public: they follow from `seed` (or a folder) alone."""
    heads = ((head,) if head else ()) if isinstance(head, str) else head
    if section.adapter is not None and section.train != "lora":
        raise DpfedError(
            f'model.adapter is a LoRA adapter: it needs model.train = "lora", not {section.train!r}'
        )
    if section.train == "full":
        return Adapted(model.requires_grad_(True), None)
    model.requires_grad_(False)
    if section.train == "head":
        if not heads:
            raise DpfedError(
                'model.train = "head": a language model has no head of its own, use "lora" or "full"'
            )
        for name in heads:
            model.get_submodule(name).requires_grad_(True)
        return Adapted(model, None)
    adapted = (
        _from_folder(model, section.adapter, heads)
        if section.adapter
        else _new(model, section.lora, heads, seed)
    )
    if section.lora.freeze_a:
        for name, parameter in adapted.model.named_parameters():
            if ".lora_A." in name or ".lora_embedding_A." in name:
                parameter.requires_grad_(False)
    return adapted


def _new(model: nn.Module, lora: LoraSection, heads: tuple[str, ...], seed: int) -> Adapted:
    from peft import LoraConfig

    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_auto(model, heads) if lora.targets == "auto" else list(lora.targets),
        exclude_modules=_excluded(heads),
        modules_to_save=list(heads) or None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            wrapped = _wrap(model, config)
        except (ValueError, TypeError) as error:
            names = sorted(
                {n.rpartition(".")[2] for n, m in model.named_modules() if _adaptable(m)}
            )
            raise DpfedError(
                f"model.lora.targets = {lora.targets} fits nothing in {type(model).__name__} ({str(error)[:80]}); "
                f"its layers are called {', '.join(names)}"
            ) from None
    return Adapted(wrapped.get_base_model(), wrapped)


def _wrap(model: nn.Module, config: Any) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="fan_in_fan_out"
        )  # GPT-2's transposed layers: peft sets it itself
        warnings.filterwarnings(
            "ignore", message="The PEFT config's `base_model_name_or_path`"
        )  # ours to choose
        # peft reads this alias from every transformers model; users cannot change that.
        alias = "`is_gradient_checkpointing` is deprecated"
        warnings.filterwarnings("ignore", alias, FutureWarning)
        return get_peft_model(model, config)


def _excluded(heads: tuple[str, ...]) -> str | None:
    """The head is trained whole, never adapted as well."""
    return rf"(.*\.)?({'|'.join(heads)})(\..*)?" if heads else None


def _adaptable(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d) or type(module).__name__ == "Conv1D"


def _auto(model: nn.Module, heads: tuple[str, ...]) -> list[str]:
    """Return every linear layer but heads and a language model's output; in a CNN convolutions.

    The names are given in full: peft would extend "all-linear" to tensors of experts and routers.
    """
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    inside_heads = tuple(f"{head}." for head in heads)
    body = {
        name: module
        for name, module in model.named_modules()
        if _adaptable(module) and name not in heads and not name.startswith(inside_heads)
    }
    linear = [n for n, m in body.items() if not isinstance(m, nn.Conv2d) and m is not outputs]
    if getattr(getattr(model, "config", None), "model_type", "") in MAMBA:
        linear = [n for n in linear if n.rpartition(".")[2] not in DEAD_IN_MAMBA]
    found = linear or list(body)
    if not found:
        name = type(model).__name__
        ways = 'set model.train = "head" or "full"'
        raise DpfedError(f"{name} has no layer that LoRA can adapt: {ways}")
    return found


def _from_folder(model: nn.Module, folder: str, heads: tuple[str, ...]) -> Adapted:
    """An adapter that somebody trained before: rank, scale and targets are its own."""
    from peft import LoraConfig, set_peft_model_state_dict

    config, state = _read_adapter(Path(folder))
    if not isinstance(config, LoraConfig):
        raise DpfedError(
            f"model.adapter = {folder!r} is {type(config).__name__}: only LoRA adapters can be trained here"
        )
    config.inference_mode, config.task_type = False, None
    config.exclude_modules = config.exclude_modules or _excluded(heads)
    state, notes = _with_head(model, state, heads)
    try:
        config.modules_to_save = sorted({*heads, *(config.modules_to_save or ())}) or None
        notes.append(
            f"starting from the adapter in {folder}: r = {config.r}, alpha = {config.lora_alpha:g} and targets are its "
            "own; [model.lora] is not used for them"
        )
        wrapped = _wrap(model, config)
        if next(model.parameters()).is_meta:  # only shapes are wanted
            return Adapted(wrapped.get_base_model(), wrapped, tuple(notes))
        outcome = set_peft_model_state_dict(wrapped, state)
    except Exception as error:  # what does not fit fails anywhere inside peft
        reason = (str(error).strip().splitlines() or ["?"])[-1].strip()[:120]
        raise DpfedError(
            f"model.adapter = {folder!r} does not fit {type(model).__name__}: {reason}"
        ) from None
    lacking = [k for k in outcome.missing_keys if ".lora_" in k]
    if outcome.unexpected_keys or lacking:
        example = [*outcome.unexpected_keys, *lacking][0]
        raise DpfedError(
            f"model.adapter = {folder!r} does not fit {type(model).__name__}: see {example}"
        )
    return Adapted(wrapped.get_base_model(), wrapped, tuple(notes))


def _read_adapter(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    from peft import PeftConfig
    from safetensors.torch import load_file

    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise DpfedError(
                f"model.adapter = {str(folder)!r} has no {name}: give a folder written by peft"
            )
    try:
        return PeftConfig.from_pretrained(str(folder)), load_file(
            folder / "adapter_model.safetensors"
        )
    except Exception as error:  # damaged files raise a dozen kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise DpfedError(f"model.adapter = {str(folder)!r} cannot be read: {reason}") from None


def _with_head(
    model: nn.Module, state: dict[str, Tensor], heads: tuple[str, ...]
) -> tuple[dict[str, Tensor], list[str]]:
    """The adapter's tensors with a head for this model: the adapter's own where it fits, else the model's new one."""
    mine = {
        f"{PREFIX}{head}.{name}": p.detach()
        for head in heads
        for name, p in model.get_submodule(head).named_parameters()
    }
    theirs = {
        k: v
        for k, v in state.items()
        if k.removeprefix(PREFIX).startswith(tuple(f"{h}." for h in heads))
    }
    if {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in mine.items()}:
        return state, []
    note = "the adapter has no head for these classes: the head is new"
    return {**{k: v for k, v in state.items() if k not in theirs}, **mine}, [note]
