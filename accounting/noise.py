"""How the noise of a run is correlated over its steps: a closed sum of strategies.

Noise of step t is z_t = sum_s C^-1[t, s] w_s with independent Gaussian draws w_s and a lower triangular matrix C. Every
accountant matches `NoiseStrategy` completely, or refuses what it does not know by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, final

from accounting.errors import UnsupportedMechanism
from accounting.registry import build


@final
@dataclass(frozen=True)
class IndependentNoise:
    """C is the identity: fresh noise at every step, which needs no state."""

    stored_name: ClassVar[str] = "independent"
    words: ClassVar[str] = "independent noise"


INDEPENDENT: Final = IndependentNoise()

NoiseStrategy = IndependentNoise
"""Every noise strategy that accountants and the file of a trace may name."""

STRATEGIES: Final[Mapping[str, type[NoiseStrategy]]] = {IndependentNoise.stored_name: IndependentNoise}
"""Noise strategies by their name in files and on the command line."""


def require_known_noise(strategy: NoiseStrategy) -> None:
    """Raise `UnsupportedMechanism` for noise whose correlation no accountant knows."""
    if not isinstance(strategy, NoiseStrategy):
        raise UnsupportedMechanism(
            f"no accountant knows the noise strategy {type(strategy).__name__}; valid: {', '.join(STRATEGIES)}"
        )


def plain_strategy(strategy: NoiseStrategy) -> dict[str, Any]:
    """Return name and fields of ``strategy``, from which `strategy_of` rebuilds it."""
    return {"name": strategy.stored_name, **asdict(strategy)}


def strategy_of(plain: Mapping[str, Any]) -> NoiseStrategy:
    """Rebuild a strategy from its name and fields. Raises: InvalidInput for an unknown name or field."""
    params = dict(plain)
    return build(STRATEGIES, params.pop("name"), params, "noise strategy")
