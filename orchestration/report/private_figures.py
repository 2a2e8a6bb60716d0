"""Draw figures for the owner of the training data only: densities of single examples, gradient norms. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from dpsweep.accounting.attacks import epsilon_of_area
from dpsweep.orchestration.comparison.formats import correlation, in_one_word
from dpsweep.orchestration.comparison.settings import Setting
from dpsweep.orchestration.report.figures import Scene, blank, faded, label_end, line, meta_of, whiskers, without_markup
from dpsweep.orchestration.report.plot import INK, Plot
from dpsweep.orchestration.store.published import Density, PublishedPrivacy, PublishedTrial
from dpsweep.workers.evaluation.attack_results import auc_interval


def norms_over_epochs(scene: Scene) -> Plot:
    """Return the mean gradient norm of each group over the epochs of the first seed; the largest at the end is
    labelled.
    """
    figure = blank(height=360)
    for setting in scene.settings:
        trial = setting.first_seed
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
    """Return epsilon_i of every training example against its log loss (paper A, Figure 5), of the first seed."""

    def found(trial: PublishedTrial) -> tuple[Density | None, float | None]:
        shown = trial.individuals
        return (shown.loss_density, shown.loss_correlation) if shown else (None, None)

    return _densities(scene, found, "ln loss when norms were last taken", "ε<sub>i</sub>")


def estimate_densities(scene: Scene) -> dict[str, Plot | None]:
    """Return estimated epsilon_i against epsilon_i from norms at every step (paper A, Figure 2), of the first seed."""

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


def risks(scene: Scene) -> dict[str, Plot | None]:
    """Return mean epsilon_i, attacks and audits of the first seed, by group; one figure for each attacked setting.

    An attack is shown as the least epsilon that allows its area under the ROC curve (`epsilon_of_area`), with the ends
    of its 95% interval: that is neither a bound nor proven. The mean epsilon_i bounds attacks on the group where these
    epsilons are guarantees, so it bears their kind.
    """
    drawn: dict[str, Plot | None] = {}
    for setting in scene.settings:
        trial = setting.first_seed
        if trial.privacy is not None and trial.privacy.is_private and trial.memberships:
            drawn[setting.name] = _risk(scene, setting, trial, trial.privacy)
    return drawn


_ATTACKS: Final = {"RMIA": "circle", "loss": "square", "gradient norm": "diamond"}
_STAGGER: Final = 0.16  # of a row, between two attacks on one group


def _risk(scene: Scene, setting: Setting, trial: PublishedTrial, privacy: PublishedPrivacy) -> Plot:
    figure, colour = blank(height=130 + 44 * len(scene.groups)), scene.style.colour(setting)
    figure.layout |= {"showlegend": True, "legend": {"orientation": "h", "y": -0.2, "yanchor": "top"}}
    rows = {name: float(row) for row, name in enumerate(scene.groups)}
    found = [each for each in trial.memberships if each.name in rows]

    def mark(label: str, places: Mapping[str, float | None], symbol: str, above: float, **look: Any) -> None:
        known = {name: value for name, value in places.items() if value is not None and name in rows}
        figure.add_scatter(
            x=[*known.values()],
            y=[rows[name] + above for name in known],
            mode="markers",
            name=label,
            text=[without_markup(name) for name in known],
            hovertemplate=f"%{{text}}: {label} %{{x:.3g}}<extra></extra>",
            marker={"color": colour, "symbol": symbol, "size": 9, **look},
            meta=meta_of(setting),
            showlegend=True,
        )

    for place, (label, symbol) in enumerate(_ATTACKS.items()):
        areas = {each.name: (each.auc, each.loss_auc, each.gradient_auc)[place] for each in found}
        ends = [auc_interval(areas[each.name], each.examples // 2) for each in found]
        shown = {name: epsilon_of_area(area, privacy.delta) for name, area in areas.items()}
        mark(f"attack by {label}", shown, symbol, _STAGGER * (place - 1), color=INK)
        low, high = ([epsilon_of_area(end, privacy.delta) for end in side] for side in zip(*ends, strict=True))
        at = [*shown.values()]
        figure.data[-1]["error_x"] = whiskers(
            [end - value for end, value in zip(high, at, strict=True)],
            [value - end for end, value in zip(low, at, strict=True)],
            thickness=1.0,
            color=INK,
        )
    if trial.individuals is not None:
        means = {group.name: group.mean for group in trial.individuals.groups}
        mark(f"mean εᵢ ({in_one_word(trial.individuals.kind)})", means, "line-ns-open", 0.0, size=22)
    audits = trial.every_audit
    for audit in audits:
        figure.add_vline(audit.lower_bound, line={"color": colour, "width": 1.0, "dash": "dot"})
        mark("proven by the audit", dict(audit.groups), "triangle-right", 2 * _STAGGER)
    figure.add_vline(privacy.epsilon, line={"color": colour, "width": 1.5})
    proven = ", dotted: proven by audits" if audits else ""
    figure.update_xaxes(title_text=f"ε (line: worst case{proven})", rangemode="tozero")
    figure.update_yaxes(
        tickvals=[*rows.values()],
        ticktext=[without_markup(name) for name in rows],
        range=[len(rows) - 0.5, -0.5],
        showgrid=False,
    )
    return figure


def _densities(
    scene: Scene, found: Callable[[PublishedTrial], tuple[Density | None, float | None]], across: str, up: str
) -> dict[str, Plot | None]:
    """Return one figure for each setting whose first seed has a density; keys are its name with Pearson's r."""
    drawn: dict[str, Plot | None] = {}
    for setting in scene.settings:
        density, r = found(setting.first_seed)
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
        hovertemplate=f"<b>{without_markup(setting.name)}</b><br>%{{x:.3~g}}, %{{y:.3~g}}: %{{customdata}} examples"
        "<extra></extra>",
        meta=meta_of(setting),
    )
    figure.update_xaxes(title_text=across, showgrid=False)
    figure.update_yaxes(title_text=up, showgrid=False)
    return figure
