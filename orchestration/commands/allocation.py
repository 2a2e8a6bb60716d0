"""`dpsweep epsilon --sampling random_allocation`: the calculator for batches that no trial draws yet."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Final

import typer

from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism, require_whole
from dpsweep.accounting.estimates import PrivacyEstimate
from dpsweep.accounting.pld import epsilon_of_allocation
from dpsweep.accounting.samplings import RANDOM_ALLOCATION, FixedBatchSampling
from dpsweep.orchestration.commands.epsilon_request import EpsilonRequest
from dpsweep.orchestration.commands.run_flags import RunFlags, warn_of_delta

_ACCOUNTANTS: Final = ("auto", "pld")


def print_allocation(flags: RunFlags, request: EpsilonRequest, as_json: bool) -> None:
    """Print the epsilon of random allocation, certified from both sides.

    Raises: InvalidInput for a missing or contradictory flag, UnsupportedMechanism for what no bound covers.
    """
    _refuse_others(flags, request)
    for name in ("dataset_size", "batch_size", "epochs"):
        if getattr(flags, name) is None:
            raise InvalidInput(f"--{name.replace('_', '-')} is missing: random allocation is accounted by whole epochs")
    sizes = FixedBatchSampling(flags.dataset_size or 0, flags.batch_size or 0)
    per_epoch = 1 if flags.per_epoch is None else flags.per_epoch
    epochs = require_whole("--epochs", flags.epochs or 0, at_least=1)
    noise = flags.required_noise()
    warn_of_delta(request.delta, flags.dataset_size)
    found = PrivacyEstimate(math.inf, request.delta, "add_remove", "pld", kind="none")
    if noise > 0.0:
        certified = epsilon_of_allocation(noise, sizes.steps_per_epoch, epochs, request.delta, per_epoch)
        found = replace(found, epsilon=certified.upper, lower_epsilon=certified.lower, kind="guarantee")
    steps = sizes.steps_per_epoch * epochs
    if as_json:
        fields = {"sampling": RANDOM_ALLOCATION, "schedule": "constant", "noise_multiplier": noise, "steps": steps}
        typer.echo(json.dumps(found.as_dict() | fields | {"per_epoch": per_epoch}))
        return
    words = "once" if per_epoch == 1 else f"{per_epoch} times"
    typer.echo(
        f"epsilon {found.epsilon:.6g}, at least {found.lower_epsilon or math.inf:.6g}, at delta {found.delta:g}: "
        f"{found.kind}, {found.adjacency}; {steps} steps, each example in a random one {words} an epoch"
    )


def _refuse_others(flags: RunFlags, request: EpsilonRequest) -> None:
    given = {
        "--sample-rate": flags.sample_rate,
        "--max-batch-size": flags.max_batch_size,
        "--steps": flags.steps,
        "--noise-strategy": flags.noise_strategy,
        "--cycle-length": flags.cycle_length,
        "--side-noise-multiplier": flags.side_noise_multiplier,
        "--release": flags.release,
        "--compare": request.compare,
        "--individual": request.individual,
        "--examples": request.examples,
        "--risk": request.risk,
        "--selection-trials": request.trials,
        "--plot": request.plot,
        "--curve": request.curve,
    }
    refused = [name for name, value in given.items() if value not in (None, False, [], ())]
    if flags.schedule != "constant":
        refused.append("--schedule")
    if request.group_size != "1":
        refused.append("--group-size")
    if request.accountant not in _ACCOUNTANTS:
        refused.append("--accountant")
    if flags.adjacency not in (None, "add_remove"):
        refused.append("--adjacency")
    if refused:
        raise UnsupportedMechanism(
            f"random allocation is accounted for one example, equal noise and whole epochs, under add_remove by pld; "
            f"drop {', '.join(refused)}"
        )
