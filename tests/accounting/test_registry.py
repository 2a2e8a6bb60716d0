"""Components by name: every mistake is one line that names the component once and says what would be right."""

from collections.abc import Callable
from typing import Any

import pytest

from dpsweep.accounting.errors import DataCorruption, InvalidInput, require_finite
from dpsweep.accounting.registry import build


def scaled(size: int, factor: float = 1.0) -> float:
    return size * require_finite("factor", factor, above=0.0)


def renamed(shape: int, classes: int) -> int:
    return shape * classes


def anything(size: int, **options: Any) -> dict[str, Any]:
    return {"size": size, **options}


def damaged() -> None:
    raise DataCorruption("the file is damaged")


def blames_itself(factor: float = 1.0) -> None:
    raise InvalidInput(f"model 'blames_itself' failed with factor {factor}")


REGISTRY: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (scaled, renamed, anything, damaged, blames_itself)
}


def make(name: str, **params: Any) -> Any:
    return build(REGISTRY, name, params, "model", size=3, num_classes=2)


def test_entries_get_what_they_take() -> None:
    assert make("scaled") == 3
    assert make("scaled", factor=2.0) == 6.0
    assert make("anything", depth=4) == {"size": 3, "num_classes": 2, "depth": 4}


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("scald", {}, r"unknown model 'scald'; did you mean 'scaled'\? valid: .*"),
        (
            "scaled:factor=2, depth=3",
            {},
            r"unknown model 'scaled:.*'; write its parameters as keys: \{name: scaled, factor: 2, depth: 3\}",
        ),
        ("scaled", {"facter": 2.0}, r"unknown key 'facter' of model 'scaled'; did you mean 'factor'\? valid: factor"),
        ("scaled", {"size": 2}, r"unknown key 'size' of model 'scaled'; valid: factor"),
        ("anything", {"size": 2}, r"unknown key 'size' of model 'anything'; any other is valid"),
        ("damaged", {"size": 2}, r"unknown key 'size' of model 'damaged'; it takes none"),
        (
            "renamed",
            {},
            r"model 'renamed' needs shape, classes; valid: classes, shape; "
            r"given to arguments of these names: size, num_classes",
        ),
        ("scaled", {"factor": "x"}, r"model 'scaled': factor is 'x', but must be a number"),
        ("scaled", {"factor": 0}, r"model 'scaled': factor is 0, but must be greater than 0.0"),
        ("renamed", {"shape": "a", "classes": "b"}, r"model 'renamed': can't multiply sequence .*"),
        ("blames_itself", {}, r"model 'blames_itself' failed with factor 1.0"),
    ],
)
def test_mistakes_name_the_component_once(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{message}$"):
        make(name, **params)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(DataCorruption, match=r"^the file is damaged$"):
        make("damaged")
