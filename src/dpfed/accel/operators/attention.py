"""Attention within small windows, and the reordering of rows, as operators with backward passes.

A window is a group of positions that attend only to one another. Swin's windows have a position
bias. In a small BERT the whole record is one window, without a bias.

Plain autograd starts two dozen kernels for the attention of one layer. Here the forward pass is one
kernel. The backward pass is a second kernel, which computes the attention probabilities again. The
operators work in eager mode, in CUDA graphs and in compiled programs.

Where `available` returns False, callers must run the layer's own code. `plain_attention` serves
only to check the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfed import accel
from dpfed.accel.operators import declare_cost

# Largest number of positions in a window. The scores of a larger window do not fit into the
# registers of a GPU.
MAX_POSITIONS = 64
# Largest width of an attention head, as in Swin and MiniLM. For wider heads the kernels may need
# more shared memory than a small GPU has.
MAX_DEPTH = 32


def available(x: Tensor) -> bool:
    """Return True if the operators can run on the device and dtype of `x` and outside vmap."""
    in_vmap = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    if in_vmap or x.dtype not in accel.FLOATS:
        return False
    return _works_on(x.device.index) if x.is_cuda else accel.interpreted


def _works_on(index: int) -> bool:
    if index not in _WORKING:
        if torch.cuda.is_current_stream_capturing():
            return False
        device = torch.device("cuda", index)
        _WORKING[index] = accel.works(device) and accel.passes_check(
            "kernels for attention", device, lambda: right(device)
        )
    return _WORKING[index]


# This attribute makes torch.compile treat the result as a constant. It is set directly, because
# calling `torch.compiler.assume_constant_result` would import the compiler in every process.
_works_on._dynamo_marked_constant = True  # type: ignore[attr-defined]
_WORKING: dict[int, bool] = {}


def right(device: torch.device) -> bool:
    """Return True if attention, its gradients and `reorder` agree with plain PyTorch on the device.

    All windows and heads of the test have different numbers, and they do not fill the kernels'
    tiles. A kernel that confuses windows or heads, or reads beyond them, therefore gives a wrong
    result.
    """
    g = torch.Generator().manual_seed(0)
    numbers = [torch.randn(3, 5, 16, generator=g) for _ in range(4)]
    heads, full, row = (
        torch.randn(size, generator=g) for size in ((2, 5, 5), (3, 5, 5), (3, 1, 5))
    )
    # Test a mask that hides all positions from one query, where a plain softmax would give NaN.
    full[1, 2] = float("-inf")
    order = torch.tensor([2, 0, 4, 1, 3], device=device)
    x = numbers[0].to(device)
    good = torch.equal(_reorder(x, order, order.argsort()), x[:, order])
    half = torch.bfloat16
    cases: tuple[tuple[torch.dtype, Tensor | None, Tensor | None], ...] = (
        (half, heads, None),
        (half, heads, full),
        (half, None, row),
        (torch.float32, None, full),
    )
    for dtype, bias, mask in cases:
        # Compute these gradients on the CPU. The caller may be PyTorch's thread for GPU gradients,
        # so gradients on the GPU would be a deadlock.
        exact_grad, q, k, v = (t.to(dtype).double() for t in numbers)
        with torch.enable_grad():
            inputs = [t.requires_grad_() for t in (q, k, v)]
            wanted = plain_attention(q, k, v, bias, mask, 0.5, 2)
            back = torch.autograd.grad(wanted, inputs, exact_grad)
        grad, q, k, v = (t.to(device, dtype) for t in numbers)
        bias, mask = (None if t is None else t.to(device) for t in (bias, mask))
        found = [_attend(q, k, v, bias, mask, 0.5, 2)]
        found += _attend_backward(grad, q, k, v, bias, mask, 0.5, 2)
        for one, other in zip(found, (wanted.detach(), *back), strict=True):
            good &= accel.nearly_equal(one.cpu(), other)
    return good


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    heads: int,
) -> Tensor:
    """Return the output of `window_attention`, computed by plain matrix products.

    A query that may see no position gets the output 0.
    """
    windows, n, width = q.shape
    q, k, v = (t.view(windows, n, heads, width // heads).transpose(1, 2) for t in (q, k, v))
    score = scale * q @ k.mT
    if mask is not None:
        score = score + mask.unsqueeze(1)
    if bias is not None:
        score = score + bias
    nowhere = (score == float("-inf")).all(-1, keepdim=True)
    p = score.masked_fill(nowhere, 0.0).softmax(-1).masked_fill(nowhere, 0.0)
    return (p @ v).transpose(1, 2).reshape(windows, n, width)


def declare_attention_cost() -> None:
    def operations(q: tuple[int, ...], *_: Any, **others: Any) -> int:
        windows, n, width = q
        return 4 * windows * n * n * width

    declare_cost(torch.ops.dpfed.window_attention, operations)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    heads: int | None = None,
) -> Tensor:
    """Return the output of softmax attention; q, k, v and output are `[windows, n, heads * d]`.

    Each window has n positions, and each head d numbers per position.

    scale  factor of the scores q kᵀ
    bias   `[heads, n, n]`, added to the scores; it gets no gradient
    mask   `[kinds, n, n]`, added to the scores; window w uses `mask[w % kinds]`; no gradient;
           with shape `[kinds, 1, n]` all queries of a window share one row
    heads  number of attention heads; None reads the number from the shape of the bias
    """
    if (bias is not None and bias.requires_grad) or (mask is not None and mask.requires_grad):
        raise ValueError("attention by kernels has no gradient for its bias and mask")
    if heads is None:
        heads = 0 if bias is None else bias.shape[0]
    n = q.shape[1]
    fits = (
        q.shape == k.shape == v.shape
        and n <= MAX_POSITIONS
        and heads > 0
        and q.shape[2] in range(heads, heads * MAX_DEPTH + 1, heads)
        and (bias is None or bias.shape == (heads, n, n))
        and (mask is None or tuple(mask.shape[1:]) in ((1, n), (n, n)))
        and (mask is None or (len(mask) > 0 and q.shape[0] % len(mask) == 0))
        and q.dtype == k.dtype == v.dtype
        and q.dtype in accel.FLOATS
    )
    if not fits:
        sizes = [x if x is None else tuple(x.shape) for x in (bias, mask)]
        raise ValueError(
            f"attention of {tuple(q.shape)} in {heads} heads with a bias of {sizes[0]} and a mask "
            f"of {sizes[1]} does not fit its kernel"
        )
    result: Tensor = torch.ops.dpfed.window_attention(q, k, v, bias, mask, scale, heads)
    return result


def reorder(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Return `x[:, index]`: the n rows of each of M records in another order, for x `[M, n, C]`.

    `index [n]` is a permutation. The backward pass needs `inverse`, its inverse.
    """
    result: Tensor = torch.ops.dpfed.reorder(x, index, inverse)
    return result


def _tile_side(count: int) -> int:
    """Return the side of a tile, the block of numbers that one GPU program computes.

    It is the smallest power of two that is at least `count`, and at least 16, as a GPU's tensor
    cores need.
    """
    return max(16, 1 << (count - 1).bit_length())


def _launch(
    q: Tensor, bias: Tensor | None, mask: Tensor | None, heads: int
) -> tuple[tuple[int], dict[str, Any]]:
    n, depth = q.shape[1], q.shape[2] // heads
    side = _tile_side(n)
    # Use so many warps (groups of 32 threads) that their registers together can hold one tile.
    warps = 4
    if side == 16:
        warps = 1
    elif q.dtype == torch.float32 and side == MAX_POSITIONS:
        warps = 8
    options = {
        "heads": heads, "masks": 1 if mask is None else len(mask), "N": n, "D": depth,
        "SIDE": side, "DEPTH": _tile_side(depth), "BIASED": bias is not None,
        "MASK_ROWS": 0 if mask is None else mask.shape[1], "num_warps": warps,
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
        # The kernel needs a valid address for bias and mask. If one of them is None, pass the
        # address of q instead; the kernel does not read it.
        added = (q if x is None else x.contiguous() for x in (bias, mask))
        grid, options = _launch(q, bias, mask, heads)
        with accel.on_device(q):
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
        grid, options = _launch(q, bias, mask, heads)
        with accel.on_device(q):
            attend_backward[grid](grad, q, k, v, *added, *outs, scale, **options)
    return outs


def _reorder(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    if out.numel():
        from dpfed.accel.windows import reorder

        count, width = x.shape[0] * x.shape[1], x.shape[2]
        columns = min(128, _tile_side(width))
        grid = (-(-count // 16), -(-width // columns))
        sizes = {"N": x.shape[1], "WIDTH": width, "ROWS": 16, "COLUMNS": columns}
        with accel.on_device(x):
            reorder[grid](x.contiguous(), index, out, count, **sizes)
    return out


def _define() -> None:
    inputs = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, float scale, int heads"
    forward = torch.library.custom_op(
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
    forward.register_fake(lambda q, *_: q.new_empty(q.shape))
    back.register_fake(
        lambda grad, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    )
    rows.register_fake(lambda x, index, inverse: x.new_empty(x.shape))
    forward.register_autograd(_gradient, setup_context=_save)
    rows.register_autograd(_reorder_back, setup_context=_save_order)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.heads = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, grad: Tensor) -> Any:
    grads = torch.ops.dpfed.window_attention_backward(
        grad, *ctx.saved_tensors, ctx.scale, ctx.heads
    )
    return *grads, None, None, None, None


def _save_order(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _reorder_back(ctx: Any, grad: Tensor) -> Any:
    index, inverse = ctx.saved_tensors
    return torch.ops.dpfed.reorder(grad, inverse, index), None, None


_define()
