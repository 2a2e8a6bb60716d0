"""Bugs in the accounting by privacy loss distributions, by file."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in

RARE: Final = ("tests/accounting/pld/test_rare_draws.py",)
CERTIFICATES: Final = "tests/accounting/pld/test_certificates.py"
COMPOSITION: Final = (CERTIFICATES, "tests/accounting/pld/test_composition.py")
GROUPS: Final = (CERTIFICATES, "tests/accounting/pld/test_groups.py")

PLD: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "accounting/pld/composition.py",
        COMPOSITION,
        B("or worse.opposite_delta(worse.upper) <= asked.delta:", "or True:", "epsilon of one direction only", True),
        B("if opposite <= upper:", "if True:", "delta of one direction only", True),
        B(
            "return max(worse.upper, other.upper), max",
            "return min(worse.upper, other.upper), max",
            "the better direction's epsilon",
            True,
        ),
        B(
            "total_variation(rounds) <= delta:",
            "total_variation(rounds) <= 2 * delta:",
            "epsilon 0 where delta does not cover the run",
            True,
            ("tests/accounting/accountants/test_closed_forms.py",),
        ),
    ),
    *bugs_in(
        "accounting/attacks/curves.py",
        ("tests/accounting/attacks/test_curves.py",),
        B("limit_of(0, _rates(", "limit_of(1, _rates(", "an audit takes records that took part for missing ones"),
    ),
    *bugs_in(
        "accounting/attacks/trade_off.py",
        ("tests/accounting/attacks/test_curves.py",),
        B(
            "(self.profile.worst, self.profile.worst)",
            "(self.profile.upper[0], self.profile.upper[1])",
            "the risk of attacks is that of one direction",
        ),
    ),
    *bugs_in(
        "accounting/pld/chains.py",
        ("tests/accounting/pld/test_chains.py",),
        B("moved + slope * starts", "moved + starts", "later links cost no more", True),
        B("np.full(len(rates), links)", "np.full(len(rates), links - 1)", "one link too few", True),
        B("gaussian=self.links * dominating_mean", "gaussian=dominating_mean", "a group as one Gaussian example", True),
    ),
    *bugs_in(
        "accounting/pld/curve.py",
        COMPOSITION,
        B("* (1 + self.relative) + self.infinity)", "* (1 + self.relative))", "mass at infinity is dropped", True),
        B("(value - additive) * max(0.0, 1 - self.relative)", "(value + additive)", "a lower bound with errors added"),
        B("high + math.log1p(-below)", "high + math.log1p(below)", "epsilon between losses the wrong way", True, RARE),
        B("- np.expm1(epsilons - self.losses[index])", "+ np.expm1(epsilons - self.losses[index])", "delta, too", True),
    ),
    *bugs_in(
        "accounting/pld/fourier.py",
        COMPOSITION,
        B(
            "            self.infinity + other.infinity,\n",
            "            self.infinity,\n",
            "mass at infinity of the other rounds is dropped",
            True,
        ),
        B(
            'return law.truncated(tail).pooled(MAX_ATOMS, "upper")',
            'return law.truncated(tail).pooled(MAX_ATOMS, "lower")',
            "neighbours are merged at the smaller",
            True,
        ),
        B("1 / (1 + np.exp(-loss))", "0.5", "randomised response without odds", True),
        B("(epsilon, math.floor(below))", "(epsilon, math.ceil(below) + 9)", "randomised response is rounded up", True),
        B("(plan.spacing, 0.0, np.ones(1)", "(plan.spacing, 9.0, np.ones(1)", "no round has a loss", True),
        B("beyond[1:], 0.0", "beyond, 0.0", "delta sums one loss too many", False, RARE),
        B("16 * _EPS * (1 + raised", "0 * _EPS * (1 + raised", "cells without rounding", True, RARE),
    ),
    *bugs_in(
        "accounting/pld/lattice.py",
        RARE,
        B(
            "1.0 + np.log(total / peak)",
            "1e4 + np.log(total / peak)",
            "the transform's error as if frequencies did not cancel",
        ),
    ),
    *bugs_in(
        "accounting/pld/loss.py",
        GROUPS,
        B("+ self.mixture.missing,", ",", "cut off sensitivities are lost", True),
        B("above=max(0.0, q_atoms[0] - q[0]),", "above=0.0,", "mass above the table is lost", True),
        B("masses[0] += cells.below", "pass", "mass below the table is lost"),
        B(
            "(cells.numerator - cells.denominator) / -np.expm1(-spacing), 0.0",
            "0.0 * cells.numerator, 0.0",
            "losses are rounded down",
            True,
        ),
    ),
    *bugs_in(
        "accounting/pld/bunches.py",
        ("tests/accounting/pld/test_bunches.py",),
        B("self._misplaced(outputs) * np", "0.0 * np", "sensitivities on the other side than their bunch", True),
        B("moments[:, 1:] * np.arange", "moments[:, 1:] + 0 * np.arange", "the slope of a bunch", True),
    ),
    *bugs_in(
        "accounting/pld/sensitivity.py",
        GROUPS,
        B(
            "units, total = np.ceil(values / spacing * (1.0 - 1e-15))",
            "units, total = np.floor(values / spacing * (1.0 - 1e-15))",
            "contributions are rounded down",
            True,
        ),
        B(
            "moved[units:] += sample_rate * probabilities",
            "moved[units:] += sample_rate**2 * probabilities",
            "joint law of Poisson members",
            True,
        ),
        B(
            '{"upper": np.append(firsts[1:], len(values)) - 1, "lower": firsts}',
            '{"lower": np.append(firsts[1:], len(values)) - 1, "upper": firsts}',
            "merged sensitivities the wrong way",
            True,
        ),
        B("self.missing + dropped)", "self.missing)", "what is cut off is not missing", True),
        B(
            "math.log1p(-positive) if positive < 0.5",
            "math.log(self.zero_probability) if positive < 0.5",
            "a rare draw's complement loses its digits",
            True,
            RARE,
        ),
    ),
    *bugs_in(
        "accounting/pld/group_rounds.py",
        GROUPS,
        B(
            "(group_size / multiplier) ** 2",
            "group_size / multiplier**2",
            "releases to a group grow with a root",
            True,
            COMPOSITION,
        ),
        B(
            "partial[run_start, epoch] = np.maximum(partial.get((run_start, epoch), 0.0), amplitudes)",
            "partial[run_start, epoch] = amplitudes",
            "an epoch costs what its last steps cost",
            True,
            (*COMPOSITION, *GROUPS),
        ),
        B(
            "laws[found] += count",
            "laws[found] = count",
            "samplings whose rounds have one law cost what the last does",
            True,
            ("tests/accounting/pld/test_prefixes.py::test_samplings_with_rounds_of_one_law_all_count",),
        ),
        B("or case.sampling != before", "or False", "one epoch of shuffled and of ordered steps", True, COMPOSITION),
        B(
            "whole += max(0, last - first - 1)",
            "whole += max(0, last - first - 2)",
            "an epoch is dropped",
            True,
            COMPOSITION,
        ),
    ),
    *bugs_in(
        "accounting/pld/allocation_transform.py",
        ("tests/accounting/pld/test_allocation_transform.py",),
        B(
            "lost_of_p = self.beyond_p + (steps - 1) * self.beyond_q + ",
            "lost_of_p = ",
            "ratios beyond the grid cost nothing",
            True,
        ),
        B("placed[1:] += raised + wrong", "placed[1:] += wrong", "mass that is spread loses its upper part", True),
        B(
            "placed = masses + up + down - 2.0 * wrong",
            "placed = masses + 2.0 * (up + down)",
            "a lower bound gains mass",
        ),
        B("first = math.exp(-end) if", "first = 2.0 * math.exp(-end) if", "small ratios are left out unnoticed", True),
    ),
    *bugs_in(
        "accounting/pld/allocation_blocks.py",
        ("tests/accounting/pld/test_allocation_blocks.py",),
        B("min(steps * float(special.ndtr(", "min(0.0 * float(special.ndtr(", "ratios that are left out are free"),
        B(
            "placed = np.concatenate((masses - raised, above))",
            "placed = np.concatenate((masses, above))",
            "too much mass",
        ),
    ),
    *bugs_in(
        "accounting/pld/block_kernels.py",
        ("tests/accounting/pld/test_allocation_blocks.py", "tests/accounting/pld/test_block_levels.py"),
        B("masses[near + sign] += weight * share", "masses[near] += weight * share", "masses move to the centre", True),
        B(
            "both[index] = ours[index] + 2.0 * near[index]",
            "both[index] = ours[index] + near[index]",
            "half of pairs",
            True,
        ),
        B("masses[at - 1] -= needed", "masses[at - 1] -= 0.0", "a pool keeps what it takes"),
        B("left[at] = missing", "left[at] = 0.0", "what a law has too much is forgotten"),
    ),
    *bugs_in(
        "accounting/pld/block_levels.py",
        ("tests/accounting/pld/test_block_levels.py",),
        B("- share * (1.0 + ROUNDING) * self.farther", "- 0.0 * self.farther", "a law from below has too much mass"),
        B("(share, stronger)", "(0.5 * share, stronger)", "a draw loses mass", True),
    ),
    *bugs_in(
        "accounting/pld/allocation.py",
        ("tests/accounting/pld/test_block_levels.py",),
        B("moved = masses *", "moved = 0.0 * masses *", "a law from below is rounded to the nearest loss"),
    ),
)
