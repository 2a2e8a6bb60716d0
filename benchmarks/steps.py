"""Plain and private training steps that `benchmarks.training` compares; the peers' steps are in `benchmarks.peers`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.micro_batches import Launches
from dpsweep.workers.gradients.pass_results import BatchNorms
from dpsweep.workers.noise.noise_sources import make_noise_source

CLIP = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.01
SETTLED = 9
"""Steps after which a private step costs what it costs later: the first batch is verified, the 1st and the 8th after it
are compared."""

Step = Callable[[Tensor, Tensor], None]
Mean = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
"""Returns the mean of the gradients of a batch, by the name of the parameter."""


def classified(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each example."""
    return functional.cross_entropy(logits, y, reduction="none")


@dataclass(frozen=True)
class Training:
    """How every method trains a model.

    micro_batch: examples in memory at once. losses: (output, targets) -> loss of each example. autocast: dtype of
    `torch.autocast` in the forward pass, or None.
    """

    micro_batch: int
    losses: Callable[[Tensor, Tensor], Tensor] = classified
    autocast: torch.dtype | None = None

    def forward(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Loss of each example, in the precision of the training."""
        with self.precision(x.device):
            return self.losses(model(x), y)

    def precision(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return the autocast of the forward pass."""
        return contextlib.nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    def parts(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batch in micro-batches."""
        return zip(x.split(self.micro_batch), y.split(self.micro_batch), strict=True)


RECORDED_AT = 4
"""Number of the pass of one shape that is recorded; those before warm up."""
Make = Callable[[nn.Module, Training], Step]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Return the optimizer of every method."""
    return torch.optim.SGD(trained(model).values(), lr=LEARNING_RATE)


def plain(model: nn.Module, training: Training) -> Step:
    """Return a step without privacy."""
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for part_x, part_y in training.parts(x, y):
            (training.forward(model, part_x, part_y).sum() / len(x)).backward()
        optimizer.step()

    return step


def plain_recorded(model: nn.Module, training: Training) -> Step:
    """Return a step without privacy that is recorded as one CUDA graph when a shape comes again."""
    step, recorded = plain(model, training), dict[torch.Size, tuple[Tensor, Tensor, torch.cuda.CUDAGraph]]()
    seen = Counter[torch.Size]()

    def run(x: Tensor, y: Tensor) -> None:
        seen[x.shape] += 1
        if seen[x.shape] < RECORDED_AT:
            torch.cuda.synchronize(x.device)  # another stream does not wait for what made the model
            with torch.cuda.stream(torch.cuda.Stream(x.device)):
                step(x, y)
            torch.cuda.synchronize(x.device)
            return
        if x.shape not in recorded:
            own = x.clone(), y.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step(*own)
            recorded[x.shape] = (*own, graph)
        own_x, own_y, graph = recorded[x.shape]
        own_x.copy_(x)
        own_y.copy_(y)
        graph.replay()

    return run


def dpsweep(model: nn.Module, training: Training) -> Step:
    """Return a private step by `GradientEngine`, without noise."""
    return updating(model, clipping(model, training))


def dpsweep_recorded(model: nn.Module, training: Training) -> Step:
    """Return the same step, whose passes are recorded as CUDA graphs where they can be."""
    return updating(model, clipped_by(engine_of(model, training, "recorded")))


def dpsweep_with_noise(model: nn.Module, training: Training) -> Step:
    """Return a private step by `GradientEngine`, with noise."""
    clipped_mean, device = clipping(model, training), next(model.parameters()).device
    noise = make_noise_source("seeded", 0, device)
    return updating(model, lambda x, y: noise.added_to_each(clipped_mean(x, y), NOISE_MULTIPLIER * CLIP / len(x)))


def updating(model: nn.Module, mean: Mean) -> Step:
    """Return a step that computes gradients by ``mean`` and updates the model."""
    parameters, optimizer = trained(model), sgd(model)

    def step(x: Tensor, y: Tensor) -> None:
        for name, gradient in mean(x, y).items():
            parameters[name].grad = gradient
        optimizer.step()

    return step


def clipping(model: nn.Module, training: Training) -> Mean:
    """Return the mean of the clipped gradients of a batch, computed by `GradientEngine`."""
    return clipped_by(engine_of(model, training))


def clipped_by(engine: GradientEngine) -> Mean:
    """Return the mean of the clipped gradients of a batch, computed by ``engine``."""

    def clipped_mean(x: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        def weigh(norms: BatchNorms, rows: slice) -> Tensor:
            return norms.norms.clamp(min=CLIP).reciprocal_().mul_(CLIP / len(x))

        return engine.weighted_sum_rowwise(x, y, weigh).gradients

    return clipped_mean


def engine_of(model: nn.Module, training: Training, launches: Launches = "each") -> GradientEngine:
    """Return the engine for a model, in the micro-batches and the precision of the training."""
    size, autocast = training.micro_batch, training.autocast
    return GradientEngine(model, training.losses, micro_batch_size=size, autocast=autocast, launches=launches)


def norm_pass(model: nn.Module, training: Training) -> Step:
    """Computes the gradient norms of all examples, without training."""
    engine = engine_of(model, training)

    def step(x: Tensor, y: Tensor) -> None:
        engine.norms(x, y)

    return step


def vmap_grad(model: nn.Module, training: Training) -> Step:
    """Return a private step with per-example gradients by ``vmap(grad)`` of torch.func, without noise."""
    optimizer, parameters = sgd(model), trained(model)

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return training.forward(lambda row: functional_call(model, values, (row,)), x[None], y[None])[0]

    per_example = vmap(grad(loss), in_dims=(None, 0, 0))

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        values = {name: parameter.detach() for name, parameter in parameters.items()}
        for part_x, part_y in training.parts(x, y):
            gradients = per_example(values, part_x, part_y)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            weights = (CLIP / norms).clamp(max=1.0) / len(x)
            for name, parameter in parameters.items():
                clipped = torch.tensordot(weights, gradients[name], 1)
                parameter.grad = clipped if parameter.grad is None else parameter.grad + clipped
        optimizer.step()

    return step
