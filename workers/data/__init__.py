"""Data sources: one file per source, one registry."""
