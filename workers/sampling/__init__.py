"""Samplers of batches, of rows and of users.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "rows_per_user",
    "samplers",
    "users",
]
