"""Per-example accounting from recorded contributions (paper A)."""
