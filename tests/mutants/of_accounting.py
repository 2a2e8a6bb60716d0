"""Bugs in what accounting knows of mechanisms, by file; those that a review found no test for come first."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in

ACCOUNTANTS: Final = (
    "tests/accounting/accountants/test_closed_forms.py",
    *(
        f"tests/accounting/accountants/test_one_run.py::{name}"
        for name in (
            "TestPublishedNumbers",
            "TestRounds",
            "TestReleases",
            "test_what_an_accountant_does_not_cover_is_refused",
            "TestMeaning",
            "TestOrder",
            "test_noise_that_followed_results_is_no_guarantee",
        )
    ),
)
CALIBRATION: Final = ("tests/accounting/calibration/test_parameter_search.py",)
MECHANISM: Final = ("tests/accounting/mechanism/test_trace.py",)
RELEASE: Final = ("tests/accounting/jobs/test_release.py",)
RENYI: Final = ("tests/accounting/numerics/test_renyi.py", *ACCOUNTANTS)
SAMPLINGS: Final = ("tests/accounting/mechanism/test_samplings.py", "tests/accounting/pld/test_groups.py")
SCHEDULES: Final = ("tests/accounting/mechanism/test_schedules.py",)
COMPOSITION: Final = ("tests/accounting/pld/test_composition.py",)
GROUPS: Final = ("tests/accounting/pld/test_groups.py",)

ACCOUNTING: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "accounting/attacks/exposures.py",
        ("tests/accounting/attacks/test_exposures.py",),
        B("np.concatenate([bits, [0.0, most]])", "bits", "secrets that were all extracted leave no doubt about others"),
    ),
    *bugs_in(
        "accounting/accountants/methods.py",
        ACCOUNTANTS,
        B(
            "[0.5 * epsilon**2 for epsilon in pure_epsilons(trace, group_size)]",
            "[0.5 * group_size * epsilon**2 for epsilon in pure_epsilons(trace)]",
            "zCDP of a pure release grows linearly with the group",
            privacy=True,
        ),
        B(
            "if not trace.is_private:\n        return math.inf",
            "if False:\n        return math.inf",
            "rho without noise",
        ),
        B(
            "count * 0.5 / sigma**2",
            "0.5 / sigma**2",
            "zCDP counts each level once",
            True,
        ),
        B("total += part.count * mixed", "total += mixed", "RDP counts each level once", True),
        B("total += pure_rdp(epsilon)", "total += 0.0 * pure_rdp(epsilon)", "RDP forgets pure releases", True),
        B("squares = [count / sigma", "squares = [1 / sigma", "gdp counts each level once", True),
        B("squares += [(2.0 * float", "squares += [(1.0 * float", "gdp halves the mu of a pure release", True),
        B("if sampled:\n", "if False:\n", "gdp and zcdp account sampled rounds as full ones"),
    ),
    *bugs_in(
        "accounting/accountants/one_run.py",
        ACCOUNTANTS,
        B(
            "rest.upper + sum(pure)",
            "rest.upper + max(pure)",
            "of several pure releases only the largest is added",
            True,
        ),
        B(
            "found = weakened(found, trace.reasons)",
            "",
            "what followed results is a guarantee",
            True,
        ),
        B(
            'Accountant("zcdp-sampled", epsilon_zcdp_sampled, is_proven=False)',
            'Accountant("zcdp-sampled", epsilon_zcdp_sampled)',
            "an unproved bound is a guarantee",
            True,
        ),
    ),
    *bugs_in(
        "accounting/accountants/paper_only.py",
        ACCOUNTANTS,
        B(
            "highest_order = min((_order(",
            "highest_order = max((_order(",
            "zcdp-sampled takes the highest order of the last round, not the lowest of all",
            privacy=True,
        ),
        B("* ROUND_UP + pure)", "* ROUND_UP)", "strong composition forgets pure releases", True),
        B("unsampled_delta = delta / sample_rate", "unsampled_delta = delta", "amplification keeps delta"),
        B(
            "math.log(sample_rate) + epsilon))",
            "math.log(sample_rate) + epsilon / 2))",
            "amplified too much",
            True,
        ),
        B("min(float(times @ each), composed)", "composed", "the plain sum is forgotten"),
    ),
    *bugs_in(
        "accounting/mechanism/rounds.py",
        ACCOUNTANTS,
        B("sigma / (1 + s.displaced)", "noise_multiplier", "fixed batches are not doubled", True),
        B(
            "merged[(SampledGaussian(1.0, 1.0, release.noise_multiplier),)] += 1",
            "merged[(SampledGaussian(1.0, 1.0, release.noise_multiplier),)] = 1",
            "equal releases count once",
            True,
        ),
        B(
            "case.noise_multiplier / group_size)",
            "case.noise_multiplier / group_size**0.5)",
            "groups grow with a root",
            True,
        ),
        B("lowest[epoch] = min(sigma,", "lowest[epoch] = max(sigma,", "an epoch costs its highest noise", True),
        B("group_size * release.epsilon for", "release.epsilon for", "pure releases ignore the group", True),
        B("yield sigma, last - first - 1", "yield sigma, last - first - 2", "an epoch is dropped", True),
    ),
    *bugs_in(
        "accounting/audits/scaled_noise.py",
        ("tests/accounting/audits/test_scaled_noise.py",),
        B("slopes[after - 1] * (rates", "slopes[after] * (rates", "an audit allows a chord, below the curve", True),
    ),
    *bugs_in(
        "accounting/calibration/budgets.py",
        CALIBRATION,
        B(
            "return total_rho(trace, self.group_size)",
            "return total_rho(trace)",
            "a rho budget ignores the group",
            True,
        ),
        B(
            "account(trace, self.delta, self.accountant, self.group_size)",
            "account(trace, self.delta, self.accountant)",
            "an epsilon budget ignores the group",
            True,
        ),
        B(
            "if self.trials is not None:",
            "if self.trials is None:",
            "a target of a selection is met by one run alone",
            True,
            ("tests/accounting/accountants/test_selection.py::TestProperties",),
        ),
    ),
    *bugs_in(
        "accounting/calibration/so_far.py",
        ("tests/accounting/calibration/test_so_far.py",),
        B(
            "place = bisect_left(asked, step)",
            "place = max(0, bisect_left(asked, step) - 1)",
            "an epoch shows the cost of an earlier one",
            privacy=True,
        ),
        B("min(partial, whole.epsilon)", "partial", "the first steps cost more than all of them"),
    ),
    *bugs_in(
        "accounting/pld/prefixes.py",
        ("tests/accounting/pld/test_prefixes.py",),
        B("max(both)", "min(both)", "a part of a run costs what the better direction does", True),
        B("before, gaussian = now,", "before, gaussian = now + now,", "later rounds of a growing run are free", True),
        B("run.gaussian > gaussian", "run.gaussian < gaussian", "later full batches of a growing run are free", True),
    ),
    *bugs_in(
        "accounting/pld/levels.py",
        ("tests/accounting/pld/test_levels.py",),
        B(
            "special.erf(scaled) if least < 1.0",
            "scaled if least < 1e9",
            "noise levels are drawn from two others linearly in their shift",
            True,
        ),
        B("(places - low)", "(high - places)", "the weaker of two noise levels has the share of the stronger", True),
    ),
    *bugs_in(
        "accounting/calibration/parameter_search.py",
        CALIBRATION,
        B("if rounded >= value else round(rounded + 10.0**-places, places)", "", "rounding goes to the nearest", True),
        B("round_up(epsilon, 4) if epsilon", "epsilon if epsilon", "an epsilon is told to the nearest", True),
        B("1.0 + _ROUNDING", "1.0 + 1e-3", "a budget may be exceeded by a thousandth", True),
        B(
            "if value > 0.0:\n            weight_high",
            "if value > 1e-3:\n            weight_high",
            "the search returns what misses the target",
            True,
        ),
        B("2.0 if math.isinf(cost) else", "-2.0 if math.isinf(cost) else", "an infinite cost meets every target", True),
    ),
    *bugs_in(
        "accounting/mechanism/trace.py",
        MECHANISM,
        B(
            "sum(query.noise_multiplier**-2 for query",
            "max(query.noise_multiplier**-2 for query",
            "of several side queries one counts",
            True,
        ),
        B(
            "sides = ((1 + displaced) / query",
            "sides = (1 / query",
            "a side query on fixed batches is not doubled",
            True,
            COMPOSITION,
        ),
        B("at_least=0.0) + displaced", "at_least=0.0)", "a displaced record contributes nothing", True, GROUPS),
        B(
            '"noise_followed_results": self.noise_follows_results,',
            "",
            "noise that followed results is a guarantee",
            True,
            ACCOUNTANTS,
        ),
        B(
            '"end_followed_results": self.ended_by_results,',
            "",
            "an end that followed results is a guarantee",
            True,
            ("tests/accounting/mechanism/test_ended_by_results.py",),
        ),
        B(
            "return weakest(self.kind, self.contributions)",
            "return self.contributions",
            "individual epsilons after such noise are guarantees",
            True,
        ),
        B(
            "if segment.start_step != expected:",
            "if segment.start_step < expected:",
            "a gap between segments is accepted",
            True,
        ),
        B(
            "return all(segment.noise_multiplier > 0.0 for",
            "return any(segment.noise_multiplier > 0.0 for",
            "one noisy step makes a run private",
            True,
        ),
        B(
            "_require_adjacency(segment.sampling, of_records(self.adjacency))",
            "pass",
            "any sampling goes under any adjacency",
            True,
            ("tests/accounting/mechanism/test_samplings.py",),
        ),
    ),
    *bugs_in(
        "accounting/jobs/release.py",
        RELEASE,
        B(
            "self.quantile_noise_multiplier / steps**0.5",
            "self.quantile_noise_multiplier",
            "all quantile steps cost one",
            True,
        ),
        B(
            "steps = len(self.quantiles) * self.quantile_steps",
            "steps = self.quantile_steps",
            "several quantiles cost one",
            True,
        ),
        B("values + rng.normal(0.0, noise_multiplier, values.shape)", "values", "releases have no noise", True),
        B(
            "SecretDraws() if generator is None else generator",
            "np.random.default_rng(0) if generator is None else generator",
            "releases draw from a seed",
            True,
        ),
        B("/ grid) * grid", "/ grid * 4096) * grid / 4096", "released values keep their low-order bits", True),
        B(
            "mean * spec.group_count_noise_multiplier) / count",
            "0.0) / count",
            "the count's noise is not in the standard error",
        ),
    ),
    *bugs_in(
        "accounting/numerics/renyi.py",
        RENYI,
        B(
            "np.log1p(-1.0 / ORDERS) - np.log(delta * ORDERS)",
            "np.log1p(-1.0 / ORDERS) - np.log(delta * ORDERS * 2.0)",
            "conversion at twice delta",
            True,
        ),
        B(
            "-np.log(delta) / (ORDERS - 1.0)",
            "-np.log(delta) / ORDERS",
            "the classic conversion divides by alpha",
            True,
        ),
        B("np.tanh(0.5 * epsilon) * np.sinh(x)", "np.tanh(0.5 * epsilon) * x", "RDP of a pure release", True),
        B("(-(delta**2)), 0.0", "(-delta), 0.0", "epsilon 0 where delta does not cover the run", True),
    ),
    *bugs_in(
        "accounting/numerics/gaussian.py",
        COMPOSITION,
        B(
            "upper = reached(log_delta + math.log1p(-slack)) * (1 + _ROOT)",
            "upper = reached(log_delta + 0.01) * (1 + _ROOT)",
            "the Gaussian's epsilon is 1 % of delta short",
            True,
        ),
        B(
            "shift, log_delta = max(mean, _LEAST)",
            "shift, log_delta = min(mean, 1e3)",
            "large shifts are cut off",
            True,
        ),
    ),
    *bugs_in(
        "accounting/mechanism/samplings.py",
        SAMPLINGS,
        B(
            "- np.log(size - group_size - batch + drawn + 1.0)",
            "- np.log(size - batch + drawn + 1.0)",
            "the hypergeometric law",
            True,
        ),
        B(
            "np.log(group_size - drawn) - np.log(drawn + 1.0) + np.log(self.sample_rate)",
            "- np.log(drawn + 1.0) + np.log(self.sample_rate)",
            "the binomial law",
            True,
        ),
        B(
            "return math.ceil(self.dataset_size / self.batch_size)",
            "return self.dataset_size // self.batch_size",
            "an epoch loses its last batch",
            True,
        ),
    ),
    *bugs_in(
        "accounting/mechanism/schedules.py",
        SCHEDULES,
        B(
            "value if value >= NEGLIGIBLE_NOISE else 0.0",
            "max(value, NEGLIGIBLE_NOISE)",
            "negligible noise counts as some",
            True,
        ),
        B(
            "runs != list(schedule.runs(epochs))",
            "runs == list(schedule.runs(epochs))",
            "reacting noise is not told",
            True,
            (*SCHEDULES, *ACCOUNTANTS),
        ),
        B(
            "yield mean - before if known else -math.inf",
            "yield mean - before if known else math.inf",
            "a plan without accuracies has the most noise",
            True,
        ),
    ),
    *bugs_in(
        "accounting/jobs/user_accounting.py",
        ("tests/accounting/jobs/test_user_accounting.py",),
        B(
            "owners.ids % self.shares == self.part",
            "owners.ids % 9 == self.part",
            "some users are passed over",
            True,
        ),
        B("places[order] = np.arange(len(order))", "places[:] = order", "rows are those of other users", True),
        B("found.update(repr(each.norms.identity).encode())", "pass", "epsilons of other norms are taken up", True),
    ),
    *bugs_in(
        "accounting/records/user_rows.py",
        ("tests/accounting/jobs/test_user_accounting.py",),
        B(
            "    write_in_private_folder(_uri(directory, part), *pieces)",
            "    uri, data = _uri(directory, part), b''.join(pieces)\n"
            "    from dpsweep.accounting.records.files import write_bytes_atomically\n"
            "    write_bytes_atomically(uri, data)",
            "sorted rows are public",
            True,
        ),
        B('if note.get("inputs") != inputs:', "if not note:", "rows of other users are taken up", True),
    ),
)
