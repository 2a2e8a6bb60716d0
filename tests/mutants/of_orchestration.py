"""Bugs in orchestration, by file; those that a review found no test for come first."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in

COMPLETING: Final = ("tests/orchestration/execution/test_completing.py",)
COMPLETION: Final = ("tests/orchestration/execution/test_completion.py",)
INDIVIDUALS: Final = ("tests/orchestration/comparison/test_individuals.py",)
INTEGRITY: Final = ("tests/orchestration/records/test_integrity.py",)
METRICS: Final = ("tests/orchestration/comparison/test_metrics.py",)
OWNERSHIP: Final = ("tests/orchestration/records/test_ownership.py",)
PLAN: Final = ("tests/orchestration/sweeps/test_plan.py",)
RECORD: Final = ("tests/orchestration/comparison/test_record.py",)
TABLES: Final = ("tests/orchestration/report/test_tables.py",)

ORCHESTRATION: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "orchestration/execution/completion.py",
        COMPLETING,
        B(
            'return exact if release_mode(sweep.release.name).statistics == "exact" else None',
            "return exact",
            "the default mode discloses exact statistics",
            True,
        ),
        B(
            "if stored is not None:\n        return stored",
            "if False:\n        return stored",
            "statistics are drawn again on repetition",
            True,
        ),
        B(
            "AccountingJob(files.root, planned.spec.delta,",
            "AccountingJob(files.root, 1e-5,",
            "epsilons of examples at a fixed delta",
            True,
        ),
        B(
            "release_statistics(epsilons.upper,",
            "release_statistics(epsilons.lower,",
            "lower bounds are released",
            True,
        ),
        B(
            'read_attacks(files.attacks) if sweep.release.name == "raw" else AttackResults()',
            "read_attacks(files.attacks)",
            "attacks are disclosed in every mode",
            True,
        ),
        B(
            "len(group_names), worst.epsilon, release)",
            "len(group_names), float(epsilons.upper.max()), release)",
            "the bound of a release is read off the data",
            True,
        ),
        B(
            "write_statistics(files.private_summary, exact, private=True)",
            "write_statistics(files.private_summary, exact, private=False)",
            "exact statistics are public",
            True,
        ),
        B(
            "releases=release.releases()), worst.delta).epsilon",
            "releases=release.releases()[:1]), worst.delta).epsilon",
            "the cost shown of a release is that of its histogram",
        ),
        B(
            "    forget_checkpoint(files.checkpoint)\n    return stopped",
            "    return stopped",
            "the key of a stopped trial's noise is kept",
            True,
            ("tests/orchestration/execution/test_coordinator.py", *COMPLETING),
        ),
        B(
            "step.noise_multiplier >= other.noise_multiplier",
            "step.noise_multiplier > 0.0",
            "any noise counts as no dearer than planned",
            True,
            COMPLETION,
        ),
        B(
            "return costs(bound, planned.spec.delta, sweep) if bound else _estimated(costs(trace, planned.spec.delta, sweep))",
            "return costs(bound or trace, planned.spec.delta, sweep)",
            "a run longer than its plan has a guarantee",
            True,
            COMPLETION,
        ),
        B(
            'account(trace.until(step), delta, "rdp")',
            'account(trace.until(step - 1), delta, "rdp")',
            "the cost so far lacks a step",
            True,
        ),
        B(
            "kind_of_capped(epsilons, worst), cost)",
            "kind_of_capped(epsilons, worst), 0.0)",
            "a release is shown to be free",
        ),
    ),
    *bugs_in(
        "orchestration/execution/estimate_quality.py",
        ("tests/orchestration/execution/test_estimate_quality.py",),
        B(
            "estimated = np.minimum(epsilons.upper[rows], worst_case)",
            "estimated = np.minimum(epsilons.upper[: len(rows)], worst_case)",
            "errors are those of other examples",
        ),
        B(
            "largest_error=float(errors.max())",
            "largest_error=float(errors.min())",
            "the smallest error is the largest",
        ),
    ),
    *bugs_in(
        "orchestration/sweeps/plan.py",
        PLAN,
        B(
            'account(trace, delta, "pld", size) if size > 1 else single',
            "replace(single, epsilon=size * single.epsilon, group_size=size) if size > 1 else single",
            "a group of k costs k times one example",
            True,
        ),
        B("after_training if point.is_private else ()", "()", "what is released is no part of the target", True),
        B(
            "if trial.spec.is_private and trial.spec.delta >= 1.0 /",
            "if trial.spec.is_private and trial.spec.delta >= 1.5 /",
            "a delta above 1/n is not warned of",
            True,
        ),
        B("if epochs == 0:", "if epochs < 0:", "a budget that pays for nothing is accepted"),
        B("steps * (tracked * _BYTES_PER_ROW", "(tracked * _BYTES_PER_ROW", "tracked examples take no space"),
        B(
            "tuple(account(trace, delta, other) for",
            "tuple(account(trace, delta, sweep.privacy.accountant) for",
            "further accountants repeat the first",
        ),
        B("self.sweep.privacy.accountant,\n", '"rdp",\n', "calibrated by another accountant than accounted"),
        B(
            "shown(error, sweep.disclosure)",
            "str(error)",
            "refusals quote the data",
            True,
            ("tests/orchestration/sweeps/test_plan.py",),
        ),
    ),
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
            "str(not noise_source_kind(spec.noise_source).is_secret)",
            "str(noise_source_kind(spec.noise_source).is_secret)",
            "research mode is turned around",
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
            "values = np.minimum(epsilons.upper, worst_case.epsilon)",
            "values = epsilons.upper",
            "statistics are not capped at the worst case",
        ),
        B(
            'epsilons.kind if worst_case.kind == "guarantee" else "estimate"',
            "epsilons.kind",
            "statistics capped at an estimate are guarantees",
            True,
        ),
        B(
            "members := epsilons.groups == group)",
            "members := epsilons.groups != group)",
            "each group shows the others",
        ),
        B("deviation / len(values) ** 0.5", "deviation", "the standard error is the deviation"),
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
            "return trial.quality.accuracy if trial.quality else None",
            "return trial.quality.loss if trial.quality else None",
            "loss as accuracy",
        ),
        B(
            "return min(groups, key=lambda group: group.accuracy, default=None)",
            "return max(groups, key=lambda group: group.accuracy, default=None)",
            "the best-served group is the worst",
        ),
        B(
            "return max(changes) - min(changes) if len(changes) > 1 else None",
            "return max(changes) if len(changes) > 1 else None",
            "unequal cost is the largest change",
            False,
            ("tests/orchestration/report/test_page.py::test_unequal_cost_is_the_range_of_changes",),
        ),
        B("return worst / median if worst", "return median / worst if worst", "the ratio is turned around"),
        B(
            "value if value is not None and math.isfinite(value) else None for",
            "value for",
            "infinite numbers reach results.json",
        ),
        B("if size > 1}", "if size > 2}", "groups of two are not in MLflow"),
        B(
            "half, before = sum(counts) / 2.0, 0.0",
            "half, before = sum(counts) / 4.0, 0.0",
            "the quartile is the median",
            False,
            ("tests/orchestration/report/test_page.py::test_the_median_is_read_off_a_released_histogram",),
        ),
        B("if finished or not family.of_model:", "if True:", "what a stopped trial reached is final"),
        B(
            "trial.history[0].noise_multiplier if",
            "trial.history[-1].noise_multiplier if",
            "the last noise is the initial one",
        ),
    ),
    *bugs_in(
        "orchestration/comparison/statistics.py",
        METRICS,
        B("statistics.fmean(finite), deviation", "min(finite), deviation", "the mean over seeds is the minimum"),
        B(
            "statistics.stdev(finite)",
            "statistics.pstdev(finite)",
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
            "-total.mean, -(worst or total).mean",
            "total.mean, -(worst or total).mean",
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
            '*((_over_seeds(metric, setting), "n") for metric in shown),',
            '*((_over_seeds(metric, settings[0]), "n") for metric in shown),',
            "every row shows the first setting",
        ),
        B(
            "worst = [max((value for",
            "worst = [min((value for",
            "of several seeds the lowest group epsilon is the worst case",
            True,
        ),
        B(
            "number(largest.high if largest else None)",
            "number(largest.low if largest else None)",
            "the smallest of the largest errors",
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
        "orchestration/records/published.py",
        METRICS,
        B("return self.ended - self.started if", "return (self.ended - self.started) / 60 if", "wall time in minutes"),
    ),
    *bugs_in(
        "orchestration/records/ownership.py",
        OWNERSHIP,
        B(
            "time.sleep(min(1.0, period / 4.0))\n    _require_free(uri, _read(uri), mine, period)",
            "time.sleep(min(1.0, period / 4.0))",
            "the claim is not read again",
        ),
        B("if age < 3.0 * period:", "if age < 0.0:", "a live claim is taken over"),
        B("fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", "two drivers share a folder"),
        B("if not _is_ours(uri, mine):", "if False:", "a replaced driver goes on"),
    ),
    *bugs_in(
        "orchestration/records/integrity.py",
        INTEGRITY,
        B(
            "return {name: digest for name, digest in digests.items() if not name.startswith(_PRIVATE)}",
            "return dict(digests)",
            "digests of private files are public",
            True,
        ),
        B(
            "write_sealed(files.private_digests, json.dumps(private).encode(), private=True)",
            "write_sealed(files.private_digests, json.dumps(private).encode())",
            "the file of private digests is public",
            True,
        ),
        B("return exists(uri) and _digest(uri) != digest", "return False", "altered files are not noticed"),
    ),
    *bugs_in(
        "orchestration/records/results.py",
        COMPLETING,
        B(
            "write_sealed(uri, _STATISTICS.dump_json(statistics), private)",
            "write_sealed(uri, _STATISTICS.dump_json(statistics))",
            "exact statistics are public",
            True,
        ),
    ),
    *bugs_in(
        "orchestration/records/failures.py",
        ("tests/orchestration/records/test_release_modes.py", "tests/orchestration/sweeps/test_plan.py"),
        B(
            "return release_mode(disclosure).error_text(error)",
            "return str(error)",
            "the text of every error is shown",
            True,
        ),
    ),
    *bugs_in(
        "orchestration/comparison/shown.py",
        RECORD,
        B(
            "accuracy_change=evaluation.accuracy - baseline.accuracy if",
            "accuracy_change=baseline.accuracy - evaluation.accuracy if",
            "the change has the wrong sign",
        ),
        B(
            "estimate.group_size: estimate.epsilon for",
            "estimate.group_size: result.worst_case.epsilon for",
            "groups cost what one example costs",
            True,
        ),
        B("kind=worst.kind,", 'kind="guarantee",', "estimates are shown as guarantees", True),
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
        ("tests/orchestration/commands/test_owner.py",),
        B("round_up(epsilon, 4) if epsilon", "epsilon if epsilon", "owners are told less than they paid", True),
        B("round_up(math.exp(epsilon), 2)", "math.exp(epsilon)", "owners are told smaller odds", True),
    ),
)
