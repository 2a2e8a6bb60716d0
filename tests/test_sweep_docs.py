"""docs/sweep.md has every key of a sweep file and every component, and is what docs/sweep.py writes."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.sections import NO_KEY

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "sweep.md").read_text()
SCRIPT = runpy.run_path(str(ROOT / "docs" / "sweep.py"))
WRITTEN = ("Adapted", "DrawnRun", "Tried", "Winner")
"""Sections that dpsweep writes."""


def test_the_page_is_up_to_date() -> None:
    """Else run: python docs/sweep.py"""
    assert SCRIPT["reference"]() == PAGE


def test_every_key_is_there_with_its_meaning() -> None:
    rows = {line.split("`")[1]: line for line in PAGE.splitlines() if line.startswith("| `")}
    keys = set(_keys(SweepSpec.model_json_schema()))
    assert len(keys) > 60
    assert keys - rows.keys() == set()
    assert [key for key in keys if len(rows[key].rstrip(" |").rpartition("|")[2].strip()) < 5] == []


def _keys(found: Mapping[str, Any]) -> Iterator[str]:
    for section in (found, *found["$defs"].values()):
        if section.get("title") not in ("Component", "DataPart", *WRITTEN):
            yield from (key for key in section["properties"] if key not in ("params", NO_KEY))


def test_every_component_is_there_with_its_parameters() -> None:
    for key, registry in SCRIPT["COMPONENTS"].items():
        listed = PAGE.partition(f"### Components for `{key}`\n")[2].partition("###")[0]
        named = [re.findall(r"`([\w:]+)`(?=,|:|$)", line.partition(": ")[0]) for line in listed.splitlines()]
        assert set(registry) == {name for line in named for name in line} - {"module:function"}
    assert "`flat`, `per_layer`, `individual`: `bound=1.0`" in PAGE


def test_the_page_shows_bounds_defaults_and_axes() -> None:
    assert "| `epochs` | integer ≥ 1 ≤ 10000000, or a list | required |" in PAGE
    assert "| `test_fraction` | number > 0 < 1 | `0.2` |" in PAGE
    assert "[docs/sweep.md](docs/sweep.md)" in (ROOT / "README.md").read_text()
