"""Whichever of its alternatives a planner takes, a layer's norms and sums are the same."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import pytest
import torch

from dpsweep.workers.gradients.convolution import Correlations, Geometry
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.planners import Alternative, ShapePlanner, T, TimingPlanner, default_planner
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss, relative_error
from tests.workers.devices import NAME
from tests.workers.gradients.test_engine import CASES, TOLERANCE

PLANNED = ["linear on sequences", *(name for name in CASES if "conv" in name)]


@dataclass
class Always:
    """The alternative at this place, and how many there were at most."""

    index: int
    most: int = 0

    def choose(self, key: Hashable, alternatives: Mapping[str, Alternative[T]]) -> T:
        self.most = max(self.most, len(alternatives))
        return list(alternatives.values())[self.index % len(alternatives)].compute()


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", PLANNED)
def test_every_alternative_gives_the_same_norms(name: str) -> None:
    model = CASES[name].model()
    x, y = CASES[name].inputs()
    expected = gradients_one_by_one(model, x, y, 2)
    weights = torch.rand(3)
    for index in range(3):
        planner = Always(index)
        engine = GradientEngine(model, per_example_loss, planner=planner, multiplicity=2)
        got = engine.weighted_sum(x, y, lambda norms: weights)
        assert planner.most >= 2
        torch.testing.assert_close(got.norms.norms, norms_of(expected), rtol=TOLERANCE, atol=0)
        for parameter, gradient in got.gradients.items():
            assert relative_error(gradient, torch.tensordot(weights, expected[parameter], 1)) < 1e-4


def test_timing_planner_keeps_its_choices_and_agrees() -> None:
    case = CASES["conv2d of 16 channels"]
    model, (x, y) = case.model(), case.inputs()
    planner = TimingPlanner(repetitions=1)
    engine = GradientEngine(model, per_example_loss, planner=planner)
    first = engine.norms(x, y).norms
    chosen = dict(planner.chosen)
    assert chosen
    assert torch.equal(engine.norms(x, y).norms, first)
    engine.norms(x[:3], y[:3])  # Poisson batches have a new size at every step
    assert planner.chosen == chosen
    torch.testing.assert_close(first, norms_of(gradients_one_by_one(model, x, y)), rtol=TOLERANCE, atol=0)


def test_timing_planner_leaves_out_what_a_library_has_no_memory_for() -> None:
    def lacking() -> int:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    alternatives = {"large": Alternative(1.0, lacking), "small": Alternative(1.0, lambda: 2)}
    assert TimingPlanner().choose("sums", alternatives) == 2


def test_alternatives_are_timed_where_no_rates_are_measured() -> None:
    assert isinstance(default_planner(torch.device("cpu")), ShapePlanner)
    assert isinstance(default_planner(torch.device("cuda")), TimingPlanner)


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups", "size", "kernel", "cheapest"),
    [
        pytest.param(8, 8, 1, 16, 3, "grouped", id="whole blocks of channels"),
        pytest.param(24, 8, 1, 16, 3, "grouped", id="other whole blocks of channels"),
        pytest.param(12, 16, 1, 16, 3, "unfold", id="input channels in part of a block"),
        pytest.param(16, 12, 1, 16, 3, "unfold", id="output channels in part of a block"),
        pytest.param(32, 24, 2, 16, 3, "unfold", id="output channels per group in part of a block"),
        pytest.param(32, 32, 2, 16, 3, "grouped", id="whole blocks per group"),
        pytest.param(32, 32, 32, 16, 3, "grouped", id="depthwise"),
        pytest.param(32, 32, 32, 3, 3, "unfold", id="depthwise with one output position"),
        pytest.param(32, 64, 1, 16, 1, "unfold", id="pointwise, which copies no patches"),
    ],
)
@pytest.mark.skipif(NAME != "cpu", reason="measured on a CPU")
def test_convolutions_are_instantiated_in_the_way_measured_as_fastest(
    inputs: int, outputs: int, groups: int, size: int, kernel: int, cheapest: str
) -> None:
    positions = size - kernel + 1
    geometry = Geometry((outputs, inputs // groups, kernel, kernel), (1, 1), (0, 0), (1, 1), groups)
    methods = Correlations(
        torch.randn(4, inputs, size, size), torch.randn(4, outputs, positions, positions), geometry, examples=4
    ).methods()
    seconds = {name: methods[name].norm_seconds for name in ("grouped", "unfold")}
    assert min(seconds, key=seconds.__getitem__) == cheapest
