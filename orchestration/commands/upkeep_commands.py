"""`dpsweep verify`, `account`, `prune`, `delete` and `record`: check, use, delete and record a stored sweep."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from dpsweep.accounting.accountants.joint_cost import epsilon_of_examples_together
from dpsweep.accounting.errors import DataCorruption, InvalidInput, count_of, require_finite
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import in_words, union, weakened
from dpsweep.accounting.records.files import exists, list_files
from dpsweep.accounting.records.shards import has_norms
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.registry import lookup
from dpsweep.orchestration.commands.options import AsJson, Folder, Pace, TrackingUri, warn, whole_numbers
from dpsweep.orchestration.commands.running import INTERRUPTED, NOT_RECORDED, print_json
from dpsweep.orchestration.commands.stored_trial import recorded, stored_trace
from dpsweep.orchestration.commands.useless_options import require_use_of_tracking, useless
from dpsweep.orchestration.comparison.formats import at_most, for_terminal, name_for_terminal, number, seconds
from dpsweep.orchestration.comparison.ledger import composed
from dpsweep.orchestration.comparison.stored import owned_record, stored_record
from dpsweep.orchestration.execution.environment import EMBEDDED, prepare_environment
from dpsweep.orchestration.store.attempts import Attempt
from dpsweep.orchestration.store.layout import SweepFiles, file_at, sweep_at
from dpsweep.orchestration.store.status import NOTHING_RECORDED, RecordingStatus

if TYPE_CHECKING:
    from dpsweep.orchestration.execution.reaccounting import OnPart, TrialCosts
    from dpsweep.orchestration.store.published import GroupEpsilon


def composed_of_examples(
    files: SweepFiles, key: str | None, examples: Sequence[int], delta: float | None
) -> tuple[PrivacyEstimate, str]:
    """Return the composed epsilon of the records ``examples`` together, from their contributions to each trial, and
    what it counts besides the trials, in words.

    key: of one trial, by default all private ones; delta: by default the sweep's. Earlier starts, candidates of a
    tuning, and trials without norms count with the most that records can contribute, and then there is no lower bound.
    A trial that trained on none of the records costs them nothing.

    Claim: as `epsilon_of_examples_together`, and an estimate for the reasons of `ledger.composed`.
    Raises: InvalidInput if no trial trained on one of the records, DataCorruption for damaged files.
    """
    ids, record = sorted(set(examples)), owned_record(files)
    trials = [record.trial(point) for point in record.points if point.is_private and key in (None, point.key)]
    cost = composed(trials)
    if cost is None:
        raise InvalidInput(f"{files.root} has no private trial that has shown anything; name another sweep or trial")
    kept = {trial.key: _kept(files.trial(trial.key), trial.attempts) for trial in trials}
    candidates = {each.identity: each for trial in trials for each in trial.candidates}
    without = [each for trial in trials for each in trial.attempts if each is not kept[trial.key]]
    without += candidates.values()
    own = [recorded(files.trial(key), each.trace, ids) for key, each in kept.items() if each is not None]
    missing = sorted(frozenset.intersection(*(each.missing for each in own))) if own else []
    if missing:
        raise InvalidInput(
            f"--examples has {missing[0]}, but no trial of {files.root} with norms trained on an example of this id; "
            f"the largest is {max(each.largest for each in own)}"
        )
    traces = [each.trace for each in kept.values() if each is not None]
    runs = [
        (trace, one.steps, one.contributions)
        for trace, one in zip(traces, own, strict=True)
        if not one.missing.issuperset(ids)
    ]
    most = np.ones((len(ids), 1), np.float32)
    asked = max(attempt.delta for trial in trials for attempt in trial.attempts) if delta is None else delta
    found = epsilon_of_examples_together([*runs, *((each.trace, (0,), most) for each in without)], asked)
    if without:  # nobody knows what the records contributed to these
        found = replace(found, lower_epsilon=None)
    reasons = cost.reasons if cost.estimate else union(trial.reasons for trial in trials)
    return weakened(found, reasons), cost.included.removesuffix(",")


def _kept(files: TrialFiles, attempts: Sequence[Attempt]) -> Attempt | None:
    """Return the attempt whose norms are stored: the last one that trained, if it showed what the stored trace says."""
    trained = [attempt for attempt in attempts if attempt.trace.segments]
    if not trained or not has_norms(files.norms) or stored_trace(files.trace) != trained[-1].trace:
        return None
    return trained[-1]


def verify(
    folder: Folder,
    code: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Your own module or file, if not where it was. It is compared, not run; may be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every stored file of the trained trials against its sha256, length and counts, and every ε by its trace.

    Also the report, comparison.json, results.json and status.json, and the same of its tuning. It warns of files of
    your own code that are not as they were. Not checked: logs, MLflow's store, and the checkpoints and norms of trials
    that have not ended, which their resumption checks.
    """
    from dpsweep.orchestration.execution.same_code import own_files
    from dpsweep.orchestration.execution.upkeep import damaged_files, damaged_reports, trained, tuning_of
    from dpsweep.orchestration.sweeps.user_code import allowed_again

    files = sweep_at(folder)
    record = owned_record(files)
    for name in code or ():
        if not allowed_again(record.sweep, [name], option="--code").modules:
            raise useless("--code", f"with {name}", "the sweep names no code of your own that it could be", "drop it")
    own = own_files(files, record, allowed_again(record.sweep, code or ()))
    damaged, count = [*damaged_files(files, record), *damaged_reports(files)], len(trained(record))
    candidates = sum(len(trained(tuning)) for _, tuning in tuning_of(files))
    if as_json:
        seen = {"compared": own.compared, "changed": own.changed, "not_found": own.unseen}
        typer.echo(json.dumps({"trials": count, "candidates": candidates, "damaged": damaged, "own_files": seen}))
    if damaged:
        raise DataCorruption("\n".join(damaged))
    if not as_json:
        what = f"{count} trained trials{f' and {candidates} of the tuning' if candidates else ''}"
        typer.echo(
            f"{what}: every file is as it was when its trial ended, and no ε is below the cost of its trace. Measures "
            "of test data and epsilons of single examples are as stored: they were not computed again"
        )
        for warning in own.changes():
            warn(warning)
        for path in own.unseen:
            warn(f"{path} is not here, so your own code was not compared; name it: --code FILE")
        if own.compared and not own.changed:
            typer.echo(for_terminal(f"your own files are as the trials keep them: {', '.join(own.compared)}"))


def prune(
    folder: Folder,
    norms: Annotated[bool, typer.Option("--norms", help="Delete the norms of accounted trials.")] = False,
    older_than: Annotated[
        float, typer.Option(min=0.0, help="Only those of trials that ended at least so many days ago.", metavar="DAYS")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Delete what accounted trials no longer need: the norms of single examples, by far their largest files."""
    from dpsweep.orchestration.execution.upkeep import prune_norms

    if not norms:
        raise InvalidInput("nothing to delete was named; give --norms")
    pruned = prune_norms(sweep_at(folder), older_than * 86_400.0)
    if as_json:
        typer.echo(json.dumps({"pruned": pruned}))
        return
    for key in pruned:
        typer.echo(f"deleted the norms of {name_for_terminal(key)}")
    typer.echo(
        f"norms of {count_of(len(pruned), 'trial')} deleted; stored epsilons, reports and owner reports stay. Without "
        "norms a trial can no longer be accounted with another delta or method, nor can `dpsweep epsilon --trial` "
        "read them"
        if pruned
        else "no accounted trial has norms that old; nothing was deleted"
    )


def delete(
    folder: Folder,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
) -> None:
    """Delete a sweep that nobody runs: its trials, models, reports and local MLflow store; asks first.

    Also what a run left before its sweep began: a tuning, a private selection, the errors of a refused plan. Releases
    stay counted: attempts/ is kept, and a sweep that is run in this folder again adds to it. Other files in the folder,
    runs on an MLflow server and copies elsewhere are left alone.
    """
    from dpsweep.orchestration.execution.upkeep import delete_sweep, left_before_it_began, remains

    files = sweep_at(folder)
    what, more = "" if exists(files.manifest) else left_before_it_began(files), ""
    if not what:
        record = stored_record(files)
        trials = f"{count_of(len(record.points), 'trial')}{_tuning_text(files)}"
        what = f"the sweep {record.sweep.name} in {files.root}: {trials}"
        more = ", with their models, reports and private files"
    if not yes and not _confirmed(for_terminal(f"Delete {what}{more}?")):
        typer.echo("nothing was deleted")
        raise typer.Exit(1)
    counted = delete_sweep(files)
    typer.echo(for_terminal(f"deleted {what}"))
    if counted:
        where = f"{files.root}/attempts{' and tuning/attempts' if list_files(files.tuning) else ''}"
        typer.echo(
            for_terminal(
                f"what {len(counted)} of them released cannot be taken back: it stays recorded in {where}, and counts "
                "if they are trained again there. Models and reports that were shared, and runs on an MLflow server, "
                "are not deleted"
            )
        )
    if left := remains(files):
        typer.echo(f"left, because not of the sweep: {', '.join(map(name_for_terminal, left))}")


def _tuning_text(files: SweepFiles) -> str:
    """Return the text on the trials of the sweep's tuning, which are deleted too; "" without tuning."""
    tuning = files.of_tuning
    return f", and {len(stored_record(tuning).points)} of its tuning" if exists(tuning.manifest) else ""


def _confirmed(question: str) -> bool:
    """Ask for confirmation. Raises: InvalidInput if nobody can answer."""
    try:
        return typer.confirm(question)
    except typer.Abort as error:
        raise InvalidInput("no answer, so nothing was deleted; give --yes to delete without being asked") from error


def account(
    context: typer.Context,
    folder: Folder,
    trial: Annotated[str | None, typer.Option(help="Key of one trial (default: all).", metavar="KEY")] = None,
    delta: Annotated[float | None, typer.Option(help="Failure probability (default: that of the sweep).")] = None,
    individual: Annotated[
        str | None,
        typer.Option(help="Accounting of single examples: rdp, rdp-classic or pld (default: that of the sweep)."),
    ] = None,
    group_sizes: Annotated[
        str | None, typer.Option(help="Also the ε of any k records, for several k: 2,4 or 2..8.", metavar="SIZES")
    ] = None,
    group_by: Annotated[
        str | None,
        typer.Option(help="CSV or Parquet file that gives each example_id a group to summarise by.", metavar="FILE"),
    ] = None,
    by_user: Annotated[
        bool, typer.Option("--by-user", help="Also the ε of each user, over all records of that user together.")
    ] = False,
    examples: Annotated[
        str | None,
        typer.Option(help="Also what records, such as 3,17 of one user, paid in all these trials together."),
    ] = None,
    address: Annotated[
        str, typer.Option(help="Where to compute: 'local', 'auto', HOST:PORT or 'in-process', as for `dpsweep run`.")
    ] = EMBEDDED,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            envvar="MLFLOW_TRACKING_URI",
            help="MLflow under release: raw (default: a SQLite store in the folder), or 'none'.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Account finished trials again from their stored norms and traces; the results are private, beside the first.

    The private report shows them, and under `release: raw` the report and MLflow too. Nothing is computed twice,
    whether a run was finished or interrupted.
    """
    from dpsweep.accounting.individual import INDIVIDUAL_ACCOUNTANTS

    if individual is not None:
        lookup(INDIVIDUAL_ACCOUNTANTS, individual, "individual accounting method")
    if delta is not None:
        require_finite("delta", delta, above=0.0, below=1.0)
    sizes = tuple(whole_numbers("--group-sizes", group_sizes, 1)) if group_sizes else ()
    own = whole_numbers("--examples", examples, 0) if examples else ()
    files = sweep_at(folder)
    require_use_of_tracking(context, owned_record(files).disclosure)
    prepare_environment(address)
    from dpsweep.orchestration.execution.reaccounting import ReaccountingRequest, account_trials_again
    from dpsweep.orchestration.pipeline import show_accounts

    request = ReaccountingRequest(trial, delta, individual, sizes, file_at(group_by) if group_by else "", by_user)
    together = composed_of_examples(files, trial, own, delta) if own else None
    shown = _parts_printed()
    found = []
    try:
        for answer in account_trials_again(files, request, address, shown, warn):
            found.append(answer.as_dict())
            typer.echo(_summary(answer), err=as_json)
            if not as_json:
                _print_details(answer, answer.individuals.groups if group_by else ())
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    show_accounts(folder, tracking_uri)
    if together is not None:
        typer.echo(_together_text(*together), err=as_json)
    if as_json:
        composed = (
            {} if together is None else {"together": {**together[0].as_dict(), "sensitive": "private like the records"}}
        )
        typer.echo(json.dumps({"accounts": found, **composed}, allow_nan=False))


def _together_text(found: PrivacyEstimate, also: str) -> str:
    whose = f"these {found.group_size} records" if found.group_size > 1 else "this record"
    said = (
        f"{whose} in all these trials together{also}: ε {at_most(found.epsilon)} at δ {found.delta:g} ({found.kind}); "
        "private like the records"
    )
    return "\n  ".join((said, *in_words(found.reasons)))


def _summary(answer: TrialCosts) -> str:
    own = answer.individuals
    return (
        f"{answer.key}: {count_of(answer.examples, 'example')} in {seconds(answer.seconds)} "
        f"({answer.examples / max(answer.seconds, 1e-9):,.0f} a second); at δ {answer.worst_case.delta:g} "
        f"worst case ε {at_most(answer.worst_case.epsilon)} ({answer.worst_case.kind}), individual ε median "
        f"{number(own.median)}, mean {number(own.mean)}"
    )


def _print_details(answer: TrialCosts, groups: Sequence[GroupEpsilon]) -> None:
    for group in groups:
        typer.echo(f"  {for_terminal(group.name)}: {group.examples:,.0f} examples, mean ε {number(group.mean)}")
    for estimate in answer.groups:
        typer.echo(f"  any {estimate.group_size} records: ε {at_most(estimate.epsilon)}")
    if answer.users is not None:
        typer.echo(
            f"  {count_of(answer.users.users, 'user')} of up to {count_of(answer.users.most_records, 'record')}: "
            f"median ε {number(answer.users.statistics.median)}, largest ε {at_most(answer.users.largest)}"
        )
    typer.echo(for_terminal(f"  private, in {answer.folder}"))


def _parts_printed() -> OnPart:
    """Return a function that prints the number of accounted parts of a trial at its `Pace`."""
    pace = Pace()

    def tell(key: str, done: int, parts: int) -> None:
        if done < parts and pace.is_due():
            typer.echo(f"{name_for_terminal(key)}: {done} of {parts} parts accounted", err=True)

    return tell


def record(folder: Folder, tracking_uri: TrackingUri = None, as_json: AsJson = False) -> None:
    """Record a stored sweep in MLflow: what its driver could not record, or all of one that ran without MLflow.

    Also of a driver that was killed. Runs that MLflow has already are kept, and nothing is recorded twice. By default
    in the store that the driver recorded in. Exit code 3 if MLflow stays silent before everything is recorded.
    """
    from dpsweep.orchestration.pipeline import record_again

    shown = _Printer()
    try:
        found = record_again(folder, tracking_uri, shown, warn)
    except KeyboardInterrupt:
        print(for_terminal(f"interrupted; {shown.last.missing() or 'the same command goes on'}"), file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json(asdict(found))
    if missing := found.missing():
        print(for_terminal(f"error: {missing}"), file=sys.stderr)
        raise typer.Exit(NOT_RECORDED)
    if not as_json:
        typer.echo(for_terminal(f"{found.count} trials are recorded in MLflow at {found.store}"))
        typer.echo(for_terminal(found.page))


class _Printer:
    """Prints how far the recording has come, at its `Pace`, and no line twice in a row."""

    def __init__(self) -> None:
        self.last, self._told, self._pace = NOTHING_RECORDED, "", Pace()

    def __call__(self, recording: RecordingStatus) -> None:
        self.last, line = recording, recording.line()
        if recording.goes_on and line != self._told and self._pace.is_due():
            print(for_terminal(line), file=sys.stderr, flush=True)
            self._told = line
