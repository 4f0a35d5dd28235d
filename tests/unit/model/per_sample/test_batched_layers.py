"""Each batched layer agrees with a loop of single-record backward passes.

The cases cover any number of records and clients, padding and a NaN record.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gradient_case import CLASSES, Case, spread
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpfed.model.fast_paths.layer_norm import FusedLayerNorm
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample import batched_layers
from dpfed.model.per_sample.gradients import PerSample, call, trainable
from dpfed.model.task import CLASSIFY

RECORDS = st.sampled_from([0, 1, 2, 5])
CLIENTS = st.sampled_from([1, 2, 3])
SEEDS = st.integers(0, 2**16)
FOLDS = st.sampled_from([1, 2, 3])
often = settings(max_examples=60)


class Around(nn.Module):
    """A model of leaf, mask, tanh and a fixed read-out.

    A record `[k, ...]` is folded into the leading axis before the leaf.
    """

    def __init__(self, leaf: nn.Module, outputs: int) -> None:
        super().__init__()
        self.leaf = leaf
        generator = torch.Generator().manual_seed(7)
        self.register_buffer(
            "read", torch.randn(outputs, CLASSES, generator=generator) / outputs**0.5
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.leaf(x.flatten(0, 1))
        y = y.unflatten(0, x.shape[:2]).flatten(2) * mask.unsqueeze(-1)
        return torch.tanh(y).flatten(1) @ self.read


def folded(
    leaf: nn.Module, shape: tuple[int, ...], n: int, s: int, k: int, seed: int, ids: int = 0
) -> None:
    """Check `leaf` on N records of k parts of `shape`: all, with padding, with one NaN record."""
    generator = torch.Generator().manual_seed(seed)
    spread(leaf, seed)
    if isinstance(leaf, nn.Embedding):
        x = torch.randint(0, ids, (n, k, *shape), generator=generator)
    else:
        x = torch.randn(n, k, *shape, generator=generator)
    with torch.no_grad():
        outputs = (
            k * leaf(x.flatten(0, 1) if n else x.new_zeros(k, *shape)).numel() // max(n * k, k)
        )
    case = Case(Around(leaf, outputs))
    labels = torch.randint(0, CLASSES, (n,), generator=generator)
    mask = torch.ones(n, k)
    case.check({"x": x, "mask": mask}, labels, s, seed=seed)
    if n > 1:
        # One record is padding alone, others in part.
        mask[0] = 0
        mask[1:] = torch.randint(0, 2, (n - 1, k), generator=generator).float()
        got = case.check({"x": x, "mask": mask}, labels, s, seed=seed)
        assert (got[0] == 0).all()
        # An id that is never the padding.
        x[-1, -1] = float("nan") if x.is_floating_point() else 1
        mask = torch.ones(n, k)
        mask[-1, -1] = float("nan")
        case.check({"x": x, "mask": mask}, labels, s, nan=n - 1, seed=seed)


@often
@given(RECORDS, CLIENTS, FOLDS, SEEDS, st.sampled_from([(), (3,), (2, 3)]), st.booleans())
def test_linear(n: int, s: int, k: int, seed: int, middle: tuple[int, ...], bias: bool) -> None:
    """The activations have two, three and four dimensions."""
    folded(nn.Linear(4, 3, bias=bias), (*middle, 4), n, s, k, seed)


@often
@given(
    RECORDS,
    CLIENTS,
    FOLDS,
    SEEDS,
    st.sampled_from([(4,), (2, 3)]),
    st.sampled_from([(), (3,)]),
    st.booleans(),
)
def test_layer_norm(
    n: int, s: int, k: int, seed: int, shape: tuple[int, ...], middle: tuple[int, ...], bias: bool
) -> None:
    folded(nn.LayerNorm(shape, bias=bias), (*middle, *shape), n, s, k, seed)


@often
@given(RECORDS, CLIENTS, FOLDS, SEEDS, st.sampled_from([1, 2, 4]), st.sampled_from([(2, 3), (5,)]))
def test_group_norm(n: int, s: int, k: int, seed: int, groups: int, rest: tuple[int, ...]) -> None:
    folded(nn.GroupNorm(groups, 4), (4, *rest), n, s, k, seed)


@often
@given(
    RECORDS,
    CLIENTS,
    FOLDS,
    SEEDS,
    st.sampled_from([None, 0, 3, -1]),
    st.sampled_from([(), (4,), (2, 3)]),
)
def test_embedding(
    n: int, s: int, k: int, seed: int, padding_idx: int | None, rest: tuple[int, ...]
) -> None:
    """Ids repeat inside a record, and the padding row gets no gradient."""
    folded(nn.Embedding(5, 3, padding_idx=padding_idx), rest, n, s, k, seed, ids=5)


@pytest.mark.parametrize("bad", [3, -1])
def test_embedding_refuses_ids_beyond_its_table(bad: int) -> None:
    """In the table of all copies such an id would address another record's copy."""
    leaf = nn.Embedding(3, 2)
    leaf.__class__ = batched_layers.BatchedEmbedding
    copies = {"weight": leaf.weight.expand(2, 3, 2)}
    torch.func.functional_call(leaf, copies, (torch.tensor([[2], [1]]),))
    with pytest.raises(IndexError):
        torch.func.functional_call(
            leaf, copies, (torch.tensor([[1 if bad < 0 else bad], [bad if bad < 0 else 1]]),)
        )


def test_embedding_padding_row_has_no_gradient() -> None:
    case = Case(Around(spread(nn.Embedding(5, 3, padding_idx=2)), 4 * 3))
    ids = torch.tensor([[[2, 2, 1, 0]], [[2, 3, 2, 2]]])
    got = case.check({"x": ids, "mask": torch.ones(2, 1)}, torch.tensor([0, 1]), clients=2).view(
        2, 5, 3
    )
    assert (got[:, 2] == 0).all()
    assert (got[0, 1] != 0).any()
    assert (got[1, 3] != 0).any()


@often
@given(
    RECORDS, CLIENTS, FOLDS, SEEDS,
    st.sampled_from([1, 2, (2, 1)]),
    st.sampled_from([0, 1, (2, 1)]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["zeros", "reflect", "circular", "replicate"]),
    st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_conv2d(
    n: int,
    s: int,
    k: int,
    seed: int,
    stride: object,
    padding: object,
    dilation: int,
    groups: int,
    mode: str,
    bias: bool,
    product: bool,
) -> None:
    """The convolution is computed as one product per record and as one with a group per record."""
    conv = nn.Conv2d(
        4,
        4,
        (3, 2),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bias,
        padding_mode=mode,
    )  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_layers.BatchedConv2d, "_product_is_faster", lambda self, x: product)
        folded(conv, (4, 7, 6), n, s, k, seed)


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize("fold", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_conv2d_is_a_product_only_where_that_is_the_same(
    dilation: int, groups: int, fold: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    product = batched_layers.BatchedConv2d._product
    monkeypatch.setattr(batched_layers.BatchedConv2d, "_product_is_faster", lambda self, x: True)
    monkeypatch.setattr(
        batched_layers.BatchedConv2d, "_product", lambda self, x: made.append(1) or product(self, x)
    )
    conv = nn.Conv2d(2, 2, 3, padding=1, dilation=dilation, groups=groups, padding_mode=mode)
    folded(conv, (2, 6, 6), n=3, s=2, k=fold, seed=0)
    assert bool(made) == (groups == fold == dilation == 1 and mode == "zeros")


def test_conv2d_on_a_cpu_goes_the_quicker_way() -> None:
    """Convolutions with many weights and few places are products."""

    def pays(channels: int, side: int, kernel: int = 3, outs: int | None = None) -> bool:
        conv = nn.Conv2d(channels, outs or channels, kernel, padding=kernel // 2)
        conv.__class__ = batched_layers.BatchedConv2d
        x = torch.empty(4, 1, channels, side, side)
        assert conv._product_is_faster(x.to("meta"))
        return conv._product_is_faster(x)

    assert [pays(c, side) for c, side in ((64, 32), (128, 16), (64, 4), (256, 8), (512, 4))] == [
        False
    ] * 3 + [True] * 2
    assert not pays(256, 8, outs=64)
    assert pays(8, 32, kernel=1)


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.filterwarnings("ignore:Using padding")
def test_conv2d_padding_by_name(padding: str, mode: str) -> None:
    conv = nn.Conv2d(2, 3, 4, padding=padding, padding_mode=mode, dilation=1)
    folded(conv, (2, 6, 5), n=2, s=2, k=2, seed=1)


# ---- the general way


class Gate(nn.Module):
    """A module without a batched class.

    It has raw parameters, one of them a single number, and a child with a batched class.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.sharp = nn.Parameter(torch.tensor(1.5))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale).sigmoid() * (self.sharp * x)


class Dictionary(nn.Module):
    """A module whose parameters are in containers, which have no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterDict(
            {"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(4, 4))}
        )
        self.more = nn.ParameterList([nn.Parameter(torch.zeros(4))])

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.parts["a"]) @ self.parts["b"] + self.more[0]


class OddLinear(nn.Linear):
    """A subclass may compute something else, so it never gets its parent's batched class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.sum()


@pytest.mark.parametrize(
    "build", [Gate, Dictionary, lambda: OddLinear(4, 4)], ids=["raw", "dict", "subclass"]
)
@often
@given(n=RECORDS, s=CLIENTS, k=FOLDS, seed=SEEDS, middle=st.sampled_from([(), (3,)]))
def test_general_way(
    build: Callable[[], nn.Module], n: int, s: int, k: int, seed: int, middle: tuple[int, ...]
) -> None:
    folded(build(), (*middle, 4), n, s, k, seed)


def test_parameters_of_the_model_itself() -> None:
    """The root module owns the parameter, so vmap maps the whole forward pass."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(
                torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(0))
            )
            self.after = nn.Linear(CLASSES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(torch.tanh(x @ self.table))

    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    Case(spread(Root())).check({"x": x}, torch.arange(5) % CLASSES, clients=3)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(4, 3), (2, 4)),
        (lambda: nn.LayerNorm(4), (2, 4)),
        (lambda: nn.GroupNorm(2, 4), (4, 2)),
        (lambda: nn.Conv2d(2, 3, 2), (2, 3, 3)),
    ],
    ids=["linear", "layer_norm", "group_norm", "conv2d"],
)
def test_half_frozen_modules(
    build: Callable[[], nn.Module], shape: tuple[int, ...], frozen: str
) -> None:
    """Only the bias or only the weight is trained."""
    leaf = build()
    leaf.get_parameter(frozen).requires_grad_(False)
    folded(leaf, shape, n=5, s=2, k=2, seed=3)


# ---- ordinary behaviour


LEAVES: list[tuple[nn.Module, Tensor]] = [
    (nn.Linear(4, 3), torch.randn(2, 4)),
    (nn.LayerNorm(4), torch.randn(2, 3, 4)),
    (nn.GroupNorm(2, 4), torch.randn(2, 4, 3)),
    (nn.Embedding(5, 3, padding_idx=0), torch.tensor([[0, 4, 1]])),
    (nn.Conv2d(2, 3, 2, padding_mode="reflect", padding=1), torch.randn(2, 2, 4, 4)),
    (Gate(), torch.randn(2, 4)),
    (Dictionary(), torch.randn(2, 4)),
]


@pytest.mark.parametrize(("leaf", "x"), LEAVES, ids=lambda v: type(v).__name__)
def test_ordinary_behaviour_is_unchanged(leaf: nn.Module, x: Tensor) -> None:
    seen: list[int] = []
    leaf.register_forward_hook(lambda *_: seen.append(1))
    cls, names, want = type(leaf), list(leaf.state_dict()), leaf(x)
    PerSample(leaf, space_of(trainable(leaf)), call, CLASSIFY)
    assert type(leaf) is not cls
    assert isinstance(leaf, cls)
    assert list(leaf.state_dict()) == names
    assert torch.equal(leaf(x), want)
    # The hook is still there.
    assert len(seen) == 2


@pytest.mark.parametrize("cls", batched_layers.BATCHED_LAYERS)
def test_only_what_trains_is_exchanged(cls: type[nn.Module]) -> None:
    args = {
        nn.Linear: (3, 3),
        nn.LayerNorm: (3,),
        nn.GroupNorm: (1, 3),
        nn.Embedding: (3, 3),
        nn.Conv2d: (3, 3, 1),
    }[cls]
    model = nn.Sequential(cls(*args).requires_grad_(False), nn.Linear(3, 3))
    PerSample(model, space_of(trainable(model)), call, CLASSIFY)
    # A frozen norm may use a kernel.
    assert type(model[0]) is (FusedLayerNorm if cls is nn.LayerNorm else cls)
    assert type(model[1]) is batched_layers.BatchedLinear


def test_a_leading_axis_that_fits_no_record_is_an_error() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(2, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(x.transpose(0, 1)).mean(0, keepdim=True).expand(x.shape[0], -1)

    case = Case(spread(Flat()))
    with pytest.raises(ValueError, match="leading axis of 5 for 3 records"):
        case.ready.grads(
            case.rows(1),
            torch.zeros(3, dtype=torch.long),
            {"x": torch.ones(3, 5, 2)},
            torch.zeros(3).long(),
        )
