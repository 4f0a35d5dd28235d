"""DP-FedAdamW: two rounds of two steps of two clients, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from algorithm_case import (
    Table,
    make_space,
    run_rounds,
)

from dpfed.algorithms.dp_fedadamw import DPFedAdamW


def test_two_rounds_of_two_steps_of_two_clients_by_hand() -> None:
    """Blocks {1,2} and {3}; θ=(1,−2,.5); β1=½, β2=¾, ϵ=1, κ=½, Φ=1, γ=λ=½;
        cosine: η_1=.2, η_2=.1.

    Round 1 (v̄=0, Δ_G=0), θ' = .9 θ − .2 step:
      client 1, k=1: g=(2,0,1)  m=g/2  v=g²/4  m̂=g  v̂=(4,0,1)  u=(3,.5,.5)
                     step=(2/(√3+1), 0, 1/(√.5+1))=(.7320508,0,.5857864)
                         θ=(.7535898,−1.8,.3328427)
                k=2: g=(2,2,−1)  m=(1.5,1,−.25) v=(1.75,1,.4375)  m̂=(2,4/3,−1/3)
                    v̂=(4,16/7,1)  u=(3,9/7,.5)
                     step=(.7320508,.6248360,−.1952621)  θ=(.5318207,−1.7449672,.3386109)
      client 2, k=1: g=(0,4,−1)  m=(0,2,−.5)  v=(0,4,.25)  m̂=(0,4,−1)  v̂=(0,16,1)  u=(.5,15,.5)
                     step=(0,.8208524,−.5857864)  θ=(.9,−1.9641705,.5671573)
                k=2: g=(2,0,1)  m=(1,1,.25)  v=(1,3,.4375)  m̂=(4/3,4/3,1/3)
                    v̂=(16/7,48/7,1) u=(9/7,41/7,.5)
                     step=(.6248360,.3898461,.1952621)  θ=(.6850328,−1.8457226,.4713891)
      v̄_1=((1.75+1)/2,.4375)=(1.375,.4375)  v̄_2=((1+3)/2,.4375)=(2,.4375)  v̄=(1.6875,.4375)
      Δ̄=(−.3915732,.2046551,−.095)  Δ_G=−Δ̄/(2·.2)=(.9789331,−.5116377,.2375)
    Round 2 (v starts at (1.6875,1.6875,.4375)), θ' = .95 θ − .1 step − .05 Δ_G;
        1−β2^3=37/64, 1−β2^4=175/256:
      client 1, k=1: g=(1,−1,2)  v=(1.515625,1.515625,1.328125)  v̂=(97/37,97/37,85/37)  u=v̂−1
          m̂=g
                     step=(.4398642,−.4398642,.9350209)  θ=(.4850723,−1.6360094,.2793729)
                k=2: g=(0,2,1)  v=(1.13671875,2.13671875,1.24609375)
                    u=(.6628571,2.1257143,.8228571)  m̂=(1/3,1,4/3)
                     step=(.1837397,.4068376,.6991364)  θ=(.3934981,−1.5693108,.1836156)
      client 2, k=1: g=(−3,1,0)  v=(3.515625,1.515625,.328125)  u=(5.0810811,1.6216216,.5)
          (v̂_3=21/37: the floor)
                     step=(−.9219067,.4398642,0)  θ=(.6212494,−1.7239822,.372875)
                k=2: g=(1,1,−2)  v=(2.88671875,1.38671875,1.24609375)
                    u=(3.2228571,1.0285714,.8228571)
                     m̂=(−1/3,1,−4/3)  step=(−.1192507,.4964787,−.6991364)
                         θ=(.5531654,−1.6618491,.4122699)
      v̄=((1.63671875+2.13671875)/2, 1.24609375)  Δ_G=−Δ̄/(2·.1)
    """
    f64 = torch.float64
    gradients = {
        1: [[[2, 0, 1], [0, 4, -1]], [[2, 2, -1], [2, 0, 1]]],
        2: [[[1, -1, 2], [-3, 1, 0]], [[0, 2, 1], [1, 1, -2]]],
    }
    algorithm = DPFedAdamW(
        lr=0.2,
        weight_decay=0.5,
        beta1=0.5,
        beta2=0.75,
        eps=1.0,
        gamma=0.5,
        agg="mean",
        bc=True,
        bc_floor=0.5,
    )
    history = run_rounds(
        algorithm,
        make_space(2, 1),
        lambda ctx: Table([torch.tensor(g, dtype=f64) for g in gradients[int(ctx.t)]], ctx.phi),
        T=2,
        K=2,
        clients=2,
        theta=torch.tensor([1, -2, 0.5], dtype=f64),
        phi=1.0,
        schedule="cosine",
    )
    first, second = history.servers[1:]
    sent = history.messages[0]
    assert sent["delta"][0].tolist() == pytest.approx(
        [-0.468179306876, 0.255032808907, -0.161389129598], abs=1e-11
    )
    assert sent["delta"][1].tolist() == pytest.approx(
        [-0.314967191093, 0.154277360209, -0.028610870402], abs=1e-11
    )
    assert sent["v"].tolist() == [[1.375, 0.4375], [2.0, 0.4375]]
    assert first.theta.tolist() == pytest.approx(
        [0.608426751016, -1.795344915442, 0.405], abs=1e-11
    )
    assert first.v.tolist() == [1.6875, 0.4375]
    assert first.dg.tolist() == pytest.approx([0.978933122461, -0.511637711395, 0.2375], abs=1e-11)
    assert second.theta.tolist() == pytest.approx(
        [0.473331732472, -1.615579926601, 0.297942756720], abs=1e-11
    )
    assert second.v.tolist() == [1.88671875, 1.24609375]
    assert second.dg.tolist() == pytest.approx(
        [0.675475092718, -0.898824944203, 0.535286216402], abs=1e-11
    )
