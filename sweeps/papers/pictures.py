"""Pictures of MNIST and CIFAR-10 at half their size, and a small network, for batches-mnist.yaml and noise-*.yaml."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from dpsweep.workers.data import Source, Split, load_source, make_split
from dpsweep.workers.spec import DataSpec


def mnist(train: int = 400, test: int = 500) -> Source:
    """Return the first pictures of each digit. train, test: how many of each."""
    return _some("mnist", train, test, 0.1307, 0.3081)


def cifar10(train: int = 400, test: int = 500) -> Source:
    """Return the first pictures of each class. train, test: how many of each."""
    return _some("cifar10", train, test, 0.4733, 0.2516)


@functools.cache  # decoding CIFAR-10 takes longer than a trial
def _some(name: str, train: int, test: int, mean: float, spread: float) -> Source:
    whole = load_source(DataSpec(name))
    assert whole.test is not None
    halves = (_first(whole.train, train, mean, spread), _first(whole.test, test, mean, spread))
    return Source(f"some {name}", *halves, whole.group_names, whole.class_names)


def _first(split: Split, each: int, mean: float, spread: float) -> Split:
    rows = torch.cat([(split.labels == label).nonzero()[:each, 0] for label in split.labels.unique()]).sort().values
    pictures: Tensor = nn.functional.avg_pool2d(split.features[rows].float() / 255.0, 2)
    return make_split(
        (pictures - mean) / spread, split.labels[rows], split.groups[rows], example_ids=split.example_ids[rows]
    )


def small_cnn(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return two convolutions with max-pooling and a linear layer: 2,700 weights for the digits."""
    channels, height, width = feature_shape
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 4) * (width // 4), num_classes),
    )
