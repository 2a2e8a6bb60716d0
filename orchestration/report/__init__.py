"""The self-contained HTML report of a sweep."""
