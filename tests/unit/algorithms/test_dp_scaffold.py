"""DP-SCAFFOLD: both forms of c_i', memory over cohorts, and an example by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from algorithm_case import (
    FakeOracle,
    curved,
    exact,
    keys_of,
    make_context,
    make_space,
    noisy,
    relative,
    run_rounds,
    start_point,
    tables,
)
from torch import Tensor

from dpfed.algorithms.base import Facts
from dpfed.algorithms.dp_fedavg import DPFedAvg
from dpfed.algorithms.dp_scaffold import DPScaffold, Server

FACTS = Facts(equal_phi=True, private=True, allow_nan=False)
F64 = torch.float64


def test_two_rounds_of_two_of_four_clients_by_hand() -> None:
    """θ=(1,−2,.5), η=.2, λ=½, so θ' = .9 θ − .2 (g − c_i + c). N=4;
        clients A, B take part in round 1, B, C in round 2.

    Round 1 (c = c_i = 0):
      A: g=(2,0,1)  θ=(.5,−1.8,.25)  g=(2,2,−1)  θ=(.05,−2.02,.425)  c_A'=(2,1,0)
      B: g=(0,4,−1)  θ=(.9,−2.6,.65)  g=(2,0,1)  θ=(.41,−2.34,.385)  c_B'=(1,2,0)
      θ=(.23,−2.18,.405)  c = ¼(c_A' + c_B') = (.75,.75,0)
    Round 2: c−c_B = (−.25,−1.25,0), c−c_C = (.75,.75,0)
      B: g=(1,−1,2)  θ=.9θ−.2(.75,−2.25,2)=(.057,−1.512,−.0355)
         g=(0,2,1)  θ=.9θ−.2(−.25,.75,1)=(.1013,−1.5108,−.23195)  c_B'=(.5,.5,1.5)
             c_B'−c_B=(−.5,−1.5,1.5)
      C: g=(−3,1,0)  θ=.9θ−.2(−2.25,1.75,0)=(.657,−2.312,.3645)
         g=(1,1,−2)  θ=.9θ−.2(1.75,1.75,−2)=(.2413,−2.4308,.72805)  c_C'=(−1,1,−1)
             c_C'−c_C=(−1,1,−1)
      θ=(.1713,−1.9708,.24805)
          c=(.75,.75,0)+¼(−1.5,−.5,.5)=(.375,.625,.125), the mean of c_A, c_B, c_C and c_D=0
    """
    gradients = [
        [[[2, 0, 1], [0, 4, -1]], [[2, 2, -1], [2, 0, 1]]],
        [[[1, -1, 2], [-3, 1, 0]], [[0, 2, 1], [1, 1, -2]]],
    ]
    history = run_rounds(
        DPScaffold(lr=0.2, weight_decay=0.5),
        make_space(2, 1),
        tables(gradients),
        T=2,
        K=2,
        clients=4,
        theta=torch.tensor([1, -2, 0.5], dtype=F64),
        phi=1.0,
        cohorts=[[0, 1], [1, 2]],
    )
    first, second = history.servers[1:]
    assert first.theta.tolist() == pytest.approx([0.23, -2.18, 0.405], abs=1e-12)
    assert first.c.tolist() == [0.75, 0.75, 0]
    assert second.theta.tolist() == pytest.approx([0.1713, -1.9708, 0.24805], abs=1e-12)
    assert second.c.tolist() == pytest.approx([0.375, 0.625, 0.125], abs=1e-12)
    assert history.messages[1]["c"].tolist() == [[-0.5, -1.5, 1.5], [-1, 1, -1]]
    assert history.memories[2]["c"].tolist() == [[2, 1, 0], [0.5, 0.5, 1.5], [-1, 1, -1], [0, 0, 0]]
    assert history.memories[2]["seen"].tolist() == [True, True, True, False]


def own_gradients(clients: int, size: int) -> Any:
    """Clients that pull towards targets of their own."""
    target = torch.randn(clients, size, generator=torch.Generator().manual_seed(1), dtype=F64)
    return lambda theta: theta - target


def test_b2_the_first_round_is_fedavg() -> None:
    settings: dict[str, Any] = {"T": 1, "K": 4, "clients": 3, "theta": start_point(6), "phi": 0.04}
    one = run_rounds(DPScaffold(lr=0.05), make_space(6), noisy(curved(6), seed=2), **settings)
    two = run_rounds(DPFedAvg(lr=0.05), make_space(6), noisy(curved(6), seed=2), **settings)
    assert torch.equal(one.theta, two.theta)


def test_b2_c_i_becomes_the_mean_of_the_clients_own_noised_gradients() -> None:
    taken: list[Tensor] = []

    class Spy(FakeOracle):
        def _release(self, theta: Tensor) -> tuple[Tensor, Tensor]:
            g, phi = super()._release(theta)
            taken.append(g.clone())
            return g, phi

    generator = torch.Generator().manual_seed(0)
    history = run_rounds(
        DPScaffold(lr=0.05, weight_decay=0.3),
        make_space(5),
        lambda ctx: Spy(curved(5, F64), ctx.phi, generator),
        3,
        4,
        2,
        theta=start_point(5, F64),
        phi=0.09,
        schedule="cosine",
    )
    for t in (1, 2, 3):
        torch.testing.assert_close(
            history.memories[t]["c"], torch.stack(taken[4 * t - 4 : 4 * t]).mean(0)
        )


def test_b2_c_is_the_mean_of_all_c_i_once_all_took_part_and_ever_after() -> None:
    """From zero, whatever the cohorts: 1/N keeps c at the mean over all clients; 1/S would not."""
    cohorts = [[0, 1], [2, 3], [4, 0], [1], [0, 1, 2, 3, 4]]
    gradient = own_gradients(5, 4)

    def factory(ctx: Any) -> FakeOracle:
        chosen = cohorts[int(ctx.t) - 1]
        return FakeOracle(lambda theta: gradient(theta.new_zeros(5, 4))[chosen] + theta, ctx.phi)

    history = run_rounds(
        DPScaffold(lr=0.05),
        make_space(4),
        factory,
        5,
        3,
        5,
        theta=start_point(4, F64),
        cohorts=cohorts,
    )
    for server, memory in zip(history.servers, history.memories, strict=True):
        torch.testing.assert_close(server.c, memory["c"].mean(0), rtol=1e-12, atol=1e-14)
    assert history.memories[3]["seen"].all()
    assert history.servers[3].c.abs().min() > 0


@pytest.mark.parametrize(("answered", "S", "N"), [(2, 2, 8), (3, 5, 8), (1, 8, 8), (8, 8, 8)])
def test_b2_the_server_adds_the_mean_change_times_answered_over_all_clients(
    answered: int, S: int, N: int
) -> None:
    """The c_i of clients that did not answer stay unchanged."""
    algorithm = DPScaffold()
    ctx = make_context(algorithm, make_space(3), 1, 5, 2, torch.zeros(S, 1))
    ctx = type(ctx)(**{**vars(ctx), "N": N, "answered": answered})
    server = Server(torch.zeros(3, dtype=F64), torch.tensor([1.0, 2, 3], dtype=F64))
    mean = {"delta": torch.ones(3, dtype=F64), "c": torch.tensor([8.0, -8, 16], dtype=F64)}
    got = algorithm.aggregate(ctx, server, mean)
    share = answered / N
    assert got.c.tolist() == [1 + 8 * share, 2 - 8 * share, 3 + 16 * share]
    assert got.theta.tolist() == [1, 1, 1]


def test_b2_identical_clients_walk_as_in_fedavg() -> None:
    """Their c_i are all c, so that nothing is corrected."""
    settings: dict[str, Any] = {
        "T": 4,
        "K": 3,
        "clients": 3,
        "theta": start_point(6, F64),
        "schedule": "cosine",
    }
    one = run_rounds(DPScaffold(lr=0.05), make_space(6), exact(curved(6, F64)), **settings)
    two = run_rounds(DPFedAvg(lr=0.05), make_space(6), exact(curved(6, F64)), **settings)
    assert one.servers[-1].c.abs().max() > 0.01
    assert relative(one.path(), two.path()) < 1e-12


def test_b2_c_and_c_i_move_a_step_by_exactly_their_difference() -> None:
    """θ' = θ'_FedAvg − η (c − c_i): catches a term without effect, a wrong sign, and (c_i + c)."""
    algorithm, space = DPScaffold(lr=0.25, weight_decay=0.0), make_space(3)
    ctx = make_context(algorithm, space, 2, 5, 4, torch.zeros(2, 1, dtype=F64))
    theta = torch.tensor([1.0, 2, 3], dtype=F64)
    own = torch.tensor([[4.0, 0, -2], [0, 8, 0]], dtype=F64)

    def stepped(c: Tensor, own: Tensor) -> Tensor:
        memory = {"c": own, "seen": torch.ones(2, dtype=torch.bool)}
        local = algorithm.start(ctx, Server(theta, c), memory)
        return algorithm.step(
            ctx, local, FakeOracle(torch.ones_like, ctx.phi), torch.tensor(1.0, dtype=F64)
        ).theta

    zero, c = torch.zeros(3, dtype=F64), torch.tensor([2.0, 4, 6], dtype=F64)
    plain = stepped(zero, torch.zeros_like(own))
    assert torch.equal(plain, (theta - 0.25).expand(2, 3))
    assert torch.equal(stepped(c, own) - plain, -0.25 * (c - own))
    assert torch.equal(stepped(zero, own) - plain, 0.25 * own)


def test_with_drifting_clients_it_finds_the_optimum_that_fedavg_misses() -> None:
    """Two clients ½h_i(θ−b_i)², h = 1, 4 and b = 1, −1: the minimum is (1·1 − 4·1)/5 = −.6."""
    h, b = torch.tensor([[1.0], [4.0]], dtype=F64), torch.tensor([[1.0], [-1.0]], dtype=F64)
    theta = torch.zeros(1, dtype=F64)
    ends = [
        run_rounds(
            cls(lr=0.1, weight_decay=0.0),
            make_space(1),
            exact(lambda x: h * (x - b)),
            200,
            10,
            2,
            theta=theta,
        )
        for cls in (DPScaffold, DPFedAvg)
    ]
    assert ends[0].theta.item() == pytest.approx(-0.6, abs=1e-6)
    assert abs(ends[1].theta.item() + 0.6) > 0.1


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_displacement_is_the_mean_without_weight_decay(schedule: str) -> None:
    """θ, c and every c_i agree, with partial cohorts, since errors in c could cancel otherwise."""
    forms: tuple[Any, ...] = ("mean", "displacement")
    one, two = (
        run_rounds(
            DPScaffold(lr=0.05, weight_decay=0.0, scaffold_c=form),
            make_space(6),
            noisy(curved(6, F64), seed=3),
            4,
            3,
            3,
            theta=start_point(6, F64),
            phi=0.25,
            schedule=schedule,
            cohorts=[[0, 1], [1, 2], [0, 2], [0, 1]],
        )
        for form in forms
    )
    torch.testing.assert_close(two.path(), one.path(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(two.servers[-1].c, one.servers[-1].c, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(two.memories[-1]["c"], one.memories[-1]["c"], rtol=1e-10, atol=1e-12)


def test_displacement_carries_weight_decay_into_c_i_and_says_so() -> None:
    """One step from θ with g: (θ − θ')/η = g + λθ, where the mean is g."""
    theta = torch.tensor([1.0, -2, 4], dtype=F64)
    kept = [
        run_rounds(
            DPScaffold(lr=0.25, weight_decay=0.5, scaffold_c=form),
            make_space(3),
            exact(torch.ones_like),
            1,
            1,
            theta=theta,
        ).memories[1]["c"][0]
        for form in ("mean", "displacement")
    ]  # type: ignore[arg-type]
    assert kept[0].tolist() == [1, 1, 1]
    assert kept[1].tolist() == [1.5, 0, 3]
    (said,) = DPScaffold(scaffold_c="displacement").check(FACTS)
    assert "weight decay" in said
    assert DPScaffold(scaffold_c="displacement", weight_decay=0.0).check(FACTS) == []
    (said,) = DPScaffold(agg_weights="size").check(FACTS)
    assert "agg_weights" in said


SWITCHES: list[dict[str, Any]] = [
    {"lr": 0.06},
    {"weight_decay": 0.2},
    {"scaffold_c": "displacement"},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_changes_the_trajectory(switch: dict[str, Any]) -> None:
    """One of two clients per round; with all clients the c_i would cancel in the mean."""
    theta, base = start_point(6, F64), {"lr": 0.05, "weight_decay": 0.1}
    one, two = (
        run_rounds(
            DPScaffold(**options),
            make_space(6),
            noisy(curved(6, F64), seed=11),
            4,
            3,
            2,
            theta=theta,
            phi=0.25,
            cohorts=[[0], [1], [0], [1]],
        ).theta
        for options in (base, {**base, **switch})
    )
    assert relative(two - theta, one - theta) > 1e-4


def test_no_key_is_left_out_of_the_switch_test() -> None:
    assert {key for switch in SWITCHES for key in switch} == keys_of(DPScaffold)
