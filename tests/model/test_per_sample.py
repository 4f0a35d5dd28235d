"""Per-sample gradients of whole Transformers, against a plain loop of single-record backwards (SPEC 9: O9, O10)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertForSequenceClassification
from transformers.models.roberta.configuration_roberta import RobertaConfig
from transformers.models.roberta.modeling_roberta import RobertaForSequenceClassification
from transformers.models.swin.configuration_swin import SwinConfig
from transformers.models.swin.modeling_swin import SwinForImageClassification
from transformers.models.vit.configuration_vit import ViTConfig
from transformers.models.vit.modeling_vit import ViTForImageClassification

from dpfed.config import LoraSection, ModelSection
from dpfed.errors import DpfedError
from dpfed.model.lora import adapt
from dpfed.model.per_sample import PerSample, call, trainable
from dpfed.model.space import Space, space_of
from dpfed.model.task import per_record_loss

TOLERANCE = 1e-5
CLASSES = 3
Inputs = dict[str, Tensor]

# ---- the reference, which knows nothing of twins


def loop(model: nn.Module, space: Space, theta: Tensor, client: Tensor, inputs: Inputs, labels: Tensor) -> Tensor:
    """Gradient of each record by itself, `[N, P]`: one plain model, one forward and one backward per record."""
    parameters = dict(model.named_parameters())
    out = torch.zeros(len(client), space.size)
    for j in range(len(client)):
        model.zero_grad(set_to_none=True)
        start = 0
        for name in space.names:
            p = parameters[name]
            p.data.copy_(theta[client[j], start : start + p.numel()].view(p.shape))
            start += p.numel()
        scores = model(**{name: x[j : j + 1] for name, x in inputs.items()})
        scores = getattr(scores, "logits", scores)
        (-F.log_softmax(scores, -1)[0, labels[j]]).backward()
        grads = [
            parameters[n].grad if parameters[n].grad is not None else torch.zeros_like(parameters[n])
            for n in space.names
        ]
        out[j] = torch.cat([g.flatten() for g in grads])
    return out


class Case:
    """A model made ready, beside an untouched copy of it."""

    def __init__(self, model: nn.Module) -> None:
        tensors = trainable(model)
        self.plain = copy.deepcopy(model).eval()
        self.space = space_of(tensors)
        self.theta = self.space.flatten(tensors)
        self.ready = PerSample(model.eval(), self.space, call, per_record_loss)

    def rows(self, clients: int, seed: int = 0) -> Tensor:
        """Different weights for each client, none of them at a special place (LoRA's B = 0)."""
        noise = torch.randn(clients, self.space.size, generator=torch.Generator().manual_seed(seed))
        return self.theta + 0.1 * noise

    def check(self, inputs: Inputs, labels: Tensor, clients: int, nan: int | None = None, seed: int = 0) -> Tensor:
        """Compares, record by record, in norm; with `nan`, that record's is not finite and no other notices."""
        client = torch.arange(len(labels)).flip(0) % clients
        theta = self.rows(clients, seed)
        grads = self.ready.grads(theta, client, inputs, labels)
        assert [g.shape for g in grads] == [(len(labels), shape.numel()) for shape in self.space.shapes]
        got = torch.cat(grads, 1)
        want = loop(self.plain, self.space, theta, client, inputs, labels)
        good = torch.ones(len(labels), dtype=torch.bool)
        if nan is not None:
            good[nan] = False
            assert not got[nan].isfinite().all()
            assert not want[nan].isfinite().all()
        assert got[good].isfinite().all()
        close(got[good], want[good], self.space)
        return got


def close(got: Tensor, want: Tensor, space: Space) -> None:
    for mine, reference in zip(got, want, strict=True):
        assert (
            mine - reference
        ).norm() <= 3 * TOLERANCE * reference.norm()  # a gradient that nearly cancels is less exact
    # And each tensor by itself. What is far below the whole is rounding: a key's bias has gradient zero in exact numbers.
    for name, part in zip(space.names, space.slices(), strict=True):
        error, size = (got[:, part] - want[:, part]).norm(), want[:, part].norm()
        assert error <= TOLERANCE * size + 2e-5 * want.norm(), f"{name}: {error / size:.1e}"


# ---- tiny models


def spread(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that follow from the seed alone, none at a special place, so that biases, norms and tables matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            around_one = "norm" in name.lower() and name.endswith("weight")
            p.copy_(0.25 * torch.randn(p.shape, generator=generator) + around_one)
    return model.eval()


def swin(**other: object) -> nn.Module:
    """Two stages of two layers, so that windows are folded, shifted and merged."""
    config: dict[str, object] = {
        "image_size": 16, "patch_size": 2, "num_channels": 1, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 2, "num_labels": CLASSES, "drop_path_rate": 0.0, "mlp_ratio": 2.0,
    }  # fmt: skip
    return spread(SwinForImageClassification(SwinConfig(**{**config, **other})))


def vit(**other: object) -> nn.Module:
    config: dict[str, object] = {
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "image_size": 8,
        "patch_size": 4, "num_channels": 1, "num_labels": CLASSES,
    }  # fmt: skip
    return spread(ViTForImageClassification(ViTConfig(**{**config, **other})))


def _text(**other: object) -> dict[str, object]:
    return {
        "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
        "max_position_embeddings": 12, "num_labels": CLASSES, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, **other,
    }  # fmt: skip


def bert(**other: object) -> nn.Module:
    return spread(BertForSequenceClassification(BertConfig(**_text(**other))))


def roberta(**other: object) -> nn.Module:
    return spread(RobertaForSequenceClassification(RobertaConfig(**_text(**other))))


def images(side: int) -> Callable[[int], Inputs]:
    return lambda count: {"pixel_values": torch.randn(count, 1, side, side, generator=torch.Generator().manual_seed(3))}


def texts(pad: int) -> Callable[[int], Inputs]:
    def make(count: int) -> Inputs:
        """Records of different length; the rest of each is padding, and the mask says so."""
        ids = torch.randint(2, 20, (count, 7), generator=torch.Generator().manual_seed(4))
        mask = (torch.arange(7) < torch.tensor([4, 7, 2, 6, 3][:count]).reshape(-1, 1)).long()
        return {"input_ids": torch.where(mask > 0, ids, pad), "attention_mask": mask}

    return make


MODELS = {
    "swin": (swin, images(16)),
    "vit": (vit, images(8)),
    "bert": (bert, texts(0)),
    "roberta": (roberta, texts(1)),
}
TRAIN = ("full", "lora", "head")


def adapted(model: nn.Module, train: str, **lora: object) -> nn.Module:
    section = ModelSection(train=train, lora=LoraSection(**{"r": 2, "alpha": 4.0, **lora}))  # type: ignore[arg-type]
    return adapt(model, section, "classifier", seed=1).model


def labels_of(count: int) -> Tensor:
    return torch.arange(count) % CLASSES


# ---- whole models


@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_the_loop(name: str, train: str) -> None:
    build, make = MODELS[name]
    case = Case(adapted(build(), train))
    for count, clients in ((0, 2), (1, 1), (1, 3), (2, 2), (5, 1), (5, 3)):
        got = case.check(make(count), labels_of(count), clients)
        assert count == 0 or (got != 0).any()


@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("name", ["swin", "vit"])
def test_a_nan_image_stays_alone(name: str, train: str) -> None:
    build, make = MODELS[name]
    inputs = make(5)
    inputs["pixel_values"][2, 0, 3, 3] = float("nan")
    Case(adapted(build(), train)).check(inputs, labels_of(5), clients=3, nan=2)


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_nan_text_stays_alone(train: str) -> None:
    """Tokens cannot be NaN, so the record comes as vectors; the word table is then unused and its gradient zero."""
    case = Case(adapted(bert(), train))
    vectors = torch.randn(5, 7, 8, generator=torch.Generator().manual_seed(1))
    vectors[3, 1, 0] = float("nan")
    inputs = {"inputs_embeds": vectors, "attention_mask": texts(0)(5)["attention_mask"]}
    got = case.check(inputs, labels_of(5), clients=2, nan=3)
    if train == "full":
        words = case.space.slices()[case.space.names.index("bert.embeddings.word_embeddings.weight")]
        assert (got[:, words] == 0).all()


@pytest.mark.parametrize("name", MODELS)
def test_padding_records_change_no_other(name: str) -> None:
    """Unused slots of the engine hold copies of some record: the others' gradients do not depend on them."""
    build, make = MODELS[name]
    case = Case(adapted(build(), "lora"))
    inputs, theta, client = make(5), case.rows(2), torch.tensor([0, 1, 1, 0, 1])
    alone = torch.cat(case.ready.grads(theta, client[:3], {k: v[:3] for k, v in inputs.items()}, labels_of(3)), 1)
    padded = torch.cat(case.ready.grads(theta, client, inputs, labels_of(5)), 1)
    close(padded[:3], alone, case.space)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_padding_tokens_change_nothing(name: str) -> None:
    """What stands behind the mask is not seen (RoBERTa reads positions from the ids, so only its length may change)."""
    build, make = MODELS[name]
    case = Case(adapted(build(), "lora"))
    short = {k: v[:, :4] for k, v in make(1).items()}  # the first record has four tokens
    args = case.rows(1), torch.tensor([0])
    a = torch.cat(case.ready.grads(*args, make(1), labels_of(1)), 1)
    b = torch.cat(case.ready.grads(*args, short, labels_of(1)), 1)
    close(a, b, case.space)


@pytest.mark.parametrize("absolute", [False, True])
def test_swin_with_other_sizes(absolute: bool) -> None:
    """Windows of 4, padding inside the model (10 x 10 patches), and the absolute table, which goes through vmap."""
    model = swin(image_size=20, window_size=4, use_absolute_embeddings=absolute)
    case = Case(adapted(model, "full"))
    case.check(images(20)(2), labels_of(2), clients=2)


# ---- the model itself stays as it was


@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("name", MODELS)
def test_twins_leave_the_model_alone(name: str, train: str) -> None:
    build, make = MODELS[name]
    model = adapted(build(), train)
    names = [n for n, _ in model.named_parameters()]
    before = {n: x.clone() for n, x in model.state_dict().items()}
    with torch.no_grad():
        want = model(**make(2)).logits
    case = Case(model)
    case.ready.grads(case.rows(2), torch.tensor([0, 1]), make(2), labels_of(2))
    assert [n for n, _ in model.named_parameters()] == names
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[n], before[n]) for n in before)  # O10: bitwise
    with torch.no_grad():
        assert torch.equal(model(**make(2)).logits, want)
    assert torch.equal(case.ready.scores(case.theta, make(2)), want)
    assert all(isinstance(m, nn.Module) for m in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_frozen_weights_are_not_in_the_space(name: str) -> None:
    model = MODELS[name][0]()
    base = {n for n, _ in model.named_parameters()}
    whole = sum(p.numel() for p in model.parameters())
    for train in TRAIN:
        case = Case(adapted(MODELS[name][0](), train))
        if train == "full":
            assert set(case.space.names) == base
            assert case.space.size == whole
        elif train == "head":
            assert all(n.startswith("classifier.") for n in case.space.names)
        else:
            assert all("lora_" in n or n.startswith("classifier.modules_to_save.") for n in case.space.names)
            assert case.space.size < whole


def test_scores_are_the_models_own() -> None:
    case = Case(adapted(vit(), "lora"))
    vector, inputs = case.rows(1)[0], images(8)(4)
    for name, x in case.space.unflatten(vector).items():
        case.plain.get_parameter(name).data.copy_(x)
    assert torch.equal(case.ready.scores(vector, inputs), case.plain(**inputs).logits)


def test_a_second_preparation_is_the_same() -> None:
    """A model that already carries twins can be made ready again (a second space, an evaluation beside a run)."""
    model = adapted(swin(hidden_dropout_prob=0.2), "full")
    first, keys = Case(model), torch.tensor([5, 6])
    again = PerSample(model, first.space, call, per_record_loss)
    args = first.rows(2), torch.tensor([0, 1]), images(16)(2), labels_of(2), keys
    assert again.has_dropout
    for a, b in zip(first.ready.grads(*args), again.grads(*args), strict=True):
        assert torch.equal(a, b)


# ---- refusals


class WithBatchNorm(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, **options)
        self.classifier = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(x))


def ready(model: nn.Module) -> PerSample:
    return PerSample(model, space_of(trainable(model)), call, per_record_loss)


def test_batch_norm_is_refused_with_the_fix() -> None:
    training = adapted(WithBatchNorm(), "head").train()
    learning = WithBatchNorm().eval()
    without_statistics = adapted(WithBatchNorm(track_running_stats=False), "head").eval()
    for model in (training, learning, without_statistics):
        with pytest.raises(DpfedError, match=r"norm is a BatchNorm1d .*GroupNorm.*eval mode") as error:
            ready(model)
        assert "\n" not in str(error.value)


def test_frozen_batch_norm_in_eval_mode_works() -> None:
    model = WithBatchNorm()
    with torch.no_grad():
        model.norm(torch.randn(20, 4) * 3 + 1)  # has seen something
    case = Case(adapted(model.eval(), "head"))
    assert all(n.startswith("classifier") for n in case.space.names)
    case.check({"x": torch.randn(5, 4, generator=torch.Generator().manual_seed(0))}, labels_of(5), clients=2)


def test_instance_norm_mixes_nothing_and_is_allowed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm1d(2, affine=True)
            self.classifier = nn.Linear(10, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.norm(x).tanh().flatten(1))

    x = torch.randn(5, 2, 5, generator=torch.Generator().manual_seed(0))
    Case(spread(Model())).check({"x": x}, labels_of(5), clients=2)


def test_a_loss_that_is_averaged_is_refused() -> None:
    model = nn.Linear(4, CLASSES)
    space = space_of(trainable(model))
    broken = PerSample(model, space, lambda m, w, x: torch.func.functional_call(m, w, (x["x"],)), nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="one each is needed"):
        broken.grads(
            torch.zeros(1, space.size), torch.zeros(2, dtype=torch.long), {"x": torch.ones(2, 4)}, labels_of(2)
        )


def test_a_model_without_trainable_tensors_is_refused() -> None:
    with pytest.raises(DpfedError, match="no trainable tensor"):
        trainable(nn.Linear(2, 2).requires_grad_(False))


def test_a_model_without_scores_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [x]

    with pytest.raises(DpfedError, match="without logits"):
        call(Model(), {}, {"x": torch.ones(1)})


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_an_embedding_that_mixes_records_is_refused(option: dict[str, object]) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, **option), nn.Flatten(), nn.Linear(6, 2))  # type: ignore[arg-type]
    with pytest.raises(DpfedError, match="mix records"):
        PerSample(model, space_of(trainable(model)), call, per_record_loss)
