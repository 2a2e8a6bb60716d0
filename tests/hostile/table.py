"""Everything that reads what others may have written."""

from __future__ import annotations

from tests.hostile.of_commands import COMMAND_LINES
from tests.hostile.of_objects import OBJECTS
from tests.hostile.of_sweeps import SWEEP_FILES
from tests.hostile.of_traces import TRACE_FILES
from tests.hostile.target import Target

TARGETS: tuple[Target, ...] = (SWEEP_FILES, OBJECTS, TRACE_FILES, COMMAND_LINES)
