"""The contract of every registered algorithm: frozen, pure, plain states, declared releases."""

from __future__ import annotations

import ast
import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithm_case import (
    FakeOracle,
    blank_memory,
    curved,
    make_context,
    make_space,
    noisy,
    run_rounds,
    start_point,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dpfed.algorithms
from dpfed.algorithms import REGISTRY
from dpfed.algorithms.base import Algorithm, ClientState, Facts, Releases, bias_correction, spread
from dpfed.errors import DpfedError

PRINTED = "dp-fedadamw-printed"
FOLDER = Path(dpfed.algorithms.__file__).parent
SWITCHED: list[tuple[str, dict[str, Any]]] = [
    ("dp-fedadamw", {"agg": "full_v"}),
    ("dp-fedadamw", {"agg": "off", "gamma": 0.0}),
    ("dp-fedadamw", {"bc_level": "block", "bc_floor": 0.1}),
    ("dp-fedsam", {"sam_batches": "independent"}),
    ("dp-scaffold", {"scaffold_c": "displacement"}),
    ("dp-fedavg-ls", {"ls_where": "client_grad"}),
    ("dp-fedopt", {"server_opt": "yogi"}),
    ("dp-fedopt", {"server_opt": "adagrad"}),
    ("dp-fedopt", {"fedopt_preset": "authors"}),
    ("dp-fafed", {"fafed_vr": True}),
    ("dp-fedlada", {"lada_amsgrad": False}),
]
VARIANTS: list[Algorithm] = [cls() for cls in REGISTRY.values()]  # type: ignore[call-arg]
VARIANTS += [REGISTRY[name](**options) for name, options in SWITCHED]
each = pytest.mark.parametrize("algorithm", VARIANTS, ids=lambda a: a.name)


def tensors(value: Any) -> dict[str, Tensor]:
    """The tensors of a state or a message, by name; anything else in it is an error."""
    items = (
        value
        if isinstance(value, dict)
        else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    )
    assert all(isinstance(x, Tensor) for x in items.values()), f"not only tensors: {items}"
    return items


def copy(value: Any) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in tensors(value).items()}


def same(value: Any, kept: dict[str, Tensor]) -> bool:
    now = tensors(value)
    return now.keys() == kept.keys() and all(torch.equal(now[name], kept[name]) for name in kept)


def memory_of(algorithm: Algorithm) -> ClientState:
    """Return a memory of three clients, the third of which never took part."""
    memory = blank_memory(algorithm, 3, start_point(6))
    generator = torch.Generator().manual_seed(2)
    for name in algorithm.remembers:
        memory[name][:2] = torch.randn(2, 6, generator=generator)
        memory["seen"][:2] = True
    return memory


def middle(algorithm: Algorithm) -> tuple[Any, Any, Any]:
    """A context, a server and a local state from the middle of a run: round 3, after one step."""
    # The printed form is NaN where the noise exceeds the gradient, so it runs without noise.
    space, phi = make_space(2, 4), torch.full((3, 1), 0.0 if algorithm.name == PRINTED else 0.01)
    history = run_rounds(algorithm, space, noisy(curved(6)), 2, 3, 3, theta=start_point(6), phi=phi)
    ctx = make_context(algorithm, space, 3, 5, 3, phi, schedule="cosine")
    local = algorithm.start(ctx, history.servers[-1], memory_of(algorithm))
    local = algorithm.step(
        ctx, local, noisy(curved(6), seed=1)(ctx), torch.tensor(1.0, dtype=torch.float64)
    )
    return ctx, history.servers[-1], local


def test_the_registry_names_every_file_and_nothing_else() -> None:
    files = {path.stem.replace("_", "-") for path in FOLDER.glob("*.py")} - {"--init--", "base"}
    assert set(REGISTRY) == files == {cls.name for cls in REGISTRY.values()}
    for cls in REGISTRY.values():
        assert issubclass(cls, Algorithm)
        assert cls.summary
        assert cls.lr_grid == tuple(sorted(cls.lr_grid))
        assert all(lr > 0 for lr in cls.lr_grid)


@each
def test_algorithms_are_frozen_and_hold_only_their_keys(algorithm: Algorithm) -> None:
    key = dataclasses.fields(algorithm)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(algorithm, key, 1.0)
    before = dict(vars(algorithm))
    middle(algorithm)
    assert vars(algorithm) == before
    assert set(before) == {f.name for f in dataclasses.fields(algorithm)}
    hash(algorithm)


@each
def test_states_are_dataclasses_of_tensors_and_messages_have_a_row_per_client(
    algorithm: Algorithm,
) -> None:
    ctx, server, local = middle(algorithm)
    for state in (server, local):
        assert dataclasses.is_dataclass(state)
        tensors(state)
        with pytest.raises(dataclasses.FrozenInstanceError):
            state.theta = server.theta
    message, memory = algorithm.finish(ctx, server, local)
    assert type(message) is dict
    assert set(memory) == set(algorithm.remembers)
    for name, value in tensors(memory).items():
        assert value.shape == (3, 6), name
        assert value.dtype == torch.float32, name
    assert local.theta.shape == (3, 6)
    for name, value in tensors(message).items():
        assert value.shape[0] == 3, name
        assert value.dtype == torch.float32, name
    after = algorithm.aggregate(
        ctx, server, {name: value.mean(0) for name, value in message.items()}
    )
    for name, value in tensors(after).items():
        assert value.shape == getattr(server, name).shape, name
        assert value.dtype == torch.float32, name


@each
def test_the_five_methods_repeat_themselves_and_leave_their_inputs_alone(
    algorithm: Algorithm,
) -> None:
    ctx, server, local = middle(algorithm)
    k, theta = torch.tensor(2.0, dtype=torch.float64), start_point(6)
    public = {name: getattr(ctx, name).clone() for name in ("t", "lr", "lr0", "phi")}
    memory = memory_of(algorithm)
    kept_server, kept_local, kept_theta, kept_memory = (
        copy(server),
        copy(local),
        theta.clone(),
        copy(memory),
    )

    assert same(algorithm.init(ctx, theta), copy(algorithm.init(ctx, theta)))
    assert same(algorithm.start(ctx, server, memory), copy(algorithm.start(ctx, server, memory)))
    oracles = [noisy(curved(6), seed=9)(ctx) for _ in range(2)]
    first, second = (algorithm.step(ctx, local, oracle, k) for oracle in oracles)
    assert same(first, copy(second))
    assert not torch.equal(first.theta, local.theta)
    (message, one), (again, two) = (algorithm.finish(ctx, server, first) for _ in range(2))
    assert same(message, copy(again))
    assert same(one, copy(two))
    mean = {name: value.mean(0) for name, value in message.items()}
    kept_mean, kept_first, kept_message = copy(mean), copy(first), copy(message)
    assert same(
        algorithm.aggregate(ctx, server, mean), copy(algorithm.aggregate(ctx, server, mean))
    )

    assert same(server, kept_server)
    assert same(local, kept_local)
    assert same(first, kept_first)
    assert same(mean, kept_mean)
    assert same(message, kept_message)
    assert same(memory, kept_memory)
    assert torch.equal(theta, kept_theta)
    assert k == 2
    assert all(torch.equal(getattr(ctx, name), value) for name, value in public.items())
    for oracle in oracles:
        assert all(torch.equal(g, copied) for g, copied in oracle.given)


MOMENTS = [
    a
    for a in VARIANTS
    if a.name in {"dp-fedadamw", "dp-local-adamw", "dp-fedlada", "dp-adambc", "dp-fafed"}
]


@pytest.mark.parametrize("algorithm", MOMENTS, ids=lambda a: a.name)
def test_a_square_that_is_no_number_holds_its_own_coordinate_and_no_more(
    algorithm: Algorithm,
) -> None:
    """v stays infinite there, so the step is zero; a difference of infinities would be NaN."""
    ctx, _, local = middle(algorithm)
    huge = torch.ones(ctx.S, ctx.space.size)
    huge[0, 1] = 1e25
    for k, gradient in ((1.0, huge), (2.0, torch.ones_like(huge)), (3.0, torch.ones_like(huge))):
        local = algorithm.step(
            ctx, local, FakeOracle(lambda x, g=gradient: g, ctx.phi), torch.tensor(k)
        )  # type: ignore[misc]
    assert local.v.isinf().nonzero().tolist() == [[0, 1]]
    assert not local.v.isnan().any()
    assert local.theta.isfinite().all()


@each
def test_the_oracle_is_called_as_declared(algorithm: Algorithm) -> None:
    """The ledger charges K·batches·releases per client and round, so exactly that is taken."""
    history = run_rounds(
        algorithm, make_space(2, 4), noisy(curved(6)), 3, 4, 2, theta=start_point(6), phi=0.01
    )
    declared = algorithm.releases
    assert isinstance(declared, Releases)
    for oracle in history.oracles:
        assert oracle.calls == 4 * declared.batches
        assert oracle.again_calls == 4 * declared.batches * (declared.releases - 1)


@each
def test_only_step_touches_the_oracle_and_it_asks_at_the_clients_own_point(
    algorithm: Algorithm,
) -> None:
    ctx, _, local = middle(algorithm)
    asked: list[Tensor] = []

    def gradient(theta: Tensor) -> Tensor:
        asked.append(theta.clone())
        return torch.ones_like(theta)

    algorithm.step(
        ctx, local, FakeOracle(gradient, ctx.phi), torch.tensor(2.0, dtype=torch.float64)
    )
    assert len(asked) == algorithm.releases.batches * algorithm.releases.releases
    assert torch.equal(asked[0], local.theta)


@each
def test_a_client_alone_computes_what_it_computes_in_a_fleet(algorithm: Algorithm) -> None:
    """S=1 is a real client on a network: its row must not depend on its neighbours."""
    ctx, server, _ = middle(algorithm)
    g = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))

    def run(rows: slice) -> dict[str, Tensor]:
        """Every message and, beside it, what is remembered."""
        phi = ctx.phi[rows]
        here = dataclasses.replace(ctx, S=len(phi), phi=phi)
        local = algorithm.start(
            here, server, {name: kept[rows] for name, kept in memory_of(algorithm).items()}
        )
        for k in range(1, 4):
            oracle = FakeOracle(lambda theta, k=k: g[k, rows], phi)
            local = algorithm.step(here, local, oracle, torch.tensor(k, dtype=torch.float64))
        message, memory = algorithm.finish(here, server, local)
        return {**message, **{f"remembered {name}": kept for name, kept in memory.items()}}

    fleet = run(slice(0, 3))
    for i in range(3):
        for name, value in run(slice(i, i + 1)).items():
            torch.testing.assert_close(value[0], fleet[name][i], rtol=1e-6, atol=1e-8)


@each
def test_a_step_branches_on_no_tensor_so_that_one_graph_serves_every_step(
    algorithm: Algorithm,
) -> None:
    """t, k, lr and the states have no values here, so `if`, `float()` and `.item()` fail."""
    ctx, server, local = middle(algorithm)
    # The block index of the space has real values.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value: Any) -> Any:
            return dataclasses.replace(
                value, **{name: mode.from_tensor(x) for name, x in tensors(value).items()}
            )

        names = ("t", "lr", "lr0", "phi")
        ghost = dataclasses.replace(
            ctx, **{name: mode.from_tensor(getattr(ctx, name)) for name in names}
        )
        memory = {name: mode.from_tensor(kept) for name, kept in memory_of(algorithm).items()}
        started = algorithm.start(ghost, fake(server), memory)
        oracle = FakeOracle(torch.ones_like, ghost.phi)
        stepped = algorithm.step(
            ghost, started, oracle, mode.from_tensor(torch.tensor(2.0, dtype=torch.float64))
        )
        message, _ = algorithm.finish(ghost, fake(server), stepped)
        after = algorithm.aggregate(
            ghost, fake(server), {name: value.mean(0) for name, value in message.items()}
        )
    assert after.theta.shape == (6,)
    assert local.theta.shape == stepped.theta.shape


@each
def test_in_a_step_the_learning_rate_may_be_given_per_client(algorithm: Algorithm) -> None:
    ctx, _, local = middle(algorithm)
    k = torch.tensor(2.0, dtype=torch.float64)
    rows = {name: getattr(ctx, name).float().expand(3, 1) for name in ("lr", "lr0")}
    one = algorithm.step(ctx, local, FakeOracle(torch.ones_like, ctx.phi), k).theta
    two = algorithm.step(
        dataclasses.replace(ctx, **rows), local, FakeOracle(torch.ones_like, ctx.phi), k
    ).theta
    assert two.dtype == torch.float32
    torch.testing.assert_close(two, one)


@each
def test_clients_read_of_the_servers_state_what_is_broadcast_all_of_it_and_nothing_else(
    algorithm: Algorithm,
) -> None:
    ctx, server, _ = middle(algorithm)
    sent = {name: getattr(server, name) for name in algorithm.broadcast}

    def messages(seen: Any) -> dict[str, Tensor]:
        local = algorithm.start(ctx, seen, memory_of(algorithm))
        oracle = noisy(curved(6), seed=1)(ctx)
        return algorithm.finish(
            ctx, seen, algorithm.step(ctx, local, oracle, torch.tensor(1.0).double())
        )[0]

    assert same(messages(SimpleNamespace(**sent)), messages(server))
    for name in sent:
        with pytest.raises(AttributeError, match=name):
            messages(
                SimpleNamespace(**{other: value for other, value in sent.items() if other != name})
            )


@each
def test_what_a_client_remembers_reaches_its_own_message_only(algorithm: Algorithm) -> None:
    """Another memory of client 1 changes its message and no other, so each vector is read."""
    ctx, server, _ = middle(algorithm)
    memory = memory_of(algorithm)

    def deltas(memory: ClientState) -> Tensor:
        local = algorithm.start(ctx, server, memory)
        oracle = noisy(curved(6), seed=1)(ctx)
        return algorithm.finish(
            ctx, server, algorithm.step(ctx, local, oracle, torch.tensor(1.0).double())
        )[0]["delta"]

    base = deltas(memory)
    for name in algorithm.remembers:
        changed = {key: kept.clone() for key, kept in memory.items()}
        changed[name][1] += 1
        got = deltas(changed)
        assert torch.equal(got[[0, 2]], base[[0, 2]])
        assert not torch.equal(got[1], base[1])


def test_bias_correction_keeps_its_digits() -> None:
    """In single precision 1−0.999 would already be wrong in the fifth digit."""
    for n in (1, 20, 2000):
        got = bias_correction(0.999, torch.tensor(float(n))).item()
        assert got == pytest.approx(1 - 0.999**n, rel=1e-12)


def test_spread_gives_every_client_its_own_copy() -> None:
    theta = start_point(4)
    rows = spread(theta, 3)
    rows[0] += 1
    assert torch.equal(rows[1], start_point(4))
    assert torch.equal(theta, start_point(4))


# Their first v̄ is Φ, one number for all clients.
NEEDS_EQUAL_NOISE = {"dp-fafed", "dp-fedlada", PRINTED}


@pytest.mark.parametrize("name", REGISTRY)
def test_check_says_nothing_about_the_defaults(name: str) -> None:
    algorithm = REGISTRY[name]()  # type: ignore[call-arg]
    for private in (True, False):
        said = algorithm.check(Facts(equal_phi=True, private=private, allow_nan=False))
        assert len(said) == (1 if name == PRINTED else 0)
    unequal = Facts(equal_phi=False, private=True, allow_nan=False)
    if name in NEEDS_EQUAL_NOISE:
        with pytest.raises(DpfedError, match="same noise level for all clients"):
            algorithm.check(unequal)
    else:
        assert algorithm.check(unequal) == []


# ------------------------------------------------------------------ imports


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.name)
def test_an_algorithm_file_imports_only_torch_and_its_base(path: Path) -> None:
    own = {
        "base.py": {"dpfed.errors"},
        "__init__.py": {f"dpfed.algorithms.{p.stem}" for p in FOLDER.glob("*.py")},
    }
    allowed = own.get(path.name, {"dpfed.algorithms.base"})
    for name in imported(path):
        top = name.split(".")[0]
        assert (
            name in allowed or top in {"torch", "annotated_types"} or top in sys.stdlib_module_names
        ), name
