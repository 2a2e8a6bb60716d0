"""The names of one trial's files, defined only here.

Everything derived from single training examples lies under ``private/`` (folder 0700, files 0600 where the
file system has modes).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrialFiles:
    """Paths below a trial's root, which is an absolute local path or an object-store URI."""

    root: str

    def _below(self, *names: str) -> str:
        return "/".join((self.root.rstrip("/"), *names))

    @property
    def spec(self) -> str:
        """The settings of the trial (JSON)."""
        return self._below("spec.json")

    @property
    def code(self) -> str:
        """Folder of the user's own code that the trial was trained with."""
        return self._below("code")

    @property
    def trace(self) -> str:
        """The trace of the run (Arrow), for accounting."""
        return self._below("trace.arrow")

    @property
    def model(self) -> str:
        """The final model."""
        return self._below("model.pt")

    @property
    def inputs(self) -> str:
        """How an example becomes the model's input: shapes, preparation and the state of preprocessing."""
        return self._below("inputs.pt")

    @property
    def training(self) -> str:
        """The history per epoch and the evaluation on test data (JSON)."""
        return self._below("training.json")

    @property
    def device(self) -> str:
        """The device that trained the trial, its peak memory and utilization (JSON)."""
        return self._below("device.json")

    @property
    def result(self) -> str:
        """The whole result of the trial; if it exists, the trial is complete."""
        return self._below("result.json")

    @property
    def private(self) -> str:
        """Folder of everything derived from single examples."""
        return self._below("private")

    @property
    def norms(self) -> str:
        """Folder of the norm snapshots of all training examples."""
        return self._below("private", "norms")

    @property
    def epsilons(self) -> str:
        """Folder of the epsilons of all training examples."""
        return self._below("private", "epsilons")

    def accounted_again(self, claim: str) -> str:
        """Return the folder with the results of `dpsweep account` for one ``claim`` (the options asked for)."""
        return self._below("private", "accounts", claim)

    @property
    def users(self) -> str:
        """The user of each training example, if the data name users."""
        return self._below("private", "users")

    @property
    def rows_by_user(self) -> str:
        """Rows of the norms by users, while users are accounted."""
        return self._below("private", "rows-by-user")

    @property
    def private_summary(self) -> str:
        """Exact statistics of the per-example epsilons (JSON)."""
        return self._below("private", "summary.json")

    @property
    def released(self) -> str:
        """Statistics of the epsilons, released with noise (JSON)."""
        return self._below("released.json")

    @property
    def exact_norms(self) -> str:
        """Norms of `exact_examples` random examples at every step."""
        return self._below("private", "exact-norms")

    @property
    def private_training(self) -> str:
        """Counts of gradients that were not finite and of empty batches (JSON)."""
        return self._below("private", "training.json")

    @property
    def attacks(self) -> str:
        """Results of attacks on the trained model (JSON)."""
        return self._below("private", "attacks.json")

    @property
    def membership(self) -> str:
        """How telling the model is about each training and test example, if `attacks.rmia` was asked for (Arrow)."""
        return self._below("private", "membership.ipc")

    @property
    def held_out(self) -> str:
        """Number of wrong predictions of a candidate of an exponential choice (JSON)."""
        return self._below("private", "held-out.json")

    @property
    def outcomes(self) -> str:
        """The final model's prediction for each test example, and its user if known (Arrow)."""
        return self._below("private", "outcomes.ipc")

    @property
    def private_digests(self) -> str:
        """sha256 of the other files below ``private/``, by name (JSON)."""
        return self._below("private", "digests.json")

    @property
    def data_fingerprint(self) -> str:
        """sha256 of the trial's data (JSON); private, because a guessed row could be tested against it."""
        return self._below("private", "data.json")

    @property
    def error(self) -> str:
        """Message and traceback of the error that ended the trial; they may quote the data."""
        return self._below("private", "error.txt")

    @property
    def checkpoint(self) -> str:
        """The latest checkpoint of training; ``checkpoint.pt-STEP-RANK`` are its parts at other ranks."""
        return self._below("private", "checkpoint.pt")
