"""The command line: what users type and what the terminal shows.

Exports nothing: `dpsweep.command` imports `commands.main`, and commands load heavy modules only when they run.
"""
