"""The shape of the code, checked: import directions, what importing loads, file sizes, documented commands."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("accounting", "workers", "orchestration", "dpsweep")


def test_import_contracts_hold() -> None:
    """The contracts in pyproject.toml: layers, leaf packages, and who may import ray, mlflow and torch."""
    finished = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("dpsweep.accounting", {"torch", "ray", "mlflow", "numba"}),
        ("dpsweep.accounting.accountants.account", {"torch", "ray", "mlflow"}),
        ("dpsweep.accounting.individual.epsilons", {"torch", "ray", "mlflow", "numba"}),
        ("dpsweep.accounting.calibration.parameter_search", {"torch", "ray", "mlflow"}),
        ("dpsweep.workers.trials.trial", {"ray", "mlflow"}),
        ("dpsweep.orchestration.commands.main", {"torch", "ray", "mlflow", "numba"}),
        ("dpsweep.orchestration.library", {"torch", "ray", "mlflow", "numba"}),
        ("dpsweep.orchestration.pipeline", {"torch", "ray", "scipy.optimize", "scipy.stats"}),
        ("dpsweep.orchestration.execution.on_ray", {"torch", "grpc", "scipy.optimize", "scipy.stats"}),
        ("dpsweep", {"torch", "ray", "mlflow", "numba"}),
    ],
)
def test_importing_a_module_loads_no_heavy_dependency(module: str, unwanted: set[str]) -> None:
    """A library user of the accountants never pays for torch; `dpsweep --help` pays for nothing."""
    code = f"import sys, {module}; print(' '.join(sorted({unwanted!r} & set(sys.modules))))"
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert finished.stdout.split() == []


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        (
            "mlflow",
            {
                f"orchestration/tracking/{name}.py"
                for name in ("access", "embedded", "loading", "logged_models", "mlflow", "model_registry", "runs")
            },
        ),
        ("optuna", {"orchestration/sweeps/tuning_stages.py"}),
        ("ray.tune", {"orchestration/execution/ray_tune.py"}),
    ],
)
def test_one_module_imports_it(library: str, allowed: set[str]) -> None:
    importing = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(
            line.strip().startswith((f"import {library}", f"from {library}")) for line in path.read_text().splitlines()
        )
    }
    assert importing <= allowed


def _rooms() -> dict[str, set[str]]:
    """Folders inside the packages, with what each exports in ``__all__``: names, or modules where names load much."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).glob("*/__init__.py"):
            named = [
                ast.literal_eval(node.value)
                for node in ast.parse(path.read_text()).body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            ]
            found[f"dpsweep.{package}.{path.parent.name}"] = set(named[0]) if named else set()
    return found


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each ``from module import name`` in the file."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)


def test_other_rooms_use_what_a_room_exports() -> None:
    rooms, unexported, used = _rooms(), [], set()
    assert len(rooms) > 10
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            file = path.relative_to(ROOT)
            for module, name in _imports(path):
                room = ".".join(module.split(".")[:3])
                if room not in rooms or file.is_relative_to(Path(*room.split(".")[1:])):
                    continue
                export = f"{module}.{name}"[len(room) + 1 :].split(".")[0]
                used.add((room, export))
                if export not in rooms[room]:
                    unexported.append(f"{file}: {module}.{name}")
    assert unexported == []
    unused = {(room, name) for room, names in rooms.items() for name in names} - used
    assert {(room, name) for room, name in unused if room.startswith("dpsweep.orchestration.")} == set()


def test_files_stay_small() -> None:
    long_files = {
        path.relative_to(ROOT).as_posix(): count
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 600
    }
    assert long_files == {}


def test_every_file_has_a_name_of_its_own() -> None:
    files = [path for package in PACKAGES[:3] for path in (ROOT / package).rglob("*.py") if path.stem != "__init__"]
    assert {name for name, count in Counter(path.stem for path in files).items() if count > 1} == set()


def _named_types(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Public classes and type aliases of a module, with the text of an alias: types of variables aside."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, f"class {node.name} at line {node.lineno}"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, meaning = node.targets[0].id, ast.unparse(node.value).replace("npt.", "")
            if re.fullmatch("[A-Z][a-z]+([A-Z][a-z]+)*", name) and not meaning.startswith("TypeVar("):
                yield name, meaning


def test_the_name_of_a_type_means_one_thing() -> None:
    meanings = dict[str, dict[str, str]]()
    for package in PACKAGES[:3]:
        for path in (ROOT / package).rglob("*.py"):
            for name, meaning in _named_types(_tree(path)):
                place = f"{path}: {meaning}" if meaning.startswith("class ") else meaning
                meanings.setdefault(name, {})[place] = path.relative_to(ROOT).as_posix()
    assert len(meanings) > 500
    assert {name: list(places.values()) for name, places in meanings.items() if len(places) > 1} == {}


def test_functions_that_other_files_import_have_names_of_their_own() -> None:
    """Commands and the functions of `dpsweep.orchestration.library` share the names of what they call."""
    paths = [path for package in PACKAGES[:3] for path in (ROOT / package).rglob("*.py") if path.stem != "__init__"]
    imported = {pair for path in paths for pair in _imports(path)}
    modules = {path: ".".join(("dpsweep", *path.relative_to(ROOT).with_suffix("").parts)) for path in paths}
    defined = Counter(
        node.name
        for path in paths
        for node in _tree(path).body
        if isinstance(node, ast.FunctionDef) and (modules[path], node.name) in imported
    )
    assert len(defined) > 1000
    assert {name for name, count in defined.items() if count > 1} == set()


def test_no_imports_go_in_a_circle() -> None:
    """Files of one room too; imports for types alone count."""
    names = {
        ".".join(("dpsweep", *path.relative_to(ROOT).with_suffix("").parts)): path
        for package in PACKAGES[:3]
        for path in (ROOT / package).rglob("*.py")
    }
    sorter = TopologicalSorter(
        {
            name: {each for module, part in _imports(path) for each in (f"{module}.{part}", module) if each in names}
            for name, path in names.items()
        }
    )
    sorter.prepare()  # raises CycleError, which names the circle


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text))


def _used_names(tree: ast.Module) -> set[str]:
    """Names that a module reads, and functions that it registers as commands; imports and re-exports are no use."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    commands = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        if any(ast.unparse(decorator).startswith("app.command(") for decorator in node.decorator_list)
    }
    return names | attributes | commands


def test_nothing_public_is_reached_by_tests_alone() -> None:
    """Every public function and class is used by product code, or named by a document or an example.

    Not by docs/reference.md, which lists every export of `accounting`, used or not.
    """
    trees = {path: _tree(path) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    used = set().union(*map(_used_names, trees.values()))
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "reference.md"]
    documents = [ROOT / "README.md", *pages, ROOT / "docs" / "results.py", *(ROOT / "examples").rglob("*.py")]
    documented = set().union(*(_words(path.read_text()) for path in documents))
    lost = {
        f"{path.relative_to(ROOT)}: {node.name}"
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if node.name not in used | documented
    }
    assert lost == set()
