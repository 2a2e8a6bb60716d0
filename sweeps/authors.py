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


def joint_notes(writers: int = 1200, notes: int = 5000, words_per_note: int = 25, seed: int = 0) -> Source:
    """Return notes that one to three authors of a circle wrote together, labelled by subject.

    An author writes within one circle of about ten, and now and then with somebody of another.
    """
    draw = np.random.default_rng(seed)
    of_subject = draw.dirichlet(np.full(WORDS, 0.3), len(SUBJECTS))
    habits = draw.dirichlet(np.full(WORDS, 0.15), writers)
    first = draw.choice(writers, notes, p=draw.dirichlet(np.full(writers, 0.8)))
    others = first[:, None] // 10 * 10 + draw.integers(0, 10, (notes, 2))
    others = np.where(draw.random((notes, 2)) < 0.02, draw.integers(0, writers, (notes, 2)), others)
    others[draw.random((notes, 2)) < 0.6] = -1  # most notes have one or two authors
    authors = np.column_stack([first, others])
    subject = draw.integers(0, len(SUBJECTS), notes)
    counts = [draw.multinomial(words_per_note, each) for each in 0.45 * of_subject[subject] + 0.55 * habits[first]]
    return Source(
        name="joint_notes",
        train=make_split((np.stack(counts) / 5.0).astype(np.float32), labels=subject, user_ids=authors),
        test=None,
        group_names=SUBJECTS,
        class_names=SUBJECTS,
    )
