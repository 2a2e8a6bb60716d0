"""The release modes, which everything that depends on them reads from one registry."""

from __future__ import annotations

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.store.release_modes import (
    EXACT,
    RELEASE_MODES,
    RELEASED,
    release_mode,
    release_spec,
    shown_error,
)


@pytest.mark.parametrize("name", RELEASE_MODES)
def test_a_mode_keeps_what_it_says(name: str) -> None:
    """Only exact statistics are sensitive; only a release has mechanisms, and the noise is in the trace."""
    mode, spec = release_mode(name), release_spec(name, {})
    assert mode.is_sensitive == (mode.statistics == "exact")
    assert (spec is not None) == (mode.statistics == "released")
    assert spec is None or all(release.noise_multiplier > 0.0 for release in spec.releases())
    assert mode.missing


@pytest.mark.parametrize("name", RELEASE_MODES)
def test_only_a_sensitive_mode_shows_texts_that_may_quote_the_data(name: str) -> None:
    with pytest.raises(ValueError, match="row 17") as caught:
        raise ValueError("row 17")
    assert ("row 17" in shown_error(caught.value, name)) == release_mode(name).is_sensitive


def test_statistics_name_the_mode_that_made_them() -> None:
    assert (release_mode(EXACT).statistics, release_mode(RELEASED).statistics) == ("exact", "released")


def test_unknown_modes_and_parameters_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="unknown release 'rav'; did you mean 'raw'"):
        release_mode("rav")
    with pytest.raises(InvalidInput, match="unknown key 'bins' of release 'raw'; it takes none"):
        release_spec("raw", {"bins": 3})
