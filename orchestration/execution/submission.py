"""Sweeps as jobs of a Ray cluster: package, submit, find, follow and stop them by Ray's Jobs API.

The package holds the sweep file, the user's modules and dpsweep, but no data.

The submission id of a sweep is its name and a digest of its specification, so the same sweep has the same id. Ray keeps
one record per id. A sweep that is submitted again after its job has ended gets the id with ``-2``, ``-3`` and so on,
and can still be found by the plain id.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http
import http.client
import importlib.util
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from dpsweep.accounting.errors import DpsweepError, InvalidInput, count_of
from dpsweep.accounting.records.encryption import KeyCheck, new_key_check
from dpsweep.accounting.records.files import read_bytes
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import checksum
from dpsweep.orchestration.comparison.formats import reason_of
from dpsweep.orchestration.execution.backend import Warn
from dpsweep.orchestration.execution.cluster import own_package, refused_token
from dpsweep.orchestration.store.limits import FIRST_COME, NO_LIMITS, Limits, Turn
from dpsweep.orchestration.sweeps.user_code import shipped_folders, unpacked
from dpsweep.orchestration.tracking.requests import Timed, within_seconds
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.own_code.own_record import has_changed

LARGEST: Final = 20 * 2**20
"""Largest total size of the user's own files, in bytes; data belong in storage that the nodes share."""
_FOLDER = "dpsweep_job"
"""Folder of the job's description; Ray makes it importable for the driver, like every shipped package."""
_DATA: Final = frozenset(
    f".{ending}"
    for endings in (
        ("csv", "tsv", "jsonl", "parquet", "arrow", "feather", "h5", "hdf5", "db", "sqlite", "npy", "npz"),
        ("pkl", "pickle", "pt", "pth", "ckpt", "safetensors", "onnx", "bin"),
        ("zip", "gz", "bz2", "xz", "tar", "tgz", "jpg", "jpeg", "png"),
    )
    for ending in endings
)
"""Suffixes of data and weight files, which are left out of the package."""


@dataclass(frozen=True)
class Asked:
    """Requests for the run of a job; see `pipeline.RunRequest`.

    `retry`: trials that it trains again.
    `name`: its name in MLflow.
    `submitted_from`: where the user's own modules lie.
    `most_seeds`: number of seeds up to which it adds them; None to add none.
    """

    limits: Limits = NO_LIMITS
    retry: tuple[str, ...] = ()
    turn: Turn = FIRST_COME
    name: str | None = None
    submitted_from: Mapping[str, str] = field(default_factory=dict)
    most_seeds: int | None = None


ONLY_TO_RUN: Final = Asked()


@dataclass(frozen=True)
class JobDescription:
    """The sweep that a job runs.

    `text`: of the sweep file.
    `origin`: name of the sweep file, for messages.
    `output`: absolute path or URI, as the nodes see it.
    `code`: the user's modules at the locations that `sweeps.user_code.shipped_folders` ships them to.
    `key_check`: identifies the key that private files must be encrypted with; the key itself is not sent.
    `tracking`: where and as whom the driver records in MLflow, as `tracking.access.sealed` returns it.
    """

    text: str
    origin: str
    output: str
    code: UserCode
    key_check: KeyCheck | None
    asked: Asked = ONLY_TO_RUN
    tracking: str = ""


@dataclass(frozen=True)
class ShippedCode:
    """Folders for Ray to ship.

    `own`: names and sizes in bytes of the user's files.
    `left_out`: files of the user's packages that are not shipped.
    `dpsweep`: size of dpsweep itself in bytes.
    `code`: sha256 of each of the user's modules that runs, by its place in the record of a trial.
    """

    folders: tuple[str, ...]
    own: tuple[tuple[str, int], ...]
    left_out: tuple[str, ...]
    dpsweep: int
    code: Mapping[str, str] = field(default_factory=dict)


_DESCRIPTION = TypeAdapter(JobDescription)


@contextlib.contextmanager
def packaged(
    text: str, origin: str, output: str, code: UserCode, asked: Asked = ONLY_TO_RUN, tracking: str = ""
) -> Iterator[ShippedCode]:
    """Yield the package of a sweep in temporary folders, which are removed when the ``with`` block ends.

    It holds the user's packages without hidden files, ``__pycache__`` and files with a suffix of data or weights.
    Raises: InvalidInput if the user's files exceed `LARGEST` together.
    """
    with shipped_folders(code) as (shipped, there), tempfile.TemporaryDirectory() as temporary:
        left_out = [path for folder in shipped for path in _prune(Path(folder))]
        job = Path(temporary, _FOLDER)
        job.mkdir()
        description = JobDescription(text, origin, output, there, new_key_check(), asked, tracking)
        (job / "job.json").write_bytes(_DESCRIPTION.dump_json(description))
        own = ((origin, len(text.encode())), *(each for folder in shipped for each in _sizes(Path(folder))))
        _require_small(own)
        dpsweep = own_package()
        sources = (file for module in code.modules for file in module.sources())
        digests = {file.place: hashlib.sha256(file.content).hexdigest() for file in sources}
        yield ShippedCode((dpsweep, *shipped, str(job)), own, tuple(left_out), _bytes_of(dpsweep), digests)


def read_job() -> JobDescription:
    """Return the job that this process was started for, with the paths at which Ray has put its code.

    Raises: InvalidInput if no job's package is importable, or what describes it was altered; UnsafeFile.
    """
    found = importlib.util.find_spec(_FOLDER)
    if found is None or not found.submodule_search_locations:
        raise InvalidInput("there is no job here: `dpsweep drive` is started by the jobs of `dpsweep submit`")
    folder = os.path.realpath(next(iter(found.submodule_search_locations)))
    try:
        job = _DESCRIPTION.validate_json(read_bytes(f"{folder}/job.json"))
    except (FileNotFoundError, ValidationError) as error:
        raise InvalidInput(
            "the job was submitted by another version of dpsweep, or is none; submit it with the version of the head"
        ) from error
    return replace(job, code=unpacked(job.code))


def _prune(folder: Path) -> list[str]:
    """Delete from a copy the files that are not shipped; return the deleted data files, relative to the copy."""
    left_out = []
    for path in sorted(folder.rglob("*"), reverse=True):  # files before their folder
        if path.name.startswith(".") and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.is_file() and path.suffix.lower() in _DATA:
            left_out.append(_shown(path, folder))
            path.unlink()
        elif path.name.startswith("."):
            path.unlink()
    return left_out


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return ((_shown(path, folder), path.stat().st_size) for path in files)


def _bytes_of(package: str) -> int:
    """Return the size of the files of a package that Ray ships, which has links to its parts in a checkout."""
    walked = [each for each in os.walk(package, followlinks=True) if "__pycache__" not in each[0]]
    return sum(Path(folder, name).stat().st_size for folder, _, names in walked for name in names)


def _shown(path: Path, folder: Path) -> str:
    """Return the path of a file as the user knows it, without the numbered folder that it is shipped in."""
    return "/".join(path.relative_to(folder).parts[1:])


def _require_small(own: tuple[tuple[str, int], ...]) -> None:
    total = sum(size for _, size in own)
    if total > LARGEST:
        name, size = max(own, key=lambda each: each[1])
        raise InvalidInput(
            f"the sweep's own files have {total / 2**20:.1f} MiB, but at most {LARGEST // 2**20} MiB are sent (the "
            f"largest is {name} with {size / 2**20:.1f} MiB); keep data in storage that the nodes share"
        )


_ANSWER_WITHIN = 10.0
"""Seconds to wait for the first answer of a dashboard."""
_MEMORY_WITHIN: Final = 15.0
"""Seconds in which the dashboard of a head that has just started tells the head's memory."""
_COMPLETE_WITHIN: Final = 120.0
"""Seconds to wait for a whole answer of a dashboard."""
_SENT_WITHIN: Final = 900.0
"""Seconds to send a job with its package."""
_AGENT_WITHIN = 90.0
"""Seconds to wait for a head to start its job agent."""
_ADVICE: Final = "see what holds up the head, and ask again"
_NO_AGENT = "No available agent"
_STOP_WITHIN = 120
"""Seconds that a stopped driver has to close its MLflow runs before Ray kills it."""
DRIVER_BYTES: Final = 2**30
"""Memory that a driver takes on the head while it plans, in a process of its own, with torch built for CUDA; less than
half of it afterwards (`dpsweep.orchestration.execution.backends`)."""
_YOUNG: Final = 120.0
"""Seconds in which a driver grows to its size."""
_ENDED: Final = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
_VERBOSE_LOGGERS: Final = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
"""Loggers that report every packed and sent file, which `dpsweep submit` has already listed."""
_SWEEP_ID = "dpsweep.id"
"""Metadata key of jobs started by `dpsweep submit`: the id of the sweep without the number of the attempt."""
_CODE: Final = "dpsweep.code"
"""Metadata key: the digests of the user's code that the job runs."""


@dataclass(frozen=True)
class SubmittedSweep:
    """A submitted sweep.

    `id`: Ray's submission id.
    `sweep_id`: the same without the number of the attempt.
    `output`: the sweep's folder or URI, as the cluster sees it.
    `state`: Ray's name for it.
    `submitted`: seconds since 1970 UTC.
    `owner`, `priority`: as its `Turn`.
    `code`: JSON of `ShippedCode.code`.
    """

    id: str
    sweep_id: str
    output: str
    state: str
    submitted: float
    owner: str = ""
    priority: str = "0"
    code: str = "{}"

    @property
    def has_ended(self) -> bool:
        """Return whether the job is over."""
        return self.state in _ENDED


def submission_id(name: str, sweep: Mapping[str, Any], output: str) -> str:
    """Return the id of a sweep: its name and a digest of its specification, given as plain values, and of its output.

    Teams that run the same file have separate jobs.

    >>> submission_id("my sweep", {"seeds": [0]}, "s3://bucket/a")
    'my-sweep-b93c1e0bae'
    """
    digest = checksum([sweep, output.rstrip("/")])
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{digest[:10]}"


def next_id(sweep_id: str, earlier: int, taken: Collection[str]) -> str:
    """Return the id of a further job of a sweep, after so many ``earlier`` ones.

    Records of some may be deleted.

    >>> next_id("a", 0, []), next_id("a", 1, ["a"]), next_id("a", 2, ["a-2", "a-3"])
    ('a', 'a-2', 'a-4')
    """
    named = (f"{sweep_id}-{number}" if number > 1 else sweep_id for number in itertools.count(earlier + 1))
    return next(name for name in named if name not in taken)


class SubmittedSweeps:
    """The submitted sweeps of the cluster whose dashboard is at ``address``, such as ``http://HEAD:8265``.

    Every method raises InvalidInput, with one line of text, if the dashboard does not answer or requires another token.
    """

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        _require_dashboard(self._address)
        os.environ["RAY_API_SERVER_ADDRESS"] = self._address  # overrides the address given to the client
        with self._errors_as_invalid_input():
            client = within_seconds(_COMPLETE_WITHIN, lambda: JobSubmissionClient(self._address), _ADVICE)
            self._client = Timed(client, _limit, _ADVICE)
        for logger in _VERBOSE_LOGGERS:
            logging.getLogger(logger).setLevel(logging.WARNING)

    def all(self) -> tuple[SubmittedSweep, ...]:
        """Return every submitted sweep, the newest last."""
        with self._errors_as_invalid_input():
            described = ((each, each.metadata or {}) for each in self._client.list_jobs())
            jobs = (
                SubmittedSweep(
                    each.submission_id,
                    metadata[_SWEEP_ID],
                    metadata["dpsweep.output"],
                    str(each.status.value),
                    (each.start_time or 0) / 1000.0,
                    metadata.get("dpsweep.owner", ""),
                    metadata.get("dpsweep.priority", "0"),
                    metadata.get(_CODE, "{}"),
                )
                for each, metadata in described
                if each.submission_id and _SWEEP_ID in metadata
            )
            return tuple(sorted(jobs, key=lambda job: job.submitted))

    def find(self, name: str) -> SubmittedSweep:
        """Return the job with this id, sweep id or output: the newest that has not ended, if any, else the newest.

        Raises: InvalidInput, listing the existing ids, if there is none.
        """
        jobs = self.all()
        found = [job for job in jobs if name in (job.id, job.sweep_id) or name.rstrip("/") == job.output.rstrip("/")]
        if not found:
            there = ", ".join(job.id for job in jobs) or "none"
            raise InvalidInput(f"no sweep at {self._address} has the id or output {name!r}; there are: {there}")
        return next((job for job in reversed(found) if not job.has_ended), found[-1])

    def submit(
        self,
        sweep_id: str,
        output: str,
        package: ShippedCode,
        environment: Mapping[str, str],
        turn: Turn,
        warn: Warn,
    ) -> SubmittedSweep:
        """Start a job that runs the packaged sweep, or return the job that already runs it.

        `environment`: variables of driver and workers. `warn`: called with a sentence where the head does not tell its
        memory. Raises: InvalidInput if the sweep already runs with the user's code as it was before an edit, if another
        one writes to this output, and if the head is full.
        """
        jobs = self.all()
        earlier = [job for job in jobs if job.sweep_id == sweep_id]
        running = next((job for job in earlier if not job.has_ended), None)
        if running is not None:
            with self._errors_as_invalid_input():
                before = dict(parsed_json(running.code))
            edited = sorted(place for place, digest in package.code.items() if before.get(place) != digest)
            if edited:
                raise InvalidInput(
                    f"{has_changed(edited)} since {running.id} was submitted, which runs what it was; stop it with "
                    "`dpsweep stop` or wait for it, and submit again with another output"
                )
            return running
        for job in jobs:
            if not job.has_ended and job.output.rstrip("/") == output.rstrip("/"):
                raise InvalidInput(
                    f"{job.id} of {job.owner} writes to {output}; wait for it, or choose another --output"
                )
        self._require_room(jobs, warn)
        name = next_id(sweep_id, len(earlier), {job.id for job in jobs})
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WITHIN), **environment}
        try:
            self._start(
                entrypoint=f"python3 -P -m dpsweep.orchestration.execution.supervisor {name}",
                submission_id=name,
                runtime_env={"py_modules": list(package.folders), "env_vars": variables},
                metadata={
                    _SWEEP_ID: sweep_id,
                    "dpsweep.output": output,
                    "dpsweep.owner": turn.owner,
                    "dpsweep.priority": str(turn.priority),
                    _CODE: json.dumps(dict(package.code)),
                },
            )
        except InvalidInput:
            if all(job.id != name for job in self.all()):
                raise
            return self.submit(sweep_id, output, package, environment, turn, warn)  # another command was faster
        return self.find(name)

    def _require_room(self, jobs: Sequence[SubmittedSweep], warn: Warn) -> None:
        """Raise `InvalidInput` if the head lacks memory for another driver; a young one has yet to take its own."""
        deadline = time.monotonic() + _MEMORY_WITHIN
        while (memory := self._memory_of_head()) is None and time.monotonic() < deadline:
            time.sleep(1.0)
        if memory is None:
            warn("the head does not tell how much memory it has left, so whether another driver fits was not checked")
            return
        running = [job for job in jobs if not job.has_ended]
        now = self.now()
        young = sum(now - job.submitted < _YOUNG for job in running)
        if memory < (1 + young) * DRIVER_BYTES:
            raise InvalidInput(
                f"the head at {self._address} has {memory / 2**30:.1f} GiB of memory left, where "
                f"{count_of(len(running), 'sweep runs', 'sweeps run')}, {young} of them just begun, and a driver "
                f"takes up to {DRIVER_BYTES / 2**30:g} GiB; submit it when one has ended (`dpsweep list`), or give "
                "the head more memory"
            )

    def now(self) -> float:
        """Return the time by the head's clock, which `SubmittedSweep.submitted` is of, in seconds since 1970 UTC."""
        with self._errors_as_invalid_input():
            said = self._client._do_request("GET", "/api/version").headers.get("Date")
            return time.time() if said is None else parsedate_to_datetime(said).timestamp()

    def _memory_of_head(self) -> int | None:
        """Return the bytes of memory that the head has left; None if its dashboard does not tell, as in its first
        seconds.
        """
        with self._errors_as_invalid_input():
            answer = self._client._do_request("GET", "/nodes?view=summary")
            if answer.status_code != http.HTTPStatus.OK:
                return None
            nodes = answer.json().get("data", {}).get("summary", [])
            heads = (node.get("mem") for node in nodes if node.get("raylet", {}).get("isHeadNode"))
            return next((int(memory[1]) for memory in heads if memory), None)

    def _start(self, **job: Any) -> None:
        """Submit a job; retry while a head that has just started has no job agent yet."""
        deadline = time.monotonic() + _AGENT_WITHIN
        with self._errors_as_invalid_input():
            while True:
                try:
                    self._client.submit_job(**job)
                    return
                except RuntimeError as error:
                    if _NO_AGENT not in str(error) or time.monotonic() > deadline:
                        raise
                time.sleep(1.0)

    def stop(self, job: SubmittedSweep) -> None:
        """Tell the job's driver to stop, as Ctrl-C does; return without waiting for it."""
        with self._errors_as_invalid_input():
            self._client.stop_job(job.id)

    def logs(self, job: SubmittedSweep) -> str:
        """Return the output of the job so far."""
        with self._errors_as_invalid_input():
            return str(self._client.get_job_logs(job.id))

    def follow(self, job: SubmittedSweep) -> Iterator[str]:
        """Yield the output of the job from its start to its end, as it is printed."""
        import aiohttp  # late: of Ray's client, which loads it where it follows

        loop = asyncio.new_event_loop()
        lines: AsyncIterator[str] = self._client.tail_job_logs(job.id)
        try:
            with self._errors_as_invalid_input(), contextlib.suppress(StopAsyncIteration):
                while True:
                    try:
                        line = loop.run_until_complete(anext(lines))
                    except (OSError, RuntimeError, aiohttp.ClientError) as error:
                        raise InvalidInput(
                            f"the connection to the Ray cluster at {self._address} broke ({reason_of(error)}); follow "
                            f"{job.id} again, or if the head is gone: `dpsweep status {job.output}` reads the sweep "
                            "without it, and the same `dpsweep submit` continues it"
                        ) from error
                    yield line
        finally:
            loop.close()

    @contextlib.contextmanager
    def _errors_as_invalid_input(self) -> Iterator[None]:
        try:
            yield
        except DpsweepError:
            raise
        except AuthenticationError as error:
            raise refused_token(self._address) from error
        except _UNLIKE_RAY as error:  # an answer that is no JSON is an OSError, too
            raise InvalidInput(
                f"what answers at {self._address} is no Ray cluster of a version that this dpsweep knows "
                f"({type(error).__name__}); give the address of the dashboard, and use one version of Ray on both sides"
            ) from error
        except (OSError, RuntimeError) as error:
            raise InvalidInput(f"the Ray cluster at {self._address} refused ({reason_of(error)})") from error


_UNLIKE_RAY: Final = (ValueError, TypeError, LookupError, AttributeError)
"""Errors of Ray's client, or of reading its answers, where another server or another version has answered."""


def _limit(method: str) -> float:
    """Return the seconds for a call of a method of Ray's client, by the method's name."""
    return _SENT_WITHIN if method == "submit_job" else _COMPLETE_WITHIN


_NO_ACCESS: Final = (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN)


def _require_dashboard(address: str) -> None:
    """Raise `InvalidInput` unless a dashboard answers within seconds; Ray's client would wait for minutes."""
    if not re.fullmatch(r"https?://[^/]+", address):
        raise InvalidInput(f"--address is {address!r}, but must be that of a dashboard, such as http://HEAD:8265")

    def ask() -> None:
        urllib.request.urlopen(f"{address}/api/version", timeout=_ANSWER_WITHIN).close()

    try:
        within_seconds(2.0 * _ANSWER_WITHIN, ask, _ADVICE)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError) and error.code in _NO_ACCESS:
            return  # the next request, which has the token, reports what is refused
        reason = " ".join(str(getattr(error, "reason", error)).split())
        if isinstance(error, urllib.error.HTTPError):  # such as a gateway to a head that is gone, or another server
            reason = f"HTTP {error.code} {reason}".rstrip()
        raise InvalidInput(
            f"no Ray dashboard answers at {address} ({reason}); give the address of the head's dashboard, usually port "
            "8265, or open a tunnel to it with `ssh -L 8265:127.0.0.1:8265 HEAD`; if the head is gone, `dpsweep status "
            "OUTPUT` reads a sweep without it"
        ) from error
