"""Sections and tables of exact results on training examples, which only appear where the release mode shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Final

from dpsweep.accounting.attacks import area_limit, exposure_limit
from dpsweep.accounting.audits import ASSUMPTIONS
from dpsweep.orchestration.comparison.entries import Metric
from dpsweep.orchestration.comparison.formats import (
    CHANGE,
    CORRELATION,
    MISSING,
    PERCENT,
    POINTS,
    at_least,
    at_most,
    number,
    opening,
)
from dpsweep.orchestration.comparison.metrics import main_metric
from dpsweep.orchestration.comparison.settings import (
    Setting,
    group_attack,
    group_epsilon,
    group_names,
    group_paid,
    group_value,
)
from dpsweep.orchestration.comparison.values import Value, loss_correlation, on_training
from dpsweep.orchestration.report.html import named, section, table
from dpsweep.orchestration.report.plot import Style
from dpsweep.orchestration.store.published import EstimateQuality, PublishedAccount, PublishedTrial
from dpsweep.workers.evaluation.attack_results import ExposureAttack, MembershipAttack


def estimates_table(settings: Sequence[Setting], style: Style) -> str:
    """Return errors of estimated epsilon_i against exactly tracked ones, by setting; "" if no trial tracked
    examples.
    """

    def quality(value: Callable[[EstimateQuality], float | None]) -> Callable[[PublishedTrial], float | None]:
        return lambda trial: (
            value(trial.individuals.estimates) if trial.individuals and trial.individuals.estimates else None
        )

    rows = []
    for setting in settings:
        examples = setting.over_seeds(quality(lambda found: found.examples))
        if examples is None:
            continue
        r = setting.over_seeds(quality(lambda found: found.correlation))
        mean = setting.over_seeds(quality(lambda found: found.mean_error))
        largest = setting.over_seeds(quality(lambda found: found.largest_error))
        rows.append(
            (
                named(setting, style),
                f"{examples.mean * examples.count:.0f}",
                f"{r.mean:.4f}" if r else MISSING,
                number(mean.mean if mean else None),
                number(largest.high if largest else None),
            )
        )
    words = ("εᵢ as estimated against εᵢ from norms of every step",)
    numbers = ("Examples tracked", "Pearson’s r", "Mean error", "Largest error")
    return "<h3>How good the estimates are</h3>" + table(words, numbers, rows) if rows else ""


def losses_table(settings: Sequence[Setting], style: Style) -> str:
    """Return the correlation of epsilon_i and log loss, overall and by group; "" if no trial has any."""
    names = group_names([trial for setting in settings for trial in setting.trials])
    values = (loss_correlation, *(group_paid(name, lambda group: group.loss_correlation) for name in names))
    rows = []
    for setting in settings:
        found = [setting.over_seeds(value) for value in values]
        if any(found):
            cells = (CORRELATION.over_seeds(spread) if spread else MISSING for spread in found)
            rows.append((named(setting, style), *cells))
    words = ("Pearson’s r of εᵢ and log loss",)
    return "<h3>εᵢ and loss</h3>" + table(words, ("All", *names), rows) if rows else ""


def _section(
    heading: str, text: str, words: Iterable[str], numbers: Iterable[str], html: Sequence[Sequence[str]]
) -> str:
    """Return the section around a table; "" without a row."""
    return section(heading, text, table(words, numbers, html)) if html else ""


def training_scores_section(settings: Sequence[Setting], style: Style, task: str) -> str:
    """Return the section on training examples; "" if no trial was scored on them or the results are withheld."""
    main = main_metric(task)
    scored = [setting for setting in settings if setting.over_seeds(on_training)]
    names = group_names([trial for setting in scored for trial in setting.trials])
    of_groups = (
        (group_value(name, lambda group: group.on_training), group_value(name, lambda group: group.main))
        for name in names
    )
    pairs = [(on_training, main.value), *of_groups]
    rows = [(named(setting, style), *(_beside_test(setting, main, *pair) for pair in pairs)) for setting in scored]
    return _section(
        "How well the models know their training examples",
        "<p>The final models on their own training examples, and below, how much better or worse that is than on test "
        "data. Where it is better, guessing that an example was trained on if it is predicted right succeeds more "
        "often than chance (Yeom et al. 2018).</p>",
        (f"{opening(main.heading.removeprefix('Test '))} on training examples",),
        ("All", *names),
        rows,
    )


def _beside_test(setting: Setting, main: Metric, training: Value, test: Value) -> str:
    """Score on training examples over the seeds; below it, its difference to the score on test examples."""
    one, other = setting.over_seeds(training), setting.over_seeds(test)
    if one is None or other is None:
        return MISSING
    distance = one.mean - other.mean
    beside = f"{POINTS.one(distance)} points" if main.format is PERCENT else CHANGE.one(distance)
    return f"{main.format.over_seeds(one)}<br><small>{beside} to test</small>"


def attacks_section(settings: Sequence[Setting], style: Style) -> str:
    """Return the section on membership attacks; "" if no trial was attacked or the results are withheld."""
    attacked = [setting for setting in settings if any(trial.attacks for trial in setting.trials)]
    names = group_names([trial for setting in attacked for trial in setting.trials])
    rows = [(named(setting, style), *(_attack_cell(setting, name) for name in names)) for setting in attacked]
    return _section(
        "Who can be found in the model",
        "<p>A membership attack on each group: an example whose loss is below a threshold is called a training "
        "example. Guessing is right for 50%. Below each share, the examples it was measured on and the mean εᵢ of the "
        "group.</p>",
        ("Right guesses of membership",),
        names,
        rows,
    )


def _attack_cell(setting: Setting, name: str) -> str:
    """Success rate with its standard error; below it, the number of attacked examples and the mean epsilon_i."""
    rate = setting.over_seeds(group_attack(name, lambda group: group.success_rate))
    measured = setting.over_seeds(group_attack(name, lambda group: group.examples))
    if rate is None or measured is None:
        return MISSING
    error = setting.error_over_seeds(group_attack(name, lambda group: group.standard_error))
    paid = setting.over_seeds(group_epsilon(name))
    below = [f"of {measured.mean * measured.count:.0f}", *([f"mean εᵢ {number(paid.mean)}"] if paid else [])]
    return f"{100 * rate.mean:.1f} ± {100 * error:.1f}%<br><small>{', '.join(below)}</small>"


def memberships_section(trials: Sequence[PublishedTrial]) -> str:
    """Return the section on likelihood-ratio attacks; "" if no trial was attacked so or the results are withheld."""
    attacked = [trial for trial in trials if trial.memberships]
    names = dict.fromkeys(group.name for trial in attacked for group in trial.memberships)
    rows = []
    for trial in attacked:
        found = {group.name: group for group in trial.memberships}
        rows.append((escape(trial.key), *(_area(found.get(name), _allowed(trial, name)) for name in names)))
    return _section(
        "Who can be found with reference models",
        "<p>A membership attack on each group (RMIA): an example is scored by its probability under the trained model "
        "over its mean probability under models trained with and without it. The area is the probability that a "
        "training example scores above another one, with a 95% interval; guessing gives 0.5.</p>",
        ("Area under the ROC curve",),
        names,
        rows,
    )


def _allowed(trial: PublishedTrial, name: str) -> float | None:
    """Return the largest area that the mean epsilon_i of a group allows; None where it is not known."""
    mean = group_epsilon(name)(trial)
    return None if mean is None or trial.privacy is None else area_limit(max(mean, 0.0), trial.privacy.delta)


def _area(found: MembershipAttack | None, allowed: float | None) -> str:
    if found is None:
        return MISSING
    interval = f"{found.lower:.3f} to {found.upper:.3f}"
    alone = f"loss alone {found.loss_auc:.3f}, gradient alone {found.gradient_auc:.3f}"
    bound = "" if allowed is None else f"; mean εᵢ allows {at_most(allowed)}"
    return f"{found.auc:.3f}<br><small>{interval}, of {found.examples}; {alone}{bound}</small>"


def exposures_section(trials: Sequence[PublishedTrial]) -> str:
    """Return the section on secrets; "" if no trial was trained on any or the results are withheld."""
    rows = []
    for trial in trials:
        if (found := trial.exposure) is not None:
            mean = f"{found.mean:.2f}<br><small>{found.lower:.2f} to {found.upper:.2f}</small>"
            paid = _epsilon_of_secret(trial, found)
            allowed = MISSING if paid is None else at_most(exposure_limit(*paid, found.candidates))
            counts = f"{found.canaries} × {found.repeats}"
            extracted = f"{found.extracted} of {found.canaries}"
            rows.append((escape(trial.key), mean, allowed, extracted, counts, f"{found.candidates:,}"))
    return _section(
        "Which secrets can be extracted",
        "<p>Random sequences of tokens were written over training examples. The exposure of one is log<sub>2</sub> R − "
        "log<sub>2</sub> r bits, where r is the rank of its loss among R sequences that the model has not seen; "
        "guessing gives 1.4. It has rank 1 where it can be extracted. The limit is what ε allows.</p>",
        ("Trial",),
        ("Exposure in bits", "ε allows", "Extracted", "Secrets × examples", "Candidates"),
        rows,
    )


def _epsilon_of_secret(trial: PublishedTrial, found: ExposureAttack) -> tuple[float, float] | None:
    """Return epsilon and delta of the examples of a secret together; None where they are not known."""
    privacy = trial.privacy
    if privacy is None or not privacy.is_private:
        return None
    epsilon = privacy.epsilon if found.repeats == 1 else privacy.group_epsilons.get(found.repeats)
    return None if epsilon is None else (epsilon, privacy.delta)


_CANARIES: Final = {"rows": "Examples", "gradient": "Gradients"}
_TRANSCRIPTS: Final = {"last_model": "seen in the last model", "iterates": "seen in every noisy sum"}


def audits_section(trials: Sequence[PublishedTrial]) -> str:
    """Return the section on audits; "" if no trial was audited or the results are withheld."""
    assumed = "; ".join(f"{name} assumes {assumption}" for name, assumption in ASSUMPTIONS.items())
    audited = [(trial, trial.audit, "") for trial in trials if trial.audit is not None]
    for trial in trials:
        count = len(trial.audits)
        audited += [(trial, each, f", in copy {place} of {count}") for place, each in enumerate(trial.audits, 1)]
    names = dict.fromkeys(name for _, audit, _ in audited for name in audit.groups)
    rows = []
    for trial, audit, copy in audited:
        claimed = trial.privacy.epsilon if trial.privacy else None
        best = _audited(audit.epsilon, claimed if audit.of_canary is None else audit.of_canary)
        bounds = [best, *(_audited(audit.groups.get(name), claimed) for name in names)]
        guessed = f"{audit.correct} of {audit.guesses}" if audit.guesses else f"ranks of {audit.canaries}"
        facts = [at_most(claimed), at_most(audit.of_canary), f"{100 * audit.confidence:g}%", guessed]
        tests = [f"{name} {at_least(bound)}" for name, bound in audit.tests.items()]
        whom = f"{_CANARIES[audit.kind]}, {_TRANSCRIPTS[audit.transcript]}{copy}<br><small>{', '.join(tests)}</small>"
        rows.append((escape(trial.key), whom, *facts, *bounds))
    return _section(
        "What an audit proves",
        "<p>A fair coin for each canary, a random training example or a made-up gradient, decided whether it was "
        "trained on. Guesses from the fall of its loss, or from its direction in the model or in every noisy sum, "
        "prove that ε is at least so much: over all canaries, and over examples of each group that has enough. "
        f"Of the tests, {assumed}. All bounds of an audit hold together with its confidence: at 95%, one audit of a "
        "right trial in twenty may accuse it, and all audits are kept. A low bound does not show that little leaks. "
        "One above the claim contradicts it, and so does one above what a made-up gradient pays. That is less where a "
        "filter or further releases are part of the claim.</p>",
        ("Trial", "Canaries"),
        ("Claimed ε", "ε of a gradient", "Confidence", "Right guesses", "ε at least", *names),
        rows,
    )


def _audited(bound: float | None, paid: float | None) -> str:
    """Return a lower bound, marked where it is above what the canaries have ``paid`` by the claim."""
    contradicts = bound is not None and paid is not None and bound > paid
    return at_least(bound) + ("<br><small>contradicts the claim</small>" if contradicts else "")


def accounts_section(trials: Sequence[PublishedTrial]) -> str:
    """Return the section on what `dpsweep account` found; "" if it found nothing, or the results are withheld."""
    rows = [_account_row(trial, account) for trial in trials for account in trial.accounts]
    return _section(
        "Accounted again",
        "<p>Finished trials at another δ, by another method or by other groups, from their stored norms. ε is that of "
        "the worst case; statistics of εᵢ are exact.</p>",
        ("Trial", "Method", "Groups"),
        ("δ", "ε", "Median εᵢ", "Mean εᵢ"),
        rows,
    )


def _account_row(trial: PublishedTrial, account: PublishedAccount) -> list[str]:
    sizes = [f"any {size} records: ε {at_most(epsilon)}" for size, epsilon in account.group_epsilons.items()]
    means = [f"{name}: mean εᵢ {number(mean)}" for name, mean in account.group_means.items()]
    claim = f"{escape(account.method)}<br><small class='claim'>{account.individual_kind.replace('_', ' ')}</small>"
    values = map(number, (account.epsilon, account.median, account.mean))
    return [escape(trial.key), claim, escape("; ".join([*sizes, *means])), f"{account.delta:g}", *values]
