"""Attention of small BERTs by the kernel gives the plain numbers; what does not fit is plain.

Without a GPU the kernel runs in Triton's interpreter.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from gradient_case import Case, adapted, bert, labels_of, roberta
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import DynamicCache
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention

from dpfed import accel
from dpfed.accel.operators import attention as operators
from dpfed.accel.operators.attention import window_attention
from dpfed.model.fast_paths import bert as fast_bert
from dpfed.model.zoo.text_inputs import additive
from dpfed.privacy.clipping import Clipping
from dpfed.privacy.fixed_shape_sum import FixedSum, Pass, PassShape
from dpfed.privacy.record_batch import Records

GPU = torch.cuda.is_available()
WHERE = "cuda" if GPU else "cpu"
# Two layers, two heads of 8 columns.
SHAPE = {"hidden_size": 16, "max_position_embeddings": 80}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret the attention kernel alone: the others have their own tests, and it is slow."""
    monkeypatch.setattr(
        operators, "accel", SimpleNamespace(**{**vars(accel), "interpreted": not GPU})
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the shapes of the masks that the kernel got, one for each call."""
    seen: list[Any] = []
    known = fast_bert.window_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Any, *rest: Any) -> Tensor:
        seen.append(None if mask is None else tuple(mask.shape))
        return known(q, k, v, bias, mask, *rest)

    monkeypatch.setattr(fast_bert, "window_attention", counted)
    return seen


def used(calls: list[Any]) -> int:
    count = len(calls)
    calls.clear()
    return count


def real_of(lengths: tuple[int, ...], n: int) -> Tensor:
    return torch.arange(n) < torch.tensor(lengths).unsqueeze(1)


def text(lengths: tuple[int, ...], n: int) -> dict[str, Tensor]:
    """Return inputs as the zoo's text models prepare them."""
    real = real_of(lengths, n)
    ids = torch.randint(2, 20, real.shape, generator=torch.Generator().manual_seed(n))
    places = torch.arange(n).expand(real.shape)
    masked = {
        "input_ids": torch.where(real, ids, 0),
        "position_ids": places,
        "attention_mask": additive(real, False),
    }
    return {name: x.to(WHERE) for name, x in masked.items()}


def attention_of(model: nn.Module) -> Any:
    return next(
        m for m in model.modules() if isinstance(m, BertSelfAttention | RobertaSelfAttention)
    )


# ---- the kernel


@pytest.mark.parametrize("mask", ["none", "rows", "one", "full", "bool"])
@pytest.mark.parametrize(("n", "heads", "depth"), [(5, 2, 8), (17, 3, 4), (64, 1, 32)])
def test_attention_without_a_bias(n: int, heads: int, depth: int, mask: str) -> None:
    g = torch.Generator().manual_seed(n)
    q, k, v, grad = (torch.randn(3, n, heads * depth, generator=g).to(WHERE) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    real = {
        "none": None,
        "rows": additive(real_of((n, 3, 0), n), False),
        "one": additive(real_of((4,), n), False),
        "full": torch.randn(3, 1, n, n, generator=g),
        "bool": (torch.rand(3, 1, n, n, generator=g) < 0.5) & real_of((n, 3, 0), n)[:, None, None],
    }[mask]
    real = None if real is None else real.to(WHERE)

    def split(x: Tensor) -> Tensor:
        return x.view(3, n, heads, depth).transpose(1, 2)

    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(split(q), split(k), split(v), attn_mask=real, scale=0.7)
    want = y.transpose(1, 2).reshape(q.shape)
    got = window_attention(q, k, v, None, fast_bert._additive(real), 0.7, heads)
    pairs = [(got, want)]
    pairs += zip(
        torch.autograd.grad(got, (q, k, v), grad),
        torch.autograd.grad(want, (q, k, v), grad),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    if mask == "bool":
        assert (got[2] == 0).all(), "who may look nowhere sees nothing"


# ---- whole models


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("build", [bert, roberta])
@pytest.mark.parametrize("n", [5, 16, 17])
def test_gradients_of_records_equal_the_plain_way(
    n: int, build: Any, train: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(adapted(build(**SHAPE), train))
    case.ready.model.to(WHERE)
    assert type(attention_of(case.ready.model)).__name__.startswith("Fused")
    lengths = (n, 3, 0, 1, n - 1)
    theta, client = case.rows(2).to(WHERE), torch.tensor([0, 1, 0, 1, 1], device=WHERE)
    args = theta, client, text(lengths, n), labels_of(5).to(WHERE)

    def outcome() -> tuple[Tensor, Tensor]:
        # The CPU's own kernel gives other gradients for a record of padding alone.
        with sdpa_kernel(SDPBackend.MATH):
            return torch.cat(case.ready.grads(*args), 1), case.ready.scores(theta[0], args[2])

    grads, scores = outcome()
    assert calls == 4 * [(5, 1, n)], "two layers, with gradients and without; a number for each key"
    calls.clear()
    monkeypatch.setattr(fast_bert, "available", lambda x: False)
    want, wanted = outcome()
    assert not calls
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-5)
    assert want.isfinite().all()
    assert ((grads - want).norm(dim=1) < 3e-5 * want.norm(dim=1)).all()


@pytest.mark.parametrize("build", [bert, roberta])
def test_masks_as_transformers_makes_them(
    build: Any, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes booleans of a 2-D mask for sdpa and numbers for eager attention.

    It makes no mask if all tokens are real.
    """
    model = build(**SHAPE).to(WHERE)
    fast_bert.fuse_bert(model)
    inputs = {
        "input_ids": text((5, 3, 4), 5)["input_ids"],
        "attention_mask": real_of((5, 3, 4), 5).long().to(WHERE),
    }
    for way in ("sdpa", "eager"):
        model.set_attn_implementation(way)
        got = [model(**inputs).logits, model(input_ids=inputs["input_ids"]).logits]
        assert calls == 2 * [(3, 5, 5)] + 2 * [None]
        calls.clear()
        with monkeypatch.context() as off:
            off.setattr(fast_bert, "available", lambda x: False)
            want = [model(**inputs).logits, model(input_ids=inputs["input_ids"]).logits]
        assert not calls
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, float("-inf")])
def test_unused_slots_add_exactly_nothing(
    lowest: float, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unused slots change no bit, also if they hold padding alone.

    The clipped sums are those of the plain path.
    """
    case = Case(adapted(bert(**SHAPE), "lora"))
    case.ready.model.to(WHERE)
    inputs = text((5, 3, 0, 4), 5)
    inputs["attention_mask"] = inputs["attention_mask"].masked_fill(
        inputs["attention_mask"] < 0, lowest
    )
    records = Records(inputs, labels_of(4).to(WHERE))
    shape = PassShape(2, 4, case.space.size)
    sums = FixedSum(case.ready, records, Clipping("flat"), None, shape, capture=False)

    def total(rows: list[int], valid: list[int]) -> Tensor:
        zeros = torch.zeros(4, dtype=torch.int64)
        packed = Pass.of(
            torch.tensor(rows), torch.tensor([0, 1, 0, 1]), torch.tensor(valid), zeros, zeros
        )
        return sums(case.rows(2).to(WHERE), Pass(packed.packed.to(WHERE)), 1.0)[0].clone()

    padding = total([0, 1, 2, 2], [1, 1, 0, 0])
    assert padding.isfinite().all()
    assert (padding != 0).any(1).all()
    assert torch.equal(padding, total([0, 1, 3, 0], [1, 1, 0, 0]))
    assert (total([2, 2, 2, 2], [0, 0, 0, 0]) == 0).all()
    blank, labels = records.take(torch.tensor([2], device=WHERE))
    alone = torch.cat(
        case.ready.grads(case.rows(1).to(WHERE), torch.tensor([0], device=WHERE), blank, labels), 1
    )
    assert alone.isfinite().all()
    assert used(calls) == 8
    monkeypatch.setattr(fast_bert, "available", lambda x: False)
    torch.testing.assert_close(padding, total([0, 1, 2, 2], [1, 1, 0, 0]), rtol=1e-4, atol=1e-6)
    assert not calls


# ---- where the kernel does not fit

NONE = torch.zeros(2, 1, 1, 5)
# Settings of the model, arguments of its attention.
FALLBACKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "past": ({}, {"past_key_values": "cache"}),
    "decoder": ({"is_decoder": True}, {"attention_mask": NONE}),
    "causal": ({}, {"is_causal": True}),
    "bias": ({}, {"position_bias": torch.zeros(1, 2, 5, 5)}),
    "weights": ({}, {"output_attentions": True}),
    "large": ({}, {"n": 65}),
    "deep": ({"hidden_size": 66}, {}),
    "two": ({}, {"attention_mask": torch.zeros(5, 5)}),
    "records": ({}, {"attention_mask": torch.zeros(4, 1, 1, 5)}),
    "rows": ({}, {"attention_mask": torch.zeros(2, 1, 3, 5)}),
    "heads": ({}, {"attention_mask": torch.zeros(2, 2, 5, 5)}),
    "whole": ({}, {"attention_mask": NONE.long()}),
    "double": ({}, {"attention_mask": NONE.double()}),
    "gradient": ({}, {"attention_mask": NONE.clone().requires_grad_()}),
    "column": ({}, {"attention_mask": torch.zeros(2, 1, 5, 1)}),
}


@pytest.mark.parametrize("why", FALLBACKS)
def test_the_plain_way_where_the_kernel_does_not_fit(
    why: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, given = FALLBACKS[why]
    model = bert(**{**SHAPE, **settings}).to(WHERE)
    fast_bert.fuse_bert(model)
    attention = attention_of(model)
    went: list[str] = []
    monkeypatch.setattr(
        BertSelfAttention, "forward", lambda *args, **kwargs: went.append("plain") or (args, kwargs)
    )
    n = given.get("n", 5)
    x = torch.randn(2, n, attention.query.in_features, device=WHERE)
    given = {
        name: y.to(WHERE) if isinstance(y, Tensor) else y
        for name, y in given.items()
        if name != "n"
    }
    if "past_key_values" in given:
        given["past_key_values"] = DynamicCache()
    args, kwargs = attention(x, **given)
    assert (used(calls), went) == (0, ["plain"])
    assert args[1] is x
    assert args[2] is given.get("attention_mask")
    assert args[3] is given.get("past_key_values")
    assert kwargs == {
        name: y for name, y in given.items() if name not in ("attention_mask", "past_key_values")
    }
    # Without that argument the kernel runs.
    if not settings and n == 5:
        attention(
            x, is_causal=False, position_ids=x, encoder_hidden_states=None, output_attentions=False
        )
        assert (used(calls), went) == (1, ["plain"])


@pytest.mark.parametrize(
    "why", ["is_causal", "is_decoder", "dropout", "precision", "way", "config", "bool", "vmap"]
)
def test_the_plain_way_in_other_states(
    why: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bert(**SHAPE, attention_probs_dropout_prob=0.5).to(WHERE).requires_grad_(False)
    fast_bert.fuse_bert(model)
    attention = attention_of(model)
    went: list[str] = []
    known = BertSelfAttention.forward
    monkeypatch.setattr(
        BertSelfAttention,
        "forward",
        lambda *args, **kwargs: went.append("plain") or known(*args, **kwargs),
    )
    x, mask = torch.randn(2, 5, 16, device=WHERE), NONE.to(WHERE)
    attention(x, mask)
    assert (used(calls), went) == (1, [])
    if why.startswith("is_"):
        setattr(attention, why, True)
    elif why == "dropout":
        attention.train()
    elif why == "precision":
        attention.double()
        x, mask = x.double(), mask.double()
    elif why in ("way", "config", "bool"):
        model.set_attn_implementation("eager")
        monkeypatch.setattr(
            attention.config, "_attn_implementation", "mine" if why == "way" else "eager"
        )
        attention.config.output_attentions = why == "config"
        mask = mask.bool() if why == "bool" else mask
    if why == "vmap":
        torch.func.vmap(lambda x: attention(x.unsqueeze(0))[0])(x)
    else:
        monkeypatch.setattr(
            fast_bert, "window_attention", lambda *args: pytest.fail("it went by the kernel")
        )
        if why == "way":
            with pytest.raises(KeyError, match="mine"):
                attention(x, mask)
        else:
            attention(x, mask)
    assert (used(calls), went) == (0, ["plain"])


def test_probabilities_are_there_for_who_asks(calls: list[Any]) -> None:
    model = bert(**SHAPE).to(WHERE)
    model.set_attn_implementation("eager")
    fast_bert.fuse_bert(model)
    found = model(**text((5, 3), 5), output_attentions=True).attentions
    assert [tuple(p.shape) for p in found] == 2 * [(2, 2, 5, 5)]
    assert not calls


# ---- the model itself stays as it was


@pytest.mark.parametrize("build", [bert, roberta])
def test_the_model_stays_what_it_was(build: Any, calls: list[Any]) -> None:
    model = adapted(build(**SHAPE), "lora").to(WHERE)
    names = list(model.state_dict())
    # A second call changes nothing.
    for _ in range(2):
        fast_bert.fuse_bert(model)
    inputs = text((5, 3), 5)
    want = model(**inputs).logits
    assert list(model.state_dict()) == names
    assert torch.equal(copy.deepcopy(model)(**inputs).logits, want)
    assert used(calls) == 4


def test_others_are_left_alone() -> None:
    class BertSelfAttention(nn.Linear):
        pass

    model = nn.Sequential(BertSelfAttention(2, 2))
    fast_bert.fuse_bert(model)
    assert type(model[0]) is BertSelfAttention


def test_a_compiled_layer_takes_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert(**SHAPE).requires_grad_(False).to(WHERE)
    fast_bert.fuse_bert(model)
    layer = attention_of(model)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)).to(WHERE).requires_grad_()
    mask = text((5, 3), 5)["attention_mask"]

    def outcome(call: Any) -> list[Tensor]:
        y = call(x, mask)[0]
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    want = outcome(layer)
    monkeypatch.setattr(BertSelfAttention, "forward", None)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    for one, other in zip(outcome(compiled), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
