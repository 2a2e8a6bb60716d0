"""Per-example gradients the slow and certain way: one example at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsweep.workers.gradients.verified_model import PerExampleLoss


def per_example_loss(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of whatever the model returns, flattened to at least two numbers per row."""
    return functional.cross_entropy(output.flatten(1), y, reduction="none")


def gradients_one_by_one(
    model: nn.Module, x: Tensor, y: Tensor, multiplicity: int = 1, loss_of: PerExampleLoss = per_example_loss
) -> dict[str, Tensor]:
    """[B, *shape] by name, of the mean loss of every ``multiplicity`` rows."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for start in range(0, len(x), multiplicity):
        rows = slice(start, start + multiplicity)
        loss = loss_of(model(x[rows]), y[rows]).mean()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            found[name].append(torch.zeros_like(parameter) if gradient is None else gradient.to_dense())
    return {name: torch.stack(parts) for name, parts in found.items()}


def norms_of(gradients: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.reshape(len(g), -1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())
