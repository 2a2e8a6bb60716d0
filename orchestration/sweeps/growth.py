"""Continuing a stored sweep with the same sweep file or a later version of it. Pure.

A later version may ask for more trials, for fewer, and for other work on them. Results of trials that it no longer asks
for are kept in the folder, and still count as released by the sweep.
"""

from __future__ import annotations

from dataclasses import replace

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.encryption import require_key
from dpsweep.orchestration.store.manifest import Manifest, new_manifest
from dpsweep.orchestration.store.release_modes import release_mode
from dpsweep.orchestration.sweeps.grid import Past, drafts
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep


def past_of(manifest: Manifest) -> Past:
    """Return the history of a stored sweep, for planning. Raises: InvalidInput if a stored text is no valid sweep
    file.
    """
    return Past(tuple(map(parse_sweep, manifest.earlier)), manifest.calibrations)


def opened(stored: Manifest | None, sweep: SweepSpec, text: str, root: str) -> Manifest:
    """Return the manifest of ``sweep``: a new one, or the stored one as it has `grown`; writes nothing.

    Raises: InvalidInput as `grown`, and if the private files of the stored sweep have another encryption key than this
    process, or only one of the two has a key.
    """
    if stored is None:
        return new_manifest(sweep.plain(), text)
    require_key(stored.key_check, f"the sweep in {root}")
    return grown(stored, sweep, text, root)


def grown(manifest: Manifest, sweep: SweepSpec, text: str, root: str) -> Manifest:
    """Return the manifest updated to ``sweep``, with which the stored sweep continues; unchanged if it is the same
    file.

    text: the file of ``sweep``. root: folder of the stored sweep, for errors. Raises: InvalidInput for a sweep of
    another name, and for another release mode if stored results hold statistics of training examples.
    """
    if manifest.sweep == sweep.plain() and manifest.text == text:
        return manifest
    stored = parse_sweep(manifest.text)
    if stored.name != sweep.name:
        raise InvalidInput(
            f"{root} holds the sweep {stored.name!r}, not {sweep.name!r}; restore the name, or choose another folder "
            "with --output"
        )
    if stored.release != sweep.release and release_mode(stored.disclosure).statistics is not None:
        raise InvalidInput(
            f"{root} holds results with release: {stored.disclosure}, which show statistics of training examples, so "
            "its release cannot change; restore it, or choose another folder with --output"
        )
    left = {point.key for point in drafts(stored)} - {point.key for point in drafts(sweep)}
    earlier = [each for each in manifest.earlier if each != text]
    return replace(
        manifest,
        text=text,
        sweep=sweep.plain(),
        earlier=[*earlier, manifest.text] if left and manifest.text not in earlier else earlier,
    )


def begun(tuning: Manifest | None, stage: str) -> str:
    """Return the stored file of the tuning, if it differs from ``stage`` only in the section ``adapted``; else
    ``stage``.

    tuning: manifest that an earlier run left, if any.
    """
    if tuning is None:
        return stage
    before, now = parse_sweep(tuning.text), parse_sweep(stage)
    return tuning.text if before.plain() | {"adapted": None} == now.plain() | {"adapted": None} else stage
