"""Ray resources of each trial: one section for all trials, or a list of sections with conditions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps.fields import LEAST_QUANTITY, Axis, Quantity, SweepSection, whole_or_share
from dpsweep.workers.spec import WHY_NOT_TRAINED, Shard, TrialSpec

LABEL: Final = "label "
"""Prefix of node labels among resource amounts: a node has 1 of each label that it carries."""
_Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$", max_length=63)]
_Place = Literal["data", "preprocessing", "model", "loss", "clipping", "noise"]


def _only_frozen(given: object) -> object:
    """Refuse parameters that ranks cannot divide, with the reason."""
    if given in ("trained", "trainable", "all"):
        raise InvalidInput(f"shard is {given!r}, but {WHY_NOT_TRAINED}; use shard: frozen")
    return given


class ResourceSettings(SweepSection):
    """Ray resources of each trial. In a list of such sections, a trial uses the first one whose ``when`` holds; the
    last one has no conditions, and gives ``max_concurrent`` and ``max_failures`` for all trials."""

    when: dict[_Place, Axis[str]] = Field(default_factory=dict)
    """In a list: names of components that a trial must have, such as ``{model: [resnet20, wrn16_4]}``."""
    cpus: Quantity = Field(default=1.0, gt=0.0)
    """CPUs of each trial."""
    gpus: Annotated[Quantity, AfterValidator(whole_or_share)] = Field(default=0.0, ge=0.0)
    """GPUs of each trial: a fraction of one GPU, or a whole number with one GPU for each rank."""
    ranks: int | None = Field(default=None, ge=1, le=1024)
    """Processes that share a trial's gradients and its reserved CPUs and GPUs; by default one per GPU."""
    ranks_on: Literal["one_node", "nodes"] = "one_node"
    """Where the ranks of a trial run: on ``one_node``, or on as few ``nodes`` as have room, which send each other sums
    over their network."""
    shard: Annotated[Shard | None, BeforeValidator(_only_frozen)] = None
    """Which parameters of a model ranks divide: the ``frozen`` ones of its layers, or by default none, so that each
    rank holds all."""
    labels: dict[str, _Label] = Field(default_factory=dict)
    """Labels that a node must have, given by ``ray start --labels``, or Ray's own ``ray.io/accelerator-type``, such as
    ``A100``."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Most trials that run at the same time; by default as many as fit."""
    max_failures: int = Field(default=3, ge=0)
    """How often a trial is continued from its checkpoint after its worker died."""

    @model_validator(mode="after")
    def _one_gpu_for_each_rank(self) -> ResourceSettings:
        if self.ranks is not None and self.gpus and self.ranks != max(1.0, self.gpus):
            raise InvalidInput(
                f"ranks is {self.ranks} and gpus {self.gpus:g}, but each rank has one GPU or none; leave ranks out, or "
                "set gpus to as many or to 0"
            )
        if self.shard is not None and self.processes == 1:
            raise InvalidInput(f"shard is {self.shard!r}, but one rank holds all; give ranks or gpus, 2 or more")
        if self.cpus / self.processes < LEAST_QUANTITY:
            raise InvalidInput(
                f"{self.cpus} CPUs are too few for {self.processes} ranks; give 0.0001 for each, or more"
            )
        return self

    @property
    def processes(self) -> int:
        """Processes that share the gradients of a trial."""
        return self.ranks or max(1, int(self.gpus))

    @property
    def bundle(self) -> dict[str, float]:
        """CPUs and GPUs of each rank, rounded down to multiples of `LEAST_QUANTITY`."""
        return {
            name: math.floor(amount / self.processes / LEAST_QUANTITY + 1e-6) / round(1 / LEAST_QUANTITY)
            for name, amount in (("CPU", self.cpus), ("GPU", self.gpus))
            if amount
        }

    @property
    def amounts(self) -> dict[str, float]:
        """Amounts that a trial reserves, by name; 1 for every label that its nodes must have."""
        return self._labelled({"CPU": self.cpus, "GPU": self.gpus})

    @property
    def on_each_node(self) -> dict[str, float]:
        """The least amounts that a node must have: all, or one rank's where ranks run on several nodes."""
        return self.amounts if self.ranks_on == "one_node" else self._labelled(self.bundle)

    @property
    def times(self) -> int:
        """Return how often nodes must have `on_each_node` together."""
        return 1 if self.ranks_on == "one_node" else self.processes

    def _labelled(self, given: Mapping[str, float]) -> dict[str, float]:
        labels = {f"{LABEL}{name}={value}": 1.0 for name, value in self.labels.items()}
        return {name: amount for name, amount in given.items() if amount} | labels


def check_sections(sections: Sequence[ResourceSettings]) -> None:
    """Check a list of sections.

    Raises: InvalidInput unless every section but the last has conditions and the last has none, and if another section
    than the last gives ``max_concurrent`` or ``max_failures``.
    """
    if sections[-1].when or not all(section.when for section in sections[:-1]):
        raise InvalidInput(
            "in a list of resources, every section but the last has a condition, and the last has none: it is for the "
            "other trials; add `when: {model: NAME}`, or a last section without it"
        )
    for section in sections[:-1]:
        for name in ("max_concurrent", "max_failures"):
            if name in section.model_fields_set:
                raise InvalidInput(f"{name} holds for all trials; give it in the last section of resources")


def reserved(sections: Sequence[ResourceSettings], trial: TrialSpec) -> ResourceSettings:
    """Return the section of a trial: the first whose conditions hold."""
    names = _names(trial)
    return next(each for each in sections if all(names[place] in wanted for place, wanted in each.when.items()))


def _names(trial: TrialSpec) -> Mapping[str, str | None]:
    """Return the names of a trial's components, by role; None for a component that the trial does not have."""
    return {
        "data": trial.data.name,
        "preprocessing": trial.preprocessing.name if trial.preprocessing else None,
        "model": trial.model.name,
        "loss": trial.loss.name,
        "clipping": trial.clipping.name,
        "noise": trial.noise.schedule.name if trial.is_private else None,
    }
