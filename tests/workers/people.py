"""A source of the user's own whose rows belong to people, one to seven each, from a seed."""

from __future__ import annotations

import numpy as np

from dpsweep.workers.data import Source, make_split

PEOPLE, MOST, FEATURES, CLASSES = 40, 7, 5, 3


def people(number: int = PEOPLE, seed: int = 0) -> Source:
    """The person decides on part of the label, so that rows of one person are alike."""
    draw = np.random.default_rng(seed)
    person = np.repeat(np.arange(number), draw.integers(1, MOST + 1, number))
    rows = draw.normal(size=(len(person), FEATURES)) + draw.normal(size=(number, FEATURES))[person]
    labels = rows[:, :CLASSES].argmax(1)
    return Source(
        name="people",
        train=make_split(rows.astype(np.float32), labels, person % 2, user_ids=1000 - 3 * person),
        test=None,
        group_names=("even", "odd"),
        class_names=("a", "b", "c"),
    )


def strangers() -> Source:
    """The same rows of nobody in particular."""
    known = people()
    rows = known.train
    train = make_split(rows.features, rows.labels, rows.groups)
    return Source("strangers", train, None, known.group_names, known.class_names)
