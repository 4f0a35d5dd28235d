"""Adapters placed by peft's rules, the head or everything can be trained."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from gradient_case import MODELS, Case, adapted, images, labels_of, roberta, texts, vit

from dpfed.config import LoraSection, ModelSection
from dpfed.errors import DpfedError
from dpfed.model.lora import adapt
from dpfed.model.per_sample.gradients import trainable


@pytest.mark.parametrize("name", MODELS)
def test_adapters_start_without_effect(name: str) -> None:
    """B = 0, so the output is that of the plain model; the saved head is a copy."""
    build, make = MODELS[name]
    model = build()
    with torch.no_grad():
        want = model(**make(2)).logits
        torch.testing.assert_close(adapted(model, "lora")(**make(2)).logits, want)
    for tensor, p in trainable(model).items():
        if ".lora_B." in tensor:
            assert (p == 0).all()
        elif ".lora_A." in tensor:
            assert (p != 0).any()


@pytest.mark.parametrize(("r", "alpha"), [(1, 1.0), (2, 8.0), (4, 2.0)])
def test_update_is_alpha_over_r_times_b_a(r: int, alpha: float) -> None:
    model = adapted(vit(), "lora", r=r, alpha=alpha, targets=("q_proj",))
    layer = model.get_submodule("vit.layers.0.attention.q_proj")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.shape == (r, 8)
    assert b.shape == (8, r)
    b.data.normal_()
    x = torch.randn(3, 8)
    want = layer.base_layer(x) + alpha / r * x @ a.T @ b.T
    torch.testing.assert_close(layer(x), want)


def test_the_start_follows_from_the_seed_alone() -> None:
    def start(seed: int) -> dict[str, torch.Tensor]:
        section = ModelSection(train="lora", lora=LoraSection(r=2))
        return {
            n: p.detach().clone()
            for n, p in trainable(adapt(vit(), section, "classifier", seed).model).items()
        }

    torch.manual_seed(1)
    first = start(5)
    torch.manual_seed(2)
    # Building draws random numbers; adapting must not.
    model = vit()
    state = torch.get_rng_state()
    adapt(model, ModelSection(train="lora"), "classifier", 9)
    assert torch.equal(torch.get_rng_state(), state)
    again, other = start(5), start(6)
    adapters = [n for n in first if ".lora_" in n]
    assert all(torch.equal(first[n], again[n]) for n in adapters)
    assert not all(torch.equal(first[n], other[n]) for n in adapters)


def test_targets_follow_peft() -> None:
    def paths(**lora: object) -> set[str]:
        return {
            n.partition(".lora_")[0]
            for n in trainable(adapted(vit(), "lora", **lora))
            if ".lora_" in n
        }

    every = {
        f"vit.layers.{i}.{m}"
        for i in range(2)
        for m in (
            "attention.q_proj",
            "attention.k_proj",
            "attention.v_proj",
            "attention.o_proj",
            "mlp.fc1",
            "mlp.fc2",
        )
    }
    # "auto" means every linear layer but the head.
    assert paths() == every
    assert paths(targets=("q_proj", "v_proj")) == {
        p for p in every if p.endswith(("q_proj", "v_proj"))
    }
    assert paths(targets=("0.attention.q_proj",)) == {"vit.layers.0.attention.q_proj"}


@pytest.mark.parametrize("targets", ["auto", ("dense",), ("dense", "query", "out_proj")])
def test_the_head_is_trained_whole_and_never_adapted(targets: object) -> None:
    """RoBERTa's head has a layer called dense, like the feed-forward layers below it."""
    model = adapted(roberta(), "lora", targets=targets)
    names = list(trainable(model))
    assert any("encoder" in n and ".dense.lora_A" in n for n in names)
    head = [n for n in names if n.startswith("classifier.")]
    saved = "classifier.modules_to_save.default"
    assert head == [f"{saved}.{m}.{p}" for m in ("dense", "out_proj") for p in ("weight", "bias")]
    Case(model).check(texts(1)(2), labels_of(2), clients=2)


@pytest.mark.parametrize("targets", [("nothing",), ("classifier",)])
def test_targets_that_fit_nothing_are_one_sentence(targets: tuple[str, ...]) -> None:
    with pytest.raises(
        DpfedError, match=r"model\.lora\.targets.*ViTForImageClassification.*q_proj"
    ) as error:
        adapted(vit(), "lora", targets=targets)
    assert "\n" not in str(error.value)
    assert targets[0] in str(error.value)


def test_dropout_is_set_by_the_configuration() -> None:
    assert Case(adapted(vit(), "lora", dropout=0.25)).ready.has_dropout
    assert not Case(adapted(vit(), "lora")).ready.has_dropout


def test_full_and_head() -> None:
    whole = adapt(vit(), ModelSection(train="full"), "classifier", 0)
    assert whole.peft is None
    assert all(p.requires_grad for p in whole.model.parameters())
    head = adapt(vit(), ModelSection(train="head"), "classifier", 0)
    assert set(trainable(head.model)) == {"classifier.weight", "classifier.bias"}


def test_peft_sees_the_same_modules(tmp_path: Path) -> None:
    """The tensors that train in the base model are the ones that peft exports."""
    model = vit()
    base = copy.deepcopy(model)
    both = adapt(model, ModelSection(train="lora", lora=LoraSection(r=2)), "classifier", 0)
    for p in trainable(both.model).values():
        p.data.add_(0.5)
    both.peft.save_pretrained(tmp_path)
    from peft import PeftModel

    back = PeftModel.from_pretrained(base, str(tmp_path)).get_base_model().eval()
    x = images(8)(2)
    with torch.no_grad():
        torch.testing.assert_close(back(**x).logits, both.model.eval()(**x).logits)


# ---- A frozen


def test_freeze_a_trains_b_and_the_head_alone() -> None:
    """With FFA-LoRA the vector has no A, and A keeps the start that the seed gives."""
    section = ModelSection(train="lora", lora=LoraSection(r=2, freeze_a=True))
    frozen = adapt(vit(), section, "classifier", 5).model
    both = adapt(vit(), ModelSection(train="lora", lora=LoraSection(r=2)), "classifier", 5).model
    assert set(trainable(frozen)) == {n for n in trainable(both) if ".lora_A." not in n}
    a = {n: p for n, p in frozen.named_parameters() if ".lora_A." in n}
    assert a
    assert all(torch.equal(p, both.get_parameter(n)) and not p.requires_grad for n, p in a.items())
    case = Case(frozen)
    case.check(images(8)(3), labels_of(3), clients=2)


def test_freeze_a_makes_the_mean_of_products_the_product_of_means() -> None:
    """With one A for all clients, averaging B loses nothing."""
    case = Case(
        adapt(vit(), ModelSection(lora=LoraSection(r=2, freeze_a=True)), "classifier", 0).model
    )
    rows = case.rows(3)
    name = "vit.layers.0.mlp.fc1.lora_B.default.weight"
    a = case.plain.get_parameter(name.replace("lora_B", "lora_A"))
    products = torch.stack([case.space.unflatten(row)[name] @ a for row in rows]).mean(0)
    torch.testing.assert_close(case.space.unflatten(rows.mean(0))[name] @ a, products)


# ---- starting from an adapter


def saved(folder: Path, classes: int = 3, **lora: object) -> torch.nn.Module:
    """Write a trained adapter and return its model."""
    section = ModelSection(train="lora", lora=LoraSection(**{"r": 3, "alpha": 6.0, **lora}))  # type: ignore[arg-type]
    both = adapt(vit(num_labels=classes), section, "classifier", 0)
    generator = torch.Generator().manual_seed(7)
    for p in trainable(both.model).values():
        p.data.add_(0.3 * torch.randn(p.shape, generator=generator))
    both.peft.save_pretrained(folder)
    return both.model


def test_an_adapter_makes_the_round_trip(tmp_path: Path) -> None:
    """Rank, scale, targets, factors and head come from the folder, and training continues."""
    want = saved(tmp_path, targets=("q_proj", "fc1"))
    back = adapt(vit(), ModelSection(adapter=str(tmp_path), lora=LoraSection(r=9)), "classifier", 1)
    mine = trainable(back.model)
    assert list(mine) == list(trainable(want))
    for name, p in trainable(want).items():
        assert torch.equal(mine[name], p)
    x = images(8)(2)
    with torch.no_grad():
        torch.testing.assert_close(back.model.eval()(**x).logits, want.eval()(**x).logits)
    assert any("r = 3, alpha = 6" in note for note in back.notes)
    Case(back.model).check(images(8)(3), labels_of(3), clients=2)
    # It can be exported again.
    back.peft.save_pretrained(tmp_path / "again")
    again = adapt(vit(), ModelSection(adapter=str(tmp_path / "again")), "classifier", 2)
    assert all(torch.equal(p, mine[n]) for n, p in trainable(again.model).items())


def test_the_head_of_an_adapter_for_other_classes_is_new(tmp_path: Path) -> None:
    want = saved(tmp_path, classes=5)
    model = vit()
    before = model.classifier.weight.detach().clone()
    back = adapt(model, ModelSection(adapter=str(tmp_path)), "classifier", 1)
    assert torch.equal(trainable(back.model)["classifier.modules_to_save.default.weight"], before)
    name = "vit.layers.1.mlp.fc2.lora_B.default.weight"
    assert torch.equal(trainable(back.model)[name], want.get_parameter(name))
    assert any("the head is new" in note for note in back.notes)


def test_an_adapter_can_be_described_without_its_numbers(tmp_path: Path) -> None:
    want = saved(tmp_path, targets=("q_proj",))
    with torch.device("meta"):
        back = adapt(vit().to("meta"), ModelSection(adapter=str(tmp_path)), "classifier", 1)
    assert {n: p.shape for n, p in trainable(back.model).items()} == {
        n: p.shape for n, p in trainable(want).items()
    }
    assert any("r = 3, alpha = 6" in note for note in back.notes)


def test_an_adapter_with_a_frozen(tmp_path: Path) -> None:
    want = saved(tmp_path)
    back = adapt(
        vit(), ModelSection(adapter=str(tmp_path), lora=LoraSection(freeze_a=True)), "classifier", 1
    ).model
    assert not any(".lora_A." in n for n in trainable(back))
    name = "vit.layers.0.mlp.fc1.lora_A.default.weight"
    assert torch.equal(back.get_parameter(name), want.get_parameter(name))


def test_an_adapter_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    saved(tmp_path)
    section = ModelSection(adapter=str(tmp_path))
    for model in (vit(hidden_size=16), roberta(), vit(num_hidden_layers=1)):
        with pytest.raises(DpfedError, match=r"model\.adapter = .* does not fit") as error:
            adapt(model, section, "classifier", 1)
        assert "\n" not in str(error.value)


def test_folders_that_are_no_adapters_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"has no adapter_config\.json"):
        adapt(vit(), ModelSection(adapter=str(tmp_path)), "classifier", 1)
    saved(tmp_path)
    with pytest.raises(DpfedError, match=r'needs model\.train = "lora"'):
        adapt(vit(), ModelSection(adapter=str(tmp_path), train="full"), "classifier", 1)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(DpfedError, match="cannot be read"):
        adapt(vit(), ModelSection(adapter=str(tmp_path)), "classifier", 1)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(DpfedError, match=r"has no adapter_model\.safetensors"):
        adapt(vit(), ModelSection(adapter=str(tmp_path)), "classifier", 1)


def test_conv_and_embedding_adapters() -> None:
    """LoRA on a convolution uses batched convolutions.

    On an embedding its factors are parameters.
    """

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(1, 2, 3)
            self.words = torch.nn.Embedding(5, 4)
            self.classifier = torch.nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self.classifier(
                torch.cat(
                    [self.conv(x).tanh().flatten(2).mean(2), self.words(ids).tanh().mean(1)], 1
                )
            )

    case = Case(adapted(Model(), "lora", targets=("conv", "words")))
    assert sum("lora_" in n for n in case.space.names) == 4
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 5):
        inputs = {
            "x": torch.randn(count, 1, 5, 5, generator=generator),
            "ids": torch.randint(0, 5, (count, 4), generator=generator),
        }
        case.check(inputs, labels_of(count), clients=2)
