"""Networks for pictures of timm and torchvision, with weights from a file, and a head, an adapter or all to train."""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import IMAGENET_SCALING, Scaling, pixels
from dpsweep.workers.models.networks import evaluating, require_image
from dpsweep.workers.models.pretrained import Adapter, Trainable, load_pretrained, require_package, trained_parts

Package = Literal["timm", "torchvision"]


@dataclass(frozen=True)
class Network:
    """A network of random weights for pictures [b, 3, height, width], and how it was published.

    heads: names of the layers that return the outputs. scaling: of pixels in [0, 255]. side: of a picture, in pixels.
    """

    module: nn.Module
    heads: tuple[str, ...]
    scaling: Scaling
    side: int


def vision(
    feature_shape: tuple[int, ...],
    num_classes: int,
    package: Package,
    architecture: str,
    initial_weights: str | None = None,
    trainable: Trainable = "all",
    adapter: Adapter | None = None,
    size: PositiveInt | None = None,
    pixel_offset: tuple[float, ...] | None = None,
    pixel_scale: tuple[float, ...] | None = None,
) -> nn.Module:
    """Return a network of timm or torchvision for pictures [b, 1 or 3, height, width].

    architecture: as the package calls it; a tag of timm, as in ``vit_base_patch16_224.dino``, names weights, which may
    have their own scaling.
    initial_weights: a file with a state dict, of ``torch.save`` or safetensors; all layers but the last must fit, and
    nothing is downloaded. The weights are taken as public: they must not depend on the training data. Batch
    normalisation then keeps their statistics, scales and shifts, and does not train; dropout is off.
    trainable: ``head`` freezes the trunk, ``bias`` all but biases and head. With an adapter, it and the head train.
    size: pictures are resized to size x size; None leaves them as they are.
    pixel_offset, pixel_scale: by which the data scaled pixels in [0, 255]; they are scaled as the network was
    published. None takes features as they are.

    Raises: InvalidInput where the package is absent, for an unknown architecture, weights that do not fit or are not
    finite, batch normalisation without weights, targets that match no layer, and pictures that the network does not
    take.
    """
    channels, height, width = require_image("vision", feature_shape)
    if channels not in (1, 3):
        raise InvalidInput(f"vision takes pictures of 1 or 3 channels, not {channels}")
    if initial_weights is None and (adapter is not None or trainable != "all"):
        raise InvalidInput(
            "vision would freeze random weights; give initial_weights, or leave out trainable and adapter"
        )
    network = _NETWORKS[package](require_package(package, "vision"), architecture, num_classes)
    if initial_weights is None:
        _refuse_batch_norms(network.module, architecture)
    else:
        load_pretrained(network.module, initial_weights, network.heads)
        _freeze_batch_norms(network.module)
        network.module.eval()
    heads = [parameter for name in network.heads for parameter in network.module.get_submodule(name).parameters()]
    trained = trained_parts(network.module, heads, trainable, adapter)
    model = _Reader(trained, network.scaling, _given(pixel_offset, pixel_scale), size)
    _require_fit(model, (channels, height, width), architecture, network.side)
    return model


class _Reader(nn.Module):
    """Pictures [b, 1 or 3, height, width] to outputs [b, num_classes]."""

    def __init__(self, network: nn.Module, published: Scaling, given: Scaling | None, size: int | None) -> None:
        super().__init__()
        self.network, self.size = network, size
        self.rescaled = None if given is None else _composed(given, published)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of pictures; each is resized and scaled by itself."""
        pictures = x.expand(-1, 3, -1, -1)
        if self.rescaled is not None:
            pictures = self.rescaled(pictures)
        if self.size is not None:
            pictures = nn.functional.interpolate(pictures, (self.size, self.size), mode="bilinear", antialias=True)
        out: Tensor = self.network(pictures)
        return out


def _given(offset: tuple[float, ...] | None, scale: tuple[float, ...] | None) -> Scaling | None:
    """Return the scaling of the data; None of features that are stored as a model takes them."""
    if offset is None or scale is None or (offset, scale) == ((0.0,), (1.0,)):
        return None
    return Scaling(offset, scale)


def _composed(given: Scaling, published: Scaling) -> Scaling:
    """Return the scaling of each channel from pixels scaled as ``given`` to pixels scaled as ``published``."""
    channels = range(3)
    offset, scale = ([values[c % len(values)] for c in channels] for values in (given.offset, given.scale))
    return Scaling(
        tuple((published.offset[c] - offset[c]) / scale[c] for c in channels),
        tuple(published.scale[c] / scale[c] for c in channels),
    )


def _of_timm(timm: Any, architecture: str, num_classes: int) -> Network:
    tagged = timm.list_models(pretrained=True)  # with the name of weights, which were published at their own scale
    _require_listed([*timm.list_models(), *tagged], architecture, "timm.list_models()")
    module: nn.Module = timm.create_model(architecture, pretrained=False, num_classes=num_classes)
    for part in (each for each in module.modules() if hasattr(each, "attention_bias_cache")):
        setattr(part, "get_attention_biases", functools.partial(_biases, part))  # noqa: B010
    published = getattr(module, "pretrained_cfg")  # noqa: B009  (a Module's attribute, unknown to mypy)
    heads = published["classifier"]
    return Network(
        module,
        (heads,) if isinstance(heads, str) else tuple(heads),
        pixels(published["mean"], published["std"]),
        published["input_size"][-1],
    )


def _biases(attention: Any, _: torch.device) -> Tensor:
    """Return the biases of an attention of timm, which in evaluation mode keeps the first ones, though they train."""
    found: Tensor = attention.attention_biases[:, attention.attention_bias_idxs]
    return found


def _require_listed(names: Sequence[str], architecture: str, listed_by: str) -> None:
    if architecture not in names:
        close = difflib.get_close_matches(architecture, names)
        hint = f"did you mean {', '.join(close)}? " if close else ""
        raise InvalidInput(f"unknown architecture {architecture!r}; {hint}{listed_by} names all")


_INCEPTION: Final = {"aux_logits": False, "transform_input": True}
"""Options of GoogLeNet and Inception: no heads inside the trunk, and the scaling that their weights expect."""


def _of_torchvision(torchvision: Any, architecture: str, num_classes: int) -> Network:
    models = torchvision.models
    _require_listed(models.list_models(module=models), architecture, "torchvision.models.list_models()")
    options = _INCEPTION if architecture in ("googlenet", "inception_v3") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of another default of initial weights
        module: nn.Module = models.get_model(architecture, weights=None, num_classes=num_classes, **options)
    last = [name for name, part in module.named_modules() if list(part.parameters(recurse=False))][-1]
    return Network(module, (last,), IMAGENET_SCALING, 224)


_NETWORKS: Final[Mapping[Package, Callable[[Any, str, int], Network]]] = {
    "timm": _of_timm,
    "torchvision": _of_torchvision,
}


class FrozenBatchNorm(nn.Module):
    """The affine map of channels [b, c, ...] that a batch normalisation is by its statistics, without parameters."""

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.dim() - 2))
        mapped: Tensor = x * self.scale.view(shape) + self.shift.view(shape)
        return mapped

    @classmethod
    def of(cls, norm: _BatchNorm, mean: Tensor, variance: Tensor) -> FrozenBatchNorm:
        scale: Tensor = (variance + norm.eps).rsqrt()
        if norm.affine:
            scale = scale * norm.weight.detach()
        shift = -mean * scale
        return cls(scale, shift + norm.bias.detach() if norm.affine else shift)


def _refuse_batch_norms(network: nn.Module, architecture: str) -> None:
    """Raises: InvalidInput for random batch normalisation, which mixes the examples of a batch."""
    norms = [name for name, part in network.named_modules() if isinstance(part, _BatchNorm)]
    if norms:
        raise InvalidInput(
            f"{architecture} has batch normalisation ({norms[0]}), which mixes the examples of a batch; give "
            "initial_weights, whose statistics then stay, or an architecture without, such as resnet20_gn or "
            "wide_resnet of dpsweep, or a vision transformer"
        )


def _freeze_batch_norms(module: nn.Module) -> None:
    """Put in place of each batch normalisation the affine map that it is by its statistics."""
    for name, part in module.named_children():
        if isinstance(part, _BatchNorm) and part.running_mean is not None and part.running_var is not None:
            frozen = FrozenBatchNorm.of(part, part.running_mean, part.running_var)
            rest = [getattr(part, each) for each in ("drop", "act") if hasattr(part, each)]
            setattr(module, name, nn.Sequential(frozen, *rest) if rest else frozen)
        else:
            _freeze_batch_norms(part)


def _require_fit(model: _Reader, feature_shape: tuple[int, ...], architecture: str, side: int) -> None:
    """Raises: InvalidInput with the size to set where the network does not take pictures of another size."""
    height, width = feature_shape[1:] if model.size is None else (model.size, model.size)
    if (height, width) == (side, side):
        return
    try:
        with evaluating(model), torch.no_grad():
            model(torch.zeros(1, *feature_shape))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise InvalidInput(
            f"{architecture} does not take pictures of {height} x {width} pixels; set size: {side}"
        ) from error
