"""The command line: what users type and what the terminal shows."""
