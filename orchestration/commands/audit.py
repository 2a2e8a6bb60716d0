"""`dpsweep audit`: what can be proven to leak, measured in a copy of a finished trial."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from dpsweep.accounting.errors import count_of
from dpsweep.orchestration.commands.options import AllowCode, AsJson, Folder, Pace, TrackingUri, warn
from dpsweep.orchestration.commands.useless_options import require_use_of_tracking
from dpsweep.orchestration.comparison.formats import at_least, at_most, for_terminal, seconds
from dpsweep.orchestration.execution.environment import IN_PROCESS, prepare_environment
from dpsweep.orchestration.store.later_results import AuditRecord
from dpsweep.orchestration.store.layout import sweep_at
from dpsweep.workers.spec import AuditKind, AuditSpec, Transcript
from dpsweep.workers.training.history import Progress


def audit(
    context: typer.Context,
    folder: Folder,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Key of a finished trial (default: every private one); may be repeated.", metavar="TRIAL"),
    ] = None,
    canaries: Annotated[int, typer.Option(min=2, help="Number of canaries.")] = 2000,
    kind: Annotated[
        AuditKind,
        typer.Option(help="Canaries: training examples that half of the time are left out, or made-up gradients."),
    ] = "gradient",
    transcript: Annotated[
        Transcript | None,
        typer.Option(help="What guesses are made from (default: iterates; last_model for rows)."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Probability with which all bounds hold together.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Tells copies of one trial apart.")] = 0,
    address: Annotated[
        str, typer.Option(help="Where copies train: 'in-process', 'local', 'auto' or HOST:PORT, as for `dpsweep run`.")
    ] = IN_PROCESS,
    allow_code: AllowCode = None,
    tracking_uri: TrackingUri = None,
    as_json: AsJson = False,
) -> None:
    """Prove a lower bound on what finished trials leak, each by a copy that trains with canaries and is then deleted.

    The trial is only read, and nothing is added to its ε: of the copy remain the bounds, which are private. The private
    report shows them beside the claim, and under `release: raw` also report, results.json and MLflow.
    """
    spec = AuditSpec(canaries, confidence, kind, transcript or ("iterates" if kind == "gradient" else "last_model"))
    prepare_environment(address)
    from dpsweep.orchestration.comparison.stored import owned_record
    from dpsweep.orchestration.execution.audit_copies import AuditRequest, audit_again
    from dpsweep.orchestration.pipeline import show_accounts
    from dpsweep.orchestration.sweeps.user_code import allowed_again

    files = sweep_at(folder)
    record, request = owned_record(files), AuditRequest(tuple(only or ()), spec, seed)
    require_use_of_tracking(context, record.disclosure)
    code = allowed_again(record.sweep, allow_code or ())
    found = []
    for audited, uri in audit_again(files, record, request, code, address, _epochs_printed(), warn):
        found.append({**asdict(audited), "sensitive": "private like the training examples"})
        for line in _lines(audited, uri):
            typer.echo(for_terminal(line), err=as_json)
    show_accounts(folder, tracking_uri)
    if as_json:
        typer.echo(json.dumps({"audits": found}, allow_nan=False))


def _lines(record: AuditRecord, uri: str) -> tuple[str, ...]:
    from dpsweep.accounting.audits import assumed_by_best

    share = f"{100 * record.lower_bound / record.claim:.0f}% of the claim" if record.claim > 0.0 else "no claim"
    contradicts = record.lower_bound > record.of_canary
    said = "ABOVE what its canaries pay, so that it CONTRADICTS the claim" if contradicts else share
    tests = ", ".join(f"{name} {at_least(bound)}" for name, bound in record.lower_bounds.items())
    return (
        f"{record.key}: ε at least {at_least(record.lower_bound)} of {at_most(record.claim)} claimed at δ "
        f"{record.delta:g} ({said}), with confidence {100 * record.confidence:g}%",
        f"  {count_of(record.canaries, 'canary', 'canaries')} ({record.kind}, {record.transcript}) that pay at most ε "
        f"{at_most(record.of_canary)}, {seconds(record.seconds)}; {tests}",
        f"  {assumed_by_best(record.lower_bounds)}; a low bound does not show that little leaks",
        f"  private, in {uri}",
    )


def _epochs_printed() -> Callable[[str, Progress], None]:
    """Return a function that prints the epochs of a copy at its `Pace`."""
    pace = Pace()

    def tell(key: str, now: Progress) -> None:
        if pace.is_due():
            typer.echo(for_terminal(f"{key}: step {now.step} of {now.total_steps} of the copy"), err=True)

    return tell
