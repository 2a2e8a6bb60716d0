"""A small table of rows that belong to people, and a sweep that protects them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml

PEOPLE = 24


def write_people(path: Path, first: int = 0, people: int = PEOPLE, seed: int = 0) -> Path:
    """One to five rows of each of the people ``first``, ``first`` + 1, ...: two features, a group, a label, a name."""
    draw = np.random.default_rng(seed)
    whose = np.repeat(np.arange(people), draw.integers(1, 6, people))
    values = draw.normal(size=(len(whose), 2)) + draw.normal(size=(people, 2))[whose]
    lines = ["a,b,team,label,who"]
    lines += [
        f"{a:.4f},{b:.4f},{'xy'[who % 2]},{'no' if a + b < 0.0 else 'yes'},p{first + who}"
        for (a, b), who in zip(values, whose, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def data_of(table: Path, **more: object) -> dict[str, object]:
    """Return the section ``data`` of the table."""
    columns = {"label": "label", "group": "team", "user": "who", "classes": ["no", "yes"]}
    declared = {"ranges": {"a": [-3, 3], "b": [-3, 3]}, "groups": {"team": ["x", "y"]}}
    return {"name": "csv", "path": str(table), **columns, **declared, **more}


def sweep_of_people(data: Path | dict[str, object], **privacy: object) -> str:
    """Return a sweep of the table, or of a section `data_of` it, with ``privacy`` changed."""
    usual = {"unit": "user", "user_sampling": "els", "max_records_per_user": 2, "noise_multiplier": 1, "delta": 1e-4}
    return yaml.safe_dump(
        {
            "name": "people",
            "data": data_of(data) if isinstance(data, Path) else data,
            "model": "logistic",
            "sampling": {"method": "poisson", "batch_size": 8},
            "epochs": 1,
            "clipping": "flat",
            "min_group_size": 1,
            "privacy": {**usual, **privacy},
        }
    )
