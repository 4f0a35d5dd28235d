"""Torch modules of a program: their inputs, their scores and the layers that cannot be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dpfed.errors import DpfedError
from dpfed.model.build import assemble
from dpfed.model.given_module import GivenModule, given_module
from dpfed.model.lora import adapt
from dpfed.model.task import InputSpec

VECTORS = InputSpec("features", "features", (4,), 3)
IMAGES = InputSpec("image", "pixel_values", (1, 8, 8), 2)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Identity())


def built(module: nn.Module, spec: InputSpec = VECTORS, **keys: Any) -> Any:
    with given_module(module):
        return GivenModule(**keys).build(spec)


def test_the_copy_has_the_weights_of_the_folder_and_leaves_the_module_alone(tmp_path: Path) -> None:
    module = net()
    state = {name: x + 1 for name, x in module.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    before = module[0].weight.detach().clone()
    found = built(module, weights=str(tmp_path))
    assert torch.equal(found.model[0].weight, before + 1)
    assert torch.equal(module[0].weight, before)
    assert found.head == "2"


def test_pixels_are_scaled_to_one_and_numbers_are_not() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    pixels = torch.full((1, 1, 8, 8), 51, dtype=torch.uint8)
    assert built(flat, IMAGES).prepare({"pixel_values": pixels})["input"].unique().item() == (
        pytest.approx(0.2)
    )
    numbers = torch.full((1, 4), 51.0)
    assert torch.equal(built(net()).prepare({"features": numbers})["input"], numbers)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x + y)


@pytest.mark.parametrize(
    ("module", "spec", "words"),
    [
        (nn.Sequential(nn.Linear(4, 2)), VECTORS, r"gives \(2, 2\) for 2 records, .* 3 classes"),
        (nn.Sequential(nn.Linear(9, 3)), VECTORS, r"cannot compute a batch of shape \(2, 4\)"),
        (nn.Linear(4, 3), VECTORS, r"give torch\.nn\.Sequential\(Linear"),
        (TwoInputs(), VECTORS, "must take one argument"),
        (net(), InputSpec("text", "input_ids", (8,), 3), "a torch module reads numbers"),
        (nn.Sequential(nn.Identity(), nn.Softmax(1)), VECTORS, "gives"),
    ],
)
def test_an_unfit_module_is_one_sentence(module: nn.Module, spec: InputSpec, words: str) -> None:
    with pytest.raises(DpfedError, match=words) as error:
        built(module, spec)
    assert "\n" not in str(error.value)


def test_without_its_program_the_model_cannot_be_built() -> None:
    with pytest.raises(DpfedError, match=r"call dpfed\.load\(folder, model=\.\.\.\) there"):
        GivenModule().build(VECTORS)


def test_named_modules_and_tensors_are_trained() -> None:
    def trained(*names: str) -> set[str]:
        module = net()
        adapt(module, GivenModule(train=names), "2", 0)
        return {name for name, p in module.named_parameters() if p.requires_grad}

    assert trained("0") == {"0.weight", "0.bias"}
    assert trained("0.bias", "2.weight") == {"0.bias", "2.weight"}
    for wrong, words in (((), "names nothing to train"), (("7",), "names '7', which is no module")):
        with pytest.raises(DpfedError, match=words):
            trained(*wrong)


def test_the_blocks_of_a_module_are_its_tensors() -> None:
    with given_module(net()):
        parts = assemble(GivenModule(), VECTORS)
    assert parts.space.block_names == ("0.weight", "0.bias", "2.weight", "2.bias")
