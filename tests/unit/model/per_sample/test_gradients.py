"""Per-sample gradients of Transformers agree with a loop of single-record backward passes."""

from __future__ import annotations

import pytest
import torch
from gradient_case import (
    CLASSES,
    MODELS,
    TRAIN,
    Case,
    adapted,
    bert,
    close,
    images,
    labels_of,
    spread,
    swin,
    texts,
    vit,
)
from torch import Tensor, nn

from dpfed.errors import DpfedError
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.gradients import PerSample, call, trainable
from dpfed.model.task import CLASSIFY, Task

# ---- the reference, which uses no batched layers


# ---- tiny models


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
    """Tokens cannot be NaN, so the record enters as vectors and the word table has no gradient."""
    case = Case(adapted(bert(), train))
    vectors = torch.randn(5, 7, 8, generator=torch.Generator().manual_seed(1))
    vectors[3, 1, 0] = float("nan")
    inputs = {"inputs_embeds": vectors, "attention_mask": texts(0)(5)["attention_mask"]}
    got = case.check(inputs, labels_of(5), clients=2, nan=3)
    if train == "full":
        words = case.space.slices()[
            case.space.names.index("bert.embeddings.word_embeddings.weight")
        ]
        assert (got[:, words] == 0).all()


@pytest.mark.parametrize("name", MODELS)
def test_padding_records_change_no_other(name: str) -> None:
    """Unused slots hold copies of a record; the gradients of the others do not depend on them."""
    build, make = MODELS[name]
    case = Case(adapted(build(), "lora"))
    inputs, theta, client = make(5), case.rows(2), torch.tensor([0, 1, 1, 0, 1])
    alone = torch.cat(
        case.ready.grads(theta, client[:3], {k: v[:3] for k, v in inputs.items()}, labels_of(3)), 1
    )
    padded = torch.cat(case.ready.grads(theta, client, inputs, labels_of(5)), 1)
    close(padded[:3], alone, case.space)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_padding_tokens_change_nothing(name: str) -> None:
    """Padding has no effect. RoBERTa reads positions from ids, so only its length changes."""
    build, make = MODELS[name]
    case = Case(adapted(build(), "lora"))
    # The first record has four tokens.
    short = {k: v[:, :4] for k, v in make(1).items()}
    args = case.rows(1), torch.tensor([0])
    a = torch.cat(case.ready.grads(*args, make(1), labels_of(1)), 1)
    b = torch.cat(case.ready.grads(*args, short, labels_of(1)), 1)
    close(a, b, case.space)


@pytest.mark.parametrize("absolute", [False, True])
def test_swin_with_other_sizes(absolute: bool) -> None:
    """Windows of 4 pad the 10 x 10 patches, and vmap maps the absolute position table."""
    model = swin(image_size=20, window_size=4, use_absolute_embeddings=absolute)
    case = Case(adapted(model, "full"))
    case.check(images(20)(2), labels_of(2), clients=2)


# ---- the model itself stays as it was


@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("name", MODELS)
def test_batched_layers_leave_the_model_alone(name: str, train: str) -> None:
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
    assert all(torch.equal(after[n], before[n]) for n in before)
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
            assert all(
                "lora_" in n or n.startswith("classifier.modules_to_save.")
                for n in case.space.names
            )
            assert case.space.size < whole


def test_scores_are_the_models_own() -> None:
    case = Case(adapted(vit(), "lora"))
    vector, inputs = case.rows(1)[0], images(8)(4)
    for name, x in case.space.unflatten(vector).items():
        case.plain.get_parameter(name).data.copy_(x)
    assert torch.equal(case.ready.scores(vector, inputs), case.plain(**inputs).logits)


def test_a_second_preparation_is_the_same() -> None:
    """A model with batched layers can be prepared again, as for a second space."""
    model = adapted(swin(hidden_dropout_prob=0.2), "full")
    first, keys = Case(model), torch.tensor([5, 6])
    again = PerSample(model, first.space, call, CLASSIFY)
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
    return PerSample(model, space_of(trainable(model)), call, CLASSIFY)


def test_batch_norm_is_refused_with_the_fix() -> None:
    training = adapted(WithBatchNorm(), "head").train()
    learning = WithBatchNorm().eval()
    without_statistics = adapted(WithBatchNorm(track_running_stats=False), "head").eval()
    for model in (training, learning, without_statistics):
        with pytest.raises(
            DpfedError, match=r"norm is a BatchNorm1d .*GroupNorm.*eval mode"
        ) as error:
            ready(model)
        assert "\n" not in str(error.value)


def test_frozen_batch_norm_in_eval_mode_works() -> None:
    model = WithBatchNorm()
    with torch.no_grad():
        # The running statistics change.
        model.norm(torch.randn(20, 4) * 3 + 1)
    case = Case(adapted(model.eval(), "head"))
    assert all(n.startswith("classifier") for n in case.space.names)
    case.check(
        {"x": torch.randn(5, 4, generator=torch.Generator().manual_seed(0))},
        labels_of(5),
        clients=2,
    )


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
    broken = PerSample(
        model,
        space,
        lambda m, w, x: torch.func.functional_call(m, w, (x["x"],)),
        Task(nn.CrossEntropyLoss()),
    )
    with pytest.raises(ValueError, match="one each is needed"):
        broken.grads(
            torch.zeros(1, space.size),
            torch.zeros(2, dtype=torch.long),
            {"x": torch.ones(2, 4)},
            labels_of(2),
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
        PerSample(model, space_of(trainable(model)), call, CLASSIFY)
