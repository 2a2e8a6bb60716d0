"""A clipping method of your own: a smooth version of flat clipping."""

from dataclasses import dataclass

from torch import Tensor, sqrt

from dpsweep.accounting.errors import require_finite
from dpsweep.workers.clipping import ClippingMethod, ClippingState, ClipRule, Examples, PublicFacts


@dataclass(frozen=True)
class Smooth(ClippingMethod):
    """Maps a gradient g to C g / sqrt(C^2 + s^2 ||g||^2). Sensitivity C / s under add/remove and zero-out adjacency.

    The author of a method must prove its sensitivity: C ||g|| / sqrt(C^2 + s^2 ||g||^2) < C ||g|| / (s ||g||) = C / s.
    Training checks the stated sensitivity on every example that it uses, which proves nothing for other examples.
    """

    steepness: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("steepness of smooth clipping", self.steepness, above=0.0)

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        bound, steepness = state.bound, self.steepness

        def weigh(examples: Examples) -> Tensor:
            """Weight of each gradient [batch], computed from its own norm only."""
            return bound / sqrt(bound**2 + (steepness * examples.norms) ** 2)

        return ClipRule(sensitivity=bound / steepness, weigh=weigh, bounds={"all": bound / steepness})
