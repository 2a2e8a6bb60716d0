"""A model with its loss, and how the per-example gradients of each layer are computed, verified on the data at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput, count_of, public_text
from dpsweep.workers.gradients.capture import Capture, Unreached, capturing
from dpsweep.workers.gradients.checks import check_model, has_half_precision
from dpsweep.workers.gradients.compared_passes import (
    Capturing,
    ComparedPasses,
    LaterBatches,
    Side,
    chosen_examples,
    of_examples,
    order_of,
    sides_of,
)
from dpsweep.workers.gradients.deferred_checks import OutputPrecision
from dpsweep.workers.gradients.fallback import WithoutBatch
from dpsweep.workers.gradients.layers import (
    Unverified,
    are_aligned,
    around,
    find_layers,
    identified_by_length,
    keep_axes,
    on_copies,
    open_axes,
    settle_axes,
    without_batch,
)
from dpsweep.workers.gradients.micro_batches import LastMicroBatch
from dpsweep.workers.gradients.modes import Structure
from dpsweep.workers.gradients.per_row import reading_as_verified
from dpsweep.workers.gradients.proofs import Proof, digest_of_structure, known_proof, note_proof
from dpsweep.workers.gradients.verification import check, in_double_where_rounding_matters, verify_rows
from dpsweep.workers.machine.devices import lacks_memory

_FEW, _AGAIN, _ALONE = 4, 3, 3
"""Number of examples that are verified together in the first batch, in some later ones, and one by one."""

PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
"""(model output, targets) -> one loss per row."""


class VerifiedModel:
    """A model with its loss, and the form in which the per-example gradients of each layer are computed.

    Forms change only while a batch is verified, which `covers` asks for: the first one with other modules, hooks or
    modes, and one that calls a layer in a new way. Of later batches some are compared again.

    layers: outermost first. outputs: which of them are precise enough to be read. Others as in `GradientEngine`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        parameters: Mapping[str, nn.Parameter],
        micro_batch_size: int | None,
        last_micro_batch: LastMicroBatch,
        multiplicity: int,
        autocast: torch.dtype | None,
    ) -> None:
        self.model, self._loss, self._parameters = model, loss, parameters
        self._micro_batch_size, self._last_micro_batch = micro_batch_size, last_micro_batch
        self._multiplicity, self._autocast = multiplicity, autocast
        self.layers = find_layers(model)
        self.outputs = OutputPrecision(self.layers)
        self._covered, self._held = set[Structure](), set[str]()
        self._later, self._called_anew = LaterBatches(), False

    def capturing(self, rows: int) -> AbstractContextManager[Capture]:
        """Return the context in which a forward pass of so many rows is captured."""
        return capturing(self.layers, rows, rows // self._multiplicity, self.outputs.ignored, self._held)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each row [b]. Raises: InvalidInput for another shape."""
        return self._losses(x, y, self._autocast)

    def _precise_losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the losses without autocast, which would hide small errors, unless half-precision parts need it."""
        return self._losses(x, y, self._autocast if has_half_precision(self.model) else None)

    def _losses(self, x: Tensor, y: Tensor, autocast: torch.dtype | None) -> Tensor:
        with nullcontext() if autocast is None else torch.autocast(x.device.type, autocast):
            losses = self._loss(self.model(x), y)
        rows = len(x)
        if losses.shape != (rows,):
            raise InvalidInput(
                f"the loss returned shape {list(losses.shape)} for a batch of {count_of(rows, 'row')}, "
                f"but must return one number for each, [{rows}], as with reduction='none'"
            )
        return losses

    def covers(self, structure: Structure) -> bool:
        """Return whether gradients were verified with these modules, in these modes."""
        return structure in self._covered

    def adapt_to(self, error: Unverified) -> None:
        """Take up that a layer was called in a new way: the next batch is verified, or no hook is waited for again."""
        if isinstance(error, Unreached):
            self._held.update(error.layers)
            return
        self._called_anew, self.layers = True, find_layers(self.model, self._whole)
        self._covered.clear()

    def verify(self, x: Tensor, y: Tensor, structure: Structure, size: int) -> None:
        """Verify the gradients of a batch, in micro-batches of ``size`` examples if layers are called in several ways.

        Raises: InvalidInput for a model without per-example gradients.
        """
        check_model(self.model)
        open_axes(self.layers)
        step = size * self._multiplicity if self._called_anew else max(1, len(x))
        conclusive = [self._verify(*part) for part in zip(x.split(step), y.split(step), strict=True)]
        if all(conclusive):
            self._covered.add(structure)
            settle_axes(self.layers)

    def due(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the rows of a later batch that are to be compared again, if any are."""
        most, size = len(x) // self._multiplicity, self._micro_batch_size or _AGAIN
        padded = self._last_micro_batch == "padded"  # then all passes have one shape
        examples = size * (size <= most) if padded else min(_AGAIN, size, most)
        if not self._later.is_to_be_compared(examples):
            return None
        return self._some(x, y, chosen_examples(most, self._later.seen, examples))

    def compare_again(self, x: Tensor, y: Tensor) -> None:
        """Check the rows that are `due`. Raises: InvalidInput."""
        with reading_as_verified():
            again = partial(self._check, self.capturing, turn=self._later.seen)
            in_double_where_rounding_matters(again, self.model, x, y)

    @property
    def _whole(self) -> dict[str, str]:
        """Return why layers run per example, as far as was found before this batch."""
        return {layer.name: layer.why for layer in self.layers if layer.form == "per example"}

    def _verify(self, x: Tensor, y: Tensor) -> bool:
        """Verify a few examples of a micro-batch. Returns whether the result is conclusive; for one example it is not.

        A model that fails is verified again: first without stacked rows, if any layer had an input whose first axis is
        not the batch. Then, if any modules read their own parameters, these run per example.
        """
        try:
            return self._compare(x, y)
        except Exception as error:  # code of the model may fail on a parameter per row with any error
            if lacks_memory(error) or not without_batch(self.layers):
                return self._verify_per_example(x, y, error)
        self.layers = find_layers(self.model, self._whole)
        keep_axes(self.layers)
        try:
            return self._compare(x, y)
        except Exception as error:
            return self._verify_per_example(x, y, error)

    def _verify_per_example(self, x: Tensor, y: Tensor, refused: Exception) -> bool:
        """Verify with what reads its own parameters run per example. Raises: ``refused`` if nothing does."""
        per_row = identified_by_length(self.layers)
        if not per_row or lacks_memory(refused):
            raise refused
        at = "" if isinstance(refused, InvalidInput) else f" ({public_text(refused)})"
        whole = dict.fromkeys(per_row, f"what reads its parameters could not be told apart by rows{at}") | self._whole
        while True:
            self.layers = find_layers(self.model, whole)
            try:
                return self._compare(x, y)
            except Exception as error:  # a layer that was not reached before may fail likewise
                name = error.layer if isinstance(error, WithoutBatch) else None
                wider = (around(self.model, name, whole) if name else identified_by_length(self.layers)) - whole.keys()
                if not wider or lacks_memory(error):
                    raise
                whole |= dict.fromkeys(wider, "it gives layers other rows than those of the batch")

    def _compare(self, x: Tensor, y: Tensor) -> bool:
        try:
            return in_double_where_rounding_matters(self._compare_forms, self.model, x, y)
        except Unreached as error:
            self.adapt_to(error)
            return self._compare(x, y)

    def _compare_forms(self, x: Tensor, y: Tensor) -> bool:
        """Verify the gradients by the current forms of all layers on a few examples, and on a micro-batch together.

        Properties of model and shapes alone are shown once for all engines of this process; the others check the batch.
        """
        examples = len(x) // self._multiplicity
        if self._micro_batch_size is not None:
            examples = min(examples, max(_ALONE, self._micro_batch_size))
        if examples == 0:
            return False

        def anew(rows: int) -> AbstractContextManager[Capture]:
            self.outputs.look_again()
            return self.capturing(rows)

        settings = self._multiplicity, self._autocast, [(layer.name, layer.form) for layer in self.layers]
        digest = None if self._called_anew else digest_of_structure(self.model, self._loss, x, y, *settings)
        known = known_proof(digest, examples)
        if known is not None and examples > 1:
            some = self._some(x, y, chosen_examples(examples, 0, _AGAIN))
            self._check(anew, *some, turn=0, sizes=() if known.aligned else (1,))
            return True
        conclusive = self._prove(anew, *self._some(x, y, chosen_examples(examples, 0, _FEW)), alone=_ALONE)
        if examples > _FEW:
            self._prove(anew, *self._some(x, y, range(examples)), alone=0)
        if conclusive:
            note_proof(digest, Proof(examples, are_aligned(self.layers)))
        return conclusive and examples > 1

    def _some(self, x: Tensor, y: Tensor, examples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the rows of these examples."""
        at = torch.tensor(list(examples), device=x.device)
        return of_examples(x, at, self._multiplicity), of_examples(y, at, self._multiplicity)

    def _prove(self, capturing: Capturing, x: Tensor, y: Tensor, alone: int) -> bool:
        """`verify_rows` on these rows, both halves; ``alone`` of the examples are also compared one by one."""
        sides = self._sides(x)
        orders = [order_of(len(x) // self._multiplicity, x)] if sides else []
        passes = self._passes(capturing, x, y, sides, alone=alone, sizes=(1,), orders=orders)
        return verify_rows(self.model, self._loss, passes)

    def _check(self, capturing: Capturing, x: Tensor, y: Tensor, turn: int, sizes: Sequence[int] = ()) -> None:
        """`check` on these rows; one half of the examples, another one in each turn, is kept.

        One example is compared with autograd alone if layers run on copies of their parameters.
        """
        sides, alone = self._sides(x, turn)[turn % 2 :][:1], int(bool(on_copies(self.layers)))
        check(self.model, self._loss, self._passes(capturing, x, y, sides, alone=alone, sizes=sizes, repeats=0))

    def _sides(self, x: Tensor, turn: int = 0) -> Sequence[Side]:
        examples, like = len(x) // self._multiplicity, next(iter(self._parameters.values()))
        return sides_of(examples, like, turn) if examples > 1 else ()

    def _passes(
        self, capturing: Capturing, x: Tensor, y: Tensor, sides: Sequence[Side], **options: Any
    ) -> ComparedPasses:
        losses, parameters, multiplicity = self._precise_losses, self._parameters, self._multiplicity
        return ComparedPasses(capturing, losses, parameters, multiplicity, x, y, sides, **options)
