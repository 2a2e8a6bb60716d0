"""Folders of the user: of somebody with a home, and of somebody without, as in many containers."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data.source_files import locate
from dpsweep.workers.machine.folders import at_home, user_cache


def test_a_tilde_is_the_home_of_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert at_home("~/x") == tmp_path / "x"
    assert at_home(f"~{pwd.getpwuid(0).pw_name}/x") == Path(pwd.getpwuid(0).pw_dir, "x")
    assert at_home("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
    assert user_cache() == (tmp_path / ".cache" / "dpsweep").resolve()


def test_a_user_without_a_home_has_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("DPSWEEP_DATA", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    assert user_cache() is None
    with pytest.raises(
        InvalidInput, match=r"data source 'mnist': this user has no home, so no cache; set DPSWEEP_DATA"
    ):
        locate("mnist", ("mnist.npz",), None, lambda folder: pytest.fail("nothing is downloaded"))
    assert not list(tmp_path.iterdir())
