"""ResNet-18 with GroupNorm for small images (He et al. 2016; Wu, He 2018).

The first layer is a 3x3 convolution without stride and without max-pool. BatchNorm would mix the
records of a batch, so every norm is a GroupNorm. LoRA of rank r adapts a convolution of k x k
pixels by two factors: A of shape `[r, in, k, k]` and B of shape `[out, r, 1, 1]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from torch import Tensor, nn

from dpfed.config import ModelSection
from dpfed.config.sections import Trainable
from dpfed.errors import DpfedError
from dpfed.model.export_files import ImageInput, image_companions
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built, fresh_head
from dpfed.model.zoo.image_inputs import images
from dpfed.model.zoo.pretrained import load_tensors, on_meta

STAGES = (2, 2, 2, 2)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, channels_out)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.GroupNorm(groups, channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        out: Tensor = self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
        return out


class ResNet(nn.Module):
    model_type = "gn-resnet"

    def __init__(self, channels: int, classes: int, width: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(groups, width)
        self.relu = nn.ReLU()
        stages = []
        channels_in = width
        for stage, depth in enumerate(STAGES):
            channels_out = width * 2**stage
            blocks = []
            for i in range(depth):
                blocks.append(
                    ResidualBlock(channels_in, channels_out, 2 if stage and i == 0 else 1, groups)
                )
                channels_in = channels_out
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.classifier = fresh_head(channels_in, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stages(self.relu(self.norm(self.conv(pixel_values))))
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits


@dataclass(frozen=True)
class GNResNet18(ModelSection):
    name: str = "gn-resnet18"
    train: Annotated[
        Trainable, "what is trained: adapters and head, all, the head, or a list of names"
    ] = "full"
    groups: Annotated[int, Ge(1), "groups of every GroupNorm"] = 32
    width: Annotated[
        int, Ge(1), "channels of the first stage; the others have 2, 4 and 8 times as many"
    ] = 64

    def __post_init__(self) -> None:
        if self.width % self.groups:
            raise DpfedError(f"model.groups = {self.groups} must divide model.width = {self.width}")

    def usual_spec(self) -> InputSpec:
        return InputSpec("image", "pixel_values", (3, 32, 32), 10)

    def build(self, spec: InputSpec) -> Built:
        if spec.kind != "image":
            raise DpfedError(
                f"gn-resnet18 reads images, this data has {spec.kind}: choose another model or data"
            )
        channels = spec.shape[0]
        model = ResNet(channels, spec.classes, self.width, self.groups)
        if self.weights not in (None, "random") and not on_meta():
            load_tensors(model, str(self.weights), self.name, new_head="classifier")
        entry = ImageInput(spec, None, channels, (0.5,) * channels, (0.25,) * channels)
        return Built(model, "classifier", images(entry), companions=image_companions(entry))
