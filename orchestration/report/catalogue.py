"""The list of the report's figures: name, title, section and drawing function of each, and which go to MLflow.

To add a figure, add a function to `dpsweep.orchestration.report.figures` and one entry to `FIGURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dpsweep.accounting.mechanism.units import protects_users
from dpsweep.orchestration.comparison.findings import Findings
from dpsweep.orchestration.comparison.rate_metrics import WORST_GROUP_METRICS, group_metric
from dpsweep.orchestration.comparison.settings import finished_settings, group_names
from dpsweep.orchestration.report import figures as draw
from dpsweep.orchestration.report import private_figures, training_curves
from dpsweep.orchestration.report.figures import Scene, drawable
from dpsweep.orchestration.report.plot import Plot, style_of
from dpsweep.orchestration.report.training_curves import metric_over_epochs, searched_curves, tuning_curves
from dpsweep.orchestration.store.published import PublishedSweep, PublishedTrial
from dpsweep.orchestration.store.release_modes import release_mode
from dpsweep.workers.tasks import task_called

Section = Literal["results", "tuning", "groups", "who pays", "single examples", "over time"]


def norms_are_off(trials: Sequence[PublishedTrial]) -> bool:
    """Return whether norms of single examples were off in every trial that ran."""
    norms = {trial.params.get("spec.norms.refreshes_per_epoch") for trial in trials if trial.privacy is not None}
    return norms == {"off"}


OF_USERS: Final = (
    "Every ε is that of a user who joins or leaves with all their rows. A change of some rows of a user who stays is "
    "not covered by it."
)


def are_per_user(trials: Sequence[PublishedTrial]) -> bool:
    """Return whether epsilons are per user, with all of a user's rows."""
    return any(trial.privacy is not None and protects_users(trial.privacy.unit) for trial in trials)


def why_examples_are_missing(data: PublishedSweep) -> str:
    """Return the reason why the report shows no individual epsilons."""
    if are_per_user(data.trials):
        return f"Not computed. {OF_USERS}"
    if norms_are_off(data.trials):
        return (
            "Not computed. The sweep says “norms: off”, so the norms that the epsilons of single training examples "
            "rest on were not taken; the worst case holds for each of them."
        )
    if any(trial.is_selected for trial in data.trials):
        return "Not computed. No epsilon of single examples is proven after a private selection; the worst case holds."
    return release_mode(data.disclosure).missing


def _without_baseline(data: PublishedSweep, found: Findings) -> str:
    if found.unknown_cost:
        return "The baseline is of no use as a reference, so changes against it would say nothing."
    if not found.private:
        return "No private trial has finished."
    return (
        "No finished private trial has a non-private baseline with the same data, model and seed. "
        "Add “none” to the clipping methods of the sweep."
    )


@dataclass(frozen=True)
class Figure:
    """One figure of the report, or several of one kind.

    `title`: ``{main}`` stands for accuracy, or the main score of the task, and ``{points}`` for its unit. `draw`:
    returns the figures by the suffix that completes their name and title ("" for a single one); None and figures
    without data are left out. `missing`: returns the text that the page shows in place of a figure without data, or "".
    """

    name: str
    title: str
    section: Section
    draw: Callable[[Scene], Mapping[str, Plot | None]]
    missing: Callable[[PublishedSweep, Findings], str] = lambda data, found: ""
    in_mlflow: bool = False
    """Whether the figure is also attached to the sweep's MLflow run."""


def _one(draw: Callable[[Scene], Plot | None]) -> Callable[[Scene], Mapping[str, Plot | None]]:
    return lambda scene: {"": draw(scene)}


FIGURES: Final = (
    Figure("utility-fairness", "Utility and fairness", "results", _one(draw.utility_fairness), in_mlflow=True),
    Figure("privacy-utility", "Privacy and utility", "results", _one(draw.privacy_utility)),
    Figure("privacy-fairness", "Privacy and fairness", "results", _one(draw.privacy_fairness)),
    Figure("group-size", "Any k records together", "results", _one(training_curves.epsilon_over_group_size)),
    Figure("tuning: ", "", "tuning", tuning_curves),
    Figure("tried: ", "", "tuning", searched_curves),
    Figure("group-accuracy", "{main} on test data", "groups", _one(draw.group_accuracy), in_mlflow=True),
    Figure(
        "group-change",
        "Change against the baseline{points}",
        "groups",
        _one(draw.group_change),
        missing=_without_baseline,
    ),
    Figure(
        "group-epsilon",
        "What its training examples paid: mean εᵢ",
        "groups",
        _one(draw.mean_group_epsilon),
        missing=lambda data, found: why_examples_are_missing(data),
        in_mlflow=True,
    ),
    Figure("group-loss", "Loss on test data", "groups", _one(draw.of_groups("loss"))),
    Figure("group-norm", "Gradient norm of its training examples", "groups", _one(draw.of_groups("gradient_norm"))),
    Figure("group-bias", "Clipping bias: taken off its gradients", "groups", _one(draw.of_groups("clipping_bias"))),
    Figure("group-noise", "Noise in its mean gradient", "groups", _one(draw.of_groups("noise_error"))),
    Figure("who-pays", "{main} of a group against its mean εᵢ", "who pays", _one(draw.who_pays)),
    Figure("histogram of ", "", "single examples", draw.histograms),
    Figure("loss of ", "εᵢ and loss: ", "single examples", private_figures.loss_densities),
    Figure("estimates of ", "Estimated and exact εᵢ: ", "single examples", private_figures.estimate_densities),
    Figure("risk of ", "Who is at risk, by ε, attack and audit: ", "single examples", private_figures.risks),
    Figure("accuracy", "{main} on test data", "over time", _one(training_curves.accuracy_over_epochs)),
    Figure(
        "loss",
        "Loss on test data",
        "over time",
        _one(metric_over_epochs("test_loss", "loss on test data")),
    ),
    Figure(
        "epsilon",
        "Cost of the steps so far",
        "over time",
        _one(training_curves.epsilon_over_epochs),
    ),
    Figure("accountants: ", "By every accountant: ", "over time", training_curves.accountants_over_epochs),
    Figure("rho", "ρ of the steps so far", "over time", _one(training_curves.rho_over_epochs)),
    Figure("noise", "Noise multiplier", "over time", _one(training_curves.noise)),
    Figure("clipping", "Clipping bounds", "over time", _one(training_curves.clipping_bounds)),
    Figure("norms", "Gradient norms of groups", "over time", _one(private_figures.norms_over_epochs)),
    Figure(
        "departures", "Training examples that have spent their budget", "over time", _one(training_curves.departures)
    ),
)


def titled(kind: Figure, task: str) -> str:
    """Return the title of a figure, with the main score of the task."""
    of = group_metric(task_called(task).main)
    return kind.title.format(main=of.heading, points=", in points" if of.format.is_share else "")


@dataclass(frozen=True)
class DrawnFigure:
    """A figure that has data, with its complete name and title."""

    kind: Figure
    name: str
    title: str
    figure: Plot

    @property
    def alone(self) -> Plot:
        """Return the figure with its title and a legend, for where no page is around it."""
        of, top = self.figure, 72
        margin = {**of.layout["margin"], "t": of.layout["margin"]["t"] + top}
        told = {"title": {"text": draw.without_markup(self.title)}, "showlegend": True}
        named = [{**trace, "showlegend": "name" in trace} for trace in of.data]
        return Plot({**of.layout, **told, "margin": margin, "height": of.height + top}, named)


def drawn_figures(
    data: PublishedSweep, useless: Container[str] = (), kinds: Sequence[Figure] = FIGURES
) -> tuple[DrawnFigure, ...]:
    """Return every figure of these kinds for which there is data, in their order. useless: names of settings that wear
    no ring.
    """
    settings = finished_settings(data.trials)
    drawn, worst = drawable(settings), WORST_GROUP_METRICS[data.worst_group]
    groups = group_names(*drawn)
    scene = Scene(drawn, style_of(settings), groups, worst, data.task, useless)
    return tuple(
        DrawnFigure(kind, kind.name + which, titled(kind, data.task) + which, figure)
        for kind in kinds
        for which, figure in kind.draw(scene).items()
        if figure is not None and figure.data
    )


def figures_for_mlflow(data: PublishedSweep, useless: Container[str] = ()) -> dict[str, str]:
    """Return the figures to attach to the sweep's MLflow run, by name, as HTML pages. useless: as in
    `drawn_figures`.
    """
    attached = [kind for kind in FIGURES if kind.in_mlflow]
    return {drawn.name: drawn.alone.page() for drawn in drawn_figures(data, useless, attached)}
