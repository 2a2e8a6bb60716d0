"""The tables that drafts are tried on: three that scikit-learn ships, and seven of seeded generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet
from sklearn import datasets

Rows = npt.NDArray[np.float64]
_TEXTS, _WORDS = 5_574, 300


@dataclass(frozen=True)
class Drawn:
    """A table of numbers with labels. words: further columns of texts. is_list: whether the numbers are one column."""

    numbers: Rows
    labels: npt.NDArray[Any]
    words: Mapping[str, list[str]] = field(default_factory=dict)
    is_list: bool = False

    def write(self, folder: Path) -> Path:
        """Return the table as a file, whose label is the column y."""
        columns: dict[str, Any] = {f"x{place}": values for place, values in enumerate(self.numbers.T)}
        if self.is_list:
            flat = pa.array(self.numbers.astype(np.float32).ravel())
            columns = {"embedding": pa.FixedSizeListArray.from_arrays(flat, self.numbers.shape[1])}
        table = pa.table({**columns, **self.words, "y": self.labels})
        path = folder / ("table.parquet" if self.is_list else "table.csv")
        (parquet.write_table if self.is_list else csv.write_csv)(table, path)
        return path


def _rides() -> Drawn:
    """Return a heavy-tailed column that decides the label, and another beside it, after taxi rides."""
    drawn = np.random.default_rng(0)
    card = drawn.random(5_000) < 0.7
    tips = card & (drawn.random(5_000) < 0.93)
    tip = np.where(tips, np.minimum(drawn.lognormal(0.8, 0.5, 5_000), 33.0), 0.0)
    fare = np.minimum(drawn.lognormal(2.4, 0.6, 5_000), 150.0)
    tip[0], fare[0] = 33.18, 150.0
    parts = drawn.choice(["north", "south"], 5_000).tolist()
    return Drawn(np.column_stack([tip, fare]).round(2), np.where(card, "card", "cash"), {"part": parts})


def _texts() -> Drawn:
    """Counts of hashed words of short messages, as an embedding; 13 % of the messages use other words more often."""
    drawn = np.random.default_rng(0)
    usual, other = drawn.dirichlet(np.full(_WORDS, 0.1), 2)
    spam = drawn.random(_TEXTS) < 0.13
    mixed = [0.8 * other + 0.2 * usual if each else 0.05 * other + 0.95 * usual for each in spam]
    counts = [drawn.multinomial(drawn.integers(8, 25), words) for words in mixed]
    return Drawn(np.stack(counts).astype(np.float64), np.where(spam, "spam", "ham"), is_list=True)


def _made(rows: int, columns: int, **how: Any) -> Drawn:
    return Drawn(*datasets.make_classification(rows, columns, random_state=0, **how))


def _large(rows: int) -> Drawn:
    made = _made(rows, 20, n_informative=12, n_classes=4, class_sep=1.2)
    return Drawn(made.numbers * 1000.0 + 5000.0, made.labels)


def _bundled(load: Callable[..., Any]) -> Drawn:
    return Drawn(*load(return_X_y=True))


TABLES: Final[Mapping[str, Callable[[int], Drawn]]] = {
    "breast_cancer": lambda most: _bundled(datasets.load_breast_cancer),
    "digits": lambda most: _bundled(datasets.load_digits),
    "diabetes": lambda most: Drawn(*datasets.load_diabetes(return_X_y=True, scaled=False)),
    "heavy_tail": lambda most: _rides(),
    "rare_class": lambda most: _made(
        min(most, 20_000), 20, n_informative=8, weights=[0.97], class_sep=1.5, flip_y=0.005
    ),
    "columns_1000": lambda most: _made(6_000, 1_000, n_informative=30, n_redundant=0, class_sep=2.0),
    "rows_500": lambda most: _made(500, 10, n_informative=5),
    "rows_200000": lambda most: _large(min(most, 200_000)),
    "texts": lambda most: _texts(),
    "friedman": lambda most: Drawn(*datasets.make_friedman1(4_000, 10, noise=1.0, random_state=0)),
}
"""Tables by name, each made of at most the given number of rows. The last and `diabetes` are regressions."""
