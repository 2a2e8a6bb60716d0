"""The phases of a run on a GPU, most important first, and how large they are there and in a dry run on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Phase:
    """A part of a run: the function ``run(record, device, size)`` of a module. limit: the most seconds it may take."""

    name: str
    module: str
    limit: float
    about: str


@dataclass(frozen=True)
class Size:
    """The amount of work of each phase.

    `workloads`: name of the mapping in `benchmarks.workloads`.
    `turns`: seconds in which methods take turns, per workload.
    `tests`, `further_tests`: arguments of pytest.
    `compared`: bundled workloads whose norms are compared with the CPU's, on ``examples`` examples.
    `profiled`, `compiled`: workloads of these phases.
    `values`: normal values that are drawn at once.
    `rows`, `epochs`: of a trial on pictures like MNIST.
    `at_once`: trials that share the device.
    `trials`: models of whole trials.
    `models`: of `benchmarks.models`, all if None.
    `patience`: factor of all limits; a dry run may be on a busy machine.
    """

    workloads: str
    turns: float
    tests: tuple[str, ...]
    further_tests: tuple[str, ...]
    compared: tuple[str, ...]
    examples: int
    profiled: tuple[str, ...]
    compiled: tuple[str, ...]
    values: int
    rows: int
    epochs: int
    at_once: int
    trials: tuple[str, ...]
    models: tuple[str, ...] | None
    patience: float


_FIRST = (
    "tests/workers/machine/test_device_option.py",
    "tests/workers/noise/test_chacha.py",
    "tests/workers/noise/test_gaussian_sources.py",
    "tests/workers/gradients/test_engine.py",
    "tests/workers/gradients/test_recorded.py",
    "tests/workers/clipping",
    "tests/workers/trials/test_trials.py",
    "tests/workers/trials/test_one_rank.py",
    "tests/workers/training/test_resume.py",
)
SIZES: Final[Mapping[str, Size]] = {
    "full": Size(
        workloads="LARGE",
        turns=2.0,
        tests=_FIRST,
        further_tests=("tests/workers",),
        compared=("logistic", "cnn", "resnet20_gn", "transformer"),
        examples=16,
        profiled=("wrn16_4_bf16", "bert_base_bf16", "vit_b16_bf16", "gpt2_lora_bf16"),
        compiled=("bert_base_bf16", "vit_b16_bf16"),
        values=2**27,
        rows=12_000,
        epochs=3,
        at_once=8,
        trials=("cnn_dpsgdf", "transformer"),
        models=None,
        patience=1.0,
    ),
    "small": Size(
        workloads="TINY",
        turns=0.0,
        tests=("tests/workers/tasks/test_losses.py",),
        further_tests=("tests/workers/tasks/test_losses.py",),
        compared=("logistic", "cnn"),
        examples=4,
        profiled=("wrn16_4_bf16",),
        compiled=("wrn16_4_bf16",),
        values=2**16,
        rows=100,
        epochs=1,
        at_once=2,
        trials=("cnn_dpsgdf",),
        models=("RNN",),
        patience=20.0,
    ),
}

PHASES: Final[tuple[Phase, ...]] = (
    Phase("imports", "benchmarks.gpu.imports", 45, "imports, and a forward pass of every model"),
    Phase(
        "tests",
        "benchmarks.gpu.tests",
        75,
        "the tests of engine, noise, clipping, trials and resumption",
    ),
    Phase(
        "equality",
        "benchmarks.gpu.equality",
        40,
        "norms, clipped sums, noise and resumed trials beside those of the CPU",
    ),
    Phase(
        "steps", "benchmarks.gpu.steps", 180, "time and memory of private steps beside plain ones and those of peers"
    ),
    Phase("noise", "benchmarks.gpu.noise", 15, "speed of the sources of noise"),
    Phase("together", "benchmarks.gpu.together", 75, "trials that share the device, beside one alone"),
    Phase("waits", "benchmarks.gpu.waits", 75, "how often a step waits for the device, and where its time goes"),
    Phase("compiled", "benchmarks.gpu.compiled", 40, "CUDA graphs and torch.compile"),
    Phase("trials", "benchmarks.gpu.trials", 40, "whole trials beside plain loops and Opacus"),
    Phase("ray", "benchmarks.gpu.ray_trials", 40, "two trials on half a device each under Ray"),
    Phase("models", "benchmarks.gpu.models", 40, "models that people bring, beside plain steps and Opacus"),
    Phase("all_tests", "benchmarks.gpu.all_tests", 480, "all tests of training, in the time that is left"),
)
