"""Privacy loss distributions: certified composition of any trace, for one example and for groups."""
