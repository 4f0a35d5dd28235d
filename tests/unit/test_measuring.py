"""Scripts that measure or make weights, with small models on a CPU.

The scripts must run, and must notice a difference.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command import dpfed
from PIL import Image
from safetensors.torch import load_file
from transformers.models.vit.configuration_vit import ViTConfig
from transformers.models.vit.modeling_vit import ViTForImageClassification

from dpfed.bench.cases import CPU
from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.model.task import InputSpec
from dpfed.model.zoo.resnet import GNResNet18
from dpfed.registry import registry

ROOT = Path(__file__).parents[2]
# glyph-vit
SMALL = replace(CPU[1], clients=2, batch=3)
HERE = torch.device("cpu")


def script(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"tried_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_pass_is_every_record_by_hand() -> None:
    equality = script("tests/gpu/test_equality.py")
    expected = equality.Setting(SMALL, HERE).by_hand(torch.float32)
    found = equality.Setting(SMALL, HERE).by_pass(torch.float32, captured=False, compiled=False)
    assert equality.difference(found, expected) < equality.FLOAT32
    assert equality.difference(1.001 * found, expected) > equality.FLOAT32
    assert (expected.norm(dim=1) <= SMALL.batch * equality.CLIP * (1 + 1e-6)).all()


def test_a_row_of_growth() -> None:
    growth = script("benchmarks/fleet_growth.py")
    row = growth.row_of(SMALL, HERE, repeats=1)
    assert (row["clients"], row["fleets"], row["failed"]) == (2, 1, None)
    # Both are rounded.
    assert row["ms_per_client"] == pytest.approx(row["ms"] / 2, abs=0.011)
    full = growth.row_of(replace(SMALL, train="full"), HERE, repeats=1)
    assert full["P"] > 10 * row["P"]


def public(folder: Path) -> str:
    """Write a small model and six images of its size; return the model's folder."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    shape = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=7, **shape))
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    for i in range(6):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return str(folder / "model")


def test_a_cnn_learns_a_teachers_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    distill, out = script("experiments/distill_cnn.py"), tmp_path / "cnn.safetensors"
    given = [
        "--teacher",
        public(tmp_path),
        "--images",
        str(tmp_path),
        "--out",
        str(out),
        "--size",
        "8",
        "--width",
        "4",
    ]
    monkeypatch.setattr(
        sys, "argv", ["distill_cnn.py", *given, "--groups", "2", "--steps", "40", "--batch", "16"]
    )
    trained: list[torch.nn.Module] = []
    train = distill.distill
    monkeypatch.setattr(
        distill, "distill", lambda *given: trained.append(train(*given)) or trained[0]
    )
    distill.main()
    *steps, last = capsys.readouterr().out.splitlines()
    far = [float(line.split()[3].rstrip(",")) for line in steps]
    assert len(far) == 10
    assert max(far[-3:]) < 0.5 * far[0]
    assert last.startswith("6 images; ")
    spec = InputSpec("image", "pixel_values", (3, 8, 8), 10)
    made = GNResNet18(width=4, groups=2, weights=str(out)).build(spec).model
    saved = load_file(out)
    assert {
        f"classifier.{name}" for name in ("weight", "bias")
    } == made.state_dict().keys() - saved.keys()
    assert all(torch.equal(made.state_dict()[name], value) for name, value in saved.items())
    assert all(torch.equal(trained[0].state_dict()[name], value) for name, value in saved.items())


def test_augmentations_are_crops_and_mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    distill = script("experiments/distill_cnn.py")
    across = torch.arange(8.0).expand(2, 3, 8, 8).contiguous()
    for ramp, axis in ((across, -1), (across.transpose(-1, -2).contiguous(), -2)):
        whole = distill.views(ramp, lambda n: torch.full((n,), 0.999999))
        assert torch.allclose(whole, ramp.flip(-1), atol=1e-3)
        # Not mirrored, a little towards the first pixel.
        crop = distill.views(ramp, lambda n: torch.full((n,), 0.4))
        part = (0.3 + 0.7 * 0.4) * (0.75 + 0.25 * 0.4)
        assert torch.allclose(crop.diff(dim=axis), torch.tensor(part), atol=1e-3)
        assert float(crop.mean()) == pytest.approx(3.5 - 0.2 * (1 - part) * 4, abs=1e-3)
    flat = torch.tensor([0.0, 100.0]).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    # Not mixed in a corner.
    for drawn, expected in ((0.75, [25.0, 75.0]), (0.02, [0.0, 100.0])):
        mixed = distill.views(flat, lambda n, drawn=drawn: torch.full((n,), drawn))
        # Equal to the edges.
        assert torch.allclose(mixed, torch.tensor(expected).view(2, 1, 1, 1), atol=1e-3)


def test_divergence_is_from_the_teachers_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    divergence = script("experiments/distill_cnn.py").divergence
    wanted, given = torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    by_hand = 0.5 * (0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5))
    assert float(divergence(given.log() + 3, wanted.log())) == pytest.approx(by_hand)
    assert float(divergence(wanted.log(), given.log())) != pytest.approx(by_hand, rel=0.1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--images", "EMPTY"], "there is no .jpeg"),
        (["--images", "UNEQUAL"], "9.png is 4x4 pixels"),
        (["--images", "DAMAGED"], "cannot be read as an image"),
        (["--steps", "0"], "at least 1"),
        (["--groups", "0"], "at least 1"),
        (["--lr", "nan"], "not a learning rate"),
        (["--lr", "1e29", "--steps", "4"], "diverged"),
        (["--device", "nowhere"], "is not there"),
        (["--out", "MISSING/cnn.safetensors"], "cannot be written"),
        (["--out", "EMPTY"], "cannot be written"),
        (["--width", "5"], "must divide"),
        (["--teacher", "HEADLESS"], "no classifier of its own"),
    ],
)
def test_distillation_refuses_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: list[str], said: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    distill, weights = script("experiments/distill_cnn.py"), public(tmp_path / "PUBLIC")
    shutil.copytree(weights, tmp_path / "HEADLESS")
    settings = json.loads((tmp_path / "HEADLESS" / "config.json").read_text())
    (tmp_path / "HEADLESS" / "config.json").write_text(
        json.dumps({**settings, "architectures": ["ViTModel"]})
    )
    (tmp_path / "EMPTY").mkdir()
    shutil.copytree(tmp_path / "PUBLIC", tmp_path / "UNEQUAL")
    Image.new("RGB", (4, 4)).save(tmp_path / "UNEQUAL" / "9.png")
    shutil.copytree(tmp_path / "PUBLIC", tmp_path / "DAMAGED")
    (tmp_path / "DAMAGED" / "9.png").write_bytes(b"none")
    monkeypatch.chdir(tmp_path)
    given = {
        "--teacher": weights,
        "--images": "PUBLIC",
        "--out": "cnn.safetensors",
        "--width": "4",
        "--groups": "2",
    }
    given |= {"--steps": "1", "--batch": "2", "--size": "8"} | dict(
        zip(changed[::2], changed[1::2], strict=True)
    )
    monkeypatch.setattr(
        sys, "argv", ["distill_cnn.py", *(word for pair in given.items() for word in pair)]
    )
    with pytest.raises(DpfedError, match=said):
        distill.main()
    assert not list(tmp_path.glob("*.safetensors"))


def test_sharpening_is_chosen_by_unchanged_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = public(tmp_path)
    choose = script("experiments/choose_sharpen.py")
    x = choose.read(tmp_path, 4)
    assert x.shape == (4, 3, 16, 16)
    given = ["--weights", weights, "--images", str(tmp_path), "--size", "8"]
    monkeypatch.setattr(sys, "argv", ["choose_sharpen.py", *given])
    choose.main()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("6 images of 16 pixels, shrunk to 8")
    assert len(said) == 1 + len(choose.WAYS)

    def answers(weights: str, x: torch.Tensor, resize: str, sharpen: float) -> torch.Tensor:
        """Answer shrunk images correctly if they are sharpened by 2, else only half of them."""
        return torch.arange(6) % (2 if x.shape[-1] == 16 or sharpen == 2 else 1)

    monkeypatch.setattr(choose, "answers", answers)
    choose.main()
    shares = [line.split()[-2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert shares == ["100.0" if sharpen == 2 else "50.0" for _, sharpen in choose.WAYS]


def test_pauses_of_a_gpu_are_measured() -> None:
    waiting = script("benchmarks/waiting.py")
    kernels = [
        waiting.Kernel(0.0, 10.0, 1),
        # Within the first one.
        waiting.Kernel(5.0, 8.0, 2),
        waiting.Kernel(9.0, 20.0, 3),
        waiting.Kernel(25.0, 30.0, 3),
        waiting.Kernel(30.5, 40.0, 4),
        waiting.Kernel(240.0, 250.0, 4),
    ]
    assert waiting.pauses(kernels) == (
        20 + 5 + 9.5 + 10,
        [(5.0, False), (0.5, True), (200.0, False)],
    )
    said = waiting.lines(kernels[::-1], 2, clock=0.5, slower=0.6)
    assert "0.50 ms, 0.60 under" in said[0]
    assert "0.02 ms in 3, by 2 launches" in said[1]
    assert [line.split()[-7:] for line in said[2:]] == [
        ["0.00", "ms,", "0.1", "%,", "0.5", "a", "round"],  # outside of launches
        ["0.10", "ms,", "20.5", "%,", "1.0", "a", "round"],  # inside
        ["0.10", "ms,", "20.5", "%,", "1.0", "a", "round"],  # over 3 us
        ["0.10", "ms,", "20.0", "%,", "0.5", "a", "round"],
        ["0.10", "ms,", "20.0", "%,", "0.5", "a", "round"],
    ]
    assert waiting.pauses([]) == (0.0, [])


def test_rounds_of_a_run_are_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole script, with an invented profile of a GPU."""
    waiting = script("benchmarks/waiting.py")
    made = {"cat": "kernel", "ts": 5.0, "dur": 1e3, "args": {"correlation": 7}}
    others = [
        {"ph": "M"},
        {"cat": "cuda_runtime", "ts": 0.0, "dur": 9e9, "args": {"correlation": 7}},
    ]
    asked: list[str] = []

    def export(path: str) -> None:
        with gzip.open(path, "wt") as file:
            json.dump({"traceEvents": [made, *others]}, file)

    profiler = SimpleNamespace(
        start=lambda: asked.append("start"),
        stop=lambda: asked.append("stop"),
        export_chrome_trace=export,
    )
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    watch = waiting.Watch()
    monkeypatch.setattr(waiting.round_loop, "choose", watch)
    tiny = [
        "model.name=linear",
        "run.local_steps=1",
        f"run.rounds={waiting.ROUNDS}",
        "run.eval_every=56",
    ]
    waiting.run(load("digits", tiny, registry()), tmp_path / "run")
    assert asked == ["start", "stop"]
    assert list(watch.at) == [*waiting.CLOCK, *waiting.PROFILED]
    assert "0.10 ms in 0" in watch.lines(tmp_path / "trace.json.gz")[1]


def test_waiting_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["waiting.py", "digits"])
    with pytest.raises(DpfedError, match="no GPU"):
        script("benchmarks/waiting.py").main()
    monkeypatch.setattr(sys, "argv", ["waiting.py", "digits", "--trace", "profile.json"])
    with pytest.raises(DpfedError, match="ends with"):
        script("benchmarks/waiting.py").main()


def test_challenges_are_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two arms really run; the others are copies, so that the test is short."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    mechanism = script("experiments/mechanism.py")
    here = lambda command, **how: SimpleNamespace(returncode=dpfed(*command[3:]))  # noqa: E731
    monkeypatch.setattr(mechanism.subprocess, "run", here)
    config, out = tmp_path / "tiny.toml", tmp_path / "runs"
    config.write_text(
        '[data]\nname = "digits"\n[model]\nname = "linear"\n'
        "[privacy]\nclip = 0.1\nsigma = 1.0\nbatch = 16\n"
        "[run]\nrounds = 3\nlocal_steps = 2\nparticipation = 0.5\n"
    )
    arms = mechanism.ARMS
    mechanism.ARMS = [arm for arm in arms if arm.name in ("local", "fedavg-free")]
    assert mechanism.main(["run", "--out", str(out), "--config", str(config)]) == 0
    before = (out / "local" / "run.json").stat().st_mtime_ns
    assert mechanism.main(["run", "--out", str(out), "--config", str(config)]) == 0
    assert (out / "local" / "run.json").stat().st_mtime_ns == before, "it runs once"
    mechanism.ARMS = arms
    with pytest.raises(DpfedError, match="holds no finished run"):
        mechanism.gathered(out)
    for arm in arms:
        if not (out / arm.name).exists():
            copied = "fedavg-free" if "fedavg" in arm.name else "local"
            shutil.copytree(out / copied, out / arm.name)
            with (out / arm.name / "config.toml").open("w") as made:
                made.write(f'[algorithm]\nname = "{arm.algorithm}"\nlr = {arm.lr}\n')
    # A run with another rate.
    with (out / "adamw" / "config.toml").open("r+") as made:
        made.write('[algorithm]\nname = "dp-fedadamw"\nlr = 0.00120\n')
    with pytest.raises(DpfedError, match="adamw holds no finished run"):
        mechanism.gathered(out)
    (out / "adamw" / "config.toml").write_text('[algorithm]\nname = "dp-fedadamw"\nlr = 0.00119\n')
    numbers, images = tmp_path / "n.json", tmp_path / "images"
    given = ["--numbers", str(numbers), "--images", str(images)]
    with pytest.raises(DpfedError, match="give the folder"):
        mechanism.main(["draw", *given])
    assert mechanism.main(["draw", str(out), *given]) == 0
    found = json.loads(numbers.read_text())["arms"]
    assert found["local"]["rounds"] == [1, 2, 3]
    assert found["local"]["noise_std"] == pytest.approx(0.1 / 16)
    # The histogram has the noise of every coordinate.
    assert 0.5 < mechanism.median_root(found["local"]) / (0.1 / 16) < 1.5
    assert found["fedavg-free"]["noise_std"] == 0
    assert str(tmp_path) not in numbers.read_text()
    assert mechanism.lines(
        {"arms": {"a": {"label": "A", "accuracy": 0.5, "drift": [1.0, 2.0, 3.0, 4.0]}}}
    )[2].endswith("| 2 |")
    table = mechanism.lines({"arms": found})
    assert table[2 + [arm.name for arm in arms].index("fedavg-free")].startswith(
        "| FedAvg, no privacy | "
    )
    for theme in ("light", "dark"):
        drawn = (images / f"mechanism-{theme}.svg").read_text()
        assert all(
            title in drawn
            for title in ("Spread of v between clients", "Where noise puts", "Client drift")
        )


def test_the_middle_of_a_histogram() -> None:
    mechanism = script("experiments/mechanism.py")
    assert mechanism.median_root({"sqrt_v": [1, 1, 6, 0], "log10": [-4, 0]}) == pytest.approx(
        10**-1.5
    )
