"""The names of one trial's files, defined only here.

Everything derived from single training examples lies under ``private/`` (folder 0700, files 0600 where the
file system has modes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


class Below(property):
    """A path below the root of the object whose property this is, or below another folder of it.

    about: shown in docs/results.md. folder: name of the attribute with the folder.
    """

    def __init__(self, about: str, name: str, folder: str = "root") -> None:
        super().__init__(lambda files: f"{str(getattr(files, folder)).rstrip('/')}/{name}")
        self.__doc__ = about

    if TYPE_CHECKING:

        def __get__(self, instance: Any, owner: type | None = None, /) -> str: ...  # type: ignore[override]  # no class is asked


@dataclass(frozen=True)
class TrialFiles:
    """Paths below a trial's root, which is an absolute local path or an object-store URI."""

    root: str

    spec = Below("The settings of the trial (JSON).", "spec.json")
    code = Below("The user's own code that the trial was trained with.", "code")
    trace = Below("The trace of the run (Arrow), for accounting.", "trace.arrow")
    model = Below("The final model.", "model.pt")
    inputs = Below(
        "How an example becomes the model's input: shapes, preparation and the state of preprocessing.", "inputs.pt"
    )
    training = Below("The history per epoch and the evaluation on test data (JSON).", "training.json")
    device = Below("The device that trained the trial, its peak memory and utilization (JSON).", "device.json")
    result = Below("The whole result of the trial; if it exists, the trial is complete.", "result.json")
    private = Below("Everything derived from single examples.", "private")
    norms = Below("The norm snapshots of all training examples.", "private/norms")
    epsilons = Below("The epsilons of all training examples.", "private/epsilons")

    def accounted_again(self, claim: str) -> str:
        """Return the folder with the results of `dpsweep account` for one ``claim`` (the options asked for)."""
        return f"{self.private}/accounts/{claim}"

    users = Below("The user of each training example, if the data name users.", "private/users")
    rows_by_user = Below("Rows of the norms by users, while users are accounted.", "private/rows-by-user")
    private_summary = Below("Exact statistics of the per-example epsilons (JSON).", "private/summary.json")
    released = Below("Statistics of the epsilons, released with noise (JSON).", "released.json")
    exact_norms = Below("Norms of `exact_examples` random examples at every step.", "private/exact-norms")
    private_training = Below(
        "Counts of gradients that were not finite, empty batches, and texts cut or without a token (JSON).",
        "private/training.json",
    )
    attacks = Below("Results of attacks on the trained model (JSON).", "private/attacks.json")
    membership = Below(
        "Scores of `attacks.rmia` for each training and test example (Arrow).",
        "private/membership.ipc",
    )
    held_out = Below(
        "Number of wrong predictions of a candidate of an exponential choice (JSON).", "private/held-out.json"
    )
    outcomes = Below(
        "The final model's prediction for each test example, and its user if known (Arrow).", "private/outcomes.ipc"
    )
    private_digests = Below("sha256 of the other files below ``private/``, by name (JSON).", "private/digests.json")
    data_fingerprint = Below(
        "sha256 of the trial's data (JSON); a guessed row could be tested against it.",
        "private/data.json",
    )
    error = Below("Message and traceback of the error that ended the trial; may quote the data.", "private/error.txt")
    checkpoint = Below(
        "The latest checkpoint of training; ``checkpoint.pt-STEP-RANK`` are its parts at other ranks.",
        "private/checkpoint.pt",
    )
