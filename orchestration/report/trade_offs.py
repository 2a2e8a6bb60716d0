"""Draw accuracy, the metric of the worst-served group and epsilon against each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpsweep.orchestration.comparison.parameters import in_words
from dpsweep.orchestration.comparison.rate_metrics import spoken, spoken_worst
from dpsweep.orchestration.comparison.settings import Setting, best_trade_offs, levels
from dpsweep.orchestration.comparison.values import epsilon, main
from dpsweep.orchestration.report.figures import (
    Axis,
    Scene,
    blank,
    meta_of,
    numbers,
    plain_text,
    range_mode,
    ticks_of,
    whiskers,
)
from dpsweep.orchestration.report.plot import INK, MUTED, Plot

_EPSILON_AXIS = Axis("worst-case ε (log scale)", epsilon, ".3~g")


def utility_fairness(scene: Scene) -> Plot | None:
    """Return the metric of the worst-served group against accuracy on all test data; None for one group."""
    return _scatter(scene, total_axis(scene), worst_axis(scene)) if len(scene.groups) > 1 else None


def privacy_utility(scene: Scene) -> Plot | None:
    """Return the accuracy against worst-case epsilon; None if all private settings have the same epsilon."""
    return _privacy(scene, total_axis(scene))


def privacy_fairness(scene: Scene) -> Plot | None:
    """Return the metric of the worst-served group against worst-case epsilon; None if all private settings cost the
    same, or if there is one group.
    """
    return _privacy(scene, worst_axis(scene)) if len(scene.groups) > 1 else None


def hyperparameters(settings: Sequence[Setting]) -> dict[str, str]:
    """Return the hover text of each setting, by name: the hyperparameters that differ between settings, one per
    line.
    """
    found = {setting.name: numbers(setting) for setting in settings}
    values: dict[str, set[float]] = {}
    for own in found.values():
        for name, value in own.items():
            values.setdefault(name, set()).add(value)
    varied = [name for name, several in values.items() if len(several) > 1]
    return {
        setting: "".join(f"<br>{plain_text(in_words(name))}: {own[name]:g}" for name in varied if name in own)
        for setting, own in found.items()
    }


def total_axis(scene: Scene, where: str = " on test data") -> Axis:
    """Return the axis of the accuracy on all test examples, or of the main score of the task."""
    return Axis(f"{spoken(scene.main)}{where}", main, scene.main_ticks)


def worst_axis(scene: Scene) -> Axis:
    """Return the axis of the worst-group metric that the sweep compares settings by."""
    of = scene.worst_group
    return Axis(f"{spoken_worst(of)} of the worst-served group", of.value, ticks_of(of.format))


def _privacy(scene: Scene, y: Axis) -> Plot | None:
    """``y`` against worst-case epsilon; None if all private settings have the same epsilon to two digits."""
    private = [setting for setting in scene.settings if not setting.is_baseline]
    if len(levels(private)) < 2:
        return None
    figure = _scatter(replace(scene, settings=private), _EPSILON_AXIS, y)
    figure.update_xaxes(type="log", dtick="D2")
    baselines = [setting for setting in scene.settings if setting.is_baseline]
    lines = sorted((mean, each.name) for each in baselines if (mean := each.mean(y.value)) is not None)
    for mean, _ in lines:
        figure.add_hline(mean, line={"color": MUTED, "width": 1, "dash": "dot"})
    # the highest above its line and the lowest below: names of lines close together would cover each other
    for (mean, name), anchor in {lines[0]: "top", lines[-1]: "bottom"}.items() if lines else ():
        figure.add_annotation(x=0, xref="paper", xanchor="left", y=mean, yanchor=anchor, text=name)
    return figure


def _scatter(scene: Scene, x: Axis, y: Axis) -> Plot:
    """Return one marker per setting at its mean over seeds, whiskers over their range, a faint dot per seed."""
    figure = blank(height=430)
    style, front = scene.style, best_trade_offs(scene.settings, scene.worst_group, scene.useless)
    adapted = hyperparameters(scene.settings)
    for setting in scene.settings:
        across, up = setting.over_seeds(x.value), setting.over_seeds(y.value)
        if across is None or up is None:
            continue
        seeds = [(x.value(trial), y.value(trial)) for trial in setting.trials] if len(setting.trials) > 1 else []
        look = {"color": style.colour(setting), "symbol": style.symbol(setting)}
        figure.add_scatter(
            x=[point[0] for point in seeds],
            y=[point[1] for point in seeds],
            mode="markers",
            marker={**look, "size": 6, "opacity": 0.35},
            hoverinfo="skip",
            meta=meta_of(setting),
        )
        ring = {"color": INK, "width": 2.5} if setting in front else {"color": "white", "width": 1}
        figure.add_scatter(
            x=[across.mean],
            y=[up.mean],
            error_x=whiskers([across.high - across.mean], [across.mean - across.low], color=style.colour(setting)),
            error_y=whiskers([up.high - up.mean], [up.mean - up.low], color=style.colour(setting)),
            mode="markers",
            cliponaxis=False,
            marker={**look, "size": 15, "line": ring if not setting.is_baseline else {"width": 2.5}},
            name=setting.name,
            text=[adapted.get(setting.name, "")],
            hovertemplate=(
                f"<b>{plain_text(setting.name)}</b><br>{x.title}: %{{x}}<br>{y.title}: %{{y}}%{{text}}<extra></extra>"
            ),
            meta=meta_of(setting),
        )
    figure.update_xaxes(title_text=x.title, tickformat=x.ticks, rangemode=range_mode(x.ticks))
    figure.update_yaxes(title_text=y.title, tickformat=y.ticks, rangemode=range_mode(y.ticks))
    return figure
