"""Names of a sweep's files."""

from __future__ import annotations

import pytest

from accounting.errors import InvalidInput
from orchestration.records.layout import absolute


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(InvalidInput, match="holds a null character"):
        absolute("runs/\0")
