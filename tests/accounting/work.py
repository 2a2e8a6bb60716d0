"""Counts what an accountant computes: the same on every machine, however busy it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from scipy import fft

from dpsweep.accounting.individual import contour, spectrum_kernels
from dpsweep.accounting.pld import loss


class Work:
    """What was computed: points of Fourier transforms, terms of moments, iterations of Newton's method, and the losses
    that these moved.
    """

    points = 0
    terms = 0
    newton = 0
    losses = 0


@contextmanager
def counted() -> Iterator[Work]:
    """Count the work done inside; the functions that do it are called as they are."""
    work, forward, inverse = Work(), fft.rfft, fft.irfft
    moments, step = spectrum_kernels.write_moments, loss.newton_step

    def rfft(values: Any, *rest: Any, **named: Any) -> Any:
        work.points += int(np.size(values))
        return forward(values, *rest, **named)

    def irfft(values: Any, *rest: Any, **named: Any) -> Any:
        found = inverse(values, *rest, **named)
        work.points += int(np.size(found))
        return found

    def summed(tilted: Any, cosines: Any, *rest: Any) -> Any:
        work.terms += int(np.size(cosines)) * rest[-1].shape[1]
        return moments(tilted, cosines, *rest)

    def stepped(atoms: Any, targets: Any, outputs: Any) -> Any:
        work.newton += 1
        work.losses += len(targets)
        return step(atoms, targets, outputs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fft, "rfft", rfft)
        patched.setattr(fft, "irfft", irfft)
        patched.setattr(contour, "write_moments", summed)
        patched.setattr(loss, "newton_step", stepped)
        yield work
