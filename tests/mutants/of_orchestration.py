"""Bugs in what orchestration plans, completes and keeps, by file; those that a review found no test for come first."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in

COMPLETING: Final = ("tests/orchestration/execution/test_completing.py",)
COMPLETION: Final = ("tests/orchestration/execution/test_completion.py",)
INTEGRITY: Final = ("tests/orchestration/store/test_integrity.py",)
AGAIN: Final = (
    "tests/orchestration/comparison/test_ledger.py"
    "::test_a_trial_that_ended_and_was_trained_again_may_have_been_by_its_results"
)
TAKEN_OVER: Final = (
    "tests/orchestration/comparison/test_ledger.py::test_a_release_that_another_sweep_took_over_counts_once"
)
OWNERSHIP: Final = ("tests/orchestration/store/test_ownership.py",)
PLAN: Final = ("tests/orchestration/sweeps/test_plan.py",)

ORCHESTRATION: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "orchestration/execution/coordinator.py",
        ("tests/orchestration/test_micro_batches.py",),
        B(
            "if self._attempts.has_released(key):",
            "if False:",
            "a private trial that has shown an epoch trains from nothing for lack of memory",
            privacy=True,
        ),
    ),
    *bugs_in(
        "orchestration/sweeps/tuning_stages.py",
        ("tests/orchestration/sweeps/test_tune.py",),
        B(
            'content["data"] = content["tune"]["data"]',
            'content["data"] = parse_text(text)["data"]',
            "a tuning that is called public trains on the private data",
            privacy=True,
        ),
    ),
    *bugs_in(
        "orchestration/sweeps/schema.py",
        ("tests/orchestration/sweeps/test_tune.py",),
        B(
            "if needs_public and not all(data.public_fraction > 0.0 for data in sweep.data):",
            "if False:",
            "candidates are chosen without public data",
            privacy=True,
        ),
    ),
    *bugs_in(
        "orchestration/pipeline/winners.py",
        ("tests/orchestration/test_exponential_mechanism.py",),
        B(
            "score: float | None = None",
            "score: float | None = float(read_wrong(files.trial(points[0].key).held_out))",
            "a count of errors leaves the choice",
            True,
        ),
        B(
            "history[-1].public if tune.data is None",
            "history[-1].test if tune.data is None",
            "candidates are chosen by the test data that are reported",
            privacy=True,
            tests=("tests/orchestration/test_tuning.py",),
        ),
    ),
    *bugs_in(
        "orchestration/pipeline/run.py",
        ("tests/orchestration/test_selection.py",),
        B(
            "    delete_folder(files.selection)\n",
            "",
            "the candidates of a private selection stay",
            privacy=True,
        ),
        B(
            "if (before := read_manifest(candidates)) is not None:",
            "if (before := read_manifest(candidates)) is not None and tune.trials is None:",
            "runs are drawn again",
            True,
        ),
    ),
    *bugs_in(
        "workers/data/base.py",
        ("tests/orchestration/test_exponential_mechanism.py",),
        B("order[(part.of - 1) * size :]", "order[part.place * size :]", "a candidate is judged on its own part", True),
        B("(seed, _PART)", "(seed, _PART, part.place)", "parts of candidates overlap", privacy=True),
    ),
    *bugs_in(
        "orchestration/pipeline/stage.py",
        ("tests/orchestration/test_selection.py",),
        B("        _require_selected(sweep, plan, files)\n", "", "a selected trial is trained again", privacy=True),
        B(
            "with closed_to_strangers(), exclusive(files):",
            "with closed_to_strangers():",
            "the composed epsilon lacks trials of a command that began meanwhile",
            privacy=True,
            tests=("tests/orchestration/test_growth.py::test_no_other_command_begins_a_sweep_while_one_plans",),
        ),
        B(
            "request.retry if earlier is None else ()",
            "request.retry",
            "a driver that its job starts again trains anew what the first one has trained anew",
            privacy=True,
            tests=("tests/orchestration/test_limits.py",),
        ),
        B(
            "        refuse(others, files, ANEW)\n",
            "",
            "results of two versions of a model stand beside each other",
            tests=(
                "tests/orchestration/test_edited_code.py::test_a_sweep_is_not_continued_beside_results_of_other_code",
            ),
        ),
    ),
    *bugs_in(
        "orchestration/comparison/ledger.py",
        ("tests/orchestration/comparison/test_ledger.py::test_trials_that_results_added_guarantee_nothing_together",),
        B("len(private) > 1 and any(", "False and any(", "trials that results added compose to a guarantee", True),
        B(
            "if by_results or repeated else",
            "if by_results else",
            "a trial that is trained until its results suit has a guarantee",
            privacy=True,
            tests=(AGAIN,),
        ),
        B(
            "in sorted(private, key=lambda each: -_trained(each.attempts)):",
            "in private:",
            "a trial that is trained again has a guarantee behind a sweep that took its first start over",
            privacy=True,
            tests=(TAKEN_OVER,),
        ),
        B(
            "if not each.release or each.release not in seen)",
            "if each.release not in seen)",
            "of releases without a name one is counted",
            privacy=True,
            tests=(TAKEN_OVER,),
        ),
    ),
    *bugs_in(
        "orchestration/store/attempts.py",
        (TAKEN_OVER,),
        B("release=secrets.token_hex(16)", "release=attempt.key", "a later start counts as the first one", True),
    ),
    *bugs_in(
        "orchestration/comparison/settings.py",
        ("tests/orchestration/report/test_first_screen.py::test_each_adjacency_has_a_pareto_front_of_its_own",),
        B(
            "costed.setdefault(setting.neighbours, [])",
            "costed.setdefault(frozenset(), [])",
            "a setting leaves the front for an epsilon of another adjacency",
            privacy=True,
        ),
    ),
    *bugs_in(
        "orchestration/tracking/given_stores.py",
        ("tests/orchestration/tracking/test_given_stores.py",),
        B("recording.experiment, sweep_id", "sweep_id", "a folder from somebody else chooses the experiment"),
    ),
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
            "delta, method = planned.spec.delta, sweep.accounting.individual",
            "delta, method = 1e-5, sweep.accounting.individual",
            "epsilons of examples at a fixed delta",
            True,
        ),
        B(
            "read_attacks(files.attacks) if shows_exact else AttackResults()",
            "read_attacks(files.attacks)",
            "attacks are disclosed in every mode",
            True,
        ),
        B(
            "read_counters(files.private_training) if shows_exact else Counters()",
            "read_counters(files.private_training)",
            "means of groups in training are disclosed in every mode",
            True,
        ),
        B(
            "Counting(worst.epsilon, released_bins=release.bins)",
            "Counting(worst.epsilon / 2, released_bins=release.bins)",
            "a release has another bound than the worst case",
            True,
        ),
        B(
            "write_exact_statistics(files.private_summary, exact)",
            "write_statistics(files.private_summary, exact)",
            "exact statistics are public",
            True,
        ),
        B(
            "step.noise_multiplier >= other.noise_multiplier",
            "step.noise_multiplier > 0.0",
            "any noise counts as no dearer than planned",
            True,
            COMPLETION,
        ),
        B(
            '(*planned.reasons, "noise_followed_results")',
            "planned.reasons",
            "a run with less noise than planned has a guarantee",
            True,
            COMPLETION,
        ),
        B(
            "cost_so_far(plan, _ends(planned), trace.steps, worst)",
            "cost_so_far(plan, _ends(planned), trace.steps - 1, worst)",
            "the cost so far lacks a step",
            True,
        ),
        B(
            "_of_group(trace, delta, size) if size > 1 else single[0]",
            "replace(single[0], epsilon=size * single[0].epsilon, group_size=size) if size > 1 else single[0]",
            "a group of k costs k times one example",
            True,
            COMPLETION,
        ),
        B(
            "    forget_checkpoint(files.checkpoint)\n    if not is_asked",
            "    if not is_asked",
            "the key of a stopped trial's noise is kept",
            True,
            ("tests/orchestration/execution/test_coordinator.py",),
        ),
    ),
    *bugs_in(
        "accounting/mechanism/estimates.py",
        PLAN,
        B("delta < 1.0 / size", "delta < 1.5 / size", "a delta above 1/n is not warned of", True),
    ),
    *bugs_in(
        "orchestration/sweeps/plan.py",
        PLAN,
        B(
            "mechanism_of(trial, method, size, point.releases)",
            "mechanism_of(trial, method, size, ())",
            "what is released is no part of the target",
            True,
        ),
        B(
            "if stored is not None and each.is_solved_by(stored):",
            "if stored is not None:",
            "a calibration that was forged is believed",
            True,
            ("tests/orchestration/test_growth.py",),
        ),
        B(
            "shown_error(error, sweep.disclosure)",
            "str(error)",
            "refusals quote the data",
            True,
            ("tests/orchestration/sweeps/test_plan.py",),
        ),
    ),
    *bugs_in(
        "orchestration/store/ownership.py",
        OWNERSHIP,
        B("if _is_ours(uri, mine):  #", "if True:  #", "the claim is not read again"),
        B("if now != found:", "if False:", "a live claim is taken over"),
        B("if not _is_ours(uri, mine):", "if False:", "a replaced driver goes on"),
    ),
    *bugs_in(
        "accounting/records/local_files.py",
        OWNERSHIP,
        B(
            "fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                break",
            "fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)\n                break",
            "two drivers share a folder",
        ),
    ),
    *bugs_in(
        "orchestration/store/integrity.py",
        INTEGRITY,
        B(
            "return {name: noted for name, noted in digests.items() if not name.startswith(_PRIVATE)}",
            "return dict(digests)",
            "digests of private files are public",
            True,
        ),
        B(
            "write_private_sealed(files.private_digests,",
            'write_private_sealed(f"{files.root}/digests.json",',
            "digests of private files lie among the public files",
            True,
        ),
        B(
            "return digest_of(uri) != noted\n",
            "return False\n",
            "altered files are not noticed",
        ),
    ),
    *bugs_in(
        "orchestration/store/results.py",
        COMPLETING,
        B(
            "write_private_sealed(uri, _STATISTICS.dump_json(statistics))",
            "write_sealed(uri, _STATISTICS.dump_json(statistics))",
            "exact statistics are public",
            True,
        ),
    ),
    *bugs_in(
        "orchestration/store/release_modes.py",
        ("tests/orchestration/store/test_release_modes.py", "tests/orchestration/sweeps/test_plan.py"),
        B(
            "return release_mode(disclosure).error_text(error)",
            "return str(error)",
            "the text of every error is shown",
            True,
        ),
    ),
)
