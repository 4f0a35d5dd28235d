"""The benchmark: every way runs, a failed competitor is a result, ratios are correct."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_case import need

from dpfed.bench.cases import CPU, GPU, Case, logits_of
from dpfed.bench.llama import LLAMAS, text_of
from dpfed.bench.run import Comparison, Measured, compare, measure, measure_in_turn
from dpfed.bench.steps import Step
from dpfed.cli.bench import lines
from dpfed.cli.main import main
from dpfed.model.causal_loss import scores_of
from dpfed.model.frozen.quantised import Quantize, has_quantised
from dpfed.model.per_sample.gradients import PerSample, trainable

torch.set_num_threads(1)
CASE = next(case for case in CPU if case.model == "glyph-vit")
INSTALL_OPACUS = "not installed: pip install 'opacus>=1.6,<1.7'"
TINY = Case(CASE.model, CASE.spec, clients=2, batch=2, rank=2)


def test_every_way_runs_on_a_cpu() -> None:
    found = compare(TINY, torch.device("cpu"), repeats=1, warm=1)
    assert [way.way for way in found.ways] == [
        "union",
        "private",
        "private, 8 slots",
        "one by one",
        "opacus",
    ]
    assert [way.failed for way in found.ways] == [None] * 5
    assert all(way.milliseconds > 0 for way in found.ways)  # type: ignore[operator]


def tiny_llama(**keys: Any) -> Case:
    return Case("llama-tiny", text_of("llama-tiny", 16), clients=2, batch=2, rank=2, **keys)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_language_models_run_every_way(checkpoint: bool) -> None:
    case = tiny_llama(checkpoint=checkpoint)
    names = case.build().space.names
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in names}
    assert len(adapted) == 7, "all seven projections have an adapter"
    found = compare(case, torch.device("cpu"), repeats=1, warm=1)
    failed = {way.way: way.failed for way in found.ways if way.failed}
    seen_twice = "ValueError: its hooks see each layer twice if layers are checkpointed"
    assert failed == ({"opacus": seen_twice} if checkpoint else {})
    assert found.records_per_second("private") == pytest.approx(
        4000 / found.of("private").milliseconds  # type: ignore[union-attr, operator]
    )


def test_the_private_step_computes_the_mean_gradient_of_the_union() -> None:
    """Both ways do the same work: without clipping their gradients agree."""
    case = tiny_llama()
    plain = case.build()
    torch.manual_seed(0)
    model, space = plain.adapted.model, plain.space
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.1)
    inputs, labels = case.records(torch.device("cpu")).take(torch.arange(4))
    task = plain.built.task
    loss = task.loss(logits_of(plain, model, inputs, torch.float32), labels).mean()
    tensors = [model.get_parameter(name) for name in space.names]
    want = torch.cat([g.flatten() for g in torch.autograd.grad(loss, tensors)])
    theta = space.flatten(trainable(model)).detach().expand(2, -1)

    def forward(model: Any, weights: Any, inputs: Any) -> torch.Tensor:
        return scores_of(task, model, weights, plain.built.prepare(dict(inputs)), inputs)

    ready = PerSample(model, space, forward, task)
    got = torch.cat(ready.grads(theta, torch.tensor([0, 0, 1, 1]), inputs, labels), 1).mean(0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_checkpointing_lowers_the_memory_of_new_tensors() -> None:
    ways = ("union", "private")
    keep, again = (
        compare(tiny_llama(checkpoint=on), torch.device("cpu"), repeats=1, warm=1, only=ways)
        for on in (False, True)
    )
    for way in ways:
        assert again.of(way).created < 0.8 * keep.of(way).created  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("how", ["int8", "4bit"])
def test_quantised_llamas(how: Quantize) -> None:
    need(how)
    case = tiny_llama(quantize=how, checkpoint=True)
    assert has_quantised(case.build().adapted.model)
    found = compare(case, torch.device("cpu"), repeats=1, warm=1, only=("union", "private"))
    assert [way.failed for way in found.ways] == [None, None]


def test_ratios() -> None:
    found = Comparison(
        "m",
        5,
        16,
        (Measured("union", 10.0), Measured("private", 12.0), Measured("x", None, failed="no")),
    )
    assert found.ratio("private", "union") == pytest.approx(1.2)
    assert found.ratio("x", "union") is None
    assert found.ratio("y", "union") is None
    assert found.processor_ratio("private", "union") is None
    shown = "\n".join(lines(found))
    assert "0.83 x the private step" in shown
    assert "-  no" in shown


def test_a_peer_that_fails_or_is_missing_is_a_result() -> None:
    def fails() -> None:
        raise ValueError("this model is not supported\nsecond line")

    def missing() -> None:
        raise ModuleNotFoundError("No module named 'opacus'", name="opacus")

    device = torch.device("cpu")
    assert measure("a", fails, device, 1, 1).failed == "ValueError: this model is not supported"  # type: ignore[arg-type]
    assert measure("b", missing, device, 1, 1).failed == INSTALL_OPACUS  # type: ignore[arg-type]


def test_on_a_cpu_the_ways_take_turns_and_the_order_rotates() -> None:
    seen: list[str] = []

    def way(name: str) -> tuple[str, Callable[[], Step]]:
        return name, lambda: lambda: seen.append(name)

    def missing() -> Step:
        raise ModuleNotFoundError("No module named 'opacus.optimizers'", name="opacus.optimizers")

    found = measure_in_turn([way("a"), ("x", missing), way("b")], repeats=3, warm=1)
    memory = "ab"
    assert "".join(seen) == "a" + "b" + "ab" + "ba" + "ab" + memory
    assert [m.way for m in found] == ["a", "x", "b"]
    assert [m.failed for m in found] == [None, INSTALL_OPACUS, None]
    assert all(m.processor is not None and m.peak is None for m in found if not m.failed)


def test_the_median_of_single_steps_counts() -> None:
    def slow() -> None:
        if len(calls) == 2:
            time.sleep(0.3)
        calls.append(None)

    calls: list[None] = []
    idle, busy = measure_in_turn(
        [("idle", lambda: slow), ("busy", lambda: burn)], repeats=3, warm=0
    )
    assert idle.milliseconds is not None
    assert busy.processor is not None
    assert idle.milliseconds < 200, "the one slow step of three is not the median"
    assert busy.processor > 4


def burn() -> None:
    end = time.process_time() + 0.005
    while time.process_time() < end:
        pass


def test_the_command_writes_json_and_refuses_unknown_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["dpfed", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    monkeypatch.setattr("dpfed.bench.cases.CPU", (TINY,))
    assert (
        run(
            "bench",
            "--device",
            "cpu",
            "--repeats",
            "1",
            "--out",
            str(tmp_path / "b.json"),
            "--json",
        )
        == 0
    )
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "b.json").read_text()) == printed
    (case,) = printed["cases"]
    assert case["case"] == "glyph-vit"
    times = {way["way"]: way["milliseconds"] for way in case["ways"]}
    assert case["times_private"]["opacus"]["clock"] == pytest.approx(
        times["opacus"] / times["private"]
    )
    assert printed["versions"]["opacus"].startswith("1.6")
    assert "benchmarks/peers/run.py" in printed["others"]
    assert run("bench", "--device", "cpu", "--case", "vit-huge") == 2
    assert "choose from glyph-vit" in capsys.readouterr().err
    assert run("bench", "--device", "cpu", "--quantize", "2bit") == 2
    assert "choose from none, int8, 4bit" in capsys.readouterr().err
    assert run("bench", "--device", "cpu", "--quantize", "int8") == 2
    assert "choose a case from llama-tiny, llama-1b" in capsys.readouterr().err


def test_options_change_the_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dpfed.bench.cases.CPU", (tiny_llama(),))
    options = ["--clients", "1", "--batch", "3", "--checkpoint", "--way", "private", "--json"]
    monkeypatch.setattr(
        sys, "argv", ["dpfed", "bench", "--device", "cpu", "--repeats", "1", *options]
    )
    with pytest.raises(SystemExit):
        main()
    *_, last = capsys.readouterr().out.splitlines()
    (case,) = json.loads(last)["cases"]
    assert (case["clients"], case["batch"], case["checkpoint"]) == (1, 3, True)
    assert case["records_per_second"]["private"] > 0


def test_the_large_llamas_have_their_sizes() -> None:
    """Weights of 1.1 and 8.0 billion numbers, 16 records of 512 tokens, adapters of rank 16."""
    billions = {"llama-1b": 1.10, "llama-8b": 8.03}
    for case in GPU:
        if case.model in LLAMAS:
            parts = case.build(device=torch.device("meta"))
            assert parts.total / 1e9 == pytest.approx(billions.pop(case.model), abs=0.01)
            assert (case.union, case.spec.shape, case.rank) == (16, (512,), 16)
            layers = LLAMAS[case.model]["num_hidden_layers"]
            assert sum(n.endswith("lora_A.default.weight") for n in parts.space.names) == 7 * layers
    assert not billions
