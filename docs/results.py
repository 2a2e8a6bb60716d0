"""Writes docs/results.md from the layouts of folders and the tables of metrics: ``python docs/results.py``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.comparison.metric_types import Metric
from dpsweep.orchestration.comparison.metrics import GROUP_METRICS, METRICS
from dpsweep.orchestration.store.later_results import audit_schema
from dpsweep.orchestration.store.layout import SweepFiles

_HEAD = """# Results: every file, every name

Start with `report.html`. Programs read `results.json`, `comparison.json`,
`dpsweep export` (a flat table), or [Python](python.md). [The epsilon to quote](accounting.md#which-epsilon-to-quote);
[who may read each file](../SECURITY.md#every-output-and-who-may-read-it).
"""

_FIRST_SCREEN = """
## Ten questions that the first screen answers

The top of `report.html` at 1400 x 900:

| question | where the answer stands |
|---|---|
| Which setting do I take? | under the title: "Take …", or why nothing trained here is of use |
| How good is it, and how sure is that? | there, with its 95% interval |
| What can it not be told from? | the next sentence |
| How private is one model? | *How private?*, the large number: worst-case ε |
| Is that a guarantee, at which δ, for which neighbours? | *How private?*, first line |
| How private is all that this page shows? | *How private?*, second line: the composed ε |
| For whom is it worst? | *For whom?*, the large number; without privacy in grey |
| Do groups differ in selection, false positives or false negatives? | *For whom?*, a line for each gap |
| What does privacy cost? | *At what cost?*, the large number, with its interval |
| Which differences could these seeds have shown? | *At what cost?*, last line |
"""

_LONG = 20
"""Most words of a sentence that is shown whole."""
_NOT_LISTED = {"local_folder", "earlier_tune"}
"""Names of a layout for a folder that another name stands for."""

_FURTHER_FILES = (
    (
        "`SWEEP/attempts/KEY`",
        "Releases of each start of a trial (JSON); deletions leave it.",
    ),
    ("`SWEEP/private/audits/KEY`", "Results of `dpsweep audit` (JSON, [schema](#an-audit)), a file for each."),
    ("`TRIAL/private/accounts`", "Results of `dpsweep account`, a folder for each δ and method."),
)
"""Folders whose names depend on more than the layout."""

_FILES = """
## Files

`SWEEP` is the output folder, `TRIAL` is `SWEEP/trials/KEY`. Everything below a folder `private` is for the owner of the
data alone.
"""

_METRICS = """
## Metrics of a trial

A name with a slash is the name in MLflow; `results.json` has its last part, or the first name where there are two. A
name without a slash is a parameter of the run in MLflow. **Exact** metrics are computed from training examples
without noise: private reports show them, and with `release: raw` all outputs. Accuracy, losses, scores, rates and
their gaps are measured on test data, which no ε covers. An ε is a guarantee unless its row says estimate.
"""

_GROUPS = """
## Metrics of a group

In `results.json` under `by_group`, in MLflow in the table `groups.json` of the sweep's run, for all trials.
"""

_FURTHER = """
## Further names in MLflow

A sweep has one parent run; below it a run for each trial, and for each setting the average over its seeds. The tag
`dpsweep.kind` tells them apart: `sweep`, `trial` or `average`.

Metrics:

- `fairness/NAME`: each gap between groups that can be computed
- `fairness/worst_group_NAME`: the metric NAME of the group where it is worst
- `fairness/SCORE_of_GROUP`, `privacy/mean_epsilon_i_of_GROUP`: of each group, where there are 2 to 20
- `final/recall_of_class_N`, `final/SCORE_of_NAME`: of one class, label or target
- `privacy/epsilon_group_of_K`: worst-case ε of K records together
- `privacy/advantage_group_of_K`, `privacy/tpr_at_fpr_1pct_group_of_K`: bounds on attacks on K records together
- `privacy/epsilon_i_quantile_P`: the P quantile of the εᵢ
- `audit/lower_bound`, `audit/confidence`, `audit/lower_bound_TEST`: bounds of an audit on ε, and confidence
- `audit/NAME/...`, `privacy/account/NAME/...`: of `dpsweep audit` and `dpsweep account` under `release: raw`
- `privacy/composed_release_epsilon`, `privacy/composed_epsilon_group_of_K` (averages and sweeps): the composed ε of the
  releases besides the steps, and of K records together
- `view/NAME`: what MLflow's comparison shows, to four decimals (ε rounded up), under short names
- `setting/NAME_corrected`: the number of its setting by which the comparison is ordered
- `deviation/METRIC` (averages): standard deviation of METRIC over the seeds
- `trials/STATE` (sweeps): number of trials that ended in this state

Series over the epochs: `test_accuracy`, `test_loss`, `test_SCORE`, `public_accuracy`, `public_SCORE`, `epsilon` (of the
steps so far), `clipping_bound` or `clipping_bound/GROUP`, `noise_multiplier`, `epoch`.

Tags:

- `dpsweep.sweep`, `dpsweep.trial_key`, `dpsweep.setting`: which sweep, trial and setting a run belongs to
- `sweep`: its name, as a column or by "Group by"
- `dpsweep.outcome`: running, finished, stopped (by a scheduler), failed or interrupted
- `baseline`: key of the non-private trial that this one is compared with
- `private`: false if ε is infinite
- `tuning`: how the tuning of the sweep is paid for
- `accountant`, `adjacency`, `unit`, `epsilon_kind`: how `privacy/epsilon` was computed, whose it is, what it claims;
  `epsilon_kind_group_of_K` of K records
- `noise_strategy`: how noise is correlated over steps, such as `banded:bands=4`; `independent`
- `epsilon_i_kind`: what the εᵢ claim
- `epsilon_reasons`, `epsilon_i_reasons`: [why](accounting.md#which-epsilon-to-quote) these are estimates
- `disclosure`, `sensitive`: the release mode; `sensitive=true` with `release: raw`
- `composed_delta`, `_adjacency`, `_unit`, `_epsilon_kind`, `_epsilon_kind_group_of_K`, `_reasons`, `_refusal` (averages
  and sweeps): what their composed ε claims, why, and why there is none
- `seeds` (averages): number of seeds
- `dpsweep.data`: name of the data set and a digest of its description
- `dpsweep.digest`, `dpsweep.groups_digest`: sha256 of content, by which nothing is recorded twice
- `best_setting` (sweeps): the setting with the best main score
"""


_AUDIT = """
## An audit

`dpsweep audit` writes a JSON object. Where audits may be shown, a row of `results.json` has them under
`audits`: the claim is the row's `epsilon`. An audit of the trial itself has the name "".

"""


def _audit() -> str:
    """Return the section on audits: the fields of a stored one."""
    schema = audit_schema()
    described = " ".join(schema["description"].split())
    objects = [f"`{name}`" for name, field in schema["properties"].items() if field["type"] == "object"]
    return f"{_AUDIT}{described} {' and '.join(objects)} have numbers by name.\n"


def results() -> str:
    """The page: the first screen, and tables of files, of metrics of trials and groups, and of names in MLflow."""
    files = [*_files(SweepFiles("SWEEP")), *_FURTHER_FILES, *_files(TrialFiles("TRIAL"))]
    return "".join(
        (
            _HEAD,
            _FIRST_SCREEN,
            _FILES,
            _list(files),
            _METRICS,
            *_metrics(),
            _GROUPS,
            *_group_metrics(),
            _FURTHER,
            _audit(),
        )
    )


def _files(files: SweepFiles | TrialFiles) -> Iterator[tuple[str, str]]:
    """Path and description of each file and folder, in the order of the class."""
    layout = {name: each for name, each in vars(type(files)).items() if isinstance(each, property)}
    paths = {name: getattr(files, name) for name in layout if name not in _NOT_LISTED}
    for name in (name for name, path in paths.items() if isinstance(path, str)):  # lists of paths repeat single ones
        about = inspect.cleandoc(layout[name].__doc__ or "").replace("``", "`")
        yield f"`{paths[name]}`", about.replace(" (JSON)", "") if paths[name].endswith(".json") else about


def _metrics() -> Iterator[str]:
    """Yield a table for each task, and a line with the metrics whose names say enough."""
    told: set[str] = set()
    for task in dict.fromkeys(metric.task for metric in METRICS):
        metrics = [metric for metric in METRICS if metric.task == task]
        rows = [(metric, _meaning(metric, metrics[0].heading, told)) for metric in metrics]
        table = [(_names(metric), meaning) for metric, meaning in rows if meaning]
        yield f"\n### {_task(task)}\n{_list(table)}"
        also = [_marked(metric) for metric, meaning in rows if not meaning and not _is_worst(metric)]
        yield f"\nAlso {', '.join(also)}.\n"


def _names(metric: Metric) -> str:
    last = (metric.tracked or "").rpartition("/")[2]
    names = [metric.name] if last != metric.name else []
    return ", ".join(f"`{name}`" for name in (*names, metric.tracked) if name)


def _meaning(metric: Metric, score: str, told: set[str]) -> str:
    """Return the first sentence of the meaning that was not ``told`` of an earlier metric, be it with another task's
    main ``score``.
    """
    sentences = {
        re.sub(re.escape(score), "SCORE", sentence, flags=re.IGNORECASE): sentence
        for sentence in re.split(r"(?<=\.) (?=[A-Z])", metric.meaning)
    }
    fresh = [sentence for key, sentence in sentences.items() if key not in told]
    told.update(sentences)
    return " ".join((["**Exact.**"] if metric.exact and any(fresh) else []) + [_short(each) for each in fresh[:1]])


def _short(sentence: str) -> str:
    """Return a long sentence up to its first colon or semicolon."""
    return re.split("[;:] ", sentence)[0].rstrip(".") + "." if len(sentence.split()) > _LONG else sentence


def _is_worst(metric: Metric) -> bool:
    """Whether one line stands for it and others of its kind."""
    return (metric.tracked or "").startswith("fairness/worst_group_")


def _marked(metric: Metric) -> str:
    return _names(metric) + (" (**exact**)" if metric.exact else "")


def _group_metrics() -> Iterator[str]:
    """Yield a line for each task."""
    for task in dict.fromkeys(metric.task for metric in GROUP_METRICS):
        names = ", ".join(f"`{metric.name}`" for metric in GROUP_METRICS if metric.task == task)
        yield f"\n- {_task(task)}: {names}.\n"


def _task(task: str | None) -> str:
    return task.replace("_", " ").capitalize() if task else "Every task"


def _list(rows: Iterable[tuple[str, str]]) -> str:
    return "\n" + "".join(f"- {name}: {text}\n" for name, text in rows)


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(results())
