"""Models: shapes, parameter counts, deterministic initialisation, and examples that do not touch each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import load_dataset, pixels
from dpsweep.workers.models import MODELS, build_for_shape, build_model, offered
from dpsweep.workers.models.extra_layers import WeightStandardizedConv2d
from dpsweep.workers.models.networks import TemperedSigmoid
from dpsweep.workers.spec import Component, DataSpec
from tests.workers.machine.test_checkpoint import compressed
from tests.workers.user_modules import allowed

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)
# name, parameters, shape of an example, number of trainable parameters for ten classes
KNOWN: list[tuple[str, dict[str, Any], tuple[int, ...], int]] = [
    ("cancer_net", {}, (9,), 640),
    ("cnn_dpsgdf", {}, MNIST, 431_080),  # as LeNet of Caffe, which it is
    ("cnn_papernot", {}, MNIST, 26_010),  # as TensorFlow Privacy's tutorial
    ("logistic", {}, (40,), 410),
    ("mlp", {"hidden": [32, 16], "activation": "tanh"}, MNIST, 25_120 + 528 + 170),
    ("pca_mlp", {}, (60,), 71_010),
    ("resnet20_gn", {}, (3, 16, 16), 272_474),  # He et al. (2016), Table 6: 0.27 M
    ("transformer", {}, MNIST, 104_970),
    ("wide_resnet", {"depth": 10, "width": 1}, CIFAR, 78_938),
    ("wrn16_4", {}, (3, 8, 8), 2_753_818),  # Zagoruyko and Komodakis (2016), Table 4: 2.7 M
]


def build(name: str, params: dict[str, Any], shape: tuple[int, ...], seed: int = 0) -> nn.Module:
    return build_for_shape(Component(name, params), shape, 10, seed)


@pytest.mark.parametrize(("name", "params", "shape", "count"), KNOWN, ids=[known[0] for known in KNOWN])
class TestEveryModel:
    def test_logits_and_size(self, name: str, params: dict[str, Any], shape: tuple[int, ...], count: int) -> None:
        model = build(name, params, shape)
        assert model(torch.rand(3, *shape)).shape == (3, 10)
        assert sum(parameter.numel() for parameter in model.parameters()) == count

    def test_initialisation_depends_only_on_the_seed(
        self, name: str, params: dict[str, Any], shape: tuple[int, ...], count: int
    ) -> None:
        before = torch.get_rng_state()
        first = build(name, params, shape, seed=5).state_dict()
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(1)
        second = build(name, params, shape, seed=5).state_dict()
        assert all(torch.equal(first[key], second[key]) for key in first)

    def test_examples_do_not_touch_each_other(
        self, name: str, params: dict[str, Any], shape: tuple[int, ...], count: int
    ) -> None:
        model = build(name, params, shape)
        x = torch.rand(4, *shape)
        alone = model(x[:1])
        assert torch.allclose(model(x)[:1], alone, atol=1e-5)

    def test_every_parameter_has_a_gradient(
        self, name: str, params: dict[str, Any], shape: tuple[int, ...], count: int
    ) -> None:
        model = build(name, params, shape)
        functional.cross_entropy(model(torch.rand(4, *shape)), torch.tensor([0, 1, 2, 3])).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_cancer_net_of_two_classes() -> None:
    model = build_for_shape(Component("cancer_net"), (9,), 2, seed=0)
    widths = [(layer.in_features, layer.out_features) for layer in model.children() if isinstance(layer, nn.Linear)]
    assert widths == [(9, 10), (10, 20), (20, 10), (10, 2)]
    assert sum(parameter.numel() for parameter in model.parameters()) == 100 + 220 + 210 + 22


def test_residual_networks_are_as_deep_as_their_names_say() -> None:
    """He et al. count the 3 x 3 convolutions and the last layer, Zagoruyko and Komodakis all convolutions."""
    convolutions = {
        name: [module for module in build(name, {}, CIFAR).modules() if isinstance(module, nn.Conv2d)]
        for name in ("resnet20_gn", "wrn16_4")
    }
    assert sum(layer.kernel_size == (3, 3) for layer in convolutions["resnet20_gn"]) + 1 == 20
    assert len(convolutions["wrn16_4"]) == 16


def test_every_registered_model_is_under_the_contract() -> None:
    known = {each[0] for each in KNOWN}
    others = {"language_model", "unet", "hugging_face", "vision"}
    assert known == set(MODELS) - others, (
        "outputs per token and pixel, weights of others: test_language_models.py, test_unet.py, test_hugging_face.py, "
        "test_vision.py"
    )


def test_seeds_differ_but_for_logistic_regression() -> None:
    one, other = (build("mlp", {}, (4,), seed).state_dict()["1.weight"] for seed in (0, 1))
    assert not torch.equal(one, other)
    assert all(not parameter.any() for parameter in build("logistic", {}, (4,)).parameters())


def test_a_model_fits_its_data_set() -> None:
    dataset = load_dataset(DataSpec("digits"))
    model = build_model(Component("cnn_dpsgdf", {"padding": 2, "channels": [4, 8]}), dataset, 0)
    assert model(dataset.prepare(dataset.test.features[:5])).shape == (5, 10)


def test_what_data_offer_takes_the_place_of_no_parameter_of_another_meaning() -> None:
    model = build_for_shape(Component("cnn_papernot"), (1, 28, 28), 10, 0, offers=offered(pixels((0.3,), (0.2,))))
    assert {each.offset for each in model.modules() if isinstance(each, TemperedSigmoid)} == {1.0}


def test_tempered_sigmoid_is_tanh_by_default() -> None:
    x = torch.linspace(-4, 4, 50)
    assert torch.allclose(TemperedSigmoid()(x), torch.tanh(x), atol=1e-6)


def test_standardised_kernels_have_mean_zero_and_the_gain_as_norm() -> None:
    layer = WeightStandardizedConv2d(6, 5, 3)
    gain = torch.arange(1.0, 6.0)
    kernel = layer.standardized(3.0 + 7.0 * torch.randn(layer.weight.shape), gain)
    assert torch.allclose(kernel.mean((1, 2, 3)), torch.zeros(5), atol=1e-5)
    assert torch.allclose(kernel.flatten(1).norm(dim=1), gain, rtol=1e-4)


@pytest.mark.parametrize(
    ("shape", "params"), [((12,), {"vocabulary": 30}), ((7, 5), {}), ((3, 8, 8), {"patch_size": 2})]
)
def test_transformer_takes_tokens_vectors_and_images(shape: tuple[int, ...], params: dict[str, Any]) -> None:
    x = torch.randint(0, 30, (2, *shape)) if "vocabulary" in params else torch.rand(2, *shape)
    assert build("transformer", params, shape)(x).shape == (2, 10)


class TestPretrained:
    def test_all_but_the_head_is_taken(self, tmp_path: Path) -> None:
        stored = build_for_shape(Component("resnet20_gn"), CIFAR, 100, 3)
        torch.save(stored.state_dict(), tmp_path / "weights.pt")
        model = build("resnet20_gn", {"initial_weights": str(tmp_path / "weights.pt")}, CIFAR)
        own, theirs = model.state_dict(), stored.state_dict()
        assert torch.equal(own["0.weight"], theirs["0.weight"])
        assert model(torch.rand(1, *CIFAR)).shape == (1, 10)

    def test_weights_of_another_model_are_refused(self, tmp_path: Path) -> None:
        torch.save(build("mlp", {}, (4,)).state_dict(), tmp_path / "weights.pt")
        with pytest.raises(InvalidInput, match="tensors do not fit the model"):
            build("resnet20_gn", {"initial_weights": str(tmp_path / "weights.pt")}, CIFAR)
        with pytest.raises(InvalidInput, match=r"there is no file .*absent\.pt"):
            build("resnet20_gn", {"initial_weights": str(tmp_path / "absent.pt")}, CIFAR)
        for content in ("weights", "hello world", "root:x:0:0:root:/root:/bin/bash", ""):
            (tmp_path / "text.pt").write_text(content)
            with pytest.raises(InvalidInput, match=r"text\.pt cannot be loaded"):
                build("resnet20_gn", {"initial_weights": str(tmp_path / "text.pt")}, CIFAR)
        stored = build_for_shape(Component("resnet20_gn"), CIFAR, 10, 3).state_dict()
        for zipped in (True, False):
            torch.save(stored, tmp_path / "weights.pt", _use_new_zipfile_serialization=zipped)
            build("resnet20_gn", {"initial_weights": str(tmp_path / "weights.pt")}, CIFAR)
        (tmp_path / "bomb.pt").write_bytes(compressed(tmp_path))
        with pytest.raises(InvalidInput, match=r"bomb\.pt cannot be loaded"):
            build("resnet20_gn", {"initial_weights": str(tmp_path / "bomb.pt")}, CIFAR)
        torch.save([1, 2], tmp_path / "list.pt")
        with pytest.raises(InvalidInput, match=r"list\.pt holds a list; save a state dict"):
            build("resnet20_gn", {"initial_weights": str(tmp_path / "list.pt")}, CIFAR)
        for weights, held in (({"0.weight": 3.0}, "float under '0.weight'"), ({0: torch.ones(1)}, "Tensor under 0")):
            torch.save(weights, tmp_path / "dict.pt")
            with pytest.raises(InvalidInput, match=rf"dict\.pt holds a {held}, but must hold named tensors alone"):
                build("resnet20_gn", {"initial_weights": str(tmp_path / "dict.pt")}, CIFAR)


@pytest.mark.parametrize(
    ("name", "params", "shape", "message"),
    [
        ("resnet18", {}, CIFAR, "unknown model 'resnet18'"),
        ("mlp", {"hiden": [3]}, (4,), "unknown key 'hiden' of model 'mlp'; did you mean 'hidden'"),
        ("mlp", {"hidden": 8}, (4,), r"hidden is 8: it takes a list, such as \[8\]"),
        ("mlp", {"hidden": [0]}, (4,), "hidden.0 is 0: Input should be greater than 0"),
        ("mlp", {"hidden": 5}, (4,), "hidden is 5: "),
        ("mlp", {"hidden": [3.5]}, (4,), "hidden.0 is 3.5: "),
        ("pca_mlp", {"hidden": [3]}, (4,), r"hidden is \[3\]: "),
        ("cnn_dpsgdf", {"channels": [3]}, MNIST, "channels.1 is "),
        ("cnn_papernot", {"scale": float("nan")}, MNIST, "scale is nan: Input should be a finite number"),
        ("wide_resnet", {"width": 0}, CIFAR, "width is 0: "),
        ("transformer", {"heads": 0}, CIFAR, "heads is 0: "),
        ("transformer", {"depth": -1}, CIFAR, "depth is -1: "),
        ("mlp", {"activation": "rel"}, (4,), "unknown activation 'rel'; did you mean 'relu'"),
        ("cnn_dpsgdf", {}, (40,), "takes images"),
        ("cnn_dpsgdf", {}, (1, 8, 8), "set `padding`"),
        ("cnn_papernot", {}, (1, 8, 8), "choose cnn_dpsgdf with `padding`, or mlp"),
        ("pca_mlp", {}, MNIST, "preprocessing"),
        ("resnet20_gn", {"groups": 5}, CIFAR, "must divide"),
        ("wide_resnet", {"depth": 12}, CIFAR, "6 k \\+ 4"),
        ("transformer", {"heads": 5}, CIFAR, "multiple of heads"),
        ("transformer", {"patch_size": 5}, CIFAR, "must divide"),
        ("transformer", {}, (12,), "vocabulary"),
    ],
)
def test_mistakes_are_named(name: str, params: dict[str, Any], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build(name, params, shape)


def test_own_model(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n"
        "def flat(feature_shape, num_classes, width=3):\n"
        "    return nn.Sequential(nn.Linear(feature_shape[0], width), nn.Linear(width, num_classes))\n"
        "def wrong(feature_shape, num_classes):\n"
        "    return 'model'\n"
    )
    model = build_for_shape(Component(f"{file}:flat", {"width": 7}), (4,), 10, 0, allowed(file))
    assert model(torch.rand(2, 4)).shape == (2, 10)
    with pytest.raises(InvalidInput, match="returned str"):
        build_for_shape(Component(f"{file}:wrong"), (4,), 10, 0, allowed(file))
