"""Folders of versions to which a sweep file without norms meant one refresh per epoch."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from accounting.errors import DataCorruption, InvalidInput
from accounting.records import read_sealed, write_sealed
from orchestration.comparison.stored import stored_record
from orchestration.pipeline import render_again
from orchestration.records.layout import SweepFiles
from orchestration.records.manifest import Manifest, open_manifest, read_manifest
from orchestration.sweeps.former_defaults import as_meant
from orchestration.sweeps.grid import grid
from orchestration.sweeps.growth import grown, past_of
from orchestration.sweeps.schema import parse_sweep
from orchestration.sweeps.text import parse_text
from tests.orchestration.sample_grids import small
from tests.orchestration.test_growth import ONE, Told, contents, run

EXPLICIT: dict[str, Any] = {**ONE, "norms": {"refreshes_per_epoch": 1}}


def as_earlier(files: SweepFiles, text: str, earlier: tuple[str, ...] = ()) -> None:
    """Write the manifest of the folder as a version did that had no `auto`."""
    manifest = json.loads(read_sealed(files.manifest, "") or b"")
    del manifest["defaults"]
    write_sealed(files.manifest, json.dumps(manifest | {"text": text, "earlier": earlier}).encode())


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> SweepFiles:
    files = run(tmp_path_factory.mktemp("sweep") / "out", **{**EXPLICIT, "seeds": [0, 1]}).files
    as_earlier(files, small(**ONE), (small(**{**ONE, "seeds": [0, 1]}),))
    return files


@pytest.fixture
def files(begun: SweepFiles, tmp_path: Path) -> SweepFiles:
    shutil.copytree(begun.root, tmp_path / "out")
    return SweepFiles(str(tmp_path / "out"))


def test_what_is_stored_is_read_as_it_was_meant(files: SweepFiles) -> None:
    before = contents(files.trials)
    record = stored_record(files)
    assert {status.state.name for status in record.statuses.values()} == {"FINISHED"}
    assert len(record.points) == 4
    assert [point.is_asked for point in record.points] == [True, True, False, False]
    assert {point.spec.norms.refreshes_per_epoch for point in record.points} == {1.0}
    page = Path(render_again(files.root).files.report).read_text()
    assert "kept, though the sweep file no longer asks for it" in page
    assert contents(files.trials) == before


def test_the_same_file_would_now_train_other_trials_and_is_refused(files: SweepFiles) -> None:
    before = contents(files.root)
    leaving_it_out: list[dict[str, Any]] = [{}, {"norms": {"rows_per_part": 1000}}, {"seeds": [0, 1, 2]}]
    for changes in leaving_it_out:
        with pytest.raises(InvalidInput, match=r"Add `norms: \{refreshes_per_epoch: 1\}` to the file") as refused:
            run(Path(files.root), **{**ONE, **changes})
        assert "\n" not in str(refused.value)
    assert contents(files.root) == before


def test_with_the_number_written_out_it_is_continued(files: SweepFiles) -> None:
    told, before = Told(), contents(files.trials)
    run(Path(files.root), told, **EXPLICIT)
    assert (told.ends, contents(files.trials)) == ([], before)
    manifest = read_manifest(files)
    assert manifest is not None
    assert (manifest.defaults, manifest.text) == (2, small(**EXPLICIT))
    assert len(stored_record(files).points) == 4, "those of the earlier file too"
    run(Path(files.root), told, **{**EXPLICIT, "seeds": [0, 2]})
    assert len(told.ends) == 2, "only the third seed"


def test_a_folder_of_a_later_version_is_not_guessed_at(files: SweepFiles) -> None:
    manifest = json.loads(read_sealed(files.manifest, "") or b"")
    write_sealed(files.manifest, json.dumps(manifest | {"defaults": 3}).encode())
    for attempt in (lambda: stored_record(files), lambda: run(Path(files.root), **EXPLICIT)):
        with pytest.raises(DataCorruption, match="is no manifest of this version of dpsweep; restore it"):
            attempt()


FILES: dict[str, tuple[dict[str, Any], list[float | str]]] = {
    "nothing": ({}, [1.0]),
    "another field of norms": ({"norms": {"rows_per_part": 7}}, [1.0]),
    "a number": ({"norms": {"refreshes_per_epoch": 3}}, [3.0]),
    "a word": ({"norms": {"refreshes_per_epoch": "every_step"}}, ["every_step"]),
    "off": ({"norms": "off"}, ["off"]),
    "a list": ({"norms": ["off", {"rows_per_part": 7}, {"refreshes_per_epoch": 2}]}, ["off", 1.0, 2.0]),
    "a list inside": ({"norms": {"refreshes_per_epoch": [0.5, 2]}}, [0.5, 2.0]),
    "a list of another field": ({"norms": {"rows_per_part": [7, 8]}}, [1.0, 1.0]),
}


def stored(text: str, tmp_path: Path) -> Manifest:
    manifest = open_manifest(SweepFiles(str(tmp_path)), parse_sweep(text).plain(), text)
    return replace(manifest, defaults=1)


@pytest.mark.parametrize("style", ["block", "braces"])
@pytest.mark.parametrize("given", FILES)
def test_only_what_a_file_leaves_out_is_written_into_it(given: str, style: str, tmp_path: Path) -> None:
    changes, expected = FILES[given]
    text = small(**{**ONE, **changes})
    text = json.dumps(parse_text(text)) if style == "braces" else text
    manifest = stored(text, tmp_path)
    meant = as_meant(manifest)
    sweep = parse_sweep(meant.text)
    assert [norms.refreshes_per_epoch for norms in sweep.norms] == expected
    assert sweep.plain() | {"norms": None} == parse_sweep(text).plain() | {"norms": None}
    assert asdict(as_meant(meant)) == asdict(meant)
    if given in ("a number", "a word", "off", "a list inside"):
        assert meant.text == text
        assert grown(manifest, sweep, text, "out").text == text
    keys = [point.key for point in grid(sweep, past_of(manifest))]
    assert keys == [point.key for point in grid(sweep, past_of(meant))]
