"""Networks of timm and torchvision: as published, what trains, per-example norms, and refusals; with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import load_dataset, pixels
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.models import build_for_shape, offered
from dpsweep.workers.models.pretrained import Adapter, trained_parts
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.spec import Component, DataSpec
from dpsweep.workers.trials.feasibility import StepSpec, check_feasible, excerpt
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss
from tests.workers.trial_runs import train
from tests.workers.trial_specs import small_trial

pytestmark = pytest.mark.skipif(not all(map(find_spec, ("peft", "timm"))), reason="needs peft and timm")

CLASSES, SIDE = 5, 32
LORA = {"method": "lora", "targets": ["qkv"], "r": 2}
GIVEN = pixels((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
"""A scaling of its own, as of a data set whose pixels were standardised."""
VIT = {"package": "timm", "architecture": "test_vit"}
RESNET = {"package": "timm", "architecture": "test_resnet"}
EFFICIENT = {"package": "timm", "architecture": "test_efficientnet"}
MOBILE = {"package": "torchvision", "architecture": "mobilenet_v3_small"}
VERSIONED = {"package": "torchvision", "architecture": "mnasnet0_5"}
WITH_HEADS_INSIDE = {"package": "torchvision", "architecture": "googlenet"}
OF_ROWS = {"package": "timm", "architecture": "levit_128s"}
"""Batch normalisation of vectors, [b * t, c], too."""


def published(params: Mapping[str, Any]) -> nn.Module:
    """The package's own network, with batch normalisation that is not as at the start."""
    import timm
    import torchvision

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if params["package"] == "timm":
            made: nn.Module = timm.create_model(params["architecture"], num_classes=CLASSES)
        else:
            as_published = {"transform_input": True, "init_weights": False} if params == WITH_HEADS_INSIDE else {}
            made = torchvision.models.get_model(params["architecture"], num_classes=CLASSES, **as_published)
        for part in made.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                for values in (part.running_mean, part.running_var, part.weight.data):
                    assert values is not None
                    values.uniform_(0.5, 1.5)
    return made.eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """A file of weights for each architecture, in the forms that both packages write."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("weights")
    for params in (VIT, RESNET, EFFICIENT, OF_ROWS):
        save_file(published(params).state_dict(), folder / f"{params['architecture']}.safetensors")
    for params in (MOBILE, VERSIONED, WITH_HEADS_INSIDE):
        torch.save(published(params).state_dict(), folder / f"{params['architecture']}.pth")
    stored = published(RESNET).state_dict()
    others = {
        "uncounted": {name: each for name, each in stored.items() if "num_batches_tracked" not in name},
        "of replicas": {f"module.{name}": each for name, each in stored.items()},
        "another shape": {**stored, "conv1.0.weight": torch.ones(2, 3)},
        "not finite": {**stored, "conv1.0.weight": stored["conv1.0.weight"] / 0},
        "statistics that are NaN": {**stored, "conv1.1.running_var": stored["conv1.1.running_var"] * torch.nan},
    }
    for name, tensors in others.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return {file.stem: str(file) for file in folder.iterdir()}


def model_of(files: Mapping[str, str], side: int = SIDE, outputs: int = CLASSES, **params: Any) -> nn.Module:
    weights = {"initial_weights": files[params["architecture"]]} if params.get("architecture") in files else {}
    return build_for_shape(
        Component("vision", {**weights, **params}), (3, side, side), outputs, 0, offers=offered(GIVEN)
    )


def trained(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize(
    "params",
    [{**VIT, "size": 48}, RESNET, EFFICIENT, MOBILE, VERSIONED, WITH_HEADS_INSIDE, {**OF_ROWS, "size": 224}],
    ids=lambda params: params["architecture"],
)
def test_it_returns_what_the_package_returns_for_pictures_scaled_as_published(
    files: Mapping[str, str], params: dict[str, Any]
) -> None:
    """Resized, with batch normalisation, with its activation in one layer, and of torchvision."""
    stored = torch.randint(0, 256, (2, 3, SIDE, SIDE), dtype=torch.uint8)
    network = published(params)
    scaling = getattr(network, "pretrained_cfg", {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)})
    pictures = pixels(scaling["mean"], scaling["std"])(stored)
    if size := params.get("size"):
        pictures = nn.functional.interpolate(pictures, (size, size), mode="bilinear", antialias=True)
    expected = network(pictures).detach()
    assert torch.allclose(model_of(files, **params)(GIVEN(stored)), expected, atol=1e-4 * float(expected.abs().max()))


def test_a_plan_says_that_batch_normalisation_does_not_train(files: Mapping[str, str]) -> None:
    """No parameter of it is left to be counted among those that are frozen."""
    dataset = excerpt(load_dataset(DataSpec("digits", test_fraction=0.2)))

    def told(params: Mapping[str, Any]) -> tuple[str, ...]:
        named = Component("vision", {**params, "initial_weights": files[params["architecture"]], "size": SIDE})
        return check_feasible(StepSpec(named, Component("cross_entropy"), None, None, False), dataset, NO_CODE).share

    (kept,) = told(RESNET)
    assert kept.startswith("model 'vision' keeps the statistics, scales and shifts of its batch normalisation: ")
    assert told({**VIT, "size": 48}) == ()


def test_a_pretrained_network_trains_without_dropout(files: Mapping[str, str]) -> None:
    params: dict[str, Any] = dict(MOBILE)
    model = model_of(files, **params)
    assert any(isinstance(part, nn.Dropout) for part in model.modules())
    pictures = torch.randn(2, 3, SIDE, SIDE)
    assert torch.equal(model(pictures), model(pictures))


def test_biases_of_attention_that_train_are_read_anew_in_evaluation_mode(files: Mapping[str, str]) -> None:
    """LevIT, TinyViT and others of timm keep the first ones there, and lose them in ``train()`` alone."""
    params: dict[str, Any] = {**OF_ROWS, "size": 224}
    model = model_of(files, **params)
    pictures = torch.randn(2, 3, SIDE, SIDE)
    before = model(pictures)
    for name, each in model.named_parameters():
        if "attention_biases" in name:
            each.data.normal_(0.0, 9.0)
    assert not torch.allclose(model(pictures), before, rtol=1e-3)


def test_batches_that_were_not_counted_are_not_missed(files: Mapping[str, str]) -> None:
    pictures = torch.randn(2, 3, SIDE, SIDE)
    params: dict[str, Any] = dict(RESNET)
    found, expected = (
        model_of(files, **params, initial_weights=files[name])(pictures) for name in ("uncounted", "test_resnet")
    )
    assert torch.equal(found, expected)


def test_weights_named_with_the_architecture_have_a_scaling_of_their_own() -> None:
    names = ("vit_small_patch16_224", "vit_small_patch16_224.dino")
    with torch.device("meta"):
        plain, tagged = (getattr(model_of({}, 224, package="timm", architecture=name), "rescaled") for name in names)  # noqa: B009
    assert plain != tagged


TRAINED: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "the head": ({**RESNET, "trainable": "head"}, ("network.fc.",)),
    "an adapter and the head": ({**VIT, "adapter": LORA}, ("lora_", ".head.")),
    "biases and the head": ({**VIT, "trainable": "bias"}, ("bias", ".head.")),
    "the head of torchvision": ({**MOBILE, "trainable": "head"}, ("classifier.3.",)),
}


@pytest.mark.parametrize("case", TRAINED)
def test_what_trains_is_what_was_asked_for(files: Mapping[str, str], case: str) -> None:
    params, expected = TRAINED[case]
    found = trained(model_of(files, **params, outputs=7))
    assert [name for name in found if not any(part in name for part in expected)] == []
    assert all(any(part in name for name in found) for part in expected)


def test_the_folder_of_an_adapter_has_the_head_that_was_trained(files: Mapping[str, str], tmp_path: Path) -> None:
    import peft

    params: dict[str, Any] = {**VIT, "adapter": LORA}
    model = model_of(files, **params).eval()
    network: Any = getattr(model, "network")  # noqa: B009
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    network.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(published(VIT), str(tmp_path)).eval()
    pictures = torch.randn(2, 3, 160, 160)
    assert torch.allclose(loaded(pictures), network(pictures), atol=1e-5)


def test_a_layer_whose_name_ends_as_that_of_the_head_stays_frozen() -> None:
    """As the layer ``fc`` of an attention in a network whose head is ``fc``."""
    network = nn.ModuleDict({"block": nn.ModuleDict({"qkv": nn.Linear(4, 4), "fc": nn.Linear(4, 4)})})
    network["fc"] = head = nn.Linear(4, 2)
    adapted = trained_parts(network, list(head.parameters()), "all", Adapter("lora", ("qkv",), r=2))
    place = "base_model.model.fc.modules_to_save.default"
    assert {name for name in trained(adapted) if "lora_" not in name} == {f"{place}.weight", f"{place}.bias"}


@pytest.mark.parametrize("case", ["the head", "an adapter and the head"])
def test_norms_are_those_of_one_example_at_a_time(files: Mapping[str, str], case: str) -> None:
    model = model_of(files, **TRAINED[case][0])
    x, y = torch.randn(3, 3, SIDE, SIDE), torch.tensor([0, 4, 2])
    found = GradientEngine(model, per_example_loss).weighted_sum(x, y, lambda norms: torch.ones_like(norms.norms))
    torch.testing.assert_close(found.norms.norms, norms_of(gradients_one_by_one(model, x, y)), rtol=1e-4, atol=0.0)


def test_without_weights_all_of_it_trains_and_greys_have_three_channels(files: Mapping[str, str]) -> None:
    params = {"package": "torchvision", "architecture": "vit_b_16"}
    with torch.device("meta"):
        model = build_for_shape(Component("vision", params), (1, 224, 224), 3, 0)
    assert trained(model) == {name for name, _ in model.named_parameters()}
    grey = build_for_shape(
        Component("vision", {**RESNET, "initial_weights": files["test_resnet"]}), (1, SIDE, SIDE), 3, 0
    )
    x = torch.randn(2, 1, SIDE, SIDE)
    assert torch.equal(grey.eval()(x), grey(x.expand(-1, 3, -1, -1)))


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "another size": (
        {**VIT, "architecture": "vit_tiny_patch16_224"},
        "does not take pictures of 32 x 32 .* set size: 224",
    ),
    "no such architecture": (
        {**VIT, "architecture": "test_vti"},
        "unknown architecture 'test_vti'; did you mean test_vit",
    ),
    "weights of another": ({**MOBILE, "initial_weights": "test_resnet"}, "tensors do not fit the model, first 'feat"),
    "no file": ({**RESNET, "initial_weights": "nowhere.pth"}, "there is no file .*nowhere.pth"),
    "names of replicas": (
        {**RESNET, "initial_weights": "of replicas"},
        "75 tensors do not fit .* 'conv1.0.weight'; the tensors of the file begin with 'module.",
    ),
    "a tensor of another shape": (
        {**RESNET, "initial_weights": "another shape"},
        "1 tensor does not fit the model, first 'conv1.0.weight', which has 2 x 3 numbers there and needs .* x 3 x 3",
    ),
    "infinite weights": (
        {**RESNET, "initial_weights": "not finite"},
        "NaN or infinite numbers in 1 tensor, first conv1.0.weight; fetch",
    ),
    "statistics that are NaN": (
        {**RESNET, "initial_weights": "statistics that are NaN"},
        "NaN or infinite .* first conv1.1.running_var; fetch",
    ),
    "batches without weights": (
        {**RESNET, "initial_weights": None},
        r"test_resnet has batch normalisation \(conv1.1\), .*; give initial_weights",
    ),
    "no weights to freeze": ({**RESNET, "initial_weights": None, "trainable": "head"}, "would freeze random weights"),
    "no such layer": ({**VIT, "adapter": {**LORA, "targets": ["x"]}}, "match no layer .* fc1, fc2, .*qkv"),
    "two ways": ({**VIT, "adapter": LORA, "trainable": "bias"}, "both say what is trained"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_does_not_fit_is_one_line(files: Mapping[str, str], case: str) -> None:
    params, message = REFUSED[case]
    weights = params.get("initial_weights")
    with pytest.raises(InvalidInput, match=message):
        model_of(files, **({**params, "initial_weights": files.get(weights, weights)} if weights else params))


def test_features_must_be_pictures_of_one_or_three_channels() -> None:
    for shape, message in (((40,), "takes images"), ((2, SIDE, SIDE), "of 1 or 3 channels, not 2")):
        with pytest.raises(InvalidInput, match=message):
            build_for_shape(Component("vision", RESNET), shape, 3, 0)


def test_a_trial_trains_a_head_on_the_digits(files: Mapping[str, str], tmp_path: Path) -> None:
    spec = small_trial(
        data=DataSpec("digits", keep={str(digit): 12 for digit in range(10)}),
        model=Component(
            "vision", {**RESNET, "initial_weights": files["test_resnet"], "trainable": "head", "size": SIDE}
        ),
        epochs=1,
    )
    result, trace, _ = train(spec, tmp_path / "trial")
    assert trace.steps > 1
    assert result.evaluation.accuracy is not None
