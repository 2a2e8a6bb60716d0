"""Refuses what code around an engine changes in its model by examples, without noise."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary, proxy

from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.deterministic_passes import same


class OutsideSteps:
    """What a model was when a batch was drawn, and after the last step; one for all engines of a model.

    Parameters must stay as they are while a batch is drawn, as an update would see its examples. Between a step and the
    next draw they may change, as by public data. Buffers must keep their values from step to step: a pass in training
    mode changes the running statistics of a batch normalisation that the engine runs in evaluation mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = proxy(model)
        self._buffers: dict[str, tuple[Tensor, int, Tensor]] = {}
        self.stepped()

    @staticmethod
    def of(model: nn.Module) -> OutsideSteps:
        """Return those of a model to which an engine was given."""
        found = _OF_MODEL.get(model)
        if found is None:
            found = _OF_MODEL[model] = OutsideSteps(model)
        else:
            found.stepped()
        return found

    def drawn(self) -> None:
        """Note the parameters: a batch was drawn."""
        self._parameters = self._versions()

    def stepped(self) -> None:
        """Note everything: an engine has taken a step, or loaded a state."""
        self._parameters = self._versions()
        now = dict(self._model.named_buffers())
        if not self._are_as_counted(now):
            self._buffers = {name: (each, each._version, each.clone()) for name, each in now.items()}

    def require_none(self) -> None:
        """Raise InvalidInput if parameters were changed since a draw, or buffers since a step."""
        now = self._versions()
        changed = [name for name, version in self._parameters.items() if now.get(name, version) != version]
        if changed:
            raise InvalidInput(
                f"parameters {', '.join(changed[:5])} were changed between the draw of a batch and its step, where no "
                "noise covers its examples: step() updates the model, so leave out backward() and optimizer.step(), "
                "and make other changes after it"
            )
        if changed := self._changed_buffers():
            raise InvalidInput(
                f"buffers {', '.join(changed[:5])} were changed outside step(), as by a pass in training mode, and "
                "no noise covers what they keep of examples: make passes of your own in a copy, copy.deepcopy(model)"
            )

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Return the number of changes in place of each parameter, and its address."""
        return {name: (each._version, each.data_ptr()) for name, each in self._model.named_parameters()}

    def _changed_buffers(self) -> list[str]:
        """Return the names of the buffers with other values than after the last step."""
        now = dict(self._model.named_buffers())
        if self._are_as_counted(now):
            return []
        return [name for name, (_, _, before) in self._buffers.items() if not same(now.get(name), before)]

    def _are_as_counted(self, now: Mapping[str, Tensor]) -> bool:
        """Return whether the buffers are the same tensors, none of which counts a change in place.

        A kernel may change one without counting that, as batch normalisation does, which counts its passes in another.
        """
        return now.keys() == self._buffers.keys() and all(
            each is now[name] and each._version == at for name, (each, at, _) in self._buffers.items()
        )


_OF_MODEL = WeakKeyDictionary[nn.Module, OutsideSteps]()
