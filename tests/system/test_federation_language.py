"""The guide for language models as real processes: three hospitals, TLS and keys, a tiny Llama."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from command import dpfed as command
from language_case import chat, chat_model
from loopback_trial import DPFED, THREADS
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpfed
from dpfed.federation.flower.processes import free_port
from dpfed.privacy.ledger.ledger import Ledger

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "language-models.md"
MARKED = re.compile(
    r"^<!-- (?P<mark>[^\n]*?) -->\n```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
NAMES = ["hospital-a", "hospital-b", "hospital-c"]
ROUNDS = 3
LIMIT = 240.0
# Tokens of a record, in place of the guide's 256.
LENGTH = 40
CHATS = [{"messages": chat("a b", "c")}, {"messages": chat("d", "e f", "g", "h")}] * 200


def marked(mark: str, kind: str) -> list[str]:
    """Return the blocks of the guide with this mark."""
    found = MARKED.finditer(PAGE.read_text(encoding="utf-8"))
    return [m["text"] for m in found if m["mark"] == mark and m["kind"] == kind]


class Hospitals:
    """The guide's files in one folder, and its commands as processes on a free port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.running: list[subprocess.Popen[bytes]] = []
        chat_model(folder / "my-chat-model", positions=LENGTH)
        (server,) = marked("saved as: server.toml", "toml")
        server = server.replace("max_length = 256", f"max_length = {LENGTH}")
        server = server.replace(
            "rounds = 20", f'rounds = {ROUNDS}\nlocal_steps = 1\ndevice = "cpu"'
        )
        (folder / "server.toml").write_text(server, encoding="utf-8")
        (client,) = marked("saved as: hospital-a.toml", "toml")
        client = client.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        client = client.replace("max_length = 256", f"max_length = {LENGTH}")
        client = client.replace("[client]", '[client]\ndevice = "cpu"')
        write_records(folder / "public.jsonl", CHATS[:4])
        for name in NAMES:
            (folder / f"{name}.toml").write_text(client.replace(NAMES[0], name), encoding="utf-8")
            write_records(folder / f"{name}.jsonl", CHATS)

    def run(self) -> None:
        """Run the guide's commands: keys, then three clients and the server at once."""
        block, _ = marked("runs: tests/system/test_federation_language.py", "sh")
        keys, *others = [shlex.split(line)[1:] for line in block.splitlines()]
        assert command(*keys) == 0
        for words in others:
            listen = ["--listen", f"127.0.0.1:{self.port}"] if words[0] == "server" else []
            self.start(words[1], [*DPFED, *words, *listen])
        try:
            assert self.running[-1].wait(LIMIT) == 0, self.logs()
        finally:
            self.end()

    def start(self, name: str, command: list[str]) -> None:
        env = {**os.environ, **THREADS}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=env)
        self.running.append(process)

    def end(self) -> None:
        for process in self.running:
            process.terminate()
        for process in self.running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def logs(self) -> str:
        return "\n".join(
            f"--- {p.name}\n{p.read_text()[-2000:]}" for p in self.folder.glob("*.log")
        )


def write_records(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.mark.federation
@pytest.mark.timeout(400)
def test_hospitals_fine_tune_a_chat_model_as_the_guide_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hospitals = Hospitals(tmp_path)
    hospitals.run()
    result = json.loads((tmp_path / "runs" / "hospitals" / "run.json").read_text())
    assert (result["state"], result["rounds"], result["task"]) == ("finished", ROUNDS, "causal")
    assert not result["release"].startswith("simulation")
    assert result["test_perplexity"] != result["start_perplexity"], "nothing was trained"
    assert len(result["examples"]) == 3
    assert "perplexity" in (tmp_path / "server.toml.log").read_text()
    assert "left out" not in hospitals.logs()
    for name in NAMES:
        with Ledger.open(
            tmp_path / f"{name}-state" / "ledger.db", client=name, readonly=True
        ) as own:
            own.verify()
            rows = list(own.rows())
        assert [row.charge.round for row in rows] == list(range(1, ROUNDS + 1))
        assert all(row.charge.noise == "os" and not row.charge.void for row in rows)
    use_the_model(tmp_path)
    assert "'role': 'assistant'" in capsys.readouterr().out


def use_the_model(folder: Path) -> None:
    """Run the guide's last commands; adapter and merged model write what the run's model writes."""
    _, block = marked("runs: tests/system/test_federation_language.py", "sh")
    for line in block.splitlines():
        assert command(*shlex.split(line)[1:]) == 0
    prompt = chat("a b")
    (written,) = dpfed.load(folder / "runs" / "hospitals").generate([prompt], max_new_tokens=8)
    base = AutoModelForCausalLM.from_pretrained(folder / "my-chat-model")
    joined = PeftModel.from_pretrained(base, folder / "my-adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(folder / "my-model").eval()
    for place, model in (("my-adapter", joined), ("my-model", merged)):
        tokenizer = AutoTokenizer.from_pretrained(folder / place)
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**ids, max_new_tokens=8, do_sample=False)
        new = out[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(new, skip_special_tokens=True) == written, place
    (code,) = marked("runs: tests/system/test_federation_language.py", "python")
    exec(code, {})
