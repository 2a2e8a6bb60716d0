"""Names of files and folders that somebody else chose are on one line, without commands for the terminal."""

from __future__ import annotations

import os
from pathlib import Path

from tests.orchestration.invoking import invoked
from tests.orchestration.sample_results import stored_sample

ODD = os.fsdecode(b"\xff\x1b]0;title\x07\nerror: nothing")
SPELT = r"\udcff\x1b]0;title\x07\nerror: nothing"


def test_names_are_spelt_out_where_they_are_listed(tmp_path: Path) -> None:
    files = stored_sample(tmp_path / "sweep")
    (Path(files.root) / ODD).write_text("")
    checkpoint = Path(files.trial(ODD).checkpoint)
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"key")
    for command, line in (
        (["forget", files.root], f"forgotten: {SPELT}\n"),
        (["delete", files.root, "--yes"], f"left, because not of the sweep: {SPELT}\n"),
    ):
        said = invoked(*command)
        assert said.exit_code == 0, said.output
        assert line in said.output
        assert "\x1b" not in said.output
