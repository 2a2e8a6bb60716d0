"""Every tensor that the engine makes is on the model's device: shown on torch's meta device, which has shapes only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.brute_force import per_example_loss
from tests.workers.gradients.test_engine import CASES
from workers.gradients import GradientEngine

META = torch.device("meta")


class DecidedScalars(TorchDispatchMode):
    """Answers what the engine asks about values: norms are finite, nothing cancelled, both passes agree."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return False if args[0].dtype is torch.bool else 1.0
        if func is torch.ops.aten.allclose.default and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{"micro_batch_size": 4}, {"layerwise": True, "multiplicity": 2}])
@pytest.mark.parametrize(
    "name",
    [
        "linear on sequences",
        "conv2d circular",
        "conv2d of 16 channels",
        "weight-standardised conv2d",
        "group norm",
        "layer norm",
        "rms norm",
        "self-attention",
        "cross-attention",
        "prelu",
    ],
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
