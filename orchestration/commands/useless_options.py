"""Options that have no effect beside another one, or without it: refused here, before a command reads anything.

Each combination is one `Useless` in `USELESS`. An option counts as given only on the command line: a variable of the
environment is for all commands. Combinations that depend on stored files are refused by `useless`, where these are
read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import typer
import typer.core

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.commands.run_flags import RunFlags
from dpsweep.orchestration.store.release_modes import Disclosure, release_mode


@dataclass(frozen=True)
class Useless:
    """Options without effect beside one of the options ``beside``, or without all of ``without``.

    Options are named as on the command line, arguments as in its usage.
    `because`: why, in words that follow a colon.
    `step`: what to do instead.
    """

    options: tuple[str, ...]
    because: str
    step: str
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def refusals(self, given: frozenset[str]) -> Iterator[InvalidInput]:
        """Yield the error for each of the options that is ``given`` in vain."""
        other = next((option for option in self.beside if option in given), None)
        lacks = bool(self.without) and given.isdisjoint(self.without)
        where = f"beside {other}" if other else f"without {' or '.join(self.without)}"
        for option in self.options if other or lacks else ():
            if option in given:
                yield useless(option, where, self.because, self.step)


_RUN_FLAGS: Final = tuple(f"--{field.name.replace('_', '-')}" for field in fields(RunFlags))
_STORED: Final = Useless(
    _RUN_FLAGS,
    "what was run is read from its files",
    "drop the flags that describe a run",
    beside=("--trial", "--trace"),
)
_SELECTED: Final = Useless(
    ("--compare", "--individual", "--examples", "--risk", "--plot", "--curve"),
    "of a selection only the epsilon of the released run is known",
    "drop one of them",
    beside=("--selection-trials",),
)
_SHAPE: Final = Useless(
    ("--selection-shape",),
    "it is the law of the number of runs",
    "add --selection-trials, the expected number",
    without=("--selection-trials",),
)
_SEEDS: Final = Useless(
    ("--max-seeds",), "it bounds the seeds that --until adds", "add --until told-apart", without=("--until",)
)
USELESS: Final[Mapping[str, Sequence[Useless]]] = {
    "init": (
        Useless(("--text",), "a model reads pictures or texts", "give one of them", beside=("--image",)),
        Useless(
            ("--tokenizer", "--pretrained"), "it reads a column of texts", "name it with --text", without=("--text",)
        ),
    ),
    "epsilon": (
        _STORED,
        _SELECTED,
        _SHAPE,
        Useless(("--trace",), "its folder holds the trace", "give one of them", beside=("--trial",)),
        Useless(
            ("--individual", "--examples"),
            "it reads the contributions that a trial has recorded",
            "name its folder with --trial",
            without=("--trial",),
        ),
        Useless(("--prior",), "it bounds reconstruction in the table of attacks", "add --risk", without=("--risk",)),
    ),
    "calibrate": (
        _SHAPE,
        Useless(
            ("--delta", "--selection-trials"),
            "no other target has it",
            "drop it, or give the target as --target-epsilon",
            without=("--target-epsilon",),
        ),
    ),
    "plan": (
        Useless(("--allow-code",), "nothing is imported", "give one of them", beside=("--no-code",)),
        Useless(("--probe",), "it runs what it trains", "give one of them", beside=("--no-code",)),
        Useless(
            ("--price-per-hour",),
            "it multiplies the time that a probe predicts",
            "add --probe",
            without=("--probe",),
        ),
        Useless(
            ("--probe", "--json"),
            "it prints lines for the sweep file and nothing else",
            "drop one of them",
            beside=("--release-rows-per-user",),
        ),
    ),
    "run": (_SEEDS,),
    "submit": (_SEEDS, Useless(("--follow",), "nothing is submitted", "give one of them", beside=("--dry-run",))),
    "status": (
        Useless(("--trials", "--state"), "JSON has every trial with its state", "drop one of them", beside=("--json",)),
        Useless(("--trials",), "it says which trials are shown", "give one of them", beside=("--state",)),
    ),
    "list": (
        Useless(("--address",), "the sweeps below the folder are listed", "give one of them", beside=("FOLDER",)),
    ),
    "prune": (Useless(("--older-than",), "it chooses among norms", "add --norms", without=("--norms",)),),
    "best": (
        Useless(
            ("--alias", "--tracking-uri"),
            "it is of the model that is registered",
            "add --register NAME",
            without=("--register",),
        ),
        Useless(("--all",), "JSON names all settings that may equal it", "drop one of them", beside=("--json",)),
    ),
}
"""By command. Values that contradict each other are refused where they are used."""


def useless(option: str, where: str, because: str, step: str) -> InvalidInput:
    """Return the error for an option without effect. where: beside what, without what, or for what."""
    return InvalidInput(f"{option} has no effect {where}: {because}; {step}")


class CheckedCommand(typer.core.TyperCommand):
    """A command that refuses options without effect, one line for each, before it begins."""

    def invoke(self, ctx: Any) -> Any:
        given = frozenset(name for each in self.params if is_given(ctx, str(each.name)) for name in names_of(each))
        found = (str(error) for rule in USELESS.get(str(self.name), ()) for error in rule.refusals(given))
        if lines := list(dict.fromkeys(found)):
            raise InvalidInput("\n".join(lines))
        return super().invoke(ctx)


def names_of(parameter: Any) -> Sequence[str]:
    """Return the flags of an option, or the metavar of an argument. parameter: one of `typer.core`."""
    return (parameter.metavar,) if parameter.param_type_name == "argument" else parameter.opts


def is_given(context: typer.Context, parameter: str) -> bool:
    """Return whether the command line gives a parameter, which a variable of the environment may hold for all
    commands.
    """
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def require_use_of_tracking(context: typer.Context, disclosure: Disclosure) -> None:
    """Raise InvalidInput if --tracking-uri is given though the results of a command are private, and not recorded."""
    if is_given(context, "tracking_uri") and not release_mode(disclosure).is_sensitive:
        raise useless(
            "--tracking-uri",
            f"under release: {disclosure}",
            "these results are private, and MLflow gets them under release: raw alone",
            "drop it",
        )
