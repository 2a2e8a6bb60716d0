"""Per-example gradient norms and weighted sums of per-example gradients, at about the cost of a plain step."""

from dpsweep.workers.gradients.checks import check_model, in_its_precision, require_autocast
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.hidden_state import HiddenState
from dpsweep.workers.gradients.layers import OUTERMOST
from dpsweep.workers.gradients.modes import RandomState, modes_kept, modes_of, set_modes
from dpsweep.workers.gradients.pass_results import BatchNorms, WeightedSum
from dpsweep.workers.gradients.planners import Planner, ShapePlanner, TimingPlanner

__all__ = [
    "OUTERMOST",
    "BatchNorms",
    "GradientEngine",
    "HiddenState",
    "Planner",
    "RandomState",
    "ShapePlanner",
    "TimingPlanner",
    "WeightedSum",
    "check_model",
    "divided",
    "in_its_precision",
    "modes_kept",
    "modes_of",
    "reached",
    "require_autocast",
    "rows_at_once",
    "set_modes",
]
