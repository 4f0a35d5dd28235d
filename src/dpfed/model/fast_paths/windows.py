"""Attention of few positions, and the reordering into Swin's windows, as operations with kernels and backward passes.

It serves Swin, whose windows have a position bias (`swin.py`), and small BERTs, where each record is a window without one
(`bert.py`). Written with autograd, one layer's attention is two dozen small kernels, most of which copy. Here the forward
pass is one, and so is the backward pass, which computes the probabilities again. As operators of `torch` they work in
eager mode, in a CUDA graph and in compiled programs.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from dpfed import accel

LOG = logging.getLogger("dpfed")
LARGEST = (
    64  # positions of a window, or tokens of a text; a side of more would not stay in registers
)
DEEPEST = 32  # columns of a head, as all known Swins and MiniLM have; more may not fit the memory of smaller GPUs
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def available(x: Tensor) -> bool:
    """Whether kernels can run where this tensor is."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return False  # inside vmap
    return x.dtype in TYPES and (_tried(x.device.index) if x.is_cuda else accel.interpreted)


def _tried(index: int) -> bool:
    """Whether kernels work on this GPU, found out by one."""
    if index not in _WORKING:
        if torch.cuda.is_current_stream_capturing():
            return False
        device = torch.device("cuda", index)
        works = accel.works(device)
        try:
            if works:
                _try(device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler of programs for GPUs fails in many ways, and none of them is worth a run
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
            LOG.warning(
                "attention has no kernel of its own on %s and goes the plain way: %s",
                device,
                reason,
            )
            works = False
        _WORKING[index] = works
    return _WORKING[index]


# To `torch.compile` the answer is a constant (`torch.compiler.assume_constant_result` would import the compiler now).
_tried._dynamo_marked_constant = True  # type: ignore[attr-defined]
_WORKING: dict[int, bool] = {}


def _try(device: torch.device) -> None:
    """Attention and its gradients, with a bias as Swin's and with masks as BERT's, and an order of rows, against plain products.

    Several windows and heads, all different and not as large as a tile: a kernel that takes one for another is noticed.
    """
    g = torch.Generator().manual_seed(0)
    numbers = [torch.randn(3, 5, 16, generator=g) for _ in range(4)]
    bias, full, row = (
        torch.randn(shape, generator=g).to(device) for shape in ((2, 5, 5), (3, 5, 5), (3, 1, 5))
    )
    full[1, 2] = float("-inf")  # who may look nowhere
    order = torch.tensor([2, 0, 4, 1, 3], device=device)
    x = numbers[0].to(device)
    good = torch.equal(_reorder(x, order, order.argsort()), x[:, order])
    half = torch.bfloat16
    cases = ((half, bias, None), (half, bias, full), (half, None, row), (torch.float32, None, full))
    for dtype, added, mask in cases:
        grad, q, k, v = (t.to(device, dtype) for t in numbers)
        with torch.enable_grad():
            a, b, c = (t.double().requires_grad_() for t in (q, k, v))
            wanted = _plain(a, b, c, added, mask, 0.5, 2)
            back = torch.autograd.grad(wanted, (a, b, c), grad.double())
        found = [
            _attend(q, k, v, added, mask, 0.5, 2),
            *_attend_backward(grad, q, k, v, added, mask, 0.5, 2),
        ]
        good &= all(
            accel.alike(one, other)
            for one, other in zip(found, (wanted.detach(), *back), strict=True)
        )
    if not good:
        raise RuntimeError("its kernel gives other numbers")


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    heads: int,
) -> Tensor:
    """What the kernels compute, by products."""
    windows, n, width = q.shape
    q, k, v = (t.view(windows, n, heads, width // heads).transpose(1, 2) for t in (q, k, v))
    score = (
        scale * q @ k.mT
        + (0 if mask is None else mask.unsqueeze(1))
        + (0 if bias is None else bias)
    )
    nowhere = (score == float("-inf")).all(-1, keepdim=True)
    p = score.masked_fill(nowhere, 0.0).softmax(-1).masked_fill(nowhere, 0.0)
    return (p @ v).transpose(1, 2).reshape(windows, n, width)


def declare_cost() -> None:
    """A compiler that weighs memory against time would take attention for nothing, and compute it twice."""
    from torch.utils.flop_counter import (
        flop_registry,
        register_flop_formula,
    )  # imports triton, so not at the top

    def operations(q: tuple[int, ...], *_: Any, **others: Any) -> int:
        windows, n, width = q
        return 4 * windows * n * n * width

    if torch.ops.dpfed.window_attention not in flop_registry:  # a second registration is an error
        register_flop_formula(torch.ops.dpfed.window_attention)(operations)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    heads: int | None = None,
) -> Tensor:
    """Softmax attention for q, k, v `[windows, n, heads * d]`, of the same shape.

    bias `[heads, n, n]` is added to the scores, and so is mask `[kinds, n, n]`, of which window w takes `w % kinds`; a mask
    `[kinds, 1, n]` is the same for all positions that look. Both get no gradient. The heads are those of the bias, and are to
    be named where there is none.
    """
    if (bias is not None and bias.requires_grad) or (mask is not None and mask.requires_grad):
        raise ValueError("attention by kernels has no gradient for its bias and mask")
    if heads is None:
        heads = 0 if bias is None else bias.shape[0]
    n = q.shape[1]
    fits = (
        q.shape == k.shape == v.shape
        and n <= LARGEST
        and heads > 0
        and q.shape[2] in range(heads, heads * DEEPEST + 1, heads)
        and (bias is None or bias.shape == (heads, n, n))
        and (mask is None or tuple(mask.shape[1:]) in ((1, n), (n, n)))
        and (mask is None or (len(mask) > 0 and q.shape[0] % len(mask) == 0))
        and q.dtype == k.dtype == v.dtype
        and q.dtype in TYPES
    )
    if not fits:
        raise ValueError(
            f"attention of {tuple(q.shape)} in {heads} heads with a bias of {_size(bias)} and a mask of {_size(mask)} does "
            "not fit its kernel"
        )
    result: Tensor = torch.ops.dpfed.window_attention(q, k, v, bias, mask, scale, heads)
    return result


def reorder(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """`x[:, index]` for x `[M, n, C]` and a permutation of its rows beside the inverse of it, by which gradients go back."""
    result: Tensor = torch.ops.dpfed.reorder(x, index, inverse)
    return result


def _size(x: Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else tuple(x.shape)


def _side(count: int) -> int:
    """A power of two, as tiles have, and no less than a matrix unit takes."""
    return max(16, 1 << (count - 1).bit_length())


def _shape(
    q: Tensor, bias: Tensor | None, mask: Tensor | None, heads: int
) -> tuple[tuple[int], dict[str, Any]]:
    n, depth = q.shape[1], q.shape[2] // heads
    side = _side(n)
    warps = (
        1 if side == 16 else 8 if q.dtype == torch.float32 and side == LARGEST else 4
    )  # as many as hold it in registers
    options = {
        "heads": heads, "masks": 1 if mask is None else len(mask), "N": n, "D": depth, "SIDE": side,
        "DEPTH": _side(depth), "BIASED": bias is not None, "MASK_ROWS": 0 if mask is None else mask.shape[1],
        "num_warps": warps,
    }  # fmt: skip
    return (q.shape[0] * heads,), options


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    heads: int,
) -> Tensor:
    out = q.new_empty(q.shape)
    if out.numel():
        from dpfed.accel.windows import attend

        q, k, v = (x.contiguous() for x in (q, k, v))
        added = (
            q if x is None else x.contiguous() for x in (bias, mask)
        )  # what is not there is not read
        grid, options = _shape(q, bias, mask, heads)
        with accel.on(q):
            attend[grid](q, k, v, *added, out, scale, **options)
    return out


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    outs = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    if grad.numel():
        from dpfed.accel.windows import attend_backward

        grad, q, k, v = (x.contiguous() for x in (grad, q, k, v))
        added = (q if x is None else x.contiguous() for x in (bias, mask))
        grid, options = _shape(q, bias, mask, heads)
        with accel.on(q):
            attend_backward[grid](grad, q, k, v, *added, *outs, scale, **options)
    return outs


def _reorder(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    if out.numel():
        from dpfed.accel.windows import reorder

        count, width = x.shape[0] * x.shape[1], x.shape[2]
        rows, columns = 16, min(128, _side(width))
        grid = (-(-count // rows), -(-width // columns))
        with accel.on(x):
            reorder[grid](
                x.contiguous(),
                index,
                out,
                count,
                N=x.shape[1],
                WIDTH=width,
                ROWS=rows,
                COLUMNS=columns,
            )
    return out


def _define() -> None:
    inputs = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, float scale, int heads"
    op = torch.library.custom_op(
        "dpfed::window_attention", _attend, mutates_args=(), schema=f"({inputs}) -> Tensor"
    )
    back = torch.library.custom_op(
        "dpfed::window_attention_backward",
        _attend_backward,
        mutates_args=(),
        schema=f"(Tensor grad, {inputs}) -> (Tensor, Tensor, Tensor)",
    )
    rows = torch.library.custom_op(
        "dpfed::reorder",
        _reorder,
        mutates_args=(),
        schema="(Tensor x, Tensor index, Tensor inverse) -> Tensor",
    )
    op.register_fake(lambda q, *_: q.new_empty(q.shape))
    back.register_fake(
        lambda grad, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    )
    rows.register_fake(lambda x, index, inverse: x.new_empty(x.shape))
    op.register_autograd(_gradient, setup_context=_keep)
    rows.register_autograd(_order_back, setup_context=_keep_order)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.heads = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, grad: Tensor) -> Any:
    grads = torch.ops.dpfed.window_attention_backward(
        grad, *ctx.saved_tensors, ctx.scale, ctx.heads
    )
    return *grads, None, None, None, None


def _keep_order(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _order_back(ctx: Any, grad: Tensor) -> Any:
    index, inverse = ctx.saved_tensors
    return torch.ops.dpfed.reorder(grad, inverse, index), None, None


_define()
