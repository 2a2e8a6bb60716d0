"""Plans a model and runs it for three steps by the product's own functions, whatever the plan says of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from dpsweep.accounting.errors import public_text
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.sweeps.grid import grid
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.workers.data import load_dataset
from dpsweep.workers.models import build_model
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.spec import Component, TrialSpec
from dpsweep.workers.trials.trained_model import load_trained
from dpsweep.workers.trials.trial import run_trial
from tests.models.brought import Brought, Verdict

HERE = Path(__file__).parent
STEPS = 3
_ONCE_PER_EXAMPLE = re.compile(r"runs (.*?) once per example, as (.*?);")


@dataclass(frozen=True)
class Tried:
    """What plan and run said of a model. reason: of a refusal, or why layers run per example.

    failed: why the run failed, or which parameters it does not train; "" if it trains.
    """

    planned: Verdict
    reason: str
    failed: str

    @property
    def agree(self) -> bool:
        """Whether the run trains exactly what is planned."""
        return (self.planned == "refused") == bool(self.failed)

    def wrong(self, brought: Brought) -> str:
        """What is not as the table says; "" if all is."""
        if not self.agree:
            return f"plan and run disagree: the plan says {self.planned}, the run {self.failed or 'trains'}"
        if self.planned != brought.verdict:
            return f"the plan says {self.planned}, the table {brought.verdict}: {self.reason}"
        return "" if re.search(brought.why, self.reason) else f"{brought.why!r} is not in the reason {self.reason!r}"


def tried(name: str, brought: Brought, folder: str) -> Tried:
    """Plan the model in a sweep of one trial, and run the trial in ``folder``, also if the plan refuses it."""
    sweep = parse_sweep(
        yaml.safe_dump(
            {
                "name": "brought",
                "data": f"made:{brought.data}",
                "model": {"name": "made:brought", "which": name},
                "sampling": {"method": "fixed", "batch_size": 8},
                "epochs": 1,
                "clipping": "flat",
                "noise": "constant",
                "seeds": 0,
                "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"},
                **brought.settings,
            }
        )
    )
    code = permitted(sweep, HERE)
    plan = plan_sweep(sweep, code)
    spec = plan.trials[0].spec if plan.trials else next(iter(grid(sweep))).spec
    failed = _run(spec, folder, code)
    if not plan.trials:
        reason = " ".join(plan.refusals[0].reason.split())
        return Tried("refused", reason, failed or _unmoved(spec, f"{folder}/without-noise", code))
    slow = [found for warning in plan.warnings if (found := _ONCE_PER_EXAMPLE.search(warning))]
    if slow:
        return Tried("generic path", "; ".join(f"{each[1]}: {each[2]}" for each in slow), failed)
    return Tried("trains", "", failed)


def _run(spec: TrialSpec, folder: str, code: UserCode) -> str:
    """Why the run failed; "" if it made all steps."""
    try:
        steps = run_trial(spec, folder, code=code).steps
    except Exception as error:  # models raise what they like
        return public_text(error)
    return "" if steps == STEPS else f"made {steps} of {STEPS} steps"


def _unmoved(spec: TrialSpec, folder: str, code: UserCode) -> str:
    """The parameters that training leaves as they were where no noise moves them; "" if there are none."""
    plain = replace(spec, clipping=Component("none", {}), noise=replace(spec.noise, initial_noise_multiplier=0.0))
    run_trial(plain, folder, code=code)
    dataset = load_dataset(plain.data, code)
    before = build_model(plain.model, dataset, plain.seed, code)
    after = load_trained(TrialFiles(folder), plain, code).model.state_dict()
    still = [name for name, each in before.named_parameters() if each.requires_grad and each.equal(after[name])]
    return f"leaves {', '.join(still)} as they were" if still else ""
