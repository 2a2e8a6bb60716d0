"""Classification: one class for each example. Rates are computed from confusion matrices
(`dpsweep.workers.evaluation.rates`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpsweep.workers.tasks.task import Task, require_indices, wrong_form

if TYPE_CHECKING:
    from torch import Tensor


class Classification(Task):
    """Labels: int64 [n], indices of classes. Outputs: a logit for each class, or one logit for class 1 of two."""

    name = "classification"
    main = "accuracy"

    def check_labels(self, what: str, labels: Tensor, names: tuple[str, ...]) -> None:
        if labels.ndim != 1 or labels.is_floating_point():
            takes = "must be int64 with one class for each example; name another task if they are not classes"
            raise wrong_form(what, labels, takes)
        require_indices(what, labels, names)

    def outputs(self, names: tuple[str, ...]) -> str:
        return f"one logit for each of {len(names)} classes"

    def kept(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return [b, 3]: the predicted class, -ln p(label) in nats, and p(predicted class)."""
        import torch  # late: sweep files, which know tasks by name, do not need it

        is_single = outputs.shape[1] == 1
        decided = (outputs[:, 0] > 0).long() if is_single else outputs.argmax(1)
        logits = outputs.double()
        # a single logit is that of class 1 against class 0
        logs = (torch.cat((torch.zeros_like(logits), logits), 1) if is_single else logits).log_softmax(1)
        losses, sure = -logs.gather(1, labels[:, None])[:, 0], logs.gather(1, decided[:, None])[:, 0].exp()
        return torch.stack((decided.double(), losses, sure), 1)
