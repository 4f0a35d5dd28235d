"""Small saved Swin and ViT models."""

from __future__ import annotations

from pathlib import Path

from transformers.models.swin.configuration_swin import SwinConfig
from transformers.models.swin.modeling_swin import SwinForImageClassification
from transformers.models.vit.configuration_vit import ViTConfig
from transformers.models.vit.modeling_vit import ViTForImageClassification
from zoo_case import save


def tiny_swin(folder: Path, **other: object) -> str:
    config: dict[str, object] = {
        "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 2, "mlp_ratio": 2.0, "drop_path_rate": 0.0, "num_labels": 5,
    }  # fmt: skip
    return save(SwinForImageClassification(SwinConfig(**{**config, **other})), folder)


def tiny_vit(folder: Path) -> str:
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        image_size=8, patch_size=4, num_labels=5,
    )  # fmt: skip
    return save(ViTForImageClassification(config), folder)
