"""``python -m dpsweep``: the command, as ``dpsweep`` starts it."""

from dpsweep.command import main

main()
