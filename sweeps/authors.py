"""Short notes by authors who each wrote a few to many, drawn from a seed: a table of words by author and subject."""

import numpy as np

from dpsweep.workers.data import Source, make_split

SUBJECTS = ("work", "travel", "food")
WORDS = 60


def notes(authors: int = 1500, most: int = 24, words_per_note: int = 25, seed: int = 0) -> Source:
    """Return notes as counts of words, labelled by subject. Authors differ in words, subjects and number of notes."""
    draw = np.random.default_rng(seed)
    of_subject = draw.dirichlet(np.full(WORDS, 0.3), len(SUBJECTS))
    # half of the authors write up to four notes, the others more, up to `most`
    written = np.where(draw.random(authors) < 0.5, draw.integers(1, 5, authors), draw.integers(5, most + 1, authors))
    author = np.repeat(np.arange(authors), written)
    favourite = draw.dirichlet(np.full(len(SUBJECTS), 0.7), authors)
    habits = draw.dirichlet(np.full(WORDS, 0.15), authors)
    subject = np.array([draw.choice(len(SUBJECTS), p=favourite[one]) for one in author])
    counts = np.stack(
        [
            draw.multinomial(words_per_note, 0.45 * of_subject[topic] + 0.55 * habits[one])
            for one, topic in zip(author, subject, strict=True)
        ]
    )
    few = (written[author] > 4).astype(np.int64)
    return Source(
        name="notes",
        train=make_split(
            (counts / 5.0).astype(np.float32),  # by a constant: a mean of the rows would be covered by no guarantee
            labels=subject,
            groups=few,
            user_ids=author,
        ),
        test=None,
        group_names=("authors of few notes", "authors of many notes"),
        class_names=SUBJECTS,
    )
