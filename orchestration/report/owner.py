"""The report for the owner of one training example, as sentences and as a self-contained HTML page. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dpsweep.accounting.attacks import FALSE_POSITIVE_RATES, AttackRisk
from dpsweep.accounting.audits import assumed_by_best
from dpsweep.accounting.calibration.parameter_search import epsilon_text, round_up
from dpsweep.accounting.jobs.release import OwnerReport
from dpsweep.accounting.mechanism.estimates import Kind
from dpsweep.accounting.mechanism.reasons import in_words
from dpsweep.orchestration.comparison.formats import at_most_share
from dpsweep.orchestration.comparison.wording import NEIGHBOURS
from dpsweep.orchestration.store.published import PublishedAudit

_KINDS: Mapping[Kind, str] = {
    "guarantee": "This is a guarantee: a proven upper bound, whatever the run did.",
    "output_specific": "This is output-specific: it was read off this run and holds given the models that were "
    "released. It is not a guarantee made before the run; the worst case is.",
    "estimate": "This is an estimate, not a guarantee.",
}
_GIVEN: Mapping[Kind, str] = {"output_specific": ", given that training goes through the models of this run"}
"""By kind: the condition under which the stated factor holds, if there is one."""
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>body{{font:16px/1.5 sans-serif;max-width:42rem;margin:3rem auto;padding:0 1rem;color:#1d1f23}}
th{{text-align:left;padding-right:2rem;font-weight:normal;color:#6b7078}}</style></head>
<body><h1>{title}</h1><table>{rows}</table>{paragraphs}</body></html>
"""


@dataclass(frozen=True)
class OwnAttack:
    """An attack on one record, against test examples of its group.

    `by`: name of the attack. `seen`: value of the record that the attack goes by, and `meant`: its words before the
    value. Of ``others`` test examples, ``alike`` look at least as much like used ones as the record does.
    """

    by: str
    meant: str
    seen: float
    others: int
    alike: int

    def sentence(self) -> str:
        """Return what an attacker learns of the record."""
        share = (self.alike + 1) / (self.others + 1)
        return (
            f"An attack of today, by {self.by}: {self.meant} {self.seen:.3g}, and {self.alike} of {self.others} test "
            "examples of its group look at least as much like used ones. Whoever calls such records used is wrong "
            f"about {100 * share:.3g}% of those that were not: the fewer, the easier this record is told apart."
        )


def owner_sentences(
    report: OwnerReport,
    risk: AttackRisk | None = None,
    attacks: Sequence[OwnAttack] = (),
    audits: Sequence[PublishedAudit] = (),
) -> tuple[str, ...]:
    """Return what the numbers mean, in plain words. `risk`: bounds on attacks on the record, if known. `attacks`: of
    today, on the record. `audits`: of the trial, by canaries that are no examples.
    """
    without, given = NEIGHBOURS[report.adjacency].unused, _GIVEN.get(report.kind, "")
    given += ", if the noise were secret" if "known_seed" in report.reasons else ""
    sentences = [
        f"Example {report.example_id}: epsilon {epsilon_text(report.epsilon)} at delta {report.delta:g}, "
        f"{report.kind}, adjacency {report.adjacency}.",
        "Whoever sees the trained model, and even every step of its training, concludes anything from it with a "
        f"probability of at most e^epsilon = {_factor(report.epsilon)} times that with this record {without}, "
        f"plus {report.delta:g}; and the other way round{given}.",
        _KINDS[report.kind],
        *(f"It is {sentence}." for sentence in in_words(report.reasons)),
        f"The worst case of this trial, for any example, is epsilon {epsilon_text(report.worst_case_epsilon)}.",
        "The number holds for the training that took place, and for this trial alone: costs of further trials on the "
        "same record add up.",
        "It was computed from the record itself: show it to nobody else.",
    ]
    if audits:
        sentences.insert(-2, _audited(audits, report.worst_case_epsilon))
    if attacks:
        sentences[-2:-2] = [*(attack.sentence() for attack in attacks), _of_others(report, risk, given)]
    if risk is not None:
        recognised = risk.true_positive_rates[FALSE_POSITIVE_RATES.index(0.01)].upper
        sentences.insert(
            2,
            f"A test for its use that is wrong about 1% of the records that were not used is right about at most "
            f"{at_most_share(recognised)} of those like it that were; at any threshold the two rates differ by at most "
            f"{at_most_share(risk.advantage.upper)} ({risk.kind}, from the record's own contributions).",
        )
    return tuple(sentences)


def _of_others(report: OwnerReport, risk: AttackRisk | None, given: str) -> str:
    """Return what the bounds say of attacks that were not made."""
    if "estimate" in (report.kind, risk and risk.kind):
        return "Another attack may do better, and the bounds above are estimates."
    return f"Another attack may do better, but none passes the bounds above{given}."


def _audited(audits: Sequence[PublishedAudit], worst_case: float) -> str:
    """Return the best bound of the audits, rounded down, with the test that gave it and what that assumes."""
    best = max(audits, key=lambda audit: audit.lower_bound)
    errors = sum(1.0 - audit.confidence for audit in audits)  # any of them may be the best by its error
    by = f"An audit of this trial by {best.canaries} made-up records (canaries)"
    if best.lower_bound == 0.0:
        return f"{by} proves no leak, which does not show that little leaks."
    contradicts = best.lower_bound > (worst_case if best.of_canary is None else best.of_canary)
    return (
        f"{by} shows that such training leaks: epsilon is at least {math.floor(100 * best.lower_bound) / 100:.2f} with "
        f"confidence {100 * max(0.0, 1.0 - errors):.3g}%, for the worst record. That is the bound of one of its tests: "
        f"{assumed_by_best(best.lower_bounds)}.{' The bound contradicts the worst case above.' if contradicts else ''}"
    )


def owner_page(report: OwnerReport, sentences: Sequence[str]) -> str:
    """Return the report as one HTML document without scripts and without references to other files."""
    facts = {
        "epsilon": epsilon_text(report.epsilon),
        "delta": f"{report.delta:g}",
        "kind": report.kind,
        **({"no guarantee because": ", ".join(report.reasons)} if report.reasons else {}),
        "adjacency": report.adjacency,
        "computed by": report.method,
        "worst case of any example": epsilon_text(report.worst_case_epsilon),
    }
    rows = (f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in facts.items())
    paragraphs = (f"<p>{escape(sentence)}</p>" for sentence in sentences[1:])
    title = f"Privacy report for example {report.example_id}"
    return _PAGE.format(title=title, rows="".join(rows), paragraphs="".join(paragraphs))


def _factor(epsilon: float) -> str:
    """Return e^epsilon, rounded up."""
    return f"{round_up(math.exp(epsilon), 2):.2f}" if epsilon < 20.0 else f"more than {math.exp(20.0):.1e}"
