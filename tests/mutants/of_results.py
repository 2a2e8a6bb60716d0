"""Bugs in what is shown of results, by file; those that a review found no test for come first."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in

INDIVIDUALS: Final = ("tests/orchestration/comparison/test_individuals.py",)
METRICS: Final = ("tests/orchestration/comparison/test_metrics.py",)
RECORD: Final = ("tests/orchestration/comparison/test_record.py",)
TABLES: Final = ("tests/orchestration/report/test_tables.py",)

RESULTS: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "orchestration/comparison/record.py",
        RECORD,
        B(
            "disclosure=EXACT if view is not disclosed else self.disclosure",
            "disclosure=self.disclosure",
            "the owner's report is not marked sensitive",
            True,
        ),
        B(
            "view: View = disclosed) -> PublishedSweep:",
            'view: View | None = None) -> PublishedSweep:\n        view = view or exact(SweepFiles(""))',
            "what is shown needs private files",
        ),
        B(
            "reasons_of(self.sweep, result.spec, set(of_data).intersection(FROM_ROWS))",
            "()",
            "what the sweep says makes no claim weaker",
            True,
        ),
        B('({"sensitive": "true"} if release_mode', "({} if release_mode", "raw runs are not marked sensitive", True),
        B(
            'row["status"] == TrialState.FAILED.word',
            'row["status"] != TrialState.FAILED.word',
            "earlier failures are forgotten",
        ),
    ),
    *bugs_in(
        "orchestration/comparison/individuals.py",
        INDIVIDUALS,
        B(
            'return weakest(own, "estimate" if',
            'return (lambda one, other: one)(own, "estimate" if',
            "statistics capped at an estimate are guarantees",
            True,
        ),
        B(
            "_group_epsilon(name, summary.groups[group])",
            "_group_epsilon(name, summary.everyone)",
            "each group shows everyone",
        ),
        B("moments.deviation / moments.count**0.5", "moments.deviation", "the standard error is the deviation"),
        B("disclosure=RELEASED,", "disclosure=EXACT,", "released statistics are called exact"),
        B("median=released.quantiles.get(0.5),", "median=released.mean_epsilon,", "the mean is the median"),
        B(
            "group.mean_epsilon, group.mean_standard_error, group.examples)",
            "group.mean_epsilon, group.examples_standard_error, group.examples)",
            "the standard error of the count is that of the mean",
        ),
    ),
    *bugs_in(
        "orchestration/comparison/metrics.py",
        METRICS,
        B(
            "return value if value is not None and math.isfinite(value) else None",
            "return value",
            "infinite numbers reach results.json",
        ),
        B("in FAMILIES if finished or not family.of_model)", "in FAMILIES)", "what a stopped trial reached is final"),
    ),
    *bugs_in(
        "orchestration/comparison/intervals.py",
        ("tests/orchestration/comparison/test_intervals.py",),
        B("np.maximum(of_examples - chance, 0.0) + between", "of_examples", "seeds leave intervals as they are"),
        B("freedom < _FEW, np.maximum", "freedom < 0, np.maximum", "two seeds that agree by chance are certain"),
        B("(1.0 / count + found.overlap)", "(1.0 / count)", "overlapping splits count as independent"),
        B("if _is_due_to_chance(value, varies, units, tail):", "if False:", "a difference of one example is a verdict"),
        B("return False\n    ahead", "pass\n    ahead", "small differences of many examples are never told apart"),
        B(
            "between = across if is_paired else nothing",
            "between = nothing",
            "what pairs of pooled seeds share is lost",
        ),
        B("spread * factor**2", "spread", "a setting whose seeds spread more unnoticed makes wrong verdicts"),
    ),
    *bugs_in(
        "orchestration/comparison/extremes.py",
        ("tests/orchestration/comparison/test_coverage.py",),
        B("float(all_high.min())", "float(high.min())", "many groups make the worst one look worse than it is"),
        B("return min(found_value, float(limits.min()))", "return found_value", "the worst group is above the mean"),
        B("tail / len(pairs))[0].max()", "tail)[0].max()", "equal groups have a gap"),
        B(
            "float(extreme.value(value)) - bias",
            "float(extreme.value(value))",
            "the worst of many groups is not corrected",
        ),
    ),
    *bugs_in(
        "orchestration/comparison/denominators.py",
        ("tests/orchestration/comparison/test_coverage.py",),
        B(
            '"true_positive_rate": lambda found: found.labels == 1',
            '"true_positive_rate": lambda found: found.labels >= 0',
            "a rate of three positives is as sure as one of all examples",
        ),
    ),
    *bugs_in(
        "orchestration/comparison/findings.py",
        ("tests/orchestration/comparison/test_findings.py",),
        B("(self.interval.low > 0.0) == (metric", "(self.interval.low < 0.0) == (metric", "better is worse"),
        B("if self.interval.is_of_one_seed:", "if False:", "one seed is a verdict"),
        B("comparisons=self.comparisons,", "comparisons=1,", "every difference is the only one"),
        B("(1.0 - LEVEL) / max(1, count)", "(1.0 - LEVEL)", "numbers of the chosen setting ignore the choice"),
        B(
            "if setting.is_baseline and not has_diverged(setting)]",
            "if setting.is_baseline]",
            "a diverged baseline counts",
        ),
    ),
    *bugs_in(
        "orchestration/comparison/rate_metrics.py",
        ("tests/orchestration/comparison/test_findings.py",),
        B('worst = min if of.better == "higher" else max', "worst = min", "the best-served group is the worst"),
    ),
    *bugs_in(
        "orchestration/comparison/values.py",
        METRICS,
        B(
            "return trial.quality.accuracy if trial.quality else None",
            "return trial.quality.loss if trial.quality else None",
            "loss as accuracy",
        ),
        B(
            "return max(changes) - min(changes) if len(changes) > 1 else None",
            "return max(changes) if len(changes) > 1 else None",
            "unequal cost is the largest change",
            False,
            ("tests/orchestration/report/test_page.py::test_unequal_cost_is_the_range_of_changes",),
        ),
        B("return worst / median if worst", "return median / worst if worst", "the ratio is turned around"),
        B("if size > 1}", "if size > 2}", "groups of two are not in MLflow"),
        B(
            "half, before = sum(counts) / 2.0, 0.0",
            "half, before = sum(counts) / 4.0, 0.0",
            "the quartile is the median",
            False,
            ("tests/orchestration/report/test_page.py::test_the_median_is_read_off_a_released_histogram",),
        ),
        B(
            "trial.history[0].noise_multiplier if",
            "trial.history[-1].noise_multiplier if",
            "the last noise is the initial one",
        ),
    ),
    *bugs_in(
        "orchestration/comparison/statistics.py",
        METRICS,
        B("mean = statistics.fmean(finite)", "mean = min(finite)", "the mean over seeds is the minimum"),
        B(
            "math.sqrt(len(finite) - 1)",
            "math.sqrt(len(finite))",
            "the deviation is that of a population",
            False,
            ("tests/orchestration/report/test_page.py::test_seeds_are_averaged_into_settings",),
        ),
        B(
            "and one != other",
            "",
            "equal points dominate each other",
            False,
            ("tests/orchestration/report/test_page.py::test_the_pareto_front_drops_what_is_beaten",),
        ),
    ),
    *bugs_in(
        "orchestration/comparison/settings.py",
        TABLES,
        B("math.hypot(*known) / len(known)", "max(known)", "the standard error does not fall with seeds"),
        B(
            "-total.mean, sign * worst.mean",
            "total.mean, sign * worst.mean",
            "the front prefers low accuracy",
            False,
            ("tests/orchestration/report/test_page.py::test_the_pareto_front_drops_what_is_beaten",),
        ),
        B(
            "if trial.state is TrialState.FINISHED:",
            "if trial.state.has_ended:",
            "failed trials are averaged",
            False,
            ("tests/orchestration/report/test_page.py",),
        ),
    ),
    *bugs_in(
        "orchestration/report/tables.py",
        TABLES,
        B(
            '(_composed(setting), "n"),\n                *((_over_seeds(metric, setting)',
            '(_composed(setting), "n"),\n                *((_over_seeds(metric, settings[0])',
            "every row shows the first setting",
        ),
        B(
            "worst = [max((value for",
            "worst = [min((value for",
            "of several seeds the lowest group epsilon is the worst case",
            True,
        ),
        B(
            '*((metric.format.one(metric.value(trial)), "n") for metric in shown),',
            '*((metric.format.one(metric.value(trial)), "n") for metric in shown[::-1]),',
            "cells stand under other headings",
        ),
        B(
            "for setting in (setting for setting in settings if not setting.is_baseline):",
            "for setting in settings:",
            "the baseline has a row of group epsilons",
        ),
        B('privacy.kind.replace("_", " ")', '"guarantee"', "every claim is a guarantee", True),
    ),
    *bugs_in(
        "orchestration/report/exact_results.py",
        ("tests/orchestration/report/test_exact_results.py",),
        B(
            "number(largest.high if largest else None)",
            "number(largest.low if largest else None)",
            "the smallest of the largest errors",
        ),
        B("distance = one.mean - other.mean", "distance = other.mean - one.mean", "the distance has the wrong sign"),
    ),
    *bugs_in(
        "orchestration/records/published.py",
        METRICS,
        B("return self.ended - self.started if", "return (self.ended - self.started) / 60 if", "wall time in minutes"),
    ),
    *bugs_in(
        "orchestration/comparison/publishing.py",
        RECORD,
        B(
            "or math.isnan(value - before) else value - before",
            "or math.isnan(value - before) else before - value",
            "the change has the wrong sign",
        ),
        B(
            "estimate.group_size: estimate.epsilon for",
            "estimate.group_size: result.worst_case.epsilon for",
            "groups cost what one example costs",
            True,
        ),
        B("kind=worst.kind if", 'kind="guarantee" if', "estimates are shown as guarantees", True),
        B(
            "privacy=None if point.is_private else",
            "privacy=None if True else",
            "a failed baseline is not known to be one",
        ),
        B(
            "record.epoch,\n            step=record.step",
            "record.epoch + 1,\n            step=record.step",
            "epochs count from 1",
        ),
    ),
    *bugs_in(
        "orchestration/report/owner.py",
        ("tests/orchestration/report/test_owner_words.py",),
        B("round_up(epsilon, 4) if epsilon", "epsilon if epsilon", "owners are told less than they paid", True),
        B("round_up(math.exp(epsilon), 2)", "math.exp(epsilon)", "owners are told smaller odds", True),
    ),
)
