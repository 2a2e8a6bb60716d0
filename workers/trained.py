"""A trained model, read back from its trial's folder, with all that evaluation applies to examples before it.

Nothing stored is executed: files are read as tensors, numbers and strings. Code of the user's own is imported only
where the caller allows it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from accounting.errors import DataCorruption, InvalidInput
from accounting.records.files import read_bytes
from accounting.records.layout import TrialFiles
from workers.data import Dataset, Preparation, Scaling, Split, Tokens, load_source
from workers.evaluation import in_batches
from workers.imports import NO_CODE, UserCode, is_import_path
from workers.models import build_for_shape
from workers.preprocessing import State, make_preprocessing
from workers.spec import TrialSpec

_PREPARATIONS: Final[Mapping[str, type[Scaling] | type[Tokens]]] = {"scaling": Scaling, "tokens": Tokens}
_INPUTS: Final = {"example_shape", "example_type", "feature_shape", "num_classes", "preparation", "fitted"}
"""Keys of `describe_inputs`."""


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode on the CPU, and what its trial's evaluation applied to examples.

    example_shape, example_type: of one example as its data source stores it.
    """

    model: nn.Module
    spec: TrialSpec
    example_shape: tuple[int, ...]
    example_type: torch.dtype
    num_classes: int
    preparation: Preparation
    fitted: State

    def logits(self, features: npt.ArrayLike | Tensor) -> npt.NDArray[np.float32]:
        """Logits [n, classes] of examples [n, ...] in the form in which the data source stores them.

        The trial's preprocessing and preparation are applied as in its evaluation. The model sees batches of
        `workers.evaluation.BATCH_SIZE`; besides, only the preprocessed features and the logits are held in memory.

        Raises: InvalidInput for another shape, or values that the stored type cannot hold.
        """
        dataset = self._dataset(self._checked(features))
        if self.spec.preprocessing is not None and len(dataset.train):
            dataset = make_preprocessing(self.spec.preprocessing).transform(dataset, self.fitted)
        batches = in_batches(
            self.model, dataset.train.features, dataset.prepare, lambda logits, _: logits.float().cpu()
        )
        found: npt.NDArray[np.float32] = (
            torch.cat(batches).numpy() if batches else np.empty((0, self.num_classes), "f4")
        )
        return found

    def _checked(self, features: npt.ArrayLike | Tensor) -> Tensor:
        expected = f"numbers of shape [n, {', '.join(map(str, self.example_shape))}] and type {self.example_type}"
        array = np.array(features.numpy(force=True) if isinstance(features, Tensor) else features)
        if array.dtype.kind not in "biuf" or array.ndim == 0 or array.shape[1:] != self.example_shape:
            raise InvalidInput(
                f"the examples have shape {array.shape} and type {array.dtype}, but must be {expected}, as the data "
                f"source {self.spec.data.name!r} stores them"
            )
        given = torch.from_numpy(array)
        stored = given.to(self.example_type)
        if not stored.is_floating_point() and not torch.equal(stored.to(given.dtype), given):
            raise InvalidInput(
                f"the examples hold numbers that {self.example_type} does not; give {expected}, not yet scaled"
            )
        return stored

    def _dataset(self, features: Tensor) -> Dataset:
        """The examples as a data set without labels, which is what preprocessing takes."""
        none = torch.zeros(len(features), dtype=torch.int64)
        rows = Split(features, none, none, torch.arange(len(features)))
        names = tuple(map(str, range(self.num_classes)))
        empty = rows.select(np.empty(0, dtype=np.int64))
        return Dataset(self.spec.data.name, rows, empty, None, ("all",), names, self.preparation)


def describe_inputs(spec: TrialSpec, source: Dataset, dataset: Dataset, fitted: State) -> dict[str, Any]:
    """What `load_trained` needs besides the weights; all of it is public.

    source: the data as loaded; dataset: after preprocessing, whose state is ``fitted``. The state of a private
    preprocessing is its release. The preparation is kept where it is known not to depend on the rows.
    """
    return {
        "example_shape": list(source.train.features.shape[1:]),
        "example_type": str(source.train.features.dtype).removeprefix("torch."),
        "feature_shape": list(dataset.feature_shape),
        "num_classes": dataset.num_classes,
        "preparation": _kept_preparation(spec, source.preparation),
        "fitted": {name: value.cpu() for name, value in fitted.items()},
    }


def _kept_preparation(spec: TrialSpec, preparation: Preparation) -> dict[str, Any] | None:
    """None for one of the user's own: it may hold statistics of the rows, and it may be code."""
    if is_import_path(spec.data.name) and preparation not in (Scaling(), Tokens()):
        return None
    for name, kind in _PREPARATIONS.items():
        if type(preparation) is kind:
            return {"name": name, **{key: list(value) for key, value in asdict(preparation).items()}}
    return None


def load_model(files: TrialFiles, spec: TrialSpec, code: UserCode = NO_CODE) -> nn.Module:
    """The trained model of ``spec`` on the CPU, in evaluation mode; averaged parameters where averaging was on.

    The model is built as for training, and gets the stored weights.

    Raises:
        InvalidInput: the trial has not trained to its end, an earlier version trained it, the weights do not fit, or a
            model of the user's own is not in ``code``.
        DataCorruption: a stored file is damaged.
    """
    return _build(files, spec, _read(files.inputs, _INPUTS), code)


def load_trained(files: TrialFiles, spec: TrialSpec, code: UserCode = NO_CODE) -> TrainedModel:
    """The trained model of ``spec``, and what its evaluation applied to examples first.

    Data are read only for a source of the user's own with a preparation of its own. Raises: see `load_model`.
    """
    inputs = _read(files.inputs, _INPUTS)
    return TrainedModel(
        model=_build(files, spec, inputs, code),
        spec=spec,
        example_shape=tuple(inputs["example_shape"]),
        example_type=getattr(torch, inputs["example_type"]),
        num_classes=inputs["num_classes"],
        preparation=_preparation(spec, inputs["preparation"], code),
        fitted=inputs["fitted"],
    )


def _build(files: TrialFiles, spec: TrialSpec, inputs: Mapping[str, Any], code: UserCode) -> nn.Module:
    weights = _read(files.model)
    model = build_for_shape(spec.model, tuple(inputs["feature_shape"]), inputs["num_classes"], spec.seed, code)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{files.model} does not fit the model {spec.model.name!r}: its code or its parameters have changed since; "
            "use those that it was trained with"
        ) from error
    return model.eval()


def _preparation(spec: TrialSpec, kept: Mapping[str, Any] | None, code: UserCode) -> Preparation:
    if kept is None:
        return load_source(spec.data, code).preparation
    fields = {key: tuple(value) for key, value in kept.items() if key != "name"}
    return _PREPARATIONS[kept["name"]](**fields)


def _read(uri: str, keys: Set[str] = frozenset()) -> dict[str, Any]:
    """The stored mapping, which has ``keys``."""
    try:
        content = read_bytes(uri)
    except FileNotFoundError:
        raise InvalidInput(
            f"{uri} does not exist: the trial has not trained to its end, or a version of dpsweep without this file "
            "trained it; resume the sweep, or run it again in another folder"
        ) from None
    damaged = DataCorruption(
        f"{uri} is damaged; restore it from a backup, or delete the trial's folder and resume the sweep"
    )
    try:
        stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises almost anything for damaged bytes
        raise damaged from error
    if not isinstance(stored, dict) or not stored.keys() >= keys:
        raise damaged
    return stored
