"""DP-FedSAM: limits, accounting, and an example by hand."""

from __future__ import annotations

import math

import pytest
import torch
from algorithm_case import FakeOracle, curved, exact, make_space, run_rounds, start_point
from torch import Tensor

from dpfed.algorithms.base import Facts
from dpfed.algorithms.dp_fedavg import DPFedAvg
from dpfed.algorithms.dp_fedsam import DPFedSAM
from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.pld import pld_epsilon
from dpfed.privacy.mechanism import Mechanism
from dpfed.registry import registry
from dpfed.training.job.plan import plan_of


def test_example_by_hand() -> None:
    """Two clients, three numbers, two steps, no noise: client 1 has gradient θ,
        client 2 has 2θ; ρ=.5, η=.1, λ=.1.

    θ = (3, 4, 0), ‖θ‖ = 5, and both gradients point along θ, so e = .5·(.6, .8, 0) = (.3, .4,
        0) at every step.
    client 1: g2 = (3.3, 4.4)  θ' = (3 − .1(3.3+.3), 4 − .1(4.4+.4))  = (2.64, 3.52)
              g2 = (2.94, 3.92)
                  θ'' = (2.64 − .1(2.94+.264), 3.52 − .1(3.92+.352)) = (2.3196, 3.0928)
    client 2: g2 = (6.6, 8.8)  θ' = (3 − .1(6.6+.3), 4 − .1(8.8+.4))  = (2.31, 3.08)
              g2 = (5.22, 6.96)
                  θ'' = (2.31 − .1(5.22+.231), 3.08 − .1(6.96+.308)) = (1.7649, 2.3532)
    mean  (2.04225, 2.723, 0)
    """
    factor = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    theta = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    algorithm = DPFedSAM(lr=0.1, weight_decay=0.1, rho=0.5)
    got = run_rounds(
        algorithm, make_space(3), exact(lambda x: factor * x), 1, 2, 2, theta=theta
    ).theta
    torch.testing.assert_close(
        got, torch.tensor([2.04225, 2.723, 0.0], dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


def test_b4_without_radius_and_noise_it_is_fedavg() -> None:
    theta, gradient = start_point(8), curved(8)
    sam = run_rounds(
        DPFedSAM(lr=0.05, rho=0.0), make_space(8), exact(gradient), 3, 4, 2, theta=theta
    ).path()
    avg = run_rounds(DPFedAvg(lr=0.05), make_space(8), exact(gradient), 3, 4, 2, theta=theta).path()
    assert torch.equal(sam, avg)


@pytest.mark.parametrize("batches", ["shared", "independent"])
def test_b4_the_perturbation_has_norm_rho_and_leaves_no_trace(batches: str) -> None:
    """The second gradient is taken at distance ρ from θ; the step from θ uses only that one."""
    asked: list[Tensor] = []
    answers: list[Tensor] = []

    class Spy(FakeOracle):
        def _release(self, theta: Tensor) -> tuple[Tensor, Tensor]:
            asked.append(theta.clone())
            g, phi = super()._release(theta)
            answers.append(g.clone())
            return g, phi

    algorithm = DPFedSAM(lr=0.1, weight_decay=0.0, rho=0.07, sam_batches=batches)  # type: ignore[arg-type]
    spy = Spy(curved(5), torch.full((2, 1), 0.01), torch.Generator().manual_seed(0))
    history = run_rounds(
        algorithm, make_space(5), lambda ctx: spy, 1, 1, 2, theta=start_point(5), phi=0.01
    )
    first, second = asked
    torch.testing.assert_close((second - first).norm(dim=1), torch.full((2,), 0.07))
    torch.testing.assert_close(history.messages[0]["delta"], -0.1 * answers[1])
    noises = [answer - curved(5)(at) for answer, at in zip(answers, asked, strict=True)]
    assert not torch.equal(*noises)
    assert (spy.calls, spy.again_calls) == ((1, 1) if batches == "shared" else (2, 0))


def test_the_declared_releases_are_what_a_step_takes() -> None:
    assert (DPFedSAM().releases.batches, DPFedSAM().releases.releases) == (1, 2)
    independent = DPFedSAM(sam_batches="independent").releases
    assert (independent.batches, independent.releases) == (2, 1)


def test_b4_a_shared_batch_is_charged_as_sigma_over_root_two() -> None:
    plan, _ = plan_of(load("digits", ["algorithm.name=dp-fedsam", "privacy.sigma=1.0"], registry()))
    mechanism = plan.mechanism(0)
    assert mechanism.effective_multiplier == pytest.approx(1 / math.sqrt(2))
    single = Mechanism("poisson", mechanism.rate, 1 / math.sqrt(2))
    assert pld_epsilon([(mechanism, 60)], 1e-5) == pytest.approx(
        pld_epsilon([(single, 60)], 1e-5), rel=1e-9
    )


def test_equal_eps_spends_what_the_others_spend() -> None:
    def plan(*keys: str) -> Mechanism:
        return plan_of(load("digits", [*keys, "privacy.sigma=1.0"], registry()))[0].mechanism(0)

    sam, avg = (
        plan("algorithm.name=dp-fedsam", "algorithm.equal_eps=true"),
        plan("algorithm.name=dp-fedavg"),
    )
    assert sam.noise_multiplier == pytest.approx(math.sqrt(2))
    assert pld_epsilon([(sam, 60)], 1e-5) == pytest.approx(pld_epsilon([(avg, 60)], 1e-5), rel=1e-6)


def test_what_equal_eps_cannot_do_is_refused() -> None:
    facts = Facts(equal_phi=True, private=True, allow_nan=False)
    with pytest.raises(DpfedError, match="shared batch only"):
        DPFedSAM(equal_eps=True, sam_batches="independent").check(facts)
    with pytest.raises(DpfedError, match="no effect"):
        DPFedSAM(equal_eps=True).check(
            Facts(equal_phi=True, private=True, allow_nan=False, calibrated=True)
        )


def test_the_spec_factors_on_epsilon() -> None:
    """ε×2.26 for a shared batch and ×1.46 for independent ones, in the CIFAR setting."""
    one = pld_epsilon([(Mechanism("poisson", 0.016, 1.0), 2000)], 1e-5)
    shared = pld_epsilon([(Mechanism("poisson", 0.016, 1.0, releases=2), 2000)], 1e-5)
    independent = pld_epsilon([(Mechanism("poisson", 0.016, 1.0, batches=2), 2000)], 1e-5)
    assert shared / one == pytest.approx(2.26, rel=0.01)
    assert independent / one == pytest.approx(1.46, rel=0.01)
