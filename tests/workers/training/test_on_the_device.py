"""What a step does beside gradients stays on a GPU: shown on fake CUDA tensors, which have shapes and a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpsweep.workers.clipping import Examples
from dpsweep.workers.clipping.by_norm import FlatClipping
from dpsweep.workers.clipping.clipping_method import PublicFacts
from dpsweep.workers.gradients.pass_results import BatchNorms
from dpsweep.workers.noise.chacha import by_integer_operations
from dpsweep.workers.training.optimizers import OPTIMIZERS
from dpsweep.workers.training.snapshot_intervals import Measurement, SnapshotInterval
from tests.workers.gradients.test_devices import OnTheDevice

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run kernels on memory that is not there")
GPU, EXAMPLES = torch.device("cuda"), 6
FACTS = PublicFacts(("all",), ("layer",), EXAMPLES, 2)


@pytest.fixture
def on_gpu() -> Iterator[None]:
    with FakeTensorMode(), OnTheDevice():  # type: ignore[no-untyped-call]
        yield


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=GPU)


def rows(count: int) -> Tensor:
    return torch.arange(count, device=GPU)


def test_contributions(on_gpu: None) -> None:
    everyone = Examples(numbers(EXAMPLES), rows(EXAMPLES), rows(EXAMPLES), numbers(EXAMPLES, 2))
    interval = SnapshotInterval.from_step(0, Measurement(everyone, numbers(EXAMPLES)), 0.5)
    for bound in (1.0, 2.0):
        method = FlatClipping(bound)
        rule = method.decide(method.start(bound, FACTS), numbers(0), FACTS)
        for _ in range(3):
            interval.renew(rows(3), BatchNorms(numbers(3), numbers(3, 2), numbers(3)))
            interval.extend(rule)
    later = interval.continued(6, 0.5)
    later.renew(rows(2), BatchNorms(numbers(2), numbers(2, 2), numbers(2)))
    later.extend(rule)
    assert {each.contributions.device.type for each in later.settled()} == {"cuda"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(on_gpu: None, name: str) -> None:
    parameters = {"weight": nn.Parameter(numbers(3, 2)), "bias": nn.Parameter(numbers(3))}
    settings: dict[str, Any] = {"momentum": 0.5} if name == "sgd" else {}
    optimizer = OPTIMIZERS[name](parameters, learning_rate=0.1, **settings)
    for _ in range(2):
        optimizer.step({key: torch.empty_like(each) for key, each in parameters.items()}, 1.0, 0.1)


def test_words_of_noise(on_gpu: None) -> None:
    assert by_integer_operations(bytes(32), bytes(12), 0, 4, GPU).shape == (32,)
