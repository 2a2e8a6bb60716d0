"""Finds out if a device runs kernels that this project writes in Triton."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch


@functools.cache
def has_triton(device: torch.device) -> bool:
    """Return whether Triton compiles and runs a kernel on the device; operations of torch do the same, more slowly.

    CUDA builds of torch bring Triton, which needs a C compiler on the machine. A failure is warned of once.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    try:
        from dpsweep.workers.machine.trial_kernel import doubled

        return bool((doubled(torch.ones(3, device=device)) == 2.0).all())
    except Exception as error:  # Triton and compilers fail with errors of any kind
        warnings.warn(
            f"Triton compiles nothing for {device} ({type(error).__name__}: {error}), so private steps are slower "
            "there; install a C compiler, such as gcc",
            stacklevel=2,
        )
        return False
