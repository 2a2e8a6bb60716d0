"""The node that a trial runs on: devices, memory, folders, and files of tensors.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "checkpoint",
    "devices",
    "folders",
    "memory",
    "stored_tensors",
    "triton_support",
]
