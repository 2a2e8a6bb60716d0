"""`dpsweep owner-report`: the cost of one example, for its owner only. `dpsweep decrypt`: a private file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from dpsweep.accounting.attacks import AttackRisk, attack_risk, curve_of_examples
from dpsweep.accounting.calibration.parameter_search import epsilon_text
from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.individual import individual_reasons
from dpsweep.accounting.jobs.release import OwnerReport, owner_report
from dpsweep.accounting.mechanism.reasons import union, weakened
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.mechanism.units import protects_users
from dpsweep.accounting.records.arrow_parts import MANIFEST
from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.files import exists
from dpsweep.accounting.records.sealed import read_encrypted
from dpsweep.accounting.records.shards import has_norms
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.commands.options import write_file
from dpsweep.orchestration.commands.stored_trial import contributions_of
from dpsweep.orchestration.comparison.formats import for_terminal
from dpsweep.orchestration.store.layout import file_at, sweep_of, trial_at

if TYPE_CHECKING:
    from dpsweep.orchestration.report.owner import OwnAttack
    from dpsweep.orchestration.store.published import PublishedAudit


def owner(
    trial: Annotated[str, typer.Argument(help="Folder or URI of a finished trial.", metavar="TRIAL")],
    example_id: Annotated[int, typer.Option(help="Id of the owner's record in the training data.")],
    html: Annotated[Path | None, typer.Option(help="Write the report to this HTML file, readable by you only.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Tell the owner of one training example what it paid in privacy, and nothing of any other example."""
    from dpsweep.orchestration.report.owner import owner_page, owner_sentences

    files = trial_at(trial)
    report, risk = read_owner_report(files, example_id)
    attacks, audits = own_attacks(files, example_id), audits_of(files)
    sentences = owner_sentences(report, risk, attacks, audits)
    if html is not None:
        write_file("--html", html, owner_page(report, sentences).encode(), private=True)
    if as_json:
        plain: dict[str, Any] = {name: None if value == math.inf else value for name, value in asdict(report).items()}
        seen = {"attacks": [asdict(attack) for attack in attacks], "audits": [asdict(audit) for audit in audits]}
        typer.echo(json.dumps({**plain, "risk": risk and risk.as_dict(), **seen, "meaning": list(sentences)}))
        return
    typer.echo(for_terminal("\n".join(sentences)))
    if html is not None:
        typer.echo(f"report: {html}")


def read_owner_report(files: TrialFiles, example_id: int) -> tuple[OwnerReport, AttackRisk | None]:
    """Return the owner report from stored files of a finished trial, and bounds on attacks if its norms are there.

    Both are estimates for the reasons of the trial.
    Raises: InvalidInput for a trial that is not finished, was trained without noise or has no stored epsilons, and for
    an unknown example; DataCorruption for damaged files.
    """
    from dpsweep.orchestration.comparison.claims import founded_result
    from dpsweep.orchestration.store.results import TrialResult
    from dpsweep.workers.training.history import reasons_of_trial

    result = founded_result(files)
    if not isinstance(result, TrialResult):
        raise InvalidInput(f"{files.root} holds no finished trial; give the folder of one, below trials/ of its sweep")
    if not result.worst_case.is_private or not read_trace(files.trace).is_private:
        raise InvalidInput(f"{files.root} was trained without noise: nothing bounds what it reveals of any example")
    if protects_users(result.spec.unit.name):
        raise InvalidInput(
            f"{files.root} protects users: each paid at most {epsilon_text(result.worst_case.epsilon)} with all their "
            "rows together; no epsilon of single rows is known"
        )
    if result.spec.norms.are_off:
        raise InvalidInput(
            f"{files.root} was trained with norms.refreshes_per_epoch: off, so no epsilon of single examples is known; "
            f"each paid at most the worst case, {epsilon_text(result.worst_case.epsilon)}"
        )
    if read_trace(files.trace).selection is not None:
        raise InvalidInput(
            f"{files.root} is the best of a private selection, after which no epsilon of single examples is proven; "
            f"each paid at most the worst case, {epsilon_text(result.worst_case.epsilon)}"
        )
    if not exists(f"{files.epsilons}/{MANIFEST}"):
        raise InvalidInput(
            f"{files.epsilons} holds no epsilons of single examples; restore them from a backup, or delete "
            f"{files.result} and resume the sweep, which accounts for them again"
        )
    epsilons = read_epsilons(files.epsilons)
    if epsilons.delta != result.worst_case.delta:
        raise DataCorruption(f"{files.epsilons} is of another run than {files.result}; restore both from one backup")
    trace, reasons = read_trace(files.trace), union((result.reasons, reasons_of_trial(result.spec, ())))
    of_run = union((reasons, individual_reasons(trace) if epsilons.kind == "estimate" else ()))
    report = owner_report(weakened(epsilons, of_run), example_id, weakened(result.worst_case, reasons))
    risk = owner_risk(files, trace, example_id)
    return report, risk and weakened(risk, reasons)


def own_attacks(files: TrialFiles, example_id: int) -> tuple[OwnAttack, ...]:
    """Return attacks on the record: by its loss if the trial stored losses that can be compared with it, and by
    reference models and its gradient if the trial was attacked so.
    """
    by_loss = _by_loss(files, example_id)
    return (*((by_loss,) if by_loss else ()), *_by_scores(files, example_id))


def _by_scores(files: TrialFiles, example_id: int) -> tuple[OwnAttack, ...]:
    """Return the attacks whose scores of single examples are stored; none on a canary that was left out."""
    from dpsweep.orchestration.report.owner import OwnAttack
    from dpsweep.workers.evaluation.attack_results import read_membership

    scores = read_membership(files.membership)
    if scores is None or not (scores.is_member & (scores.example_ids == example_id)).any():
        return ()
    own = int(np.flatnonzero(scores.is_member & (scores.example_ids == example_id))[0])
    others = ~scores.is_member & (scores.groups == scores.groups[own])
    count, ratio, norm = int(others.sum()), float(scores.log_ratios[own]), float(scores.gradient_norms[own])
    if count == 0 or not math.isfinite(norm):
        return ()
    as_likely = int(np.sum(scores.log_ratios[others] >= ratio))
    as_short = int(np.sum(scores.gradient_norms[others] <= norm))
    likelier = "the log-likelihood of its label, less that under models of random halves of the data, is"
    return (
        OwnAttack("reference models (RMIA)", likelier, ratio, count, as_likely),
        OwnAttack("the gradient", "under the final model its gradient has the norm", norm, count, as_short),
    )


def _by_loss(files: TrialFiles, example_id: int) -> OwnAttack | None:
    from dpsweep.orchestration.report.owner import OwnAttack
    from dpsweep.orchestration.store.results import TrialResult, read_result
    from dpsweep.workers.evaluation.outcomes import Outcomes, read_outcomes

    tested, result, own = read_outcomes(files.outcomes), read_result(files.result), read_epsilons(files.epsilons)
    if not isinstance(tested, Outcomes) or not isinstance(result, TrialResult):
        return None
    (row,) = np.flatnonzero(own.example_ids == example_id)
    losses = tested.log_losses[tested.groups == own.groups[row]]
    loss = float(own.losses[row])
    if result.spec.loss.name != "cross_entropy" or not math.isfinite(loss) or not len(losses):
        return None
    meant = "when norms were last taken, the model's loss on it was"
    return OwnAttack("the loss", meant, loss, len(losses), int(np.sum(losses <= loss)))


def audits_of(files: TrialFiles) -> tuple[PublishedAudit, ...]:
    """Return the audits of a trial whose canaries are no examples: of itself, and by `dpsweep audit`."""
    from dpsweep.orchestration.comparison.publishing import published_audit
    from dpsweep.orchestration.store.later_results import read_audits
    from dpsweep.workers.evaluation.attack_results import read_attacks

    own, place = published_audit(read_attacks(files.attacks).audit), sweep_of(files)
    found = (*((own,) if own else ()), *(read_audits(*place) if place else ()))
    return tuple(audit for audit in found if audit.kind == "gradient")


def owner_risk(files: TrialFiles, trace: Trace, example_id: int) -> AttackRisk | None:
    """Return the bounds on every attack on this example, from its own contributions; None if the trial's norms were
    deleted.

    Raises: InvalidInput for an unknown example, DataCorruption for missing or damaged norm shards.
    """
    if not has_norms(files.norms):
        return None
    own = contributions_of(files, trace, [example_id])
    return attack_risk(curve_of_examples(trace, own.steps, own.contributions))


def decrypt(
    file: Annotated[str, typer.Argument(help="A file below a folder private/, or its URI.", metavar="FILE")],
    to: Annotated[Path, typer.Option(help="The file to write, readable by you only.", metavar="FILE")],
) -> None:
    """Decrypt a private file with the key in DPSWEEP_KEY, such as private/report.html or a trial's error.txt."""
    uri = file_at(file)
    try:
        content = read_encrypted(uri)
    except FileNotFoundError:
        raise InvalidInput(f"there is no {uri}; name a file below a folder private/ of a sweep") from None
    write_file("--to", to, content, private=True)
    typer.echo(for_terminal(f"{to}: {len(content):,} bytes, not encrypted and readable by you only"))
