"""``python -m dpsweep``: the command, as ``dpsweep`` starts it."""

from dpsweep.orchestration.commands.main import main

main()
