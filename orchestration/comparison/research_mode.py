"""What to say of trials whose noise can be computed from known seeds, and what may be claimed of them: estimates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import Field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from accounting.estimates import Kind
from orchestration.records.published import PublishedTrial

KNOWN_NOISE = "the noise is drawn from a known seed (noise_source: seeded), and whoever knows the seed can subtract it"
"""Why an epsilon of such a trial is no guarantee."""


def has_known_noise(noise_source: str) -> bool:
    """Whether whoever knows the seed of a trial can subtract its noise (research mode)."""
    from workers.noise import noise_source_kind  # late: it imports torch

    return not noise_source_kind(noise_source).is_secret


class _HasKind(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def kind(self) -> Kind: ...


Claimed = TypeVar("Claimed", bound=_HasKind)


def with_claim(claimed: Claimed, noise_source: str) -> Claimed:
    """``claimed``, but of kind ``estimate`` if its noise is known."""
    return as_estimate(claimed) if has_known_noise(noise_source) else claimed


def with_claims(trial: PublishedTrial, noise_source: str) -> PublishedTrial:
    """``trial``, but with all its epsilons and bounds on attacks of kind ``estimate`` if its noise is known."""
    if not has_known_noise(noise_source):
        return trial
    privacy = trial.privacy and as_estimate(trial.privacy)
    if privacy is not None:
        privacy = replace(privacy, risks={size: as_estimate(risk) for size, risk in privacy.risks.items()})
    accounts = tuple(
        replace(as_estimate(account), individual_kind=_claimable(account.individual_kind)) for account in trial.accounts
    )
    individuals = trial.individuals and as_estimate(trial.individuals)
    return replace(trial, privacy=privacy, individuals=individuals, accounts=accounts)


def as_estimate(claimed: Claimed) -> Claimed:
    """``claimed`` with the kind ``estimate``; a lower bound, and what claims nothing, stay so."""
    return replace(claimed, kind=_claimable(claimed.kind))


def _claimable(kind: Kind) -> Kind:
    return kind if kind in ("lower_bound", "none") else "estimate"


def research_warning(trials: Iterable[PublishedTrial]) -> tuple[str, ...]:
    """A sentence if the noise of some private trial is drawn from its seed, which results show; else nothing."""
    if not any(trial.tags.get("research_mode") == "True" for trial in trials if not trial.is_baseline):
        return ()
    return (
        "Research mode: the noise is drawn from the seeds of the trials, which results show. Whoever knows them can "
        "subtract it, so every ε says what the same runs would cost with secret noise; for models that are released, "
        "set noise_source: os_entropy.",
    )
