"""Bugs in what is shown of results, by file; those that a review found no test for come first."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in

INDIVIDUALS: Final = ("tests/orchestration/execution/test_example_statistics.py",)
RECORD: Final = ("tests/orchestration/comparison/test_record.py",)
TABLES: Final = ("tests/orchestration/report/test_tables.py",)

RESULTS: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "orchestration/comparison/record.py",
        RECORD,
        B(
            "disclosure=self.disclosure if owned is None else EXACT",
            "disclosure=self.disclosure",
            "the owner's report is not marked sensitive",
            True,
        ),
        B(
            "reasons_of(self.sweep, result.spec, set(of_data).intersection(FROM_ROWS))",
            "()",
            "what the sweep says makes no claim weaker",
            True,
        ),
        B('({"sensitive": "true"} if release_mode', "({} if release_mode", "raw runs are not marked sensitive", True),
    ),
    *bugs_in(
        "orchestration/execution/example_statistics.py",
        INDIVIDUALS,
        B(
            'return weakest(own, "estimate" if',
            'return (lambda one, other: one)(own, "estimate" if',
            "statistics capped at an estimate are guarantees",
            True,
        ),
    ),
    *bugs_in(
        "orchestration/comparison/intervals.py",
        ("tests/orchestration/comparison/test_intervals.py",),
        B("np.maximum(of_examples - chance, 0.0) + between", "of_examples", "seeds leave intervals as they are"),
        B("freedom < _FEW, np.maximum", "freedom < 0, np.maximum", "two seeds that agree by chance are certain"),
        B(" + count * runs.overlap) if", ") if", "overlapping splits count as independent"),
        B("if len(names) == 1:", "if True:", "seeds of one split count as splits"),
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
        "orchestration/comparison/settings.py",
        ("tests/orchestration/comparison/test_intervals.py",),
        B(
            "more = more if more.any() else _spread_apart",
            "more = more if True else _spread_apart",
            "seeds of several settings that failed hide each other, so that one that fits has learnt nothing",
        ),
        B("subsets = special.comb(count, few) * len(few)", "subsets = 1.0", "settings are held apart by chance"),
    ),
    *bugs_in(
        "orchestration/comparison/extremes.py",
        ("tests/orchestration/comparison/test_coverage.py",),
        B("tail / count)[1].min()", "tail)[1].min()", "many groups make the worst one look worse than it is"),
        B("return min(found_value, float(limits.min()))", "return found_value", "the worst group is above the mean"),
        B("tail / len(pairs))[0].max()", "tail)[0].max()", "equal groups have a gap"),
        B(
            "float(extreme.value(value)) - bias",
            "float(extreme.value(value))",
            "the worst of many groups is not corrected",
        ),
        B(
            '"true_positive_rate": lambda found: found.labels == 1',
            '"true_positive_rate": lambda found: found.labels >= 0',
            "a rate of three positives is as sure as one of all examples",
        ),
    ),
    *bugs_in(
        "orchestration/comparison/sanity.py",
        ("tests/orchestration/comparison/test_sanity.py",),
        B("interval.low > chance", "interval.high > chance", "what chance may have found is of use"),
    ),
    *bugs_in(
        "orchestration/sweeps/grid.py",
        ("tests/orchestration/sweeps/test_identity.py",),
        B("for point in () if all(", "for point in () if any(", "trials of another version are further seeds"),
    ),
    *bugs_in(
        "orchestration/sweeps/manifest.py",
        ("tests/orchestration/test_growth.py",),
        B("    if before != now:", "    if False:", "an epsilon at one delta is told at another"),
        B(
            "if not list_files(SweepFiles(root).attempts_of_all):",
            "if True:",
            "what was added to results composes as if it had been planned",
            True,
        ),
        B("if point.is_private and key not in known", "if key not in known", "a baseline weakens the composed epsilon"),
    ),
    *bugs_in(
        "orchestration/comparison/findings.py",
        ("tests/orchestration/comparison/test_findings.py",),
        B("(self.interval.low > 0.0) == (metric", "(self.interval.low < 0.0) == (metric", "better is worse"),
        B("if self.interval.is_of_one_seed:", "if False:", "one seed is a verdict"),
        B("comparisons=self.comparisons,", "comparisons=1,", "every difference is the only one"),
        B("(1.0 - LEVEL) / max(1, count)", "(1.0 - LEVEL)", "numbers of the chosen setting ignore the choice"),
        B(
            "if setting.is_baseline and not is_lost(setting)]",
            "if setting.is_baseline]",
            "a diverged baseline counts",
        ),
    ),
    *bugs_in(
        "orchestration/report/tables.py",
        TABLES,
        B(
            "return at_most(max(epsilons",
            "return at_most(min(epsilons",
            "of several seeds the lowest group epsilon is the worst case",
            True,
        ),
        B("in_one_word(privacy.kind)", '"guarantee"', "every claim is a guarantee", True),
        B(
            "each.group_kinds.get(size, each.kind)",
            "each.kind",
            "groups claim what one record does",
            True,
        ),
        B(
            "in_one_word(account.kind)",
            "in_one_word(account.individual_kind)",
            "a worst case accounted again claims what single examples do",
            True,
            ("tests/orchestration/report/test_exact_results.py",),
        ),
    ),
    *bugs_in(
        "orchestration/report/first_screen.py",
        ("tests/orchestration/report/test_first_screen.py::test_what_all_models_cost_bears_its_own_kind",),
        B(
            "_claimed(whole.estimate.kind)",
            "_claimed(privacy.kind if privacy else 'guarantee')",
            "all models together claim what one does",
            True,
        ),
    ),
    *bugs_in(
        "orchestration/tracking/tracker.py",
        ("tests/orchestration/comparison/test_ledger.py::test_groups_pay_for_all_trials_together",),
        B(
            "group.group_size: group.estimate.kind for",
            "group.group_size: 'guarantee' for",
            "the composed epsilon of groups is a guarantee in MLflow",
            True,
        ),
    ),
    *bugs_in(
        "orchestration/comparison/publishing.py",
        RECORD,
        B(
            "estimate.group_size: estimate.epsilon for",
            "estimate.group_size: result.worst_case.epsilon for",
            "groups cost what one example costs",
            True,
        ),
        B("kind=worst.kind if", 'kind="guarantee" if', "estimates are shown as guarantees", True),
    ),
    *bugs_in(
        "orchestration/comparison/across_sweeps.py",
        (
            "tests/orchestration/commands/test_compare.py"
            "::test_results_of_a_sweep_may_have_decided_that_another_private_one_was_run",
        ),
        B("if sum(is_private) > 1 else", "if False else", "sweeps that follow each other compose to a guarantee", True),
        B("if sum(is_private) > 1 else", "if True else", "a sweep of baselines weakens the composed epsilon"),
    ),
    *bugs_in(
        "orchestration/report/owner.py",
        ("tests/orchestration/report/test_owner_words.py",),
        B("round_up(math.exp(epsilon), 2)", "math.exp(epsilon)", "owners are told a smaller factor", True),
        B('f"plus {report', 'f"except with probability {report', "owners are told that larger odds are rare", True),
        B('"estimate" in (report.kind, risk and risk.kind)', "False", "no attack passes an estimate", True),
    ),
)
