"""Every tensor that the engine makes is on the model's device: shown on torch's meta device, which has shapes only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpsweep.workers.gradients.capture import capturing
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.factors import ExampleGradients, Planned
from dpsweep.workers.gradients.layers import find_layers
from dpsweep.workers.gradients.planners import ShapePlanner
from tests.workers.brute_force import per_example_loss
from tests.workers.gradients.test_engine import CASES

WITH_CONSTANTS = frozenset(
    {"masked self-attention", "cross-attention without weights"}
    | {"a table as long as the batch", "a table as long as what is verified"}
)
"""Cases whose model reads a real tensor, which does not mix with fake ones."""

META = torch.device("meta")


class DecidedScalars(TorchDispatchMode):
    """Answers what the engine asks about values: norms are finite, nothing cancelled, passes agree."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return False if args[0].dtype is torch.bool else 1.0
        if func is torch.ops.aten.equal.default and args[0].is_meta:
            return True
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and (kwargs or {}).get("device") != META:
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear on sequences", {"micro_batch_size": 4}),
        pytest.param("conv2d circular", {"layerwise": True, "multiplicity": 2}, marks=pytest.mark.long),
    ],
    ids=["in pieces", "by layer"],
)
def test_a_step_on_another_device_stays_there(name: str, options: dict[str, Any]) -> None:
    model = CASES[name].model().to(META)
    x, y = (tensor.to(META) for tensor in CASES[name].inputs())
    engine = GradientEngine(model, per_example_loss, **options)

    def weigh(norms: Any) -> Tensor:
        return torch.ones_like(norms.norms if norms.layer_norms is None else norms.layer_norms)

    with DecidedScalars():  # type: ignore[no-untyped-call]
        norms = engine.norms(x, y)
        results = [
            engine.weighted_sum(x, y, weigh),
            engine.weighted_sum_rowwise(x, y, lambda found, rows: weigh(found)),
        ]
    assert norms.norms.device == norms.losses.device == META
    for result in results:
        assert result.weights.device == META
        for parameter, gradient in result.gradients.items():
            assert gradient.device == META
            assert gradient.shape == model.get_parameter(parameter).shape


class OnTheDevice(TorchDispatchMode):
    """Refuses operators that read numbers of the host beside a GPU's, or send them there: it would wait for them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given, made = ({each.device.type for each in _sized(values)} for values in ((args, kwargs), output))
        assert len(given | made) < 2, f"{func} with {', '.join(sorted(given | made))}"
        return output


def _sized(values: object) -> list[Tensor]:
    """Tensors among the values, but single numbers, which kernels are started with."""
    return [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor) and each.dim()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run kernels on memory that fake tensors lack")
@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", sorted(set(CASES) - WITH_CONSTANTS))
def test_norms_and_sums_on_a_gpu_mix_no_devices(name: str) -> None:
    """Shown on fake CUDA tensors, which have shapes and a device: forward pass, norms by every method, and sums.

    The default device is the CPU, as in a trial. The backward pass needs a real GPU; output gradients are made up.
    """
    model, gpu = CASES[name].model(), torch.device("cuda")
    with FakeTensorMode():
        with gpu:
            _fake(model)
            x, y, rows = torch.empty(6, *CASES[name].shape), torch.zeros(6, dtype=torch.long), torch.arange(3)
        layers = find_layers(model)
        with OnTheDevice():  # type: ignore[no-untyped-call]
            with capturing(layers, 6, 6) as capture:
                assert per_example_loss(model(x), y).device.type == "cuda"
            for use in capture.uses:
                shown = [edge.node._input_metadata[edge.output_nr] for edge in use.edges]
                found = use.differentiate(*(torch.empty(tuple(each.shape), device=gpu) for each in shown))
                for gradients in found.values():
                    for norm_sq in (*_norms(gradients), gradients.precise_norm_sq(rows)):
                        assert norm_sq.device.type == "cuda"
                    assert gradients.weighted_sum(torch.ones(6, device=gpu)).device.type == "cuda"
                    assert gradients.select(rows).instantiate().device.type == "cuda"


def _fake(model: nn.Module) -> None:
    """Replace parameters and buffers by fake ones on the current default device."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is not None and id(value) not in made:
                    fake = torch.empty(tuple(value.shape), dtype=value.dtype)
                    made[id(value)] = (
                        nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake
                    )
                tensors[name] = None if value is None else made[id(value)]  # type: ignore[assignment]


def _norms(gradients: ExampleGradients) -> list[Tensor]:
    """Squared norms by every method that there is."""
    if isinstance(gradients, Planned):
        return [method.prepare()[0] for method in gradients.methods().values()]
    return [gradients.norm_sq(ShapePlanner())]
