"""Draw figures for the owner of the training data only: densities of single examples, gradient norms. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from dpsweep.orchestration.comparison.formats import correlation
from dpsweep.orchestration.comparison.rate_metrics import group_metric
from dpsweep.orchestration.comparison.settings import Setting, first_seed, group_value
from dpsweep.orchestration.records.published import Density, PublishedTrial
from dpsweep.orchestration.report.figures import Scene, blank, by_group, faded, label_end, line, meta_of, plain_text
from dpsweep.orchestration.report.plot import Plot
from dpsweep.orchestration.report.style import INK


def gradient_norms(scene: Scene) -> Plot:
    """Return the mean gradient norm of the training examples of each group, before clipping (papers A and D)."""
    return _in_training(scene, "gradient_norm")


def clipping_biases(scene: Scene) -> Plot:
    """Return the mean norm of the part that clipping removes from gradients of each group (paper D, Section 4.2)."""
    return _in_training(scene, "clipping_bias")


def noise_errors(scene: Scene) -> Plot:
    """Norm of the noise in the mean gradient of each group (paper D, Section 4.2)."""
    return _in_training(scene, "noise_error")


def _in_training(scene: Scene, name: str) -> Plot:
    return by_group(scene, lambda group: group_value(group, group_metric(name).value), ".3~g")


def norms_over_epochs(scene: Scene) -> Plot:
    """Return the mean gradient norm of each group over the epochs of the first seed; the largest at the end is
    labelled.
    """
    figure = blank(height=360)
    for setting in scene.settings:
        trial = first_seed(setting)
        groups = (
            {group.name: group.training for group in trial.quality.groups if group.training} if trial.quality else {}
        )
        ends = {name: course.norms[-1] or 0.0 for name, course in groups.items() if course.norms}
        for name, course in groups.items():
            history = trial.history[len(trial.history) - len(course.norms) :]
            bold = ends.get(name) == max(ends.values(), default=None)
            whose = f"{setting.name}: {name}"
            width, opacity = (2.0, 1.0) if bold else (1.0, 0.25)
            line(figure, setting, scene.style, history, course.norms, whose, width=width, opacity=opacity)
            if bold and history:
                label_end(figure, name, history[-1].epoch, ends[name], scene.style.colour(setting))
    figure.update_xaxes(title_text="epoch")
    figure.update_yaxes(title_text="mean gradient norm", rangemode="tozero")
    return figure


def loss_densities(scene: Scene) -> dict[str, Plot | None]:
    """epsilon_i of every training example against its log loss (paper A, Figure 5), of the first seed."""

    def found(trial: PublishedTrial) -> tuple[Density | None, float | None]:
        shown = trial.individuals
        return (shown.loss_density, shown.loss_correlation) if shown else (None, None)

    return _densities(scene, found, "ln loss when norms were last taken", "ε<sub>i</sub>")


def estimate_densities(scene: Scene) -> dict[str, Plot | None]:
    """Estimated epsilon_i against epsilon_i from norms at every step (paper A, Figure 2), of the first seed."""

    def found(trial: PublishedTrial) -> tuple[Density | None, float | None]:
        quality = trial.individuals.estimates if trial.individuals else None
        return (quality.density, quality.correlation) if quality else (None, None)

    drawn = _densities(scene, found, "ε<sub>i</sub> from norms of every step", "ε<sub>i</sub> as estimated")
    for figure in drawn.values():
        if figure is not None:
            (density,) = figure.data
            ends = [limit(*density["x"], *density["y"]) for limit in (min, max)]
            look = {"mode": "lines", "line": {"color": INK, "width": 1, "dash": "dot"}, "hoverinfo": "skip"}
            figure.add_scatter(x=ends, y=ends, meta=density["meta"], **look)
    return drawn


def _densities(
    scene: Scene, found: Callable[[PublishedTrial], tuple[Density | None, float | None]], across: str, up: str
) -> dict[str, Plot | None]:
    """Return one figure for each setting whose first seed has a density; keys are its name with Pearson's r."""
    drawn: dict[str, Plot | None] = {}
    for setting in scene.settings:
        density, r = found(first_seed(setting))
        if density is not None:
            title = f"{setting.name}, r = {correlation(r)}" if r is not None else setting.name
            drawn[title] = _heatmap(scene, setting, density, across, up)
    return drawn


def _heatmap(scene: Scene, setting: Setting, density: Density, across: str, up: str) -> Plot:
    """Return a heatmap of counts on a logarithmic scale in the setting's colour; empty cells are transparent."""
    figure, colour = blank(height=300), scene.style.colour(setting)
    counts = [[count or None for count in column] for column in zip(*density.counts, strict=True)]
    figure.add_heatmap(
        x=density.x_edges,
        y=density.y_edges,
        z=[[None if count is None else math.log10(count) for count in row] for row in counts],
        customdata=counts,
        colorscale=[[0.0, faded(colour, 0.2)], [1.0, colour]],
        showscale=False,
        hovertemplate=f"<b>{plain_text(setting.name)}</b><br>%{{x:.3~g}}, %{{y:.3~g}}: %{{customdata}} examples"
        "<extra></extra>",
        meta=meta_of(setting),
    )
    figure.update_xaxes(title_text=across, showgrid=False)
    figure.update_yaxes(title_text=up, showgrid=False)
    return figure
