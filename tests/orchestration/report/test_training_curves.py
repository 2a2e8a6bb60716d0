"""Pictures of what changes: over epochs, over group sizes, over hyperparameters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpsweep.accounting import (
    PoissonSampling,
    ShuffledSampling,
    account,
    parse_schedule,
    planned_trace,
)
from dpsweep.accounting.jobs.release import ReleaseSpec
from dpsweep.accounting.mechanism.samplings import Sampling
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.pld import vadhan_epsilon
from dpsweep.orchestration.comparison.formats import at_most
from dpsweep.orchestration.report.page import render
from dpsweep.orchestration.store.attempts import Attempt
from dpsweep.orchestration.store.published import Label, PublishedSweep, PublishedTrial, PublishedTuning
from tests.known import known
from tests.orchestration.report.pages import Page, figures
from tests.orchestration.sample_sweeps import sample_sweep, sample_trial


def test_accuracy_loss_and_cost_are_drawn_over_the_epochs() -> None:
    drawn = figures(sample_sweep())
    (flat, *_) = [trace for trace in drawn["accuracy"].data if trace.name == "flat · constant"]
    assert list(flat.y) == [epoch.metrics["test_accuracy"] for epoch in sample_trial().history]
    assert [trace.name for trace in drawn["epsilon"].data] == [trace.name for trace in drawn["noise"].data]
    assert "loss" not in drawn, "the sample has no losses over epochs"
    losses = tuple(replace(epoch, metrics={"test_loss": 2.0 / (1 + epoch.epoch)}) for epoch in sample_trial().history)
    data = replace(sample_sweep(), trials=(replace(sample_trial(), history=losses),))
    assert figures(data)["loss"].data[0].y[1] == 1.0
    assert "accuracy" not in figures(data)


def test_an_epoch_that_has_the_bound_of_a_later_one_is_not_drawn_as_free() -> None:
    costs = (1.1, 1.1, 1.6, 1.6, 2.0)
    epochs = tuple(replace(sample_trial().history[0], epoch=at, metrics={"epsilon": e}) for at, e in enumerate(costs))
    (drawn,) = figures(replace(sample_sweep(), trials=(replace(sample_trial(), history=epochs),)))["epsilon"].data
    assert (list(drawn.x), list(drawn.y)) == ([1, 3, 4], [1.1, 1.6, 2.0])


def test_curves_are_of_the_lowest_seed_in_whatever_order_seeds_are_listed() -> None:
    late, early = sample_trial(seed=3), sample_trial(seed=1)
    late = replace(late, history=tuple(replace(epoch, noise_multiplier=9.0) for epoch in late.history))
    for trials in ((late, early), (early, late)):
        (line,) = figures(replace(sample_sweep(), trials=trials))["noise"].data
        assert list(line.y) == [epoch.noise_multiplier for epoch in early.history]


RUN = planned_trace(parse_schedule("exponential:decay=0.05", 1.5), PoissonSampling(0.02), 30, 23, 5000)
SHUFFLED = planned_trace(parse_schedule("constant", 8.0), ShuffledSampling(23), 30, 23, 5000)


def with_trace(trace: Trace) -> PublishedSweep:
    trial = sample_trial()
    return replace(sample_sweep(), trials=(replace(trial, attempts=(Attempt(trial.key, 1, 1e-5, trace),)),))


@pytest.mark.long
def test_accountants_are_overlaid_over_epochs() -> None:
    """Each at the cost of the steps so far; what covers no sampled batches is not drawn."""
    drawn = figures(with_trace(RUN))
    lines = {line.name: line for line in drawn["accountants: constant"].data}
    assert list(lines) == ["pld", "rdp", "rdp-classic", "zcdp-sampled (estimate)", "strong"]
    for name, line in lines.items():
        steps = [23 * (epoch + 1) for epoch in line.x]
        assert list(line.y) == [account(RUN.until(step), 1e-5, name.partition(" ")[0]).epsilon for step in steps]
        assert (line.x[0], line.x[-1]) == (0, 29)
        assert list(line.y) == sorted(line.y)
    assert all(tight <= loose for tight, loose in zip(lines["pld"].y, lines["rdp-classic"].y, strict=True))
    assert "rho" not in drawn, "sampling does not reduce rho"


def test_rho_is_drawn_over_epochs_where_nothing_is_sampled() -> None:
    drawn = figures(with_trace(SHUFFLED))
    (line,) = drawn["rho"].data
    assert list(line.y) == pytest.approx([(epoch + 1) / (2 * 8.0**2) for epoch in range(30)])
    assert "zcdp" in [line.name for line in drawn["accountants: constant"].data]


def test_the_owner_sees_examples_as_densities_and_others_nothing() -> None:
    drawn = figures(sample_sweep())
    found = drawn["loss of flat · constant, r = 0.87"].data[0]
    assert [[count or 0 for count in row] for row in found.customdata] == [
        [40, 2, 0, 0],
        [0, 30, 0, 0],
        [0, 0, 20, 0],
        [0, 0, 0, 10],
    ], "a row for each bin of epsilon, a column for each of the loss"
    estimates = drawn["estimates of flat · constant, r = 0.99"]
    assert list(estimates.data[1].x) == list(estimates.data[1].y), "the line where both agree"
    for disclosure in ("none", "private"):
        shown = figures(sample_sweep(disclosure))
        assert not [name for name in shown if name.startswith(("loss of", "estimates of", "norms", "group-noise"))]


def test_norms_bias_and_noise_are_drawn_by_group_and_norms_over_epochs() -> None:
    trial = sample_trial()
    drawn = figures(replace(sample_sweep(), trials=(trial,)))
    assert trial.quality is not None
    last = {group.name: group.training.norms[-1] for group in trial.quality.groups if group.training}
    marks = drawn["group-norm"].data[0]
    assert dict(zip(marks.text, marks.x, strict=True)) == last
    noises = drawn["group-noise"].data[0]
    assert max(zip(noises.x, noises.text, strict=True))[1] == "digit 8", "the smallest group"
    assert [len(line.x) for line in drawn["norms"].data] == [30] * 10
    assert drawn["norms"].layout.annotations[0].text == max((norm or 0.0, name) for name, norm in last.items())[1]


@pytest.mark.long
def test_under_release_none_one_line_says_what_private_would_show_and_cost() -> None:
    data = replace(with_trace(RUN), disclosure="none")
    trial = replace(data.trials[0], individuals=None)
    text = Page(render(replace(data, trials=(trial,)))).text
    cost = account(Trace(5000, releases=ReleaseSpec().releases(), adjacency="add_remove"), 1e-5).epsilon
    assert f"alone ε = {at_most(cost)} at δ = 1e-05 per trial, taken from its target" in text
    assert "release: private would show" not in Page(render(with_trace(RUN))).text


GROUP_RUNS = {
    "one sampled step": (0.5, PoissonSampling(0.01), 1, False),
    "every example in every step": (20.0, PoissonSampling(1.0), 50, True),
}


@pytest.mark.parametrize(("noise_multiplier", "sampling", "steps", "is_bound"), GROUP_RUNS.values(), ids=GROUP_RUNS)
def test_linear_growth_is_a_lower_bound_for_groups_only_where_nothing_is_sampled(
    noise_multiplier: float, sampling: Sampling, steps: int, is_bound: bool
) -> None:
    trace, sizes = planned_trace(parse_schedule("constant", noise_multiplier), sampling, 1, steps, 5000), (1, 2, 4)
    tight = {size: account(trace, 1e-5, "pld", size).epsilon for size in sizes}
    trial = sample_trial()
    assert trial.privacy is not None
    privacy = replace(trial.privacy, epsilon=tight[1], group_epsilons=tight)
    shown = replace(trial, privacy=privacy, attempts=(Attempt(trial.key, 1, 1e-5, trace),))
    data = replace(sample_sweep(), trials=(shown,))
    lines = {line.name.rpartition(", ")[2]: list(line.y) for line in figures(data)["group-size"].data}
    assert lines["tight"] == [tight[size] for size in sizes]
    linear = lines["linear (lower bound)" if is_bound else "linear (no bound)"]
    assert linear == pytest.approx([size * tight[1] for size in sizes], rel=0.01)
    assert all(low <= value for low, value in zip(linear, lines["tight"], strict=True)) is is_bound
    generic = lines["Vadhan (upper bound)"]
    assert generic == [vadhan_epsilon(trace, 1e-5, size) for size in sizes], "an upper bound of the tight line"
    assert generic[2] > 1.05 * lines["tight"][2]
    assert "a lower bound where nothing is sampled, else only a reference" in Page(render(data)).text


def test_swept_values_have_curves_by_method() -> None:
    def swept(clipping: str, bound: float, seed: int) -> PublishedTrial:
        trial = sample_trial(clipping, "constant", seed, target=1.0 + bound, bound=bound)
        params: dict[str, Label] = {"spec.clipping.name": clipping, "spec.clipping.params.bound": bound}
        return replace(trial, params=params, labels={**trial.labels, "bound": f"{clipping}-{bound:g}"})

    trials = [
        swept(clipping, bound, seed) for clipping in ("flat", "dpsgd_f") for bound in (0.5, 2.0) for seed in (0, 1)
    ]
    drawn = figures(replace(sample_sweep(), trials=tuple(trials)))
    curve = drawn["tuning: accuracy against clipping bound"]
    assert [trace.name for trace in curve.data] == ["flat · constant", "dpsgd_f · constant"]
    assert [list(trace.x) for trace in curve.data] == [[0.5, 2.0]] * 2
    dearer = [replace(each, labels={**each.labels, "epsilon": 8.0}) for each in trials]
    both = figures(replace(sample_sweep(), trials=(*trials, *dearer)))["tuning: accuracy against clipping bound"]
    assert [list(trace.x) for trace in both.data] == [[0.5, 2.0]] * 4, "no line joins two epsilons"
    chosen = [replace(each, params={**each.params, "spec.clipping.params.bound": at}) for at, each in enumerate(trials)]
    by_seed = figures(replace(sample_sweep(), trials=tuple(chosen)))
    assert "tuning: accuracy against clipping bound" not in by_seed, "each seed of a private selection chooses a bound"
    assert not [name for name in figures(sample_sweep()) if name.startswith("tuning")]
    said = Page(render(replace(sample_sweep(), trials=tuple(trials)))).text
    assert "Lines join the settings of one method" in said
    assert "As tuned" not in said, "no setting was tuned"


def test_what_tuning_tried_has_a_curve_for_every_setting() -> None:
    def tuned(clipping: str, bounds: dict[float, float | None]) -> PublishedTrial:
        tried = tuple(
            ({"clipping.bound": bound, "optimizer.learning_rate": rate}, None if score is None else score - rate / 100)
            for bound, score in bounds.items()
            for rate in (1.0, 2.0)
        )
        chosen = {"clipping.bound": 2.0, "optimizer.learning_rate": 1.0}
        return replace(sample_trial(clipping), tuning=PublishedTuning("accuracy", chosen, tried))

    trials = tuned("flat", {0.5: 0.7, 2.0: 0.9, 8.0: None}), tuned("dpsgd_f", {0.5: 0.8, 2.0: 0.85, 8.0: 0.6})
    data = replace(sample_sweep(), trials=trials)
    curve = figures(data)["tried: accuracy, as tuned, against clipping bound"]
    flat, fair = (trace for trace in curve.data if trace.mode == "lines+markers")
    assert (list(flat.x), list(fair.x)) == ([0.5, 2.0], [0.5, 2.0, 8.0])
    assert list(flat.y) == pytest.approx([0.69, 0.89])
    assert list(fair.y) == pytest.approx([0.79, 0.84, 0.59])
    assert list(fair.marker.size) == [8, 14, 8], "where it was chosen"
    assert (curve.layout.xaxis.type, list(curve.layout.xaxis.tickvals)) == ("log", [0.5, 2.0, 8.0])
    assert list(curve.layout.xaxis.ticktext) == ["0.5", "2", "8"]
    near = tuned("flat", {1.0: 0.7, 1.01: 0.8, 1.02: 0.9, 8.0: 0.6})
    crowded = figures(replace(data, trials=(near,)))["tried: accuracy, as tuned, against clipping bound"].layout.xaxis
    assert (crowded.tickvals, crowded.dtick) == (None, "D2"), "labels that would overlap"
    assert "tried: accuracy, as tuned, against optimizer learning rate" in figures(data)
    errors = replace(trials[0], tuning=replace(known(trials[0].tuning), by="mse"))
    least = figures(replace(data, trials=(errors,)))["tried: mean squared error, as tuned, against clipping bound"]
    assert list(least.data[1].y) == pytest.approx([0.68, 0.88]), "the smallest is the best"
    assert least.layout.yaxis.tickformat == ".3~g"
    said = Page(render(data)).text
    assert "asks for a wider range" in said
    assert "Lines join the settings" not in said, "every setting has one bound"
