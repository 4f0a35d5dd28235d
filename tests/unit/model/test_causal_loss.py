"""The chunked next-token loss: values, gradients per record, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_case import close
from sizes_case import SIZES
from text_case import gpt2, llama
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    XLMConfig,
    XLMWithLMHeadModel,
)
from zoo_case import Inputs, ZooCase, save, text_spec, tokens_of, with_train

from dpfed.model import causal_loss
from dpfed.model.causal_loss import causal_logits, causal_scores, scores_of_logits
from dpfed.model.task import NEXT_TOKEN
from dpfed.model.zoo.text import AutoCausal

DECODER: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 12, "max_position_embeddings": 24,
    "pad_token_id": 0,
}  # fmt: skip
RECORDS = 4


def tied_llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**DECODER, tie_word_embeddings=True))


def gemma2() -> nn.Module:
    """Return a Gemma whose logits are capped at 0.5, so that the cap matters."""
    config = {**DECODER, "head_dim": 4, "final_logit_softcapping": 0.5, "sliding_window": 3}
    return Gemma2ForCausalLM(Gemma2Config(**config))


def completions() -> Inputs:
    """Return padded records with other targets than their tokens; record 2 has no target."""
    inputs = tokens_of(RECORDS, 8, 20, 0)
    start = torch.tensor([2, 4, 8, 0]).unsqueeze(1)
    return {**inputs, "target_mask": (inputs["attention_mask"] * (torch.arange(8) >= start)).byte()}


def plain_loss(model: nn.Module, one: Inputs) -> Tensor:
    """Return the mean loss of one unpadded record over its targets, from all logits."""
    real = int(one["attention_mask"].sum())
    ids = one["input_ids"][0, :real].long()
    counted = one["target_mask"][0, 1:real].bool()
    logits = model(input_ids=ids.unsqueeze(0)).logits[0, :-1]
    return F.cross_entropy(logits[counted], ids[1:][counted])


def case_of(build: Callable[[], nn.Module], folder: Path, train: str, **keys: Any) -> ZooCase:
    section = with_train(AutoCausal(weights=save(build(), folder), max_length=8), train, **keys)
    return ZooCase(section, text_spec(classes=1))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a chunk hold two tokens of four records."""
    monkeypatch.setattr(causal_loss, "CHUNK_LOGITS", 2 * RECORDS * 20)


def test_scores_by_hand() -> None:
    ids = torch.tensor([[2, 0, 1, 0], [1, 2, 0, 0], [3, 0, 0, 0]], dtype=torch.int32)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.uint8)
    logits = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    # Two of the three next tokens of the first record are guessed.
    logits[0, 0, 0] = logits[0, 1, 1] = 9.0
    logits[0, 2, 3] = 9.0
    scores = scores_of_logits(logits, {"input_ids": ids, "attention_mask": mask})
    logp = F.log_softmax(logits, -1)
    first = -(logp[0, 0, 0] + logp[0, 1, 1] + logp[0, 2, 0]) / 3
    second = -logp[1, 0, 2]
    labels = torch.zeros(3, dtype=torch.int64)
    torch.testing.assert_close(
        NEXT_TOKEN.loss(scores, labels), torch.stack([first, second, torch.tensor(0.0)])
    )
    assert NEXT_TOKEN.correct(scores, labels).tolist() == pytest.approx([2 / 3, 0, 0])
    assert scores[:, 2].tolist() == [3, 1, 0]
    last_only = torch.tensor([[0, 0, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]])
    scores = scores_of_logits(
        logits, {"input_ids": ids, "attention_mask": mask, "target_mask": last_only}
    )
    third = -(logp[2, 0, 0] + logp[2, 1, 0] + logp[2, 2, 0]) / 3
    torch.testing.assert_close(
        scores[:, 0], torch.stack([-logp[0, 2, 0], torch.tensor(0.0), third])
    )


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("build", "train", "targets"),
    [
        (llama, "lora", ("q_proj", "lm_head")),
        (llama, "full", ()),
        (tied_llama, "lora", ("v_proj", "lm_head")),
        (tied_llama, "full", ()),
        (gemma2, "lora", ("k_proj",)),
        (gemma2, "full", ()),
        (gpt2, "full", ()),
    ],
)
def test_gradients_equal_those_of_all_logits(
    build: Callable[[], nn.Module], train: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    case = case_of(build, tmp_path, train, **({"targets": targets} if targets else {}))
    inputs = completions()
    client = torch.tensor([0, 1, 1, 0])
    theta = case.rows(2)
    labels = torch.zeros(RECORDS, dtype=torch.int64)
    got = torch.cat(case.ready.grads(theta, client, inputs, labels), 1)
    want = torch.zeros_like(got)
    for j in (0, 1, 3):
        model = case.at(theta[client[j]])
        model.zero_grad(set_to_none=True)
        loss = plain_loss(model, {name: x[j : j + 1] for name, x in inputs.items()})
        loss.backward()
        want[j] = torch.cat([model.get_parameter(n).grad.flatten() for n in case.space.names])
        scores = case.ready.scores(theta[client[j]], {k: x[j : j + 1] for k, x in inputs.items()})
        torch.testing.assert_close(scores[0, 0], loss.detach(), rtol=1e-5, atol=1e-6)
    assert (got[2] == 0).all(), "a record without targets has no gradient"
    with_targets = [0, 1, 3]
    close(got[with_targets], want[with_targets], case.space)


@pytest.mark.usefixtures("small_chunks")
def test_a_record_without_targets_has_loss_zero(tmp_path: Path) -> None:
    case = case_of(llama, tmp_path, "lora")
    scores = case.ready.scores(case.theta, completions())
    assert scores[2].tolist() == [0.0, 0.0, 0.0]
    assert (scores[[0, 1, 3], 0] > 0).all()


@pytest.mark.usefixtures("small_chunks")
def test_logits_in_chunks_are_the_logits(tmp_path: Path) -> None:
    case = case_of(gemma2, tmp_path, "lora")
    prepared = case.form(tokens_of(RECORDS, 8, 20, 0))
    with torch.no_grad():
        torch.testing.assert_close(
            causal_logits(case.plain, {}, prepared), case.plain(**prepared).logits
        )


@pytest.mark.usefixtures("small_chunks")
def test_half_precision(tmp_path: Path) -> None:
    case = case_of(llama, tmp_path, "lora")
    case.ready.to(torch.bfloat16)
    inputs = completions()
    rows, client = case.rows(1), torch.zeros(RECORDS, dtype=torch.int64)
    with torch.no_grad():
        want = scores_of_logits(case.at(rows[0])(**case.form(dict(inputs))).logits, inputs)
    got = case.ready.scores(rows[0], inputs)
    assert got.dtype == torch.float32, "sums over tokens are in float32"
    torch.testing.assert_close(got[:, 0], want[:, 0], rtol=0.03, atol=0.01)
    grads = torch.cat(case.ready.grads(rows, client, inputs, client), 1)
    assert grads.isfinite().all()
    assert (grads[2] == 0).all()


def test_a_model_without_a_body_of_its_own_uses_all_logits() -> None:
    class Bigram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 20)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.table(input_ids)

    inputs, model = completions(), Bigram()
    ids = {"input_ids": inputs["input_ids"].long()}
    torch.testing.assert_close(
        causal_scores(model, {}, ids, inputs), scores_of_logits(model(**ids), inputs)
    )
    other = XLMWithLMHeadModel(XLMConfig(**{**SIZES, "emb_dim": 8, "n_layers": 1, "n_heads": 2}))
    with torch.no_grad():
        torch.testing.assert_close(
            causal_scores(other.eval(), {}, ids, inputs),
            scores_of_logits(other(**ids).logits, inputs),
        )


# ---- memory


class Largest(TorchDispatchMode):
    """Note the most numbers that any tensor of an operation has."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return out


@contextmanager
def largest_tensor() -> Iterator[Largest]:
    with Largest() as found:
        yield found


def wide() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**DECODER, "vocab_size": 600}))


@pytest.mark.parametrize(("chunk", "in_chunks"), [(600 * RECORDS * 2, True), (2**26, False)])
@pytest.mark.parametrize("targets", [("q_proj",), ("q_proj", "lm_head")])
def test_all_logits_are_never_in_memory(
    chunk: int,
    in_chunks: bool,
    targets: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of(wide, tmp_path, "lora", targets=targets)
    monkeypatch.setattr(causal_loss, "CHUNK_LOGITS", chunk)
    inputs, client = tokens_of(RECORDS, 8, 600, 0), torch.zeros(RECORDS, dtype=torch.int64)
    with largest_tensor() as found:
        case.ready.grads(case.rows(1), client, inputs, client)
        case.ready.scores(case.theta, inputs)
    all_logits = RECORDS * 7 * 600
    assert (found.numbers < all_logits) == in_chunks
