"""No code runs or unpacks the content of a file; hostile files are refused."""

from __future__ import annotations

import ast
import json
import pickle
import sys
import zipfile
from pathlib import Path

import export_case
import pytest
import torch

import dpfed
from dpfed.errors import DpfedError
from dpfed.federation.flower import processes
from dpfed.model.build import assemble
from dpfed.model.task import InputSpec
from dpfed.model.zoo.vision import AutoImage

ROOT = Path(dpfed.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {
    "pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "yaml",
    "subprocess",
    "runpy",
    "code",
}
# A test below checks the processes of the first two; the third reads without running code.
ALLOWED = {
    "federation/flower/processes.py": ["subprocess"],
    "federation/flower/keeper.py": ["subprocess"],
    "data/pickles.py": ["pickle"],
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "extractall",
    "extract",
    "unpack_archive",
    "system",
    "popen",
    "enable_load_extension",
    "load_extension",
}


def unsafe(source: str) -> list[str]:
    """Return the calls and imports that could run or unpack foreign content."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            found += _unsafe_call(node)
    return found


def _unsafe_call(node: ast.Call) -> list[str]:
    name = node.func
    text = ast.unparse(name)
    keys = {key.arg: ast.unparse(key.value) for key in node.keywords}
    if isinstance(name, ast.Name) and name.id in BUILTINS:
        return [text]
    if isinstance(name, ast.Attribute) and name.attr in METHODS:
        return [text]
    if text in ("torch.load", "torch.jit.load", "torch.hub.load"):
        return [] if text == "torch.load" and keys.get("weights_only") == "True" else [text]
    if text in ("np.load", "numpy.load"):
        return [] if keys.get("allow_pickle") == "False" else [text]
    if text.endswith((".from_pretrained", ".from_config")) and text.lower().startswith("auto"):
        return [] if keys.get("trust_remote_code") == "False" else [text]
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_content_is_run_or_unpacked(path: Path) -> None:
    allowed = ALLOWED.get(str(path.relative_to(ROOT)), [])
    assert unsafe(path.read_text(encoding="utf-8")) == allowed


def test_the_only_started_processes_are_a_module_of_this_package_and_flowers_commands() -> None:
    """processes.py starts a keeper and `flwr`, and a keeper starts its plan, without a shell."""
    folder = ROOT / "federation" / "flower"
    started = {}
    programs = []
    for name in ("processes.py", "keeper.py"):
        source = (folder / name).read_text(encoding="utf-8")
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        found = [c for c in calls if ast.unparse(c.func).startswith("subprocess.")]
        started[name] = [ast.unparse(call.args[0]) for call in found]
        assert not any(word.arg == "shell" for call in found for word in call.keywords)
        programs += [ast.unparse(c.args[0]) for c in calls if ast.unparse(c.func) == "program"]
    assert started == {
        "processes.py": ["KEEPER", "[program('flwr'), *words]"],
        "keeper.py": ["command"],
    }
    assert programs == ["f'flower-{kind}'", "'flower-superexec'", "'flwr'"]
    assert [sys.executable, "-m", "dpfed.federation.flower.keeper"] == processes.KEEPER


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("import pickle", True),
        ("def f():\n    from joblib import load", True),
        ("torch.load(p)", True),
        ("torch.load(p, weights_only=False)", True),
        ("torch.load(p, weights_only=True)", False),
        ("np.load(p)", True),
        ("np.load(p, allow_pickle=True)", True),
        ("np.load(p, allow_pickle=False)", False),
        ("eval(text)", True),
        ("model.eval()", False),
        ("tar.extractall(p)", True),
        ("tar.extractfile(m)", False),
        ("os.system('x')", True),
        ("AutoConfig.from_pretrained(n, trust_remote_code=True)", True),
        ("AutoConfig.from_pretrained(n)", True),
        ("auto.from_pretrained(n, trust_remote_code=False)", False),
        ("import pickletools, zipfile", False),
    ],
)
def test_the_rule_finds_unsafe_calls(source: str, wrong: bool) -> None:
    assert bool(unsafe(source)) is wrong


class Bomb:
    """A pickle of it makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


SPEC = InputSpec("image", "pixel_values", (3, 8, 8), 3)


def test_the_test_pickle_runs_code_when_it_is_trusted(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "mark"))).close()
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("legacy", [True, False])
def test_weights_that_are_a_pickle_are_not_run(tmp_path: Path, legacy: bool) -> None:
    base = Path(export_case.base("vit", tmp_path / "base"))
    (base / "model.safetensors").unlink()
    content = {"vit.layernorm.weight": Bomb(tmp_path / "mark")}
    if legacy:
        (base / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, base / "pytorch_model.bin")
    with pytest.raises(DpfedError, match="cannot be loaded"):
        assemble(AutoImage(weights=str(base)), SPEC)
    assert not (tmp_path / "mark").exists()


def test_code_beside_weights_is_not_run(tmp_path: Path) -> None:
    base = Path(export_case.base("vit", tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForImageClassification": "evil.M"}
    for model_type in (config["model_type"], "evil"):
        (base / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        (base / "evil.py").write_text(
            f"open({str(tmp_path / 'mark')!r}, 'w')\nclass C: pass\nclass M: pass\n"
        )
        try:
            assemble(AutoImage(weights=str(base)), SPEC)
        except DpfedError as error:
            sentence = str(error)
            assert sentence.count("\n") == 0
    assert not (tmp_path / "mark").exists()


def test_an_adapter_that_is_a_pickle_is_not_read(tmp_path: Path) -> None:
    base = export_case.base("vit", tmp_path / "base")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "target_modules": ["fc1"]})
    )
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps({"x": Bomb(tmp_path / "mark")}))
    with pytest.raises(DpfedError, match=r"no adapter_model\.safetensors"):
        assemble(AutoImage(weights=base, adapter=str(adapter)), SPEC)
    assert not (tmp_path / "mark").exists()


def test_a_zip_that_points_outside_leaves_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpfed.data.sources.tiny_imagenet import TinyImagenet

    monkeypatch.setenv("DPFED_CACHE", str(tmp_path / "cache"))
    inside = tmp_path / "inside"
    inside.mkdir()
    with zipfile.ZipFile(inside / "a.zip", "w") as archive:
        archive.writestr("../escaped.txt", b"x")
        archive.writestr("root/wnids.txt", b"../../n01\n")
        archive.writestr("root/train/../../escaped/images/a.JPEG", b"x")
    with pytest.raises(DpfedError):
        TinyImagenet(path=str(inside / "a.zip"), check=False).load()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == ["inside"]
    assert [p.name for p in inside.iterdir()] == ["a.zip"]
