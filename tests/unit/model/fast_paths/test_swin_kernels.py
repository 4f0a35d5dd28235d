"""Swin models with the kernels against Swin models without them.

Without a GPU the kernels run in Triton's interpreter, which truncates bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from gradient_case import Case, adapted, images, labels_of, swin
from triton_interpreter import round_bfloat16

from dpfed import accel
from dpfed.accel import windows as kernels
from dpfed.model.fast_paths import swin as fast_swin

GPU = torch.cuda.is_available()
WHERE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "interpreted", not GPU)
    if not GPU:
        round_bfloat16(monkeypatch)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the names of the operators that Swin's layers have called."""
    seen: list[str] = []

    def counted(name: str) -> Any:
        known = getattr(fast_swin, name)
        return lambda *args: seen.append(name) or known(*args)

    for name in ("window_attention", "reorder"):
        monkeypatch.setattr(fast_swin, name, counted(name))
    fast_swin._STORED.clear()
    yield seen
    fast_swin._STORED.clear()


# One stage of 4 x 4 patches in windows of 2.
ONE = {"image_size": 8, "depths": [2], "num_heads": [2]}


def used(calls: list[str]) -> tuple[int, int]:
    counts = calls.count("window_attention"), calls.count("reorder")
    calls.clear()
    return counts


def grads_of(case: Case, side: int, dtype: torch.dtype = torch.float32) -> Tensor:
    case.ready.model.to(WHERE)
    case.ready.to(dtype)
    inputs = {"pixel_values": images(side)(2)["pixel_values"].to(WHERE, dtype)}
    args = (
        case.rows(2).to(WHERE),
        torch.tensor([0, 1], device=WHERE),
        inputs,
        labels_of(2).to(WHERE),
    )
    return torch.cat(case.ready.grads(*args), 1).double().cpu()


@pytest.mark.parametrize(
    ("side", "other", "reordered"),
    [
        # 8 x 8 and 4 x 4 patches in windows of 2, merged once.
        (16, {}, 9),
        # 10 x 10 and 5 x 5 patches, padded, but merged.
        (20, {"window_size": 4}, 1),
        # The second stage is one window.
        (16, {"window_size": 4, "embed_dim": 12, "num_heads": [3, 6]}, 5),
        (16, {"window_size": 4, "hidden_dropout_prob": 0.3, "drop_path_rate": 0.5}, 5),
    ],
    ids=["windows", "padded", "heads", "dropout"],
)
def test_gradients_of_records_equal_the_plain_way(
    side: int,
    other: dict[str, Any],
    reordered: int,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(adapted(swin(image_size=side, **other), "lora"))
    args = case.rows(2), torch.tensor([1, 0]), images(side)(2), labels_of(2)
    keys = torch.tensor([11, 12]) if case.ready.has_dropout else None
    case.ready.model.to(WHERE)

    def grads() -> Tensor:
        theta, client, inputs, labels = args
        moved = {name: x.to(WHERE) for name, x in inputs.items()}
        drawn = None if keys is None else keys.to(WHERE)
        return torch.cat(
            case.ready.grads(theta.to(WHERE), client.to(WHERE), moved, labels.to(WHERE), drawn), 1
        )

    got = grads()
    assert used(calls) == (4, reordered)
    monkeypatch.setattr(fast_swin, "available", lambda x: False)
    want = grads()
    assert used(calls) == (0, 0)
    assert (got - want).norm() < 2e-5 * want.norm()


def test_low_precision_is_as_near_as_the_plain_way(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(adapted(swin(window_size=4), "lora"))
    exact = grads_of(case, 16)
    calls.clear()
    got = grads_of(case, 16, torch.bfloat16)
    assert used(calls) == (4, 5)
    monkeypatch.setattr(fast_swin, "available", lambda x: False)
    want = grads_of(case, 16, torch.bfloat16)
    assert (got - exact).norm() < 1.2 * (want - exact).norm()


def test_scores_and_trained_tables(calls: list[str]) -> None:
    """Evaluation uses the kernel; a trained table gets its gradient on the plain path."""
    case = Case(adapted(swin(**ONE), "lora"))
    case.ready.model.to(WHERE)
    inputs = {name: x.to(WHERE) for name, x in images(8)(2).items()}
    got = case.ready.scores(case.rows(1)[0].to(WHERE), inputs)
    assert used(calls) == (2, 4)
    assert got.shape == (2, 3)
    full = Case(adapted(swin(**ONE), "full"))
    full.ready.model.to(WHERE)
    full.ready.scores(full.rows(1)[0].to(WHERE), inputs)
    assert used(calls) == (0, 4)
    if not GPU:
        full.check(images(8)(2), labels_of(2), clients=2)
        assert used(calls) == (0, 4)


def test_what_was_kept_without_gradients_serves_a_pass_with_them(calls: list[str]) -> None:
    case = Case(adapted(swin(**ONE), "lora"))
    with torch.inference_mode():
        case.ready.model.to(WHERE)(pixel_values=images(8)(1)["pixel_values"].to(WHERE))
    grads_of(case, 8)
    assert used(calls) == (4, 8)
    # A mask and two orders.
    assert len(fast_swin._STORED) == 3


@pytest.mark.parametrize("why", ["gradient", "dropout", "weights", "large", "deep", "precision"])
def test_the_plain_way_where_the_kernel_does_not_fit(why: str, calls: list[str]) -> None:
    other = {
        "large": {"window_size": 9, "image_size": 36, "depths": [1], "num_heads": [2]},
        "deep": {**ONE, "embed_dim": 34, "num_heads": [1]},
    }.get(why, {})
    model = swin(attention_probs_dropout_prob=0.5, **other).requires_grad_(why == "gradient")
    fast_swin.fuse_windows(model.to(WHERE))
    asked: dict[str, Any] = {"output_attentions": True} if why == "weights" else {}
    if why == "dropout":
        model.train()
    if why == "precision":
        model.double()
    x = images(model.config.image_size)(1)["pixel_values"].to(WHERE, next(model.parameters()).dtype)
    model.set_attn_implementation("eager")
    out = model(pixel_values=x, **asked)
    assert used(calls)[0] == 0
    assert why != "weights" or all(a is not None for a in out.attentions)


def test_the_bias_follows_its_table(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = swin(**ONE).requires_grad_(False).to(WHERE)
    fast_swin.fuse_windows(model)
    bias = next(m for m in model.modules() if type(m).__name__ == "SwinRelativePositionBias")
    x = images(8)(1)["pixel_values"].to(WHERE)
    made: list[int] = []
    known = type(bias).forward
    monkeypatch.setattr(type(bias), "forward", lambda self: made.append(1) or known(self))

    def check(fresh: int, model: nn.Module = model) -> None:
        made.clear()
        got = model(pixel_values=x.to(next(model.parameters()).dtype)).logits
        assert len(made) == fresh
        with monkeypatch.context() as off:
            off.setattr(fast_swin, "available", lambda x: False)
            want = model(pixel_values=x.to(next(model.parameters()).dtype)).logits
        torch.testing.assert_close(
            got, want, rtol=2e-2, atol=2e-2 if got.dtype == torch.bfloat16 else 1e-5
        )

    check(2)
    check(0)
    check(2, copy.deepcopy(model))
    bias.relative_position_bias_table.mul_(3)
    check(1)
    bias.relative_position_bias_table.data = -bias.relative_position_bias_table
    check(1)
    state = {name: 2 * value for name, value in model.state_dict().items() if "bias_table" in name}
    model.load_state_dict(state, strict=False)
    check(2)
    model.load_state_dict(
        {name: -value for name, value in state.items()}, strict=False, assign=True
    )
    check(2)
    model.to(torch.bfloat16)
    check(2)
    check(0)
    assert not [name for name in model.state_dict() if "kept" in name]


def test_a_compiled_layer_takes_the_operator(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph holds the shifted windows, and tracing stores and reads nothing."""
    model = swin(**ONE).requires_grad_(False).to(WHERE)
    fast_swin.fuse_windows(model)
    layer = next(
        m for m in model.modules() if type(m).__name__ == "FusedSwinLayer" and m.shift_size
    )
    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)).to(WHERE).requires_grad_()

    def outcome(call: Any) -> list[Tensor]:
        y = call(x, (4, 4))[0]
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    want = outcome(layer)
    fast_swin._STORED.clear()
    # From here on calls are not counted.
    monkeypatch.undo()
    monkeypatch.setattr(accel, "interpreted", not GPU)
    ran: list[str] = []
    for name in ("attend", "attend_backward", "reorder"):
        monkeypatch.setattr(kernels, name, Counted(name, getattr(kernels, name), ran))
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    for one, other in zip(outcome(compiled), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert ran == ["attend", "attend_backward"]
    assert not fast_swin._STORED


class Counted:
    def __init__(self, name: str, kernel: Any, ran: list[str]) -> None:
        self.name, self.kernel, self.ran = name, kernel, ran

    def __getitem__(self, grid: Any) -> Any:
        self.ran.append(self.name)
        return self.kernel[grid]
