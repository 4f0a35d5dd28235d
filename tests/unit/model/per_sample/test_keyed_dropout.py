"""The dropout mask depends on the record's key, the layer and the place alone."""

from __future__ import annotations

import pytest
import torch
from gradient_case import (
    CLASSES,
    MODELS,
    Case,
    adapted,
    images,
    labels_of,
    spread,
    swin,
    texts,
    vit,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from dpfed.accel.operators.dropout import keep_mask, mix
from dpfed.model.per_sample.keyed_dropout import KEY, install_keyed_dropout, rule_of

INT64 = st.integers(-(2**63), 2**63 - 1)


def keyed(model: nn.Module, x: Tensor, keys: Tensor) -> Tensor:
    names = install_keyed_dropout(model)
    return functional_call(model, dict.fromkeys(names, keys), (x,))


@given(INT64)
def test_mix_is_splitmix64(value: int) -> None:
    """The hash agrees with one on Python's unbounded integers."""
    x = value % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x = x ^ (x >> 31)
    assert mix(torch.tensor([value])).item() % 2**64 == x


@given(
    st.lists(INT64, min_size=1, max_size=5),
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.floats(0.05, 0.95),
)
def test_mask_depends_on_the_key_alone(keys: list[int], salt: int, width: int, drop: float) -> None:
    together = keep_mask(torch.tensor(keys), rule_of(salt, drop), width)
    for key, row in zip(keys, together, strict=True):
        assert torch.equal(keep_mask(torch.tensor([key]), rule_of(salt, drop), width)[0], row)
    assert torch.equal(
        keep_mask(torch.tensor(keys), rule_of(salt, drop), width + 4)[:, :width], together
    )


@pytest.mark.parametrize("drop", [0.1, 0.5, 0.9])
def test_keep_rate(drop: float) -> None:
    """Shares lie within five standard deviations over places, successive keys and layers."""
    n = 100_000
    for kept in (
        keep_mask(torch.tensor([17]), rule_of(3, drop), n),
        keep_mask(torch.arange(n), rule_of(3, drop), 1),
        torch.stack(
            [
                keep_mask(torch.tensor([17]), rule_of(salt, drop), 100)
                for salt in range(1, n // 100 + 1)
            ]
        ),
    ):
        assert abs(kept.float().mean() - (1 - drop)) < 5 * (drop * (1 - drop) / n) ** 0.5


def test_keys_layers_and_places_are_unrelated() -> None:
    n = 40_000
    a = keep_mask(torch.tensor([1, 2]), rule_of(1, 0.5), n).float()
    b = keep_mask(torch.tensor([1, 2]), rule_of(2, 0.5), n).float()
    pairs = {
        "keys": (a[0], a[1]),
        "layers": (a[0], b[0]),
        "both": (a[0], b[1]),
        "places": (a[0, 1:], a[0, :-1]),
    }
    for name, (x, y) in pairs.items():
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 5 / n**0.5, name


def test_layers_differ_and_values_are_scaled() -> None:
    model = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
    names = install_keyed_dropout(model)
    x, keys = torch.ones(3, 50), torch.tensor([4, 5, 6])
    a, b = (functional_call(layer, {KEY: keys}, (x,)) for layer in model)
    assert names == [f"0.{KEY}", f"1.{KEY}"]
    assert not torch.equal(a, b)
    assert set(a.unique().tolist()) == {0.0, 2.0}


def test_windows_of_a_record_follow_its_key() -> None:
    """A record with k rows gets the same mask in any batch."""
    model, x = nn.Sequential(nn.Dropout(0.4)), torch.ones(6, 5, 2)
    out = keyed(model, x, torch.tensor([8, 9, 10])).view(3, 2, 5, 2)
    alone = keyed(model, x[:2], torch.tensor([9]))
    assert torch.equal(out[1].reshape(2, 5, 2), alone)
    # Two windows, two parts of the mask.
    assert not torch.equal(out[1][0], out[1][1])


def test_identity_without_keys() -> None:
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.9)), torch.randn(3, 4)
    install_keyed_dropout(model)
    assert torch.equal(model(x), x)
    model.train()
    # The mode of the module does not matter.
    assert torch.equal(model(x), x)


def test_expectation_is_preserved() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0]])
    n, drop = 50_000, 0.3
    out = keyed(nn.Sequential(nn.Dropout(drop)), x.expand(n, 3), torch.arange(n))
    assert ((out.mean(0) - x[0]).abs() < 5 * x[0].abs() * (drop / (1 - drop) / n) ** 0.5).all()


def test_rate_zero_needs_no_key() -> None:
    model = nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.2))
    assert install_keyed_dropout(model) == [f"1.{KEY}"]
    assert KEY not in model.state_dict()
    assert not any(KEY in n for n in model.state_dict())


def test_an_activation_that_fits_no_record_is_an_error() -> None:
    with pytest.raises(ValueError, match="leading axis of 4 for 3 records"):
        keyed(nn.Sequential(nn.Dropout(0.5)), torch.ones(4, 3), torch.arange(3))


# ---- in whole models


def dropping(name: str) -> Case:
    if name == "swin":
        return Case(adapted(swin(hidden_dropout_prob=0.2, drop_path_rate=0.4), "full"))
    # Its embeddings own raw parameters and a dropout, so vmap maps the keys.
    if name == "vit-full":
        return Case(adapted(vit(hidden_dropout_prob=0.3), "full"))
    if name == "vit-lora":
        return Case(adapted(vit(), "lora", dropout=0.3))
    return Case(adapted(MODELS[name][0](hidden_dropout_prob=0.3), "full"))


@pytest.mark.parametrize("name", ["swin", "vit-full", "vit-lora", "bert", "roberta"])
def test_a_record_drops_the_same_in_any_fleet(name: str) -> None:
    case = dropping(name)
    assert case.ready.has_dropout
    make = {"swin": images(16), "bert": texts(0), "roberta": texts(1)}.get(name, images(8))
    inputs, labels, theta = make(5), labels_of(5), case.rows(3)
    client, keys = torch.tensor([0, 2, 1, 1, 0]), torch.tensor([11, 22, 33, 44, 55])

    def grads(order: list[int], keys: Tensor | None) -> Tensor:
        part = torch.tensor(order)
        chosen = None if keys is None else keys[part]
        return torch.cat(
            case.ready.grads(
                theta, client[part], {k: v[part] for k, v in inputs.items()}, labels[part], chosen
            ),
            1,
        )

    want = grads([0, 1, 2, 3, 4], keys)
    for order in ([4, 2, 0, 1, 3], [3], [1, 4]):
        torch.testing.assert_close(grads(order, keys), want[order], rtol=1e-4, atol=1e-6)
    without, other = grads([0, 1, 2, 3, 4], None), grads([0, 1, 2, 3, 4], keys + 1)
    for j in range(5):
        assert (want[j] - without[j]).norm() > 1e-3 * without[j].norm()
        assert (want[j] - other[j]).norm() > 1e-3 * other[j].norm()


def test_gradients_with_dropout_equal_masks_written_out() -> None:
    """A model that multiplies by its records' masks gives the same gradients."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 6)
            self.drop = nn.Dropout(0.4)
            self.classifier = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = torch.tanh(self.first(x))
            return self.classifier(self.drop(y) if mask is None else y * mask)

    case = Case(spread(Masked()))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    keys, client, theta = torch.arange(100, 105), torch.tensor([0, 1, 0, 1, 1]), case.rows(2)
    mask = keep_mask(keys, case.ready.model.drop.drop_rule, 6).float() / 0.6
    got = case.ready.grads(theta, client, {"x": x}, labels_of(5), keys)
    want = case.ready.grads(theta, client, {"x": x, "mask": mask}, labels_of(5))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert (mask == 0).any()


def test_drop_path_is_one_decision_per_record() -> None:
    case = Case(adapted(swin(drop_path_rate=0.6), "lora"))
    seen: list[tuple[float, Tensor]] = []

    def watch(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        given, out = args[0].flatten(1), out.flatten(1)
        factor = out.norm(dim=1) / given.norm(dim=1)
        # A record is kept or dropped as a whole.
        torch.testing.assert_close(out, given * factor.unsqueeze(1))
        seen.append((float(module.drop_prob), factor.detach()))

    paths = [m for m in case.ready.model.modules() if type(m).__name__.endswith("DropPath")]
    for module in paths:
        module.register_forward_hook(watch)
    count = 64
    case.ready.grads(
        case.rows(1),
        torch.zeros(count).long(),
        images(16)(count),
        labels_of(count),
        torch.arange(count),
    )
    rates = {rate for rate, _ in seen}
    assert max(rates) == pytest.approx(0.6)
    for rate, factor in seen:
        kept = factor > 0
        torch.testing.assert_close(factor[kept], torch.full_like(factor[kept], 1 / (1 - rate)))
        assert (
            abs(kept.float().mean() - (1 - rate)) <= 5 * (rate * (1 - rate) / count) ** 0.5 + 1e-6
        )
    strong = [factor for rate, factor in seen if rate == max(rates)]
    # Layers draw independently.
    assert len(strong) < 2 or not torch.equal(strong[0], strong[1])


def test_drop_path_keeps_the_windows_of_a_record_together() -> None:
    class MyDropPath(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop_prob = 0.5

        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("exchanged")

    out = keyed(nn.Sequential(MyDropPath()), torch.ones(30, 2, 3), torch.arange(10)).view(10, -1)
    assert (out == out[:, :1]).all()
    assert set(out.unique().tolist()) == {0.0, 2.0}
