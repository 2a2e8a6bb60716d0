"""How a draft scales the features of a table, and the learning rate, bound and model that follow from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dpsweep.workers.data import NORM_OF_TEXT, ColumnProfile, TableTask
from dpsweep.workers.training.robust_ranges import ROUNDS

_ROWS_OVER_NOISE: Final = 40.0
"""Training rows over the noise of a count of private ranges, at which a few percent of the rows show above it."""
_NOISE_OF_SCALING: Final = (8.0, 50.0)
"""Least and largest noise multiplier of a private scale. The least costs a fifth of the budget at an epsilon of 1."""
_MOST_NOISE_OF_MEANS: Final = 0.1
"""Largest noise of a private mean of numbers in [0, 1], whose deviation is seldom less."""
_SQUARED_IN_RANGE: Final = 0.3
"""Mean square of a number in [0, 1], as ranges scale it; that of private ranges is 1."""
_SQUARED_PIXEL: Final = 2.0
"""Mean square of a colour of a pixel, as pictures of a table are scaled: 1 in photographs, more where most is dark."""
_SPREAD_OF_TEXT: Final = 0.6
"""Share of the squared norm of a text that counts for the rate: its features hardly vary together."""
_FEWEST_OF_COUNTS: Final = 100
"""Rows below which private counts of a batch, then more than a fifth of the rows, cost most of an epsilon of 1."""
_FEWEST_COUNTED: Final = 4.0
"""Examples of a group in a batch below which averaged private counts, of noise 2.3, tell little of its share."""
PLACES: Final = 1024
"""Features of a column of texts. More learn more, and have more noise: by mails of 150 letters, 13 % of them spam."""
_LARGEST_BATCH: Final = 16_384
_FULL_RATE: Final = 100
"""Rows of a batch from which on the learning rate is that of a model without noise."""
_BOUND: Final = 0.2
"""Clipping bound over the norm of a row."""
_DEVIATION: Final = 0.15
"""Deviation of targets over their range from which on a bound is not reduced; residuals are about as large."""
_LEAST_DEVIATION: Final = 1e-3
HIDDEN: Final = 64
_SQUARED_LAYER: Final = 1.0 + HIDDEN / 6.0
"""Squared norm of a new hidden layer for features of deviation 1, with a constant 1 for the bias."""
_OVER_NOISE: Final = 10.0
"""Rows of a batch over the norm of the noise of all weights, for a multiplier of 1, from which on a hidden layer may
learn more than a linear model at an epsilon of 1. More rows bear a bound that is larger by as much."""
_LARGEST_BOUND: Final = 4.0
"""Bound for many rows over that for few."""


@dataclass(frozen=True)
class Scale:
    """How numbers are scaled, and how large a row is then, on which bound and learning rate depend.

    `preprocessing`: its name, if enough rows show through its noise. `numbers`: columns of numbers, an embedding's
    counted each. `squared_norm`: that of a row, expected, with a constant 1 for the bias.

    With features divided by their norm, a learning rate of 4 with momentum 0.9 is stable for cross-entropy, whose
    Hessian has a norm of at most 1/2; squares are steeper by 4. A batch of fewer than 100 rows takes a smaller rate, as
    the noise of a step is divided by the batch. Gradients have a norm of about 1/2 at first and of 1/10 later. The
    bound lies between: noise grows with it, and below it nothing is cut.

    A model with a hidden layer is drafted beside the linear one where the sizes of the table promise that the noise of
    its many weights is small beside a batch. More rows then bear a larger bound, which lets both models learn faster.
    `python -m benchmarks.drafts` tries these values on ten tables.
    """

    preprocessing: Literal["robust_ranges", "standardised"] | None
    noise_multiplier: float
    numbers: int
    squared_norm: float
    has_hidden_layer: bool
    learning_rate: float
    bound: float


def drafted_batch_size(rows: int) -> int:
    """Return the batch size for a table of so many rows, with a fifth held out."""
    return max(16, min(_LARGEST_BATCH, round(0.08 * rows)))


SCALE_OF_TOKENS: Final = Scale(None, 0.0, 0, 4.0, False, 0.2, 1.0)
"""For texts that a small transformer reads in place of features."""


def scale_of(
    used: Sequence[ColumnProfile],
    rows: int,
    task: TableTask,
    outputs: int,
    deviation: float | None = None,
    embedded: bool = False,
) -> Scale:
    """Return the scale for features of these columns; for a model with so many outputs. By public numbers alone, but
    for ``deviation``: that of the targets of a regression over their range. embedded: whether a pretrained model makes
    features of norm 1 beside them.
    """
    numbers = sum(max(column.places, 1) for column in used if column.span is not None)
    name, noise = _private_scaling(0.8 * rows, numbers)
    categories = [column.values for column in used if column.span is None and column.values is not None]
    texts = len(used) - len(categories) - sum(column.span is not None for column in used)
    of_table = 1.0 + numbers * (_SQUARED_IN_RANGE if name is None else 1.0) + len(categories)
    squared, spread = (of_table + texts * NORM_OF_TEXT**2 * share + embedded for share in (1.0, _SPREAD_OF_TEXT))
    inputs = numbers + sum(map(len, categories)) + (texts + embedded) * PLACES
    weights = (inputs + 1) * HIDDEN + (HIDDEN + 1) * outputs  # of a model with a hidden layer
    over_noise = drafted_batch_size(rows) / math.sqrt(weights) / _OVER_NOISE
    if task == "regression" and over_noise >= 1.0:  # without noise a larger rate diverges, as squares have no bound
        spread = max(spread, _SQUARED_LAYER)
    rate, bound = _rate(rows, task, spread), _bound(squared, deviation) * min(max(over_noise, 1.0), _LARGEST_BOUND)
    return Scale(name, noise, numbers, squared, over_noise >= 1.0, two_digits(rate), two_digits(bound))


def scale_of_pictures(side: int, rows: int, task: TableTask, deviation: float | None) -> Scale:
    """Return the scale for the pixels of colour pictures of side x side; other arguments as of `scale_of`."""
    squared = 1.0 + 3 * side**2 * _SQUARED_PIXEL
    rate, bound = _rate(rows, task, squared), _bound(squared, deviation)
    return Scale(None, 0.0, 0, squared, False, two_digits(rate), two_digits(bound))


def _rate(rows: int, task: TableTask, spread: float) -> float:
    """Return the learning rate for rows of this squared norm, of all that varies together."""
    return (1.0 if task == "regression" else 4.0) * min(1.0, drafted_batch_size(rows) / _FULL_RATE) / spread


def _bound(squared: float, deviation: float | None) -> float:
    """Return the clipping bound for rows of this squared norm, and for targets of this deviation."""
    of_targets = min(1.0, max(deviation, _LEAST_DEVIATION) / _DEVIATION) if deviation is not None else 1.0
    return _BOUND * math.sqrt(squared) * of_targets


def _private_scaling(rows: float, numbers: int) -> tuple[Literal["robust_ranges", "standardised"] | None, float]:
    """Return the preprocessing whose noise so many rows bear, and its noise multiplier; by public numbers alone."""
    least, most = _NOISE_OF_SCALING
    if not numbers:
        return None, 0.0
    ranges = rows / (_ROWS_OVER_NOISE * math.sqrt(ROUNDS * numbers))
    if ranges >= least:
        return "robust_ranges", two_digits(min(ranges, most))
    of_means = math.sqrt(numbers / 2.0) / rows  # noise of a mean in [0, 1], for a multiplier of 1
    if least * of_means > _MOST_NOISE_OF_MEANS:
        return None, 0.0
    return "standardised", two_digits(min(max(0.02 / of_means, least), most))


def too_few_to_count(rows: int, least: int) -> str:
    """Return what is too few for private counts of groups, the smallest of ``least`` rows, to tell of them; or ""."""
    if rows < _FEWEST_OF_COUNTS:
        return "rows"
    return "rows of a group" if least * drafted_batch_size(rows) < _FEWEST_COUNTED * rows else ""


def outward(low: float, high: float) -> tuple[float, float]:
    """Return a range that contains both numbers, with round ends, which are not the values of two individuals."""
    unit = 0.5 * 10.0 ** math.floor(math.log10(max(high - low, 1e-300)))
    ends = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    return (float(f"{ends[0]:.12g}"), float(f"{ends[1]:.12g}")) if ends[0] < ends[1] else (low, low + 1.0)


def two_digits(value: float) -> float:
    """Return the value to two digits."""
    return float(f"{value:.2g}")
