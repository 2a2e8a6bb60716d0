"""How rows of other tables are read for a trained model: one description for each kind of data that a table holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpsweep.workers.data.new_pictures import Pictures
from dpsweep.workers.data.new_rows import Columns
from dpsweep.workers.data.new_texts import Texts
from dpsweep.workers.own_code.imports import with_checked_types

RowReader = Columns | Texts | Pictures


def reader_of_rows(plain: Mapping[str, Any]) -> RowReader:
    """Return how rows are read, from the plain values of a `Source`. Raises: InvalidInput for others."""
    return _checked(plain)  # type: ignore[arg-type]  # pydantic makes one of them of a mapping


@with_checked_types
def _checked(reader: RowReader) -> RowReader:
    return reader
