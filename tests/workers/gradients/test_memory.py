"""Memory of passes: gradients of layers are freed as soon as nothing reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpsweep.workers.gradients.engine import GradientEngine


class Live(TorchDispatchMode):
    """Tracks the bytes of tensors that are made within this context. most: at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._held = dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, called: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = called(*args, **(kwargs or {}))
        given = {each._cdata for each in map(_storage, _tensors((args, kwargs)))}
        for storage in map(_storage, _tensors(found)):
            if storage._cdata not in given:
                self._held.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._held.values()))
        return found


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def normed(width: int) -> list[nn.Module]:
    return [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(2, width), nn.ReLU()]


def losses(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


def test_a_pass_of_a_convolutional_net_needs_about_the_memory_of_a_plain_one() -> None:
    torch.manual_seed(0)
    body = [layer for _ in range(6) for layer in normed(8)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(16, 3, 16, 16), torch.randint(3, (16,))
    engine = GradientEngine(model, losses)

    def private() -> None:
        engine.weighted_sum(x, y, lambda norms: norms.norms.clamp(min=1.0).reciprocal())

    def plain() -> None:
        torch.autograd.grad(losses(model(x), y).sum(), list(model.parameters()))

    most = {}
    for run in (private, plain):
        run()  # private: verifies
        with Live() as live:
            run()
        most[run] = live.most
    assert most[private] < 1.4 * most[plain]


class Unused(nn.Module):
    """Calls a layer whose output takes part in no loss unless told."""

    def __init__(self, takes_part: bool) -> None:
        super().__init__()
        self.takes_part = takes_part
        self.first, self.second, self.other = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        other = self.other(hidden)
        output: Tensor = self.second(hidden)
        return output + other if self.takes_part else output


class Marked(nn.Module):
    """Lets its frozen part's output require gradients, as `enable_input_require_grads` of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Embedding(7, 4).requires_grad_(False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(self.frozen(x).requires_grad_()).tanh())
        return output


@pytest.mark.parametrize(
    ("model", "x"),
    [(Unused(False), torch.randn(6, 4)), (Unused(True), torch.randn(6, 4)), (Marked(), torch.randint(7, (6,)))],
    ids=["unused", "used", "marked"],
)
def test_layers_whose_gradient_does_not_arrive_have_the_gradients_of_autograd(model: nn.Module, x: Tensor) -> None:
    y = torch.randint(3, (len(x),))
    found = GradientEngine(model, losses).weighted_sum(x, y, lambda norms: torch.ones_like(norms.norms)).gradients
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    expected = torch.autograd.grad(losses(model(x), y).sum(), list(trained.values()), materialize_grads=True)
    for (name, parameter), gradient in zip(trained.items(), expected, strict=True):
        torch.testing.assert_close(found.get(name, torch.zeros_like(parameter)), gradient)


def test_a_layer_that_takes_part_in_some_batches_is_not_left_out() -> None:
    torch.manual_seed(0)
    model = Unused(True)
    engine, x, y = GradientEngine(model, losses), torch.randn(6, 4), torch.randint(3, (6,))
    for takes_part in (True, False, True):
        model.takes_part = takes_part
        torch.testing.assert_close(engine.norms(x, y).norms, GradientEngine(model, losses).norms(x, y).norms)
