"""Time of a step that clips 64 users of four rows, over one that clips 256 rows.

    python -m benchmarks.users [--steps 150]

Both trainers take turns, step by step, on the same data. A step draws its batch, clips, adds noise and updates. Shown
are medians, which leave out what other work on the machine delays.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch

from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.clipping import make_clipping
from dpsweep.workers.data import Dataset, Tokens, make_split
from dpsweep.workers.dataset_description import NO_GROUPS
from dpsweep.workers.noise.noise_sources import make_noise_source
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.sampling.users import population_of
from dpsweep.workers.spec import Component, DataSpec, NoiseSpec, NormSpec, SamplingSpec, TrialSpec, UserSpec
from dpsweep.workers.training.batch_gradients import recipe_of
from dpsweep.workers.training.norm_recorder import stored_norms
from dpsweep.workers.training.trainer import Trainer
from dpsweep.workers.training.trial_mechanism import mechanism_of

USERS, ROWS, SAMPLED = 1024, 4, 64
MODELS: Final[Mapping[str, tuple[Component, tuple[int, ...]]]] = {
    "logistic": (Component("logistic"), (60,)),
    "mlp of width 256": (Component("mlp", {"hidden": (256,)}), (60,)),
    "mlp of width 1,024": (Component("mlp", {"hidden": (1024,)}), (784,)),
    "cnn_papernot": (Component("cnn_papernot"), (1, 28, 28)),
    "transformer": (Component("transformer"), (64,)),
}


def data(shape: tuple[int, ...], *, tokens: bool) -> Dataset:
    """Return random examples of ten classes, four of each user."""
    draw, count = np.random.default_rng(0), USERS * ROWS
    if tokens:
        features = draw.integers(1, 1000, (count, *shape))
    else:
        features = draw.normal(size=(count, *shape)).astype(np.float32)
    labels = draw.integers(0, 10, count)
    split = make_split(features, labels, np.zeros(count, np.int64), user_ids=np.arange(count) // ROWS)
    dataset = Dataset("random", split, split, None, NO_GROUPS, tuple(map(str, range(10))))
    return replace(dataset, preparation=Tokens(vocabulary=1000)) if tokens else dataset


def trainer_of(model: Component, dataset: Dataset, users: UserSpec | None, folder: str) -> Trainer:
    """Return a trainer that clips users if they are given, else rows."""
    spec = TrialSpec(
        key="step",
        data=DataSpec("random"),
        model=model,
        sampling=SamplingSpec("poisson", SAMPLED if users else SAMPLED * ROWS),
        clipping=Component("flat", {"bound": 1.0}),
        noise=NoiseSpec(1.0),
        epochs=1000,
        delta=1e-5,
        seed=0,
        optimizer=Component("sgd", {"learning_rate": 0.01}),
        norms=NormSpec("off"),
        users=users,
    )
    method = make_clipping(spec.clipping)
    mechanism = mechanism_of(spec, method, population_of(spec, dataset))
    noise = make_noise_source("seeded", 0, torch.device("cpu"))
    trainer = Trainer(
        spec,
        mechanism,
        dataset,
        noise,
        stored_norms(TrialFiles(folder), spec.norms),
        recipe_of(spec, method, dataset, NO_CODE),
    )
    trainer.begin()
    return trainer


def medians(trainers: list[Trainer], steps: int) -> list[float]:
    """Return the median milliseconds of a step of each, after a tenth of the steps."""
    taken: list[list[float]] = [[] for _ in trainers]
    for step in range(steps + steps // 10):
        for trainer, times in zip(trainers, taken, strict=True):
            begun = time.perf_counter()
            trainer.step()
            if step >= steps // 10:
                times.append(1e3 * (time.perf_counter() - begun))
    return [statistics.median(times) for times in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print("| model | rows, ms | users, ms | ratio |\n|---|---|---|---|", flush=True)
    for name, (model, shape) in MODELS.items():
        dataset = data(shape, tokens=model.name == "transformer")
        with TemporaryDirectory() as folder:
            both = [trainer_of(model, dataset, users, folder) for users in (None, UserSpec("uls", ROWS))]
            rows, users = medians(both, steps)
        print(f"| {name} | {rows:.2f} | {users:.2f} | {users / rows:.2f} |", flush=True)


if __name__ == "__main__":
    main()
