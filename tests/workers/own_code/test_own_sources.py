"""The sources of a module: all that it imports of the user's, as far as a reader of the source knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsweep.workers.own_code.own_sources import sources_of


def write(folder: Path, **sources: str) -> None:
    """Files by their path with ``__`` for ``/``, such as ``package__nets``."""
    for name, source in sources.items():
        file = folder.joinpath(*name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)


def places(location: str, source: Path) -> list[str]:
    return [file.place for file in sources_of(location, str(source))]


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("import a_closed", {"a_closed.py"}),
        ("import a_closed as other, json", {"a_closed.py"}),
        ("from a_closed import anything", {"a_closed.py"}),
        ("def f():\n    import a_closed", {"a_closed.py"}),
        ("try:\n    import nothing_here\nexcept ImportError:\n    import a_closed", {"a_closed.py"}),
        ("import pack_closed.nets", {"pack_closed/init.py", "pack_closed/nets.py"}),
        ("from pack_closed import nets", {"pack_closed/init.py", "pack_closed/nets.py"}),
        ("from pack_closed import *", {"pack_closed/init.py", "pack_closed/nets.py", "pack_closed/other.py"}),
        ("import space_closed.inner", {"space_closed/inner.py"}),
        ("import importlib\nimportlib.import_module('a_closed')", {"a_closed.py"}),
        (
            "from importlib import import_module\nimport_module('pack_closed.nets')",
            {"pack_closed/init.py", "pack_closed/nets.py"},
        ),
        (
            "from importlib import import_module\ndef f(name):\n    return import_module(f'pack_closed.{name}')",
            {"pack_closed/init.py", "pack_closed/nets.py", "pack_closed/other.py"},
        ),
        (
            "def f(name):\n    return __import__('pack_closed.' + name)",
            {"pack_closed/init.py", "pack_closed/nets.py", "pack_closed/other.py"},
        ),
        ("import torch, numpy, dpsweep.workers.data, os", set()),
        ("from a_closed import (", set()),
    ],
)
def test_imports_are_followed(tmp_path: Path, source: str, imported: set[str]) -> None:
    write(
        tmp_path, a_closed="", pack_closed__nets="", pack_closed__other="", space_closed__inner="", entry_closed=source
    )
    (tmp_path / "pack_closed" / "__init__.py").write_text("")
    expected = {place.replace("init.py", "__init__.py") for place in imported}
    for location, given in (("entry_closed", tmp_path), ("sub/entry_closed.py", tmp_path / "entry_closed.py")):
        first, *others = places(location, given)
        beside = "sub/" if location.endswith(".py") else ""
        assert first == f"{beside}entry_closed.py"
        assert set(others) == {f"{beside}{place}" for place in expected}


def test_a_name_that_is_computed_whole_may_be_any_module_beside(tmp_path: Path) -> None:
    write(
        tmp_path,
        entry_any="import importlib\ndef f(name):\n    return importlib.import_module(name)",
        b_any="",
        p_any__c="",
    )
    write(tmp_path, env__lib__far_any="")
    (tmp_path / "p_any" / "__init__.py").write_text("")
    (tmp_path / "p_any" / "itself").symlink_to(tmp_path / "p_any")
    found = set(places("entry_any", tmp_path))
    assert found == {"entry_any.py", "b_any.py", "p_any/__init__.py", "p_any/c.py", "p_any/itself/__init__.py"}


def test_relative_imports_and_imports_of_imports(tmp_path: Path) -> None:
    write(
        tmp_path,
        pack_rel__deep__nets="from ..layers import Layer\nfrom . import beside\nfrom ... import beyond",
        pack_rel__deep__beside="",
        pack_rel__layers="import far_rel",
        pack_rel__unused="",
        far_rel="",
    )
    for package in ("pack_rel", "pack_rel/deep"):
        (tmp_path / package / "__init__.py").write_text("")
    assert places("pack_rel.deep.nets", tmp_path) == [
        "pack_rel/deep/nets.py",
        "far_rel.py",
        "pack_rel/__init__.py",
        "pack_rel/deep/__init__.py",
        "pack_rel/deep/beside.py",
        "pack_rel/layers.py",
    ]


def test_an_installed_package_is_listed_by_its_digests() -> None:
    (found,) = sources_of("yaml", None)
    assert found.place == "installed/yaml.sha256"
    lines = found.content.decode().splitlines()
    assert {"yaml/__init__.py", "yaml/loader.py"} <= {line.rpartition("  ")[2] for line in lines}
    assert {len(line.partition(" ")[0]) for line in lines} == {64}
    assert sources_of("os", None) == ()


def test_what_lies_beside_wins_over_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("here", "beside"):
        write(tmp_path / folder, helper_beside=f"# {folder}", entry_beside="import helper_beside")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    found = sources_of("entry_beside", str(tmp_path / "beside"))
    assert [Path(file.path).parent.name for file in found] == ["beside", "beside"]
