"""Reasons why an epsilon is an estimate and no guarantee. Every output that shows the epsilon names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, replace
from typing import Any, ClassVar, Final, Literal, Protocol, TypeVar, get_args

Claim = Literal["guarantee", "output_specific", "estimate"]
"""Strength of an upper bound, strongest claim first; see `dpsweep.accounting.mechanism.estimates.PrivacyEstimate`."""
Kind = Claim | Literal["lower_bound", "none"]
Reason = Literal[
    "known_seed",
    "ranges_from_rows",
    "classes_from_rows",
    "groups_from_rows",
    "not_confirmed",
    "own_clipping",
    "unaccounted_tuning",
    "candidates_not_counted",
    "unaccounted_scheduler",
    "chosen_by_private_results",
    "noise_followed_results",
    "end_followed_results",
    "repeated_seed",
    "norms_estimated",
    "accountant_not_proven",
]
REASONS: Final[Mapping[Reason, str]] = {
    "known_seed": "the noise is drawn from a known seed (noise_source: seeded), and whoever knows the seed can "
    "subtract it; set noise_source: os_entropy",
    "ranges_from_rows": "ranges or categories of columns were read off the rows, which no ε covers; declare `ranges` "
    "and `categories`",
    "classes_from_rows": "the classes were read off the rows, which no ε covers; declare `classes`",
    "groups_from_rows": "the groups were read off the rows, which no ε covers; declare `groups`, or `group_names` of "
    "pictures",
    "not_confirmed": "what `dpsweep init` read off the rows was not confirmed before the run, and no ε covers it; "
    "confirm it, and delete `drafted`",
    "own_clipping": "the sensitivity that the user's own clipping method states was checked in the run, but is not "
    "proved",
    "unaccounted_tuning": "hyperparameters were tuned on the private data, and no ε covers that one candidate was "
    "chosen (tune.privacy: unaccounted)",
    "candidates_not_counted": "the candidates of the tuning trained on the same records and are not counted, because "
    "tuning/ is gone",
    "unaccounted_scheduler": "the scheduler compares trials by results that no ε covers (accept_unaccounted_selection)",
    "chosen_by_private_results": "the choice was made by exact results on training examples, which no ε covers",
    "noise_followed_results": "the noise followed earlier results, and no bound on every course of the run is known",
    "end_followed_results": "results could decide when the run ended, or how many runs there are; or it ended before "
    "its planned end",
    "repeated_seed": "runs of one seed draw the same noise, so what they show is no independent composition",
    "norms_estimated": "gradient norms were not taken at every step of exactly the gradients that were summed",
    "accountant_not_proven": "no error analysis proves that the accountant rounds upwards",
}
"""Every reason by its name in files, in words; the words end with what would remove it, if anything does."""
FROM_ROWS: Final[tuple[Reason, ...]] = ("ranges_from_rows", "classes_from_rows", "groups_from_rows")
"""Reasons that a source of data can give: what it read off the rows."""


class _Claimed(Protocol):
    """A number that claims something of privacy."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def kind(self) -> Kind: ...

    @property
    def reasons(self) -> tuple[Reason, ...]: ...


Claimed = TypeVar("Claimed", bound=_Claimed)


def weakened(claimed: Claimed, reasons: Iterable[Reason]) -> Claimed:
    """Return ``claimed`` as an estimate for these reasons besides its own; unchanged without any.

    A lower bound, and what claims nothing, stay so: no reason makes them stronger than they are.
    """
    found = union((claimed.reasons, reasons))
    if not found or claimed.kind in ("lower_bound", "none"):
        return claimed
    return replace(claimed, kind="estimate", reasons=found)


def union(each: Iterable[Iterable[Reason]]) -> tuple[Reason, ...]:
    """Return all reasons once, in the order of `REASONS`."""
    found = {reason for reasons in each for reason in reasons}
    return tuple(reason for reason in get_args(Reason) if reason in found)


def in_words(reasons: Iterable[Reason]) -> tuple[str, ...]:
    """Return a sentence for each reason, with its name, such as ``no guarantee (known_seed): the noise is ...``."""
    return tuple(f"no guarantee ({reason}): {REASONS[reason]}" for reason in reasons)
