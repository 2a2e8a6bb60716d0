"""One model that people bring, and what plan and run are to say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

Verdict = Literal["trains", "generic path", "refused"]
"""generic path: trains, and the plan says which layers run once per example."""

Data = Literal["vectors", "pictures", "tokens", "clips"]
"""A source of `tests.models.made`."""


@dataclass(frozen=True)
class Brought:
    """A model. why: regular expression that the reason of a refusal, or of the generic path, has.

    settings: further keys of the sweep.
    cure: name of the model of the table that follows the advice of the refusal, and trains.
    """

    make: Callable[[], nn.Module]
    data: Data
    verdict: Verdict = "trains"
    why: str = ""
    cure: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
