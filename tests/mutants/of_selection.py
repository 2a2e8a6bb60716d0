"""Bugs in what a choice among several runs costs, by file."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in

SELECTION: Final = (
    "tests/accounting/accountants/test_selection.py::TestAgainstDpAccounting",
    "tests/accounting/accountants/test_selection.py::TestProperties",
    "tests/accounting/accountants/test_selection.py::TestExactly",
    "tests/accounting/accountants/test_selection.py::TestLaw",
)

SELECTIONS: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "accounting/mechanism/random_trials.py",
        ("tests/accounting/mechanism/test_random_trials.py",),
        B("Fraction(self.epsilon) / 2", "Fraction(self.epsilon)", "a choice costs twice what it claims", privacy=True),
        B(
            "* (number + self.shape) / (number + 1.0)",
            "* (number + self.shape) / number",
            "the number of trials follows another law than the one accounted for",
            privacy=True,
            tests=SELECTION,
        ),
    ),
    *bugs_in(
        "accounting/accountants/selection.py",
        ("tests/accounting/mechanism/test_random_trials.py",),
        B("epsilon=max(run.epsilon, choice.epsilon)", "epsilon=run.epsilon", "a choice costs nothing", privacy=True),
        B("if require_group_size(group_size) > 1:", "if False:", "a choice covers groups over several parts", True),
        B(
            "return np.maximum(total_rdp(replace(trace, selection=None)), pure_rdp(trace.selection.epsilon))",
            "return total_rdp(replace(trace, selection=None))",
            "the total of a sweep forgets its choices",
            privacy=True,
        ),
        B(
            "+ math.log(trials.largest_mean) / (ORDERS - 1.0)",
            "",
            "the Renyi bound of a selection forgets the expected number of trials",
            privacy=True,
            tests=SELECTION,
        ),
        B(
            "gamma, aim = trials.gamma, delta / trials.largest_mean",
            "gamma, aim = trials.gamma, delta",
            "the profile of a selection forgets the expected number of trials",
            privacy=True,
            tests=SELECTION,
        ),
        B(
            "(released + (1.0 + trials.shape) * ratio)",
            "(released + trials.shape * ratio)",
            "the profile of a selection forgets one ratio",
            privacy=True,
            tests=SELECTION,
        ),
        B(
            "odds = gamma / (1.0 - gamma)",
            "odds = 1.0 / (1.0 - gamma)",
            "the ratio of a selection is sought as if trials were few",
            privacy=True,
            tests=SELECTION,
        ),
    ),
    *bugs_in(
        "accounting/mechanism/reductions.py",
        ("tests/accounting/accountants/test_selected_traces.py",),
        B("    require_one_run(trace)\n", "", "a selection costs what one of its runs costs", privacy=True),
        B(
            "    require_supported(trace)\n    trace = as",
            "    trace = as",
            "an unknown sampling is accounted for",
            privacy=True,
            tests=("tests/accounting/mechanism/test_closed_sums.py",),
        ),
        B(
            "if not 0.0 < spent <= _RAREST * delta:",
            "if not 0.0 < spent:",
            "Renyi divergences never see a batch that is cut",
            privacy=True,
            tests=("tests/accounting/accountants/test_truncated.py",),
        ),
        B(
            "stats.binom.sf(most - 1, size - 1, rate)",
            "stats.binom.sf(most + 1, size - 1, rate)",
            "cuts too rare",
            True,
            ("tests/accounting/accountants/test_truncated.py",),
        ),
        B(
            "stats.binom.sf(most - group_size, size",
            "stats.binom.sf(most, size",
            "a group needs no room",
            True,
            ("tests/accounting/accountants/test_truncated.py",),
        ),
        B(
            "s.batch_size <= s.dataset_size - group_size",
            "True",
            "a group displaces others that a full batch does not have",
            tests=("tests/accounting/test_lower_bounds.py",),
        ),
        B(
            "fits = group_size <= trace.dataset_size",
            "fits = True",
            "more records than the data hold have the lower bound of a larger run",
            tests=("tests/accounting/test_lower_bounds.py::test_more_records_than_the_data_hold_have_none",),
        ),
        B(
            "group_size == 1 and trace.adjacency",
            "trace.adjacency",
            "a pure release tells a group from none as randomised response does",
            tests=("tests/accounting/test_lower_bounds.py",),
        ),
        B(
            "steps_per_round <= MOST_ALLOCATED",
            "steps_per_round > 0",
            "blocks longer than are told apart have the lower bound of shorter ones",
            tests=("tests/accounting/test_lower_bounds.py",),
        ),
        B(
            "members == 1 and not trace.allocated and",
            "members == 1 and",
            "a block at its largest contribution bounds given records from below",
            tests=("tests/accounting/test_lower_bounds.py",),
        ),
        B(
            "max(filled + (_CHANCE_UP**2",
            "max(0.0 * filled + (_CHANCE_UP**2",
            "one data set more is never cut",
            True,
            ("tests/accounting/accountants/test_truncated.py",),
        ),
    ),
    *bugs_in(
        "accounting/mechanism/samplings.py",
        ("tests/accounting/accountants/test_truncated.py",),
        B(
            "return self.steps_per_epoch == 1",
            "return True",
            "the worst order of shuffled batches is taken for the run",
            tests=("tests/accounting/test_lower_bounds.py",),
        ),
    ),
    *bugs_in(
        "accounting/accountants/joint_cost.py",
        ("tests/accounting/accountants/test_selected_traces.py",),
        B(
            "share = delta / (sum(selected.values()) + bool(plain))",
            "share = delta",
            "every selection has the whole delta for itself",
            privacy=True,
        ),
        B(
            "adjacency=adjacency) for trace in counts.elements())",
            "adjacency=adjacency) for trace in counts)",
            "equal runs cost what one of them does",
            True,
            ("tests/accounting/accountants/test_joint_cost.py",),
        ),
        B(
            "found.lower if attained and take_part else None",
            "found.lower if attained else None",
            "a run whose data may lack the record adds to the lower bound",
            tests=("tests/accounting/test_lower_bounds.py",),
        ),
    ),
)
