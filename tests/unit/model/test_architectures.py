"""Architectures with something odd: each is trained right or refused with a way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_case import mixtral
from sizes_case import SIZES
from torch import Tensor, nn
from transformers import (
    BigBirdConfig,
    BigBirdForSequenceClassification,
    CLIPConfig,
    CLIPForImageClassification,
    DebertaConfig,
    DebertaForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    EsmConfig,
    EsmForSequenceClassification,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    NystromformerConfig,
    NystromformerForSequenceClassification,
)
from vision_case import tiny_vit
from zoo_case import (
    ZooCase,
    alone_causal,
    alone_image,
    alone_text,
    lora,
    save,
    text_spec,
    tokens_of,
    with_train,
)

from dpfed.errors import DpfedError
from dpfed.model.build import assemble, describe_space
from dpfed.model.per_sample.isolation_check import RECORDS, check_gradients
from dpfed.model.task import InputSpec
from dpfed.model.zoo.text import AutoCausal, AutoText
from dpfed.model.zoo.vision import AutoImage

IMAGE = InputSpec("image", "pixel_values", (3, 8, 8), 3)
PATCHES: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
RELATIVE: dict[str, Any] = {
    **SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0,
}  # fmt: skip


def deberta_v2(**keys: Any) -> nn.Module:
    config = {**RELATIVE, "position_buckets": 3, "norm_rel_ebd": "layer_norm", **keys}
    return DebertaV2ForSequenceClassification(DebertaV2Config(**config))


def deberta_v3() -> nn.Module:
    return deberta_v2(share_att_key=True)


def deberta() -> nn.Module:
    return DebertaForSequenceClassification(DebertaConfig(**RELATIVE))


def bigbird() -> nn.Module:
    return BigBirdForSequenceClassification(BigBirdConfig(**SIZES, attention_type="original_full"))


def esm() -> nn.Module:
    config = EsmConfig(**SIZES, pad_token_id=1, mask_token_id=19, token_dropout=True)
    return EsmForSequenceClassification(config)


def nystromformer() -> nn.Module:
    config = NystromformerConfig(**SIZES, num_landmarks=4, segment_means_seq_len=8)
    return NystromformerForSequenceClassification(config)


def dinov2() -> nn.Module:
    return Dinov2ForImageClassification(Dinov2Config(**{**PATCHES, "mlp_ratio": 2}))


def clip() -> nn.Module:
    words = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "intermediate_size")}
    words |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(vision_config=PATCHES, text_config=words, projection_dim=8)
    return CLIPForImageClassification(config)


def mamba() -> nn.Module:
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4}
    config = MambaConfig(**sizes, pad_token_id=0)
    return MambaForCausalLM(config)


def mamba2() -> nn.Module:
    config = Mamba2Config(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, state_size=4, num_heads=4, head_dim=4,
        n_groups=1, chunk_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Mamba2ForCausalLM(config)


@pytest.mark.parametrize("train", ["head", "lora", "full"])
@pytest.mark.parametrize("build", [deberta_v2, deberta_v3, deberta, bigbird, esm])
def test_text_classifiers(build: Callable[[], nn.Module], train: str, tmp_path: Path) -> None:
    section = with_train(AutoText(weights=save(build(), tmp_path), max_length=8), train)
    case = ZooCase(section, text_spec())
    case.check(tokens_of(4, 8, 19, 1), torch.tensor([0, 1, 2, 0]), alone_text)
    case.alive()


@pytest.mark.parametrize("train", ["head", "lora", "full"])
@pytest.mark.parametrize("build", [dinov2, clip])
def test_image_classifiers(build: Callable[[], nn.Module], train: str, tmp_path: Path) -> None:
    """CLIP's image size stands in the part of its configuration that is for images."""
    case = ZooCase(with_train(AutoImage(weights=save(build(), tmp_path)), train), IMAGE)
    pixels = torch.randint(0, 256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    inputs = {"pixel_values": pixels.to(torch.uint8)}
    case.check(inputs, torch.tensor([0, 1, 2, 0]), alone_image(case))
    case.alive()


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("build", [mamba, mamba2])
def test_language_models(build: Callable[[], nn.Module], train: str, tmp_path: Path) -> None:
    section = with_train(AutoCausal(weights=save(build(), tmp_path), max_length=8), train)
    case = ZooCase(section, text_spec(classes=1))
    case.check(tokens_of(4, 8, 20, 0), torch.zeros(4, dtype=torch.int64), alone_causal)
    case.alive()


def test_dropout_of_deberta_is_by_record(tmp_path: Path) -> None:
    """Also that of the shared table of positions, which has no record axis."""
    weights = save(deberta_v2(hidden_dropout_prob=0.5), tmp_path)
    section = with_train(AutoText(weights=weights, max_length=8), "lora")
    case = ZooCase(section, text_spec())
    assert case.ready.has_dropout
    inputs, labels = tokens_of(4, 8, 20, 0), torch.tensor([0, 1, 2, 0])
    rows, client, keys = case.rows(1), torch.zeros(4, dtype=torch.int64), torch.arange(4)
    together = torch.cat(case.ready.grads(rows, client, inputs, labels, keys), 1)
    for j in range(4):
        one = {name: x[j : j + 1] for name, x in inputs.items()}
        alone = case.ready.grads(rows, client[:1], one, labels[j : j + 1], keys[j : j + 1])
        torch.testing.assert_close(together[j : j + 1], torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


# ---- tensors that are never used


@pytest.mark.parametrize(
    ("build", "section", "spec", "unused"),
    [
        (dinov2, AutoImage, IMAGE, ["dinov2.embeddings.mask_token"]),
        (clip, AutoImage, IMAGE, ["vision_model.post_layernorm."]),
        (bigbird, AutoText, text_spec(), ["bert.pooler."]),
        (esm, AutoText, text_spec(), ["esm.contact_head."]),
    ],
)
def test_unused_tensors_stay_frozen_and_a_note_says_so(
    build: Callable[[], nn.Module], section: Any, spec: InputSpec, unused: list[str], tmp_path: Path
) -> None:
    chosen = section(weights=save(build(), tmp_path), train="full")
    parts = assemble(chosen, spec)
    names = {name for name, _ in parts.adapted.model.named_parameters()}
    frozen = names - set(parts.space.names)
    assert frozen
    assert all(name.startswith(tuple(unused)) for name in frozen)
    sentence = f"not used by {type(parts.adapted.model).__name__}, so not trained: {unused[0]}"
    assert any(note.startswith(sentence) for note in parts.notes)
    described = describe_space(chosen, spec)
    assert described.space.names == parts.space.names
    assert described.notes == parts.notes


def test_a_model_that_uses_everything_has_no_such_note(tmp_path: Path) -> None:
    parts = assemble(AutoImage(weights=tiny_vit(tmp_path), train="full"), IMAGE)
    assert len(parts.space.names) == len(list(parts.adapted.model.named_parameters()))
    assert not any("not used" in note for note in parts.notes)


# ---- one sentence with a way out


def refusal(section: Any, spec: InputSpec) -> str:
    with pytest.raises(DpfedError) as error:
        ZooCase(section, spec).alive()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nystromformer_needs_all_tokens(tmp_path: Path) -> None:
    section = AutoText(weights=save(nystromformer(), tmp_path), max_length=8)
    for train in ("head", "lora", "full"):
        said = refusal(with_train(section, train), text_spec())
        assert said.startswith("NystromformerForSequenceClassification cannot compute a single")
        assert said.endswith("choose another model")


def test_adapters_of_a_router_are_refused_with_the_key_to_change(tmp_path: Path) -> None:
    section = AutoCausal(weights=save(mixtral(), tmp_path), max_length=8)
    said = refusal(with_train(section, "lora", targets=("q_proj", "gate")), text_spec(classes=1))
    assert "MixtralForCausalLM" in said
    assert said.endswith('leave that layer out of model.lora.targets, or set model.train = "head"')


def test_targets_that_are_not_there_are_said(tmp_path: Path) -> None:
    section = AutoImage(weights=tiny_vit(tmp_path), lora=lora(targets=("nothing",)))
    assert "model.lora.targets" in refusal(section, IMAGE)


def test_default_targets_of_mamba_leave_out_what_cannot_be_adapted(tmp_path: Path) -> None:
    section = with_train(AutoCausal(weights=save(mamba(), tmp_path), max_length=8), "lora")
    names = describe_space(section, text_spec(classes=1)).space.names
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in names}
    assert adapted == {"in_proj", "x_proj"}


def test_the_way_out_is_not_what_was_done_already() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.scale if self.scale.item() > 0 else 1)

    from gradient_case import Case

    case = Case(Branching())
    inputs = {"x": torch.randn(RECORDS, 3)}
    sentence = r'cannot be computed .*: set model.train = "lora" or "head"$'
    with pytest.raises(DpfedError, match=sentence):
        check_gradients(case.ready, case.theta, inputs, 3, torch.Generator().manual_seed(0))
