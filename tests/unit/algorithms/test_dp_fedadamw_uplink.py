"""DP-FedAdamW's uplink: block means, unequal noise of the clients, and the floor."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from algorithm_case import (
    Table,
    curved,
    exact,
    make_context,
    make_space,
    noise,
    noisy,
    relative,
    run_rounds,
    start_point,
)
from torch import Tensor

from dpfed.algorithms.dp_fedadamw import DPFedAdamW, Server

# σ=1, C=0.1, B=16
PHI = (0.1 / 16) ** 2


@pytest.mark.parametrize(("agg", "numbers"), [("mean", 10 + 3), ("off", 10), ("full_v", 20)])
def test_uplink_is_the_parameters_and_one_number_per_block(agg: Any, numbers: int) -> None:
    history = run_rounds(DPFedAdamW(agg=agg), make_space(2, 3, 5), noise(), 2, 3, 4, phi=PHI)
    for message in history.messages:
        assert sum(value[0].numel() for value in message.values()) == numbers
        assert all(value.shape[0] == 4 for value in message.values())


def test_what_is_sent_is_the_block_mean_of_the_raw_second_moment() -> None:
    """After one round of constant gradient g, v is (1−β2^K) g² and v̂ would be g²."""
    g = torch.tensor([[1.0, 3.0, 2.0, 2.0, 5.0]], dtype=torch.float64)
    theta = torch.zeros(5, dtype=torch.float64)
    # The block means are (1+9)/2 and (4+4+25)/3.
    squares = torch.tensor([5.0, 11.0], dtype=torch.float64)
    history = run_rounds(
        DPFedAdamW(), make_space(2, 3), exact(lambda x: g.expand_as(x)), 1, 20, theta=theta
    )
    torch.testing.assert_close(
        history.messages[0]["v"][0], (1 - 0.999**20) * squares, rtol=1e-12, atol=0
    )


class Centred(DPFedAdamW):
    """Always subtracts the noise's share from v, also where all clients have the same noise."""

    def finish(self, ctx: Any, server: Any, local: Any) -> Any:
        return super().finish(dataclasses.replace(ctx, equal_phi=False), server, local)

    def start(self, ctx: Any, server: Any, memory: Any) -> Any:
        return super().start(dataclasses.replace(ctx, equal_phi=False), server, memory)


class PlainMean(DPFedAdamW):
    """A broken build: averages raw second moments although the noise of the clients differs."""

    def finish(self, ctx: Any, server: Any, local: Any) -> Any:
        return super().finish(dataclasses.replace(ctx, equal_phi=True), server, local)

    def start(self, ctx: Any, server: Any, memory: Any) -> Any:
        return super().start(dataclasses.replace(ctx, equal_phi=True), server, memory)


@pytest.mark.parametrize("agg", ["mean", "full_v"])
def test_the_corrected_form_is_the_plain_one_when_noise_is_equal(agg: Any) -> None:
    theta = start_point(6, torch.float64)
    settings: dict[str, Any] = {"T": 4, "K": 5, "clients": 3, "theta": theta, "phi": 0.01}
    plain, corrected = (
        run_rounds(
            cls(lr=0.05, agg=agg), make_space(2, 4), noisy(curved(6, torch.float64)), **settings
        )
        for cls in (DPFedAdamW, Centred)
    )
    assert relative(corrected.path(), plain.path()) <= 1e-12
    # The part of the noise in v after one round.
    share = (1 - 0.999**5) * 0.01
    torch.testing.assert_close(
        corrected.messages[0]["v"], plain.messages[0]["v"] - share, rtol=1e-12, atol=1e-14
    )


def unequal_v_hat(algorithm: DPFedAdamW, ratios: list[float]) -> dict[Any, Tensor]:
    """Mean of v̂_j/Φ_j under pure noise, for clients whose Φ_j are in these ratios."""
    phi, seen = torch.tensor([[r] for r in ratios]) * PHI, {}

    def watch(ctx: Any, k: int, before: Any, after: Any) -> None:
        seen[int(ctx.t), k] = (after.v_hat / ctx.phi).mean(1)

    run_rounds(
        algorithm,
        make_space(15_000, 25_000),
        noise(8),
        3,
        20,
        len(ratios),
        phi=phi,
        watch=watch,
        checked=False,
    )
    return seen


@pytest.mark.parametrize(
    ("agg", "ratios"), [("mean", [1.0, 4.0, 16.0]), ("full_v", [1.0, 1.3, 1.6])]
)
def test_with_unequal_noise_every_client_starts_unbiased(agg: Any, ratios: list[float]) -> None:
    """E v̂_j = Φ_j, for ratios at which full_v is rarely clamped."""
    seen = unequal_v_hat(DPFedAdamW(agg=agg), ratios)
    for where in ((1, 1), (1, 20), (2, 1), (2, 20), (3, 1), (3, 20)):
        assert seen[where].tolist() == [pytest.approx(1, abs=0.02)] * 3, where


def test_the_plain_form_would_give_every_client_the_others_noise() -> None:
    """The test above has power: the mean of Φ is 7 times the smallest, 7/16 of the largest."""
    plain = unequal_v_hat(PlainMean(), [1.0, 4.0, 16.0])[2, 1]
    assert plain[0].item() == pytest.approx(7, rel=0.1)
    assert plain[2].item() == pytest.approx(7 / 16, rel=0.2)
    plain = unequal_v_hat(PlainMean(agg="full_v"), [1.0, 1.3, 1.6])[2, 1]
    assert plain[0].item() == pytest.approx(1.3, rel=0.05)


@pytest.mark.parametrize("agg", ["mean", "full_v"])
def test_the_start_value_is_the_mean_plus_ones_own_noise_clamped_at_zero(agg: Any) -> None:
    algorithm, space = DPFedAdamW(agg=agg, beta2=0.5), make_space(1, 2)
    phi = torch.tensor([[1.0], [4.0]])
    # 1−β2^2 = 0.75.
    ctx = make_context(algorithm, space, 2, 5, 2, phi)
    v = torch.tensor([-2.0, 1.0]) if agg == "mean" else torch.tensor([-2.0, 1.0, 1.0])
    local = algorithm.start(ctx, Server(torch.zeros(3), v, torch.zeros(3), torch.zeros(0)), {})
    assert local.v.tolist() == [[0.0, 1.75, 1.75], [1.0, 4.0, 4.0]]


def test_at_floor_one_a_second_moment_below_twice_phi_means_a_constant_denominator() -> None:
    P, K, T, lr, phi = 6, 5, 3, 0.05, 0.04
    generator = torch.Generator().manual_seed(0)
    bound = 0.999 * math.sqrt(2 * phi)
    gradients = bound * (2 * torch.rand(T, K, 1, P, generator=generator, dtype=torch.float64) - 1)
    algorithm = DPFedAdamW(lr=lr, bc_floor=1.0, gamma=0.0, weight_decay=0.1)
    theta = start_point(P, torch.float64)
    got = run_rounds(
        algorithm,
        make_space(2, 4),
        lambda ctx: Table(list(gradients[int(ctx.t) - 1]), ctx.phi),
        T,
        K,
        theta=theta,
        phi=phi,
    ).theta
    x = theta
    for t in range(T):
        m = torch.zeros(P, dtype=torch.float64)
        for k in range(1, K + 1):
            m = 0.9 * m + 0.1 * gradients[t, k - 1, 0]
            x = x - lr * (m / (1 - 0.9**k) / (math.sqrt(phi) + 1e-8) + 0.1 * x)
    torch.testing.assert_close(got, x, rtol=1e-12, atol=0)
