"""The report: what it says, what it withholds, that it stands alone, and that a browser draws it."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE
from dpsweep.orchestration.comparison.findings import findings
from dpsweep.orchestration.comparison.formats import number, points, seconds
from dpsweep.orchestration.comparison.metrics import metric
from dpsweep.orchestration.comparison.rate_metrics import WORST_GROUP_METRICS
from dpsweep.orchestration.comparison.settings import Setting, best_trade_offs, finished_settings, group_names
from dpsweep.orchestration.comparison.statistics import pareto_front
from dpsweep.orchestration.comparison.values import main, worst_over_median
from dpsweep.orchestration.report import page
from dpsweep.orchestration.report.catalogue import FIGURES, drawn_figures, figures_for_mlflow
from dpsweep.orchestration.report.figures import look_of
from dpsweep.orchestration.report.page import render
from dpsweep.orchestration.report.prose import headline
from dpsweep.orchestration.store.published import (
    EpsilonHistogram,
    PublishedPrivacy,
    PublishedQuality,
    PublishedSweep,
    PublishedTrial,
    TrialState,
)
from dpsweep.orchestration.store.release_modes import RELEASE_MODES
from tests.known import known
from tests.orchestration.report.pages import Page, figures, rendered
from tests.orchestration.sample_sweeps import sample_sweep, sample_trial


def test_a_page_stands_alone() -> None:
    """Nothing is loaded from anywhere, and every picture it shows is inside it."""
    html = rendered("raw")
    page = Page(html)
    assert page.addresses == ["data:,"]
    assert "ε<sub>i</sub>" in html
    assert not re.search('title="[^"]*<', html), "a tooltip is plain text"
    content = known(re.search(r'<script id="figures" type="application/json">(.*?)</script>', html, re.DOTALL))
    assert set(page.plots) == set(json.loads(content[1]))
    packed = known(re.search(r'<script id="plotly" type="text/plain">([^<]*)</script>', html))
    assert gzip.decompress(base64.b64decode(packed[1])).count(b"plotly.js v") == 1
    assert len(html.encode()) < 4_000_000


def test_a_large_page_keeps_each_row_in_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_LARGE", 40_000)
    stored = known(re.search(r'<script id="rows" type="text/plain">([^<]*)', render(sample_sweep())))[1]
    rows = json.loads(gzip.decompress(base64.b64decode(stored)))
    assert rows
    assert not any("</table>" in each for each in rows)


def test_the_page_says_that_trials_add_up_and_baselines_are_not_protected() -> None:
    said = " ".join(" ".join(Page(rendered("raw")).words).split())
    assert "publishing several costs more, as the composed ε says" in said
    assert "No guarantee covers the non-private baseline" in said


def _mean(setting: Setting, metric: Callable[[PublishedTrial], float | None]) -> float:
    spread = known(setting.over_seeds(metric))
    return spread.mean


def test_the_headline_says_what_was_found() -> None:
    data = sample_sweep()
    settings = finished_settings(data.trials)
    said = " ".join(headline(data, findings(data, NO_EVIDENCE)))
    private = [setting for setting in settings if not setting.is_baseline]
    best = max(private, key=lambda setting: _mean(setting, main))
    assert best.name in said
    ratios = [_mean(setting, worst_over_median) for setting in private]
    assert f"{max(ratios):.1f} times less" in said
    assert "Groups served worse paid more under " in said
    assert "1 trial failed" in said


def test_a_range_of_equal_ends_is_told_as_one_number() -> None:
    def paid_half(trial: PublishedTrial) -> PublishedTrial:
        half = trial.privacy.epsilon / 2.0 if trial.privacy else 0.0
        return replace(trial, individuals=trial.individuals and replace(trial.individuals, median=half))

    data = replace(sample_sweep(), trials=tuple(map(paid_half, sample_sweep().trials)))
    assert "2.0 times less (as in all settings)." in " ".join(headline(data, findings(data, NO_EVIDENCE)))


def test_a_worst_case_that_the_median_example_paid_is_not_called_overstated() -> None:
    def all_paid(trial: PublishedTrial) -> PublishedTrial:
        paid = trial.privacy.epsilon if trial.privacy else 0.0
        return replace(trial, individuals=trial.individuals and replace(trial.individuals, median=paid / 1.03))

    data = replace(sample_sweep(), trials=tuple(map(all_paid, sample_sweep().trials)))
    said = " ".join(headline(data, findings(data, NO_EVIDENCE)))
    assert "overstates" not in said
    assert "The median example paid about as much as the worst case: under " in said


def _with_weak_correlation(trial: PublishedTrial) -> PublishedTrial:
    """The trial with a mean epsilon_i of its groups that hardly follows their accuracy."""
    if trial.individuals is None or trial.quality is None:
        return trial
    served = sorted(trial.quality.groups, key=lambda group: group.main or 0.0)
    paid = dict(zip((group.name for group in served), (1.3, 1.1, 1.5, 1.2, 1.4, 1.1, 1.5, 1.2, 1.4, 1.3), strict=True))
    groups = tuple(replace(group, mean=paid[group.name]) for group in trial.individuals.groups)
    return replace(trial, individuals=replace(trial.individuals, groups=groups))


def test_a_correlation_over_groups_that_chance_explains_is_no_finding() -> None:
    data = replace(sample_sweep(), trials=tuple(map(_with_weak_correlation, sample_sweep().trials)))
    said = " ".join(headline(data, findings(data, NO_EVIDENCE)))
    assert "paid more" not in said
    assert "Whether groups that are served worse pay more cannot be told: the strongest correlation" in said
    assert re.search(r"is r = −?0\.[0-4]\d, over 10 groups \(.*\)\. By ranks, which one group far off does not", said)


def test_withheld_statistics_are_nowhere_and_the_page_says_why() -> None:
    html = rendered("none")
    text = Page(html).text.replace("ε i", "εᵢ")
    assert text.count(RELEASE_MODES["none"].missing) == 2
    assert "median example paid" not in text
    assert not [
        name for name in figures(sample_sweep("none")) if name.startswith(("histogram", "group-epsilon", "who"))
    ]
    assert "Sensitive." not in text


def test_exact_statistics_are_announced() -> None:
    assert "Sensitive. This page shows exact statistics" in Page(rendered("raw")).text
    released = Page(rendered("private")).text
    assert "Sensitive." not in released
    assert "released with differential privacy at ε = 0.100" in released


def test_epsilons_of_several_kinds_are_told_apart_by_method() -> None:
    def enforced(trial: PublishedTrial) -> PublishedTrial:
        own = trial.individuals if trial.labels["clipping"] == "flat" else None
        return replace(trial, individuals=replace(own, kind="guarantee")) if own else trial

    data = replace(sample_sweep(), trials=tuple(map(enforced, sample_sweep().trials)))
    assert "themselves are estimates (dpsgd_f, individual) and guarantees (flat)." in render(data, NO_EVIDENCE)


def test_user_text_is_never_markup() -> None:
    hostile = "<img src=x onerror=alert(1)>&</script><script>alert(2)</script>%{x}"
    trial = sample_trial(flavour=hostile)
    assert trial.quality is not None
    groups = (replace(trial.quality.groups[0], name=hostile), *trial.quality.groups[1:])
    trial = replace(trial, quality=replace(trial.quality, groups=groups), error=hostile, notes=(hostile,), key=hostile)
    data = replace(sample_sweep(), name=hostile, trials=(trial,), provenance={hostile: hostile})
    html = render(data)
    plain = rendered("raw")
    assert html.count("<script") == plain.count("<script")
    assert "<img" not in html.replace(_plotly(html), "")
    assert hostile in Page(html).text


def _plotly(html: str) -> str:
    scripts: list[str] = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    return max(scripts, key=len)


def _broken(data: PublishedSweep) -> PublishedSweep:
    """Numbers a diverged training leaves behind."""
    trial = data.trials[2]
    assert trial.quality is not None
    assert trial.individuals is not None
    groups = tuple(replace(group, accuracy=math.nan, accuracy_change=math.nan) for group in trial.quality.groups)
    quality = PublishedQuality(math.nan, math.nan, math.nan, groups)
    individuals = replace(trial.individuals, histogram=EpsilonHistogram((0.0, 1.0), (math.nan,)), median=math.nan)
    return replace(data, trials=(replace(trial, quality=quality, individuals=individuals), *data.trials[3:]))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (replace(sample_sweep(), trials=()), "This sweep has no trials."),
        (replace(sample_sweep(), trials=sample_sweep().trials[-1:]), "No private trial has finished"),
        (replace(sample_sweep(), trials=sample_sweep().trials[:2]), "No private trial has finished"),
        (replace(sample_sweep(), trials=(sample_trial(),)), "flat · constant reaches accuracy"),
        (sample_sweep(baseline=False), "No finished private trial has a non-private baseline"),
        (_broken(sample_sweep()), " reaches accuracy "),
        (
            replace(sample_sweep(), trials=(replace(sample_trial(), state=TrialState.PENDING, quality=None),)),
            "the same dpsweep run continues",
        ),
    ],
    ids=["no trials", "all failed", "baseline only", "single trial", "no baseline", "not a number", "unfinished"],
)
def test_incomplete_sweeps_render(data: PublishedSweep, said: str) -> None:
    page = Page(render(data))
    assert said in page.text
    assert not re.search(r"\bnan\b", page.text, re.IGNORECASE)
    assert "All trials" in page.text


def test_an_infinite_epsilon_is_never_a_number() -> None:
    trial = replace(sample_trial("none", "none"), labels={"clipping": "none", "schedule": "none", "seed": 0})
    assert trial.privacy == PublishedPrivacy(math.inf, 1e-5, "pld")
    html = render(replace(sample_sweep(), trials=(trial,)))
    assert "∞" in Page(html).text
    assert "Infinity" not in html.replace(_plotly(html), "")


def test_pictures_across_sweeps_share_their_looks() -> None:
    """Colour says clipping and symbol says schedule, wherever a setting is drawn."""
    looks: dict[tuple[str, str], set[tuple[str, str]]] = {}
    drawn = figures(sample_sweep())
    for name in ("utility-fairness", "group-accuracy", "group-change", "group-epsilon", "who-pays"):
        for trace in drawn[name].data:
            look = (trace.marker.color, trace.marker.symbol)
            looks.setdefault((trace.meta["clipping"], trace.meta["schedule"]), set()).add(look)
    assert all(len(found) == 1 for found in looks.values())
    assert len({next(iter(found)) for found in looks.values()}) == len(looks) == 7


def test_every_figure_that_is_drawn_has_its_place_on_the_page_and_some_in_mlflow() -> None:
    data = sample_sweep(targets=(1.0, 3.0, 8.0))
    html, drawn = render(data), drawn_figures(data)
    left_out = {"tuning: ", "tried: ", "loss", "accountants: ", "rho", "risk of "}
    assert {each.kind for each in drawn} == {kind for kind in FIGURES if kind.name not in left_out}
    assert all(f'data-figure="{each.name}"' in html and each.title for each in drawn)
    pages = figures_for_mlflow(data)
    assert list(pages) == ["utility-fairness", "group-accuracy", "group-epsilon"]
    assert all("</html>" in page and "Plotly.newPlot(" in page for page in pages.values())


def test_a_marker_tells_the_hyperparameters_that_differ() -> None:
    def tuned(clipping: str, bound: float) -> PublishedTrial:
        return replace(sample_trial(clipping), params={"clipping.bound": bound, "epochs": 3})

    data = replace(sample_sweep(), trials=(tuned("flat", 0.5), tuned("dpsgd_f", 2.0)))
    hovers = [trace.text for trace in figures(data)["utility-fairness"].data if trace.text]
    assert hovers == [("<br>clipping bound: 0.5",), ("<br>clipping bound: 2",)]


def test_privacy_gets_its_own_axis_when_it_varies() -> None:
    assert "privacy-utility" not in figures(sample_sweep())
    drawn = figures(sample_sweep(targets=(1.0, 3.0, 8.0)))
    assert drawn["privacy-utility"].layout.xaxis.type == "log"
    assert {"privacy-utility", "privacy-fairness", "utility-fairness"} <= set(drawn)


def test_a_page_says_of_looks_that_its_key_does_not_have_where_their_names_are() -> None:
    told = "Shades and open markers tell settings of one method apart"
    assert told not in render(sample_sweep())
    assert told in render(sample_sweep(targets=(1.0, 3.0)))


def test_names_of_two_baselines_stand_on_both_sides_of_their_lines() -> None:
    data = sample_sweep(targets=(1.0, 8.0))
    others = [each for each in data.trials if each.is_baseline]
    wide = [replace(each, key=f"{each.key}-wide", labels={**each.labels, "model": "<wide>"}) for each in others]
    named = figures(replace(data, trials=(*data.trials, *wide)))["privacy-utility"].layout.annotations
    names = {each.yanchor: each.text for each in named}
    assert names == {"top": "non-private", "bottom": "non-private · model &lt;wide&gt;"}


def test_groups_are_ordered_by_how_they_are_served() -> None:
    drawn = figures(sample_sweep())
    assert group_names(*finished_settings(sample_sweep().trials))[0] == "digit 8"
    axes = [drawn[name].layout.yaxis.ticktext for name in ("group-accuracy", "group-change", "group-epsilon")]
    assert axes[0] == axes[1] == axes[2]
    assert axes[0][0] == "digit 8"


def test_whiskers_show_the_noise_of_a_release() -> None:
    """One seed has no range; its released mean still is no sharper than the noise that was added to it."""
    trial = sample_trial(disclosure="private")
    trace = figures(replace(sample_sweep("private"), trials=(trial,)))["group-epsilon"].data[0]
    assert trial.individuals is not None
    errors = {group.name: group.standard_error for group in trial.individuals.groups}
    assert list(trace.error_x.array) == list(trace.error_x.arrayminus) == [errors[name] for name in trace.text]


def test_the_page_compares_by_the_chosen_metric_of_the_worst_group() -> None:
    data = replace(sample_sweep(), worst_group="accuracy_change")
    drawn, text = figures(data), Page(render(data)).text
    assert drawn["utility-fairness"].layout.yaxis.title.text == "change of the worst-served group"
    assert "Change of the worst-served group" in text
    assert "Worst change" in text
    assert '<option value="worst_group_accuracy_change" selected>' in render(data)


def test_a_sweep_says_why_it_has_no_changes_against_a_baseline() -> None:
    data = sample_sweep()
    baselines = tuple(trial for trial in data.trials if trial.is_baseline)
    alone = Page(render(replace(data, trials=baselines))).text
    assert "No private trial has finished." in alone
    assert "Pareto front of" not in alone, "no ring is drawn"
    text = Page(rendered("raw")).text
    assert "Grey is without privacy. A dark ring marks the Pareto front of the private settings." in text


def test_the_pareto_front_drops_what_is_beaten() -> None:
    assert pareto_front([(1.0, 1.0), (2.0, 0.5), (2.0, 2.0), (1.0, 1.0)]) == (0, 1, 3)
    assert pareto_front([]) == ()
    worst = WORST_GROUP_METRICS["accuracy"]
    front = {setting.name for setting in best_trade_offs(finished_settings(sample_sweep().trials), worst)}
    assert front == {"dpsgd_f · exponential"}, "epsilons that differ by a rounding are the same cost"


def test_what_is_exact_is_shown_to_the_owner_alone() -> None:
    """Estimates, attacks and correlations with loss, whose numbers have tests of their own."""
    headings = (
        "How good the estimates are",
        "Who can be found in the model",
        "Membership attack",
        "Pearson’s r of ε i and log loss",
    )
    text = Page(rendered("raw")).text
    assert [heading for heading in headings if heading not in text] == []
    for disclosure in ("private", "none"):
        shown = Page(rendered(disclosure)).text
        assert [
            each
            for each in ("How good the estimates are", "found in the model", "Membership", "log loss")
            if each in shown
        ] == []


def test_pictures_have_names_and_tables_can_be_scrolled_without_a_mouse() -> None:
    html = rendered("raw")
    assert '<html lang="en">' in html
    body = html[html.index("<body>") : html.index("<script>")]
    assert body.count('role="img" aria-label="') == len(Page(html).plots) + 1, "and the one with axes to choose"
    assert not re.search(
        r'aria-label="[^"]{0,2}"|<th(?!ead| scope)|<div class="scroll">|<svg class="swatch" width', body
    )


def test_axes_of_shares_end_at_0_and_100_percent_where_all_are_equal() -> None:
    layout = figures(sample_sweep())["utility-fairness"].layout
    for axis in (layout.xaxis, layout.yaxis, figures(sample_sweep())["group-accuracy"].layout.xaxis):
        assert (axis.autorangeoptions.clipmin, axis.autorangeoptions.clipmax) == (0.0, 1.0)
    assert look_of(metric("r2").format)["autorangeoptions"] == {"clipmin": None, "clipmax": 1.0}, "may be negative"
    assert look_of(metric("accuracy_change").format)["autorangeoptions"]["clipmin"] == -1.0


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (number(3.0), "3.00"),
        (number(259.136), "259"),
        (number(12345.6), "12,346"),
        (number(0.0123), "0.0123"),
        (number(math.inf), "∞"),
        (number(math.nan), "–"),
        (points(-0.0123), "−1.2"),
        (seconds(3725.0), "1 h 2 min"),
        (seconds(9.96), "10.0 s"),
    ],
)
def test_numbers_read_well(shown: str, expected: str) -> None:
    assert shown == expected
