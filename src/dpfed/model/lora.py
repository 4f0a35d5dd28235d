"""Choose the trainable tensors: LoRA adapters from peft, the head, or all tensors.

LoRA adds the product B·A of two small matrices to a frozen weight. With `model.lora.freeze_a`, A
keeps its random, public initial values: FFA-LoRA (Sun, Li, Li, Ding, ICLR 2024). The server
averages A and B separately. If A is frozen, the product of the averages equals the average of the
clients' products.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpfed.config import LoraSection, ModelSection, nearest
from dpfed.errors import DpfedError, reason
from dpfed.model.frozen.quantised import has_quantised, is_quantised

PREFIX = "base_model.model."
QUANTISED = 'model.train = "{}" would train quantised weights, which stay frozen: use "lora"'
MAMBA = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
# Mamba reads the weights of these layers without calling the layers. An adapter in them would have
# no effect.
DEAD_IN_MAMBA = ("out_proj", "dt_proj")


@dataclass(frozen=True)
class Adapted:
    """A model in which only the trainable tensors require a gradient.

    model  the module to call, with its LoRA adapters if there are any
    peft   peft's wrapper of the same modules, which the export needs; None without LoRA
    notes  sentences to show to the user
    """

    model: nn.Module
    peft: Any | None
    notes: tuple[str, ...] = ()


def adapt(
    model: nn.Module, section: ModelSection, head: str | tuple[str, ...], seed: int
) -> Adapted:
    """Add LoRA adapters if the `[model]` section asks for them, and mark the trainable tensors.

    head  names of the modules that are trained as a whole, with or without LoRA
    seed  random seed of new adapters; with `model.adapter` adapters are loaded from a folder

    The initial adapters are public, because they come from a seed or a folder and not from private
    data.
    """
    heads = tuple(filter(None, (head,))) if isinstance(head, str) else head
    if section.adapter is not None and section.train != "lora":
        raise DpfedError(
            f'model.adapter is a LoRA adapter: it needs model.train = "lora", not {section.train!r}'
        )
    quantised = getattr(section, "quantize", "none") != "none" or has_quantised(model)
    if section.train == "full" and quantised:
        raise DpfedError(QUANTISED.format("full"))
    model.requires_grad_(section.train == "full")
    if section.train == "full":
        return Adapted(model, None)
    if section.train != "lora":
        _mark(model, heads if section.train == "head" else section.train)
        return Adapted(model, None)
    if section.adapter:
        adapted = _from_folder(model, section.adapter, heads)
    else:
        adapted = _new(model, section.lora, heads, seed)
    if section.lora.freeze_a:
        for name, parameter in adapted.model.named_parameters():
            if ".lora_A." in name or ".lora_embedding_A." in name:
                parameter.requires_grad_(False)
    return adapted


def _mark(model: nn.Module, names: tuple[str, ...]) -> None:
    """Mark the named modules and tensors as trainable, so that they require a gradient.

    Raise DpfedError for a name that matches no parameter of the model.
    """
    if not names:
        raise DpfedError(
            "model.train names nothing to train, and a language model has no head of its own: "
            'use "lora", "full" or a list of modules'
        )
    tensors = dict(model.named_parameters())
    for name in names:
        chosen = [n for n in tensors if n == name or n.startswith(f"{name}.")]
        if not chosen:
            known = [*dict(model.named_modules()), *tensors]
            raise DpfedError(
                f"model.train names {name!r}, which is no module or tensor with parameters in "
                f"{type(model).__name__}{nearest(name, known)}"
            )
        for tensor in chosen:
            if is_quantised(tensors[tensor]):
                raise DpfedError(QUANTISED.format(name))
            tensors[tensor].requires_grad_(True)


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
            names = {n.rpartition(".")[2] for n, m in model.named_modules() if _adaptable(m)}
            raise DpfedError(
                f"model.lora.targets = {lora.targets} fits nothing in {type(model).__name__} "
                f"({str(error)[:80]}); its layers are called {', '.join(sorted(names))}"
            ) from None
    return Adapted(wrapped.get_base_model(), wrapped)


def _wrap(model: nn.Module, config: Any) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft warns if this option is wrong for GPT-2's transposed layers, and then corrects it.
        # Hide the warning.
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        # peft warns that this name is missing. Hide the warning, because the export sets the name
        # later.
        warnings.filterwarnings("ignore", message="The PEFT config's `base_model_name_or_path`")
        # peft itself reads this deprecated attribute. Hide the warning, because users cannot avoid
        # it.
        alias = "`is_gradient_checkpointing` is deprecated"
        warnings.filterwarnings("ignore", alias, FutureWarning)
        return get_peft_model(model, config)


def _excluded(heads: tuple[str, ...]) -> str | None:
    """Return a regular expression for the names of modules in which peft must not add adapters.

    These are the heads, which are trained as a whole. Return None without heads.
    """
    return rf"(.*\.)?({'|'.join(heads)})(\..*)?" if heads else None


def _adaptable(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d) or type(module).__name__ == "Conv1D"


def _auto(model: nn.Module, heads: tuple[str, ...]) -> list[str]:
    """Return the names of the layers that get a LoRA adapter if the user names none.

    These are all linear layers except the heads and the output layer of a language model. A model
    without such layers, for example a CNN, gets adapters in its convolutions. The names are given
    in full, because peft's "all-linear" would also adapt experts and routers of a mixture of
    experts.
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
    from peft import LoraConfig, set_peft_model_state_dict

    config, state = _read_adapter(Path(folder))
    if not isinstance(config, LoraConfig):
        raise DpfedError(
            f"model.adapter = {folder!r} is {type(config).__name__}: "
            "only LoRA adapters can be trained here"
        )
    config.inference_mode = False
    config.task_type = None
    config.exclude_modules = config.exclude_modules or _excluded(heads)
    state, notes = _with_head(model, state, heads)
    try:
        config.modules_to_save = sorted({*heads, *(config.modules_to_save or ())}) or None
        notes.append(
            f"starting from the adapter in {folder}: r = {config.r}, "
            f"alpha = {config.lora_alpha:g} and targets are its own; "
            "[model.lora] is not used for them"
        )
        wrapped = _wrap(model, config)
        # On PyTorch's meta device only shapes are needed, so do not load the weights of the
        # adapter.
        if next(model.parameters()).is_meta:
            return Adapted(wrapped.get_base_model(), wrapped, tuple(notes))
        outcome = set_peft_model_state_dict(wrapped, state)
    except Exception as error:
        # peft raises errors of many classes if an adapter does not fit, so catch all of them. The
        # last line of the message names the tensor that does not fit.
        cause = (str(error).strip().splitlines() or ["?"])[-1].strip()[:120]
        raise DpfedError(
            f"model.adapter = {folder!r} does not fit {type(model).__name__}: {cause}"
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
        config = PeftConfig.from_pretrained(str(folder))
        return config, load_file(folder / "adapter_model.safetensors")
    except Exception as error:
        # Damaged files raise errors of many classes, so catch all of them.
        raise DpfedError(
            f"model.adapter = {str(folder)!r} cannot be read: {reason(error)}"
        ) from None


def _with_head(
    model: nn.Module, state: dict[str, Tensor], heads: tuple[str, ...]
) -> tuple[dict[str, Tensor], list[str]]:
    new_heads = {
        f"{PREFIX}{head}.{name}": p.detach()
        for head in heads
        for name, p in model.get_submodule(head).named_parameters()
    }
    starts = tuple(f"{head}." for head in heads)
    own_heads = {k: x for k, x in state.items() if k.removeprefix(PREFIX).startswith(starts)}
    if {k: x.shape for k, x in own_heads.items()} == {k: x.shape for k, x in new_heads.items()}:
        return state, []
    note = "the adapter has no head for these classes: the head is new"
    body = {name: x for name, x in state.items() if name not in own_heads}
    return body | new_heads, [note]
