"""Areas under ROC curves of membership attacks on several examples, and the epsilon that allows them."""

from __future__ import annotations

import math

from dpsweep.accounting.errors import require_finite


def area_limit(epsilon: float, delta: float) -> float:
    """Return the largest expected area under the ROC curve of any attack on examples that each pay at most ``epsilon``.

    Assumes that members and others of the attack are drawn from one distribution, as by a random split. Proof: the area
    is the probability that a member x scores above another example z. Without x in the training data, or with something
    independent of x in its place, both would be strangers to the model, and the probability 1/2 at most. Adding x
    changes it as (epsilon, delta)-DP allows: x scores no higher with probability at least e^-epsilon (1/2 - delta).
    The limit is concave in epsilon, so that the mean epsilon of several examples bounds their mean area.

    >>> area_limit(0.0, 0.0), round(area_limit(1.0, 1e-5), 4)
    (0.5, 0.8161)
    """
    epsilon = require_finite("epsilon", epsilon, at_least=0.0)
    return min(1.0, 1.0 - math.exp(-epsilon) * (0.5 - require_finite("delta", delta, at_least=0.0, at_most=0.5)))


def epsilon_of_area(area: float, delta: float) -> float:
    """Return the least epsilon whose `area_limit` is at least ``area``; infinite for an area of 1.

    >>> round(epsilon_of_area(area_limit(0.7, 1e-5), 1e-5), 9), epsilon_of_area(0.3, 0.0)
    (0.7, 0.0)
    """
    area = require_finite("area", area, at_least=0.0, at_most=1.0)
    if area >= 1.0:
        return math.inf
    return max(0.0, math.log((0.5 - delta) / (1.0 - area))) if delta < 0.5 else 0.0
