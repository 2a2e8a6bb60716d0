"""Stored sweep files of versions with other defaults, rewritten so that they mean now what they meant then. Pure.

Version 1 of the defaults (`Manifest.defaults`): norms are refreshed once per epoch unless ``norms.refreshes_per_epoch``
says otherwise. Version 2: it is ``auto``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from accounting.errors import InvalidInput
from orchestration.records.manifest import DEFAULTS, Manifest
from orchestration.sweeps.text import parse_text, with_section

_OFTEN: Final = "refreshes_per_epoch"


def as_meant(manifest: Manifest) -> Manifest:
    """The manifest with sweep files that mean to this version what they meant to the one that stored them."""
    if manifest.defaults >= DEFAULTS:
        return manifest
    return replace(
        manifest,
        text=_written_out(manifest.text),
        earlier=[_written_out(each) for each in manifest.earlier],
        defaults=DEFAULTS,
    )


def require_same_defaults(manifest: Manifest, text: str, root: str) -> None:
    """Refuse to continue the stored sweep in ``root`` with a file that leaves to a default what has changed.

    Otherwise all its trials would be trained anew, and their releases counted twice. Raises: InvalidInput.
    """
    if manifest.defaults < DEFAULTS and _written_out(text) != text:
        raise InvalidInput(
            f"{root} holds a sweep of an earlier version of dpsweep, to which a file without norms.{_OFTEN} meant one "
            f"refresh per epoch; now it means auto, which is another trial. Add `norms: {{{_OFTEN}: 1}}` to the file "
            "to continue that sweep, or choose another folder with --output"
        )


def _written_out(text: str) -> str:
    """The sweep file of version 1 with the number of refreshes that it leaves out."""
    norms = parse_text(text).get("norms", {})
    explicit = [_with_number(each) for each in norms] if isinstance(norms, list) else _with_number(norms)
    return text if explicit == norms else with_section(text, "norms", explicit, "The default of an earlier version.")


def _with_number(norms: Any) -> Any:
    return {_OFTEN: 1, **norms} if isinstance(norms, Mapping) else norms
