"""The user's own modules and weights: how they are imported, stored and told apart by content.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "code_digests",
    "imports",
    "own_modules",
    "own_record",
    "own_sources",
]
