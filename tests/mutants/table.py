"""All mutants."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant
from tests.mutants.of_accounting import ACCOUNTING
from tests.mutants.of_clipping import METHODS
from tests.mutants.of_hostile import HOSTILE
from tests.mutants.of_numerics import NUMERICS
from tests.mutants.of_orchestration import ORCHESTRATION
from tests.mutants.of_pld import PLD
from tests.mutants.of_results import RESULTS
from tests.mutants.of_selection import SELECTIONS
from tests.mutants.of_steps import STEPS
from tests.mutants.of_workers import WORKERS

MUTANTS: Final[tuple[Mutant, ...]] = (
    *ACCOUNTING,
    *SELECTIONS,
    *PLD,
    *NUMERICS,
    *METHODS,
    *STEPS,
    *WORKERS,
    *ORCHESTRATION,
    *RESULTS,
    *HOSTILE,
)
