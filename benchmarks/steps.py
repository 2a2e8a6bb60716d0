"""Plain and private training steps of the methods that `benchmarks.training` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from workers.gradients import BatchNorms, GradientEngine
from workers.noise import make_noise_source

CLIP = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.01

Step = Callable[[Tensor, Tensor], None]
Mean = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
"""Returns the mean of the gradients of a batch, by the name of the parameter."""


def micro_batches(x: Tensor, y: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batch in micro-batches of ``size`` examples."""
    return zip(x.split(size), y.split(size), strict=True)


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each example."""
    return functional.cross_entropy(logits, y, reduction="none")


def plain(model: nn.Module, micro_batch: int) -> Step:
    """A step without privacy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for part_x, part_y in micro_batches(x, y, micro_batch):
            (losses(model(part_x), part_y).sum() / len(x)).backward()
        optimizer.step()

    return step


def dpsweep(model: nn.Module, micro_batch: int) -> Step:
    """A private step by `GradientEngine`, without noise."""
    return updating(model, clipping(model, micro_batch))


def dpsweep_with_noise(model: nn.Module, micro_batch: int) -> Step:
    """A private step by `GradientEngine`, with noise."""
    clipped_mean, device = clipping(model, micro_batch), next(model.parameters()).device
    noise = make_noise_source("seeded", 0, device)
    return updating(model, lambda x, y: noise.added_to_each(clipped_mean(x, y), NOISE_MULTIPLIER * CLIP / len(x)))


def updating(model: nn.Module, mean: Mean) -> Step:
    """A step that computes gradients by ``mean`` and updates the model."""
    parameters, optimizer = dict(model.named_parameters()), torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> None:
        for name, gradient in mean(x, y).items():
            parameters[name].grad = gradient
        optimizer.step()

    return step


def clipping(model: nn.Module, micro_batch: int) -> Mean:
    """Mean of the clipped gradients of a batch, computed by `GradientEngine`."""
    engine = GradientEngine(model, losses, micro_batch_size=micro_batch)

    def clipped_mean(x: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        def weigh(norms: BatchNorms, rows: slice) -> Tensor:
            return norms.norms.clamp(min=CLIP).reciprocal_().mul_(CLIP / len(x))

        return engine.weighted_sum_rowwise(x, y, weigh).gradients

    return clipped_mean


def norm_pass(model: nn.Module, micro_batch: int) -> Step:
    """Computes the gradient norms of all examples, without training."""
    engine = GradientEngine(model, losses, micro_batch_size=micro_batch)

    def step(x: Tensor, y: Tensor) -> None:
        engine.norms(x, y)

    return step


def opacus_hooks(model: nn.Module, micro_batch: int) -> Step:
    """A private step of Opacus with per-example gradients by hooks, without noise."""
    wrapped = GradSampleModule(model)
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    optimizer = DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=CLIP, expected_batch_size=1)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.expected_batch_size = len(x)
        for start in range(0, len(x), micro_batch):
            rows = slice(start, start + micro_batch)
            optimizer.zero_grad()
            functional.cross_entropy(wrapped(x[rows]), y[rows]).backward()
            optimizer.signal_skip_step(rows.stop < len(x))
            optimizer.step()

    return step


def opacus_ghost(model: nn.Module, micro_batch: int) -> Step:
    """A private step of Opacus with ghost clipping, without noise."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):  # its norm sampler takes no expanded indices
            module.register_forward_pre_hook(lambda _, args: (args[0].contiguous(),))
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP, use_ghost_clipping=True)
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    optimizer = DPOptimizerFastGradientClipping(inner, noise_multiplier=0.0, max_grad_norm=CLIP, expected_batch_size=1)
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.expected_batch_size = len(x)
        for start in range(0, len(x), micro_batch):
            rows = slice(start, start + micro_batch)
            optimizer.zero_grad()
            criterion(wrapped(x[rows]), y[rows]).backward()
            optimizer.signal_skip_step(rows.stop < len(x))
            optimizer.step()

    return step


def vmap_grad(model: nn.Module, micro_batch: int) -> Step:
    """A private step with per-example gradients by ``vmap(grad)`` of torch.func, without noise."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, values, (x[None],)), y[None])

    per_example = vmap(grad(loss), in_dims=(None, 0, 0))

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        values = {name: parameter.detach() for name, parameter in parameters.items()}
        for part_x, part_y in micro_batches(x, y, micro_batch):
            gradients = per_example(values, part_x, part_y)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            weights = (CLIP / norms).clamp(max=1.0) / len(x)
            for name, parameter in parameters.items():
                clipped = torch.tensordot(weights, gradients[name], 1)
                parameter.grad = clipped if parameter.grad is None else parameter.grad + clipped
        optimizer.step()

    return step


METHODS: Mapping[str, Callable[[nn.Module, int], Step]] = {
    "plain": plain,
    "dpsweep": dpsweep,
    "dpsweep_with_noise": dpsweep_with_noise,
    "opacus_hooks": opacus_hooks,
    "opacus_ghost": opacus_ghost,
    "vmap": vmap_grad,
    "norm_pass": norm_pass,
}
PRIVATE = ("dpsweep", "opacus_hooks", "opacus_ghost", "vmap")
