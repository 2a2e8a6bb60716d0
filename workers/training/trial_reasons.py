"""Reasons why the epsilons of a trial are estimates, as far as they follow from its specification and its data."""

from __future__ import annotations

from collections.abc import Iterable

from dpsweep.accounting.mechanism.reasons import Reason, union
from dpsweep.workers.noise.noise_sources import noise_source_kind
from dpsweep.workers.own_code.imports import is_import_path
from dpsweep.workers.spec import TrialSpec


def reasons_of_trial(spec: TrialSpec, of_data: Iterable[Reason]) -> tuple[Reason, ...]:
    """Return why the epsilons of a trial are estimates, whatever its training does; none for a trial without noise.

    of_data: `Source.reasons`, what was read off the rows.
    """
    if not spec.is_private:
        return ()
    own: dict[Reason, bool] = {
        "known_seed": not noise_source_kind(spec.noise_source).is_secret,
        "own_clipping": is_import_path(spec.clipping.name),
    }
    return union((of_data, (reason for reason, holds in own.items() if holds)))
