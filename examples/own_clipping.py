"""A clipping method of one's own: a smooth version of flat clipping."""

from dataclasses import dataclass

from torch import Tensor, sqrt

from accounting.errors import require_finite
from workers.clipping import ClippingMethod, ClippingState, ClipRule, Examples, Setting


@dataclass(frozen=True)
class Smooth(ClippingMethod):
    """C g / sqrt(C^2 + s^2 ||g||^2), shorter than C / s for every g. Sensitivity C / s.

    The proof is the author's business: ||g|| C / sqrt(C^2 + s^2 ||g||^2) < C ||g|| / (s ||g||) = C / s. What is stated
    below is checked on every example of the training, which is no proof for those that never occur.
    """

    steepness: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("steepness of smooth clipping", self.steepness, above=0.0)

    def decide(self, state: ClippingState, noisy_answer: Tensor, setting: Setting) -> ClipRule:
        bound, steepness = state.bound, self.steepness

        def weigh(examples: Examples) -> Tensor:
            """[B]: the factor of each gradient, from its own norm alone."""
            return bound / sqrt(bound**2 + (steepness * examples.norms) ** 2)

        return ClipRule(sensitivity=bound / steepness, weigh=weigh, bounds={"all": bound / steepness})
