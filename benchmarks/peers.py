"""Private training steps of other libraries. None is a dependency of dpsweep; those that are installed are measured."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.steps import CLIP, Make, Step, Training, sgd, trained


@dataclass(frozen=True)
class Peer:
    """A method of another library. library: the module whose import tells whether it is installed."""

    library: str
    make: Make


class MeanLoss:
    """A criterion as Opacus takes it: mean loss of a batch, or each example's where Opacus asks for those."""

    def __init__(self, training: Training) -> None:
        self._losses, self.reduction = training.losses, "mean"

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        each = self._losses(output, y)
        return each if self.reduction == "none" else each.mean()


def opacus_hooks(model: nn.Module, training: Training) -> Step:
    """Return a private step of Opacus with per-example gradients by hooks, without noise."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(sgd(model), noise_multiplier=0.0, max_grad_norm=CLIP, expected_batch_size=1)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.expected_batch_size = len(x)
        for start in range(0, len(x), training.micro_batch):
            rows = slice(start, start + training.micro_batch)
            optimizer.zero_grad()
            training.forward(wrapped, x[rows], y[rows]).mean().backward()
            optimizer.signal_skip_step(rows.stop < len(x))
            optimizer.step()

    return step


def opacus_ghost(model: nn.Module, training: Training) -> Step:
    """Return a private step of Opacus with ghost clipping, the model in its wrapper, without noise."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    _contiguous_indices(model)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP, use_ghost_clipping=True)
    return _by_ghost_norms(wrapped, wrapped, model, training)


def opacus_ghost_unwrapped(model: nn.Module, training: Training) -> Step:
    """Return the same with ``wrap_model=False`` of Opacus 1.6: hooks on the model itself."""
    from opacus.grad_sample import wrap_model

    _contiguous_indices(model)
    hooks = wrap_model(model, "ghost", wrap_model=False, max_grad_norm=CLIP)
    return _by_ghost_norms(hooks, model, model, training)


def _contiguous_indices(model: nn.Module) -> None:
    """Copy expanded indices of embeddings, which Opacus' norm sampler does not take."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(lambda _, args: (args[0].contiguous(), *args[1:]))


def _by_ghost_norms(hooks: Any, forward: nn.Module, model: nn.Module, training: Training) -> Step:
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    optimizer = DPOptimizerFastGradientClipping(
        sgd(model), noise_multiplier=0.0, max_grad_norm=CLIP, expected_batch_size=1
    )
    criterion = DPLossFastGradientClipping(hooks, optimizer, MeanLoss(training))

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.expected_batch_size = len(x)
        for start in range(0, len(x), training.micro_batch):
            rows = slice(start, start + training.micro_batch)
            optimizer.zero_grad()
            with training.precision(x.device):
                loss = criterion(forward(x[rows]), y[rows])
            loss.backward()
            optimizer.signal_skip_step(rows.stop < len(x))
            optimizer.step()

    return step


def opake(model: nn.Module, training: Training) -> Step:
    """Return a private step by Opake's ``clipped_grad``, without noise."""
    from opake.dpsgd.clipping import clipped_grad

    optimizer, parameters = sgd(model), trained(model)

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return training.forward(lambda row: functional_call(model, values, (row,)), x[None], y[None])[0]

    def step(x: Tensor, y: Tensor) -> None:
        values = {name: parameter.detach() for name, parameter in parameters.items()}
        gradients, _ = clipped(values, x, y, state=state)
        for name, parameter in parameters.items():
            parameter.grad = gradients.pytree[name] / len(x)
        optimizer.step()

    clipped, state = clipped_grad(loss, batch_argnums=(1, 2), clipping_norm=CLIP, microbatch_size=training.micro_batch)
    return step


PEERS: Mapping[str, Peer] = {
    "opacus_hooks": Peer("opacus", opacus_hooks),
    "opacus_ghost": Peer("opacus", opacus_ghost),
    "opacus_unwrapped": Peer("opacus", opacus_ghost_unwrapped),
    "opake": Peer("opake.dpsgd", opake),
}


def installed(library: str) -> bool:
    """Return whether the module can be found."""
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
