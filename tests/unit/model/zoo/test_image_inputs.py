"""Preparation of images: matrix products on a GPU give the same result as torch's resizing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dpfed.model.export_files import ImageInput
from dpfed.model.task import InputSpec
from dpfed.model.zoo import image_inputs
from dpfed.model.zoo.image_inputs import by_products, images, resize_matrix, resizing


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("smaller", [False, True])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 3), (8, 8), (28, 28), (33, 47)])
@pytest.mark.parametrize("size", [1, 4, 17, 32, 56])
def test_resizing_is_two_products(
    size: int, height: int, width: int, smaller: bool, mode: str
) -> None:
    """Any image: one matrix for its columns and one for its rows, averaged or not."""
    x = torch.rand(3, 2, height, width, generator=torch.Generator().manual_seed(size))
    down, across = (resize_matrix(side, size, mode, smaller) for side in (height, width))
    assert (down.shape, across.shape) == ((size, height), (size, width))
    torch.testing.assert_close(down.sum(1), torch.ones(size), rtol=0, atol=1e-5)
    wanted = F.interpolate(x, (size, size), mode=mode, align_corners=False, antialias=smaller)
    torch.testing.assert_close(by_products(x, down, across), wanted, rtol=0, atol=1e-5)


def test_a_matrix_by_hand() -> None:
    """Two pixels to four: between their centres by quarters."""
    rows = [[1.0, 0.0], [0.75, 0.25], [0.25, 0.75], [0.0, 1.0]]
    assert resize_matrix(2, 4, "bilinear", False).tolist() == rows


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("shape", [(6, 6), (12, 12), (5, 9)])
def test_images_enter_a_gpu_as_they_enter_a_processor(
    shape: tuple[int, int], channels: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices are made for the first images and reused for others of the same size."""
    spec = InputSpec("image", "x", (channels, *shape), 2)
    g = torch.Generator().manual_seed(0)
    x = {"x": torch.randint(0, 256, (4, channels, *shape), generator=g, dtype=torch.uint8)}
    entry = ImageInput(spec, 8, 3, (0.5,) * 3, (0.25,) * 3, mode, sharpen=0.5)
    wanted = images(entry)(x)["x"]
    made: list[int] = []

    def counted(side: int, *rest: Any) -> torch.Tensor:
        made.append(side)
        return resize_matrix(side, *rest)

    monkeypatch.setattr(image_inputs, "takes_products", lambda x: True)
    monkeypatch.setattr(image_inputs, "resize_matrix", counted)
    prepare = images(entry)
    for _ in range(2):
        torch.testing.assert_close(prepare(x)["x"], wanted, rtol=0, atol=1e-5)
    assert sorted(made) == sorted(set(shape))


def test_compilers_and_processors_get_the_plain_form() -> None:
    x = torch.rand(2, 1, 4, 4)
    assert not image_inputs.takes_products(x)
    compiled = torch.compile(resizing(8, "bilinear"), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), resizing(8, "bilinear")(x))
