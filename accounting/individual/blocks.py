"""Tables of blocks of random allocation, for single examples: logs of moments at nodes, with error bounds.

A node is a place of `contributions.AllocationBlock`, so a shift. There the mean of likelihood ratios is replaced by a
discrete law above it in convex order (`dpsweep.accounting.pld.mean_from_above`), which dominates the block. A block
between two nodes is dominated by a public draw between both, linear in the place. For moments A and B at the nodes it
has the moment (1 - t) A + t B. The log of that is linear in t up to an error that A and B bound.

For real exponents, r^2 / 8 and r bound it, with r = |log B / A|. This is Hoeffding's lemma.

For complex ones, let d = B / A - 1. The second derivative of log(1 + t d) is -(d / (1 + t d))^2. So |d|^2 / (8 (1 -
|d|)^2) bounds it if |d| < 1. Else let r = log |B / A|. The moment differs from the exponential of the chord by at most
1 + e^|r| times that, an error of log(2 + e^|r|) in the log. For its modulus is at most the larger of both, and
that of the chord at least the smaller. Errors add up over blocks, and their sum enters delta.

On a contour, losses are moreover connected to the dots of a lattice whose length is the contour's period, which
dominates. So moments along the whole line are a Fourier transform of masses folded onto its points. They repeat, and
mirror. Up to the repetition the modulus is at most the largest one from the end of the contour to the middle of the
lattice, read off the transform. Beyond it, `lattice_damping` counts: one more Gaussian, which only adds cost.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from dpsweep.accounting.individual.contour import UNKNOWN, Complex, Contour, beside_nodes
from dpsweep.accounting.individual.contributions import LARGEST_LOSS, AllocationBlock, Array
from dpsweep.accounting.individual.table_cache import kept
from dpsweep.accounting.pld import AllocatedRound, Direction, EvenLaw, mean_from_above

MOST_POINTS: Final = 512
"""Most points of a contour."""
_PER_BLOCK: Final = 512.0
"""Points of a lattice over the root of the number of blocks. What a lattice adds to a cost falls with their square. On
too fine a lattice spectra do not decay: laws are discrete."""
_MOST_LATTICE: Final = 1 << 17
_POOLED: Final = 6
"""Neighbouring atoms that are pooled for moments of real order, where no bound is tight anyway."""
_ROUNDING: Final = 2e-8
"""Relative error of masses and of their transform, far above that of sums of a million positive terms."""
_LEAST_SHIFT: Final = 1e-4
"""Positive shifts below it count as it."""
_DAMPING: Final = 12.0
"""Repetitions of the spectrum are damped by at least exp(-12)."""
_FLAT: Final = (5.0, 0.9)
"""Decay at which a contour may end, and its share of the decay at the longest one, where spectra decay no further."""


def lattice_damping(law: AllocationBlock, contour: Contour) -> float:
    """Return the precision of damping that makes negligible all repetitions of a spectrum of blocks."""
    return 2.0 * _DAMPING / (contour.spacing * (_lattice(law) - contour.size)) ** 2


def enough_decay(decays: Array, wanted: float) -> NDArray[np.bool_]:
    """Return whether contours are long enough; shape [rows, sizes], as that of ``decays``."""
    least, share = _FLAT
    return np.asarray(decays >= np.minimum(wanted, np.maximum(least, share * decays[:, -1:])))


def _lattice(law: AllocationBlock) -> int:
    """Return the number of points of a lattice, which is its length over its spacing."""
    return int(min(2 ** math.ceil(math.log2(_PER_BLOCK * math.sqrt(law.blocks))), _MOST_LATTICE))


def cut_by_repetitions(decays: Array) -> Array:
    """Return the decay that counts where spectra repeat and `lattice_damping` is applied.

    The error is at most the sum over one repetition, which decays, and the sum over the rest, which is damped.
    """
    return np.asarray(np.minimum(decays, _DAMPING) - np.log(2.0))


@kept(16 * 2**20)
def block_moments(law: AllocationBlock, nodes: bytes, exponents: bytes) -> Array:
    """Return upper bounds on log E_Q[M^e] at nodes, for real e outside [0, 1], whose chords are upper bounds as well.

    M is the likelihood ratio; shape [nodes, exponents]. Infinite where a law loses too much.
    """
    orders = np.frombuffer(exponents)
    found = np.array([_log_moments(law, shift, orders) for shift in _shifts(law, nodes)])
    with np.errstate(invalid="ignore"):
        steps = np.abs(np.diff(found, axis=0))
    excess = np.minimum(0.125 * steps**2, steps)
    return np.nan_to_num(found + beside_nodes(excess), nan=np.inf, posinf=np.inf)


def _log_moments(law: AllocationBlock, shift: float, orders: Array) -> Array:
    if shift == 0.0:
        return np.zeros_like(orders)
    atoms = _law(law.steps, shift, law.tail)
    logs, log_masses = _pooled(atoms)
    exponents = orders[:, None] * logs + log_masses
    peaks = exponents.max(axis=1)
    found = peaks + np.log(np.exp(exponents - peaks[:, None]).sum(axis=1)) + _ROUNDING
    lost = np.where(orders > 1.0, atoms.lost_of_p, atoms.lost_of_q)
    return np.asarray(np.where(lost <= LARGEST_LOSS * law.tail, np.maximum(found, 0.0), np.inf))


def _pooled(atoms: EvenLaw) -> tuple[Array, Array]:
    """Return log M and the logs of masses of a law above ``atoms`` with fewer of them."""
    values, masses = atoms.values, atoms.masses
    kept_places = np.unique(np.append(np.arange(0, len(values), _POOLED), len(values) - 1))
    nodes = values[kept_places]
    below = np.clip(np.searchsorted(nodes, values, side="right") - 1, 0, max(len(nodes) - 2, 0))
    above = np.minimum(below + 1, len(nodes) - 1)
    widths = nodes[above] - nodes[below]
    shares = np.where(widths > 0.0, (values - nodes[below]) / np.where(widths > 0.0, widths, 1.0), 0.0)
    placed = np.bincount(below, masses * (1.0 - shares), len(nodes)) + np.bincount(above, masses * shares, len(nodes))
    with np.errstate(divide="ignore"):
        return np.log(nodes), np.log(placed)


@kept(256 * 2**20)
def block_spectra(law: AllocationBlock, nodes: bytes, tilt: float, period: float, direction: Direction) -> Array:
    """Return a table [nodes, 4 `MOST_POINTS` + 1] along Re z = tilt: see `spectrum_columns`.

    Columns: real and imaginary parts of log A at the points of a contour of this period. Then the error of their chords
    over the cells beside a node. Last, the decay of A in those cells from each point on.
    """
    found = [_spectrum(law, shift, tilt, period, direction) for shift in _shifts(law, nodes)]
    logs, envelopes, errors = (np.array(column) for column in zip(*found, strict=True))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        ratios = np.diff(logs, axis=0)
        moved = np.abs(np.expm1(ratios))
        curved = 0.125 * np.square(moved / (1.0 - moved))
        apart = np.log(2.0 + np.exp(np.abs(ratios.real)))
    principal = (moved < 1.0) & (np.abs(ratios.imag) < 0.5 * np.pi)
    errors += beside_nodes(np.where(principal, np.fmin(curved, apart), apart))
    highest = np.maximum(envelopes, np.maximum(np.roll(envelopes, 1, axis=0), np.roll(envelopes, -1, axis=0)))
    highest[0], highest[-1] = np.maximum(*envelopes[:2]), np.maximum(*envelopes[-2:])
    decays = logs[:, :1].real - highest
    known = np.isfinite(logs) & (errors < UNKNOWN)
    logs, errors = np.where(known, logs, 0.0), np.where(known, errors, UNKNOWN)
    return np.hstack([logs.real, logs.imag, errors, np.nan_to_num(decays, nan=0.0, posinf=0.0, neginf=0.0)])


def spectrum_columns(table: Array, size: int) -> tuple[Complex, Array, Array]:
    """Return log A [nodes, size], its errors [nodes, size], and the decay from each point on [nodes, points]."""
    real, imaginary, errors = (table[:, at * MOST_POINTS : at * MOST_POINTS + size] for at in range(3))
    return np.asarray(real + 1j * imaginary), errors, table[:, 3 * MOST_POINTS :]


def _spectrum(
    law: AllocationBlock, shift: float, tilt: float, period: float, direction: Direction
) -> tuple[Complex, Array, Array]:
    """Return log A at the first points, the log of the largest |A| from each point on, and log A's rounding error.

    NaN where the law loses too much.
    """
    if shift == 0.0:
        return np.zeros(MOST_POINTS, np.complex128), np.zeros(MOST_POINTS + 1), np.zeros(MOST_POINTS)
    atoms = _law(law.steps, shift, law.tail)
    lost = atoms.lost_of_p if direction is Direction.REMOVE else atoms.lost_of_q
    if lost > LARGEST_LOSS * law.tail:
        unknown = np.full(MOST_POINTS + 1, np.nan)
        return unknown[1:].astype(np.complex128), unknown, unknown[1:]
    logs, log_masses = np.log(atoms.values), np.log(atoms.masses)
    losses, log_first = (logs, log_masses + logs) if direction is Direction.REMOVE else (-logs, log_masses)
    points = _lattice(law)
    spacing = period / points
    places = np.floor(losses / spacing)
    shares = np.clip(np.expm1(places * spacing - losses) / np.expm1(-spacing), 0.0, 1.0)
    exponents = log_first + (tilt - 1.0) * places * spacing
    peak = float(exponents.max())
    masses = np.exp(exponents - peak)
    on_ring = np.mod(places, points).astype(np.intp)
    folded = np.bincount(on_ring, masses * (1.0 - shares), points)
    raised = masses * shares * np.exp((tilt - 1.0) * spacing)
    folded += np.bincount((on_ring + 1) % points, raised, points)
    spectrum = np.conj(fft.rfft(folded))
    error = _ROUNDING * float(folded.sum())
    sizes = np.abs(spectrum)
    with np.errstate(divide="ignore"):
        log_sizes = np.log(np.maximum.accumulate((sizes + error)[::-1])[::-1]) + peak
        first = sizes[:MOST_POINTS]
        logs_of_moments = np.log(first) + peak + 1j * np.unwrap(np.angle(spectrum[:MOST_POINTS]))
        errors = np.where(first > 2.0 * error, 2.0 * error / first, UNKNOWN)
    return np.asarray(logs_of_moments), log_sizes[: MOST_POINTS + 1], errors


def _shifts(law: AllocationBlock, nodes: bytes) -> list[float]:
    shifts = law.shifts(np.frombuffer(nodes))
    return [max(shift, _LEAST_SHIFT) if shift > 0.0 else 0.0 for shift in shifts.tolist()]


@functools.lru_cache(maxsize=1024)  # about 50 kB each
def _law(steps: int, shift: float, tail: float) -> EvenLaw:
    return mean_from_above(AllocatedRound(shift, steps), tail)
