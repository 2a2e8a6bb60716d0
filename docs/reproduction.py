"""Writes the pages on the papers and their figures from stored results: ``python -m docs.reproduction``."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from benchmarks.experiments import EXPERIMENTS, PLANNED_ONLY
from benchmarks.figures import FIGURES
from benchmarks.printed import Form
from benchmarks.reproduced import Number, StoredSetting, StoredSweep, difference, read_stored
from benchmarks.scorecard import MISSING, RESULTS, RULE, Result, judged, number_of, verdict

DOCS: Final = Path(__file__).parent
PAGES: Final = ("reproduction", "beyond", "who-gains")
"""The pages, each from a text of its name. A line ``@source NAMES`` stands for how sweeps were trained, ``@figure
NAME`` for a figure, ``@verdicts NAME`` for the verdicts of a sweep, and ``{NAME: setting: number}`` for a number; ``one
− other`` as the setting is a paired difference. The words `_PARTS` stand for the scorecard and what belongs to it."""
TABLE: Final = "reproduction.csv"
"""The file of all numbers that a paper prints or draws, beside ours."""
_NOT_HERE: Final = "795eb17334"
"""The commit of stored results whose history is lost; they were not trained again."""
_UNTOLD: Final = "not distinguishable"
"""The verdict that a page leaves out."""
_PLACE: Final = re.compile(r"\{([\w-]+): ([^:{}]+): ([^:{}]+?)(?:: (share|change|plain))?\}")


def page(text: str, stored: Mapping[str, StoredSweep]) -> str:
    """The page of a text with its links to figures and numbers."""
    lines: list[str] = []
    for line in text.splitlines():
        word, _, name = line.partition(" ")
        if word == "@source":
            lines += [_source(stored[each]) for each in name.split()]
        elif word in _PARTS:
            lines += _PARTS[word](stored)
        elif word == "@verdicts":
            lines += _verdicts(name, stored.get(name))
        elif word == "@figure":
            lines.append(f"![{FIGURES[name].title}](images/{name}.svg)")
        else:
            lines.append(_PLACE.sub(lambda found: _told(found, stored), line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def table(stored: Mapping[str, StoredSweep]) -> str:
    """Return a row for each number that a paper prints or draws, with ours, its interval and the verdict."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("sweep", "item", "printed", "ours", "low", "high", "runs", "verdict"))
    for name, sweep in stored.items():
        for item in EXPERIMENTS[name].items:
            number = number_of(sweep, item)
            found = (number.mean, *(number.ends or ())) if number else ()
            shown = [f"{value:.4g}" for value in found] + [""] * (3 - len(found))
            printed = item.printed if item.printed != "none" else ""
            runs = len(number.values) if number else 0
            rows.writerow((name, item.item, printed, *shown, runs, verdict(item, number)))
    return text.getvalue()


def figures(stored: Mapping[str, StoredSweep]) -> dict[str, str]:
    """The figures as SVG by the name of the file in docs/images."""
    known = {name: figure for name, figure in FIGURES.items() if all(sweep in stored for sweep in figure.sweeps)}
    return {f"{name}.svg": figure.draw(stored) for name, figure in known.items()}


def stored_results() -> dict[str, StoredSweep]:
    """By name, what is stored of the sweeps that were trained."""
    found = {name: read_stored(name) for name in EXPERIMENTS}
    return {name: sweep for name, sweep in found.items() if sweep is not None}


def _source(sweep: StoredSweep) -> str:
    trials = "trial" if sweep.asked == 1 else "trials"
    finished = "" if sweep.finished == sweep.asked else f"{sweep.finished} of "
    command = sweep.command.removeprefix("python -m benchmarks.reproduce ")
    return (
        f"`{command}`, `{sweep.commit}`: {finished}{sweep.asked} {trials}; "
        f"{sweep.train_size:,} + {sweep.test_size:,} rows."
    )


def _made(stored: Mapping[str, StoredSweep]) -> Iterator[str]:
    """Yield how the sweeps were trained."""
    hardware, versions = ({getattr(sweep, name) for sweep in stored.values()} for name in ("hardware", "version"))
    yield f"All were trained on {' or '.join(sorted(hardware))} by dpsweep {' or '.join(sorted(versions))}."
    if any(sweep.commit == _NOT_HERE for sweep in stored.values()):
        yield f"The commit `{_NOT_HERE}` is not in this repository."


def _counted(stored: Mapping[str, StoredSweep]) -> Iterator[str]:
    """Count tables and figures, and printed numbers, by verdict."""
    results = [each for paper in RESULTS.values() for each in paper]
    outcomes = Counter(judged(each.of(), stored.get(each.sweep)).outcome for each in results)
    said = Counter(found for name, sweep in stored.items() for found in judged(EXPERIMENTS[name].items, sweep).said)
    yield (
        f"Of {len(results)} tables and figures that a sweep tries, reproduced: {outcomes['reproduced']}, "
        f"in shape: {outcomes['in shape']}, not: {outcomes['not']}. Cannot be told from one run: "
        f"{outcomes['cannot be told']}, no number printed: {outcomes['not judged']}, cannot be tried here: "
        f"{outcomes['cannot be tried']}."
    )
    yield (
        f"Of {said.total()} printed numbers of trained models, {said['inside']} lie inside our interval and "
        f"{said['outside']} outside. Held against a single run, which has none: {said['no interval']}, not measured: "
        f"{said['not measured']}."
    )


def _scorecard(stored: Mapping[str, StoredSweep]) -> Iterator[str]:
    for paper, results in RESULTS.items():
        yield from (
            f"### {paper}",
            "",
            "| item | printed → ours | inside, order | verdict | why |",
            "|---|---|---|---|---|",
        )
        unjudged = []
        for result in results:
            sweep = stored.get(result.sweep)
            found = judged(result.of(), sweep)
            if found.outcome == "not judged":
                unjudged += [f"- {result.item}: {result.why}.", ""]
                continue
            item = next((each for each in result.of() if each.item == result.headline), None)
            number = number_of(sweep, item) if sweep is not None and item is not None else None
            ours = _shown(number, item.form) if number and item else "–"
            shown = f"{item.printed} → {ours}" if item and item.printed else ours
            said = [each for each in found.said if each in ("inside", "outside")]
            inside = f"{said.count('inside')} of {len(said)}" if said else "–"
            order = f", {sum(found.orders)} of {len(found.orders)}" if found.orders else ""
            named = f"{result.item}: {_headline(result)}" if item else result.item
            yield f"| {named} | {shown} | {inside}{order} | {found.outcome} | {result.why} |"
        yield from ("", *(("No number printed:", "", *unjudged) if unjudged else ()))


def _headline(result: Result) -> str:
    """The name of the number shown, without that of its table."""
    return re.sub(r"^(Table|Figure|Appendix) \w+: ", "", result.headline)


def _missing(_: Mapping[str, StoredSweep]) -> Iterator[str]:
    yield from (f"- {each.item}: {each.why}.\n" for each in MISSING)


_PARTS: Final[Mapping[str, Callable[[Mapping[str, StoredSweep]], Iterator[str]]]] = {
    "@made": _made,
    "@counts": _counted,
    "@rule": lambda _: iter([RULE]),
    "@scorecard": _scorecard,
    "@missing": _missing,
}


def _verdicts(name: str, sweep: StoredSweep | None) -> Iterator[str]:
    """Yield what the sweep's report says of each setting against the first one of the same epsilon."""
    if sweep is None:
        yield f"`{name}`: not trained yet ({PLANNED_ONLY[name]})."
        return
    yield "| ε | batches and noise | σ | sq. error | accuracy | difference | lowest group | difference |"
    yield "|---|---|---|---|---|---|---|---|"
    first: dict[float, StoredSetting] = {}
    for setting in sorted(sweep.settings, key=_cost):
        beside = first.setdefault(_cost(setting), setting)
        noise = [f"{setting.numbers[each].mean:.4g}" for each in ("noise_multiplier", "mean_squared_error")]
        cells = [f"{_cost(setting):g}", _name(setting), *noise]
        for number in ("accuracy", "worst_group_accuracy"):
            cells += [_one(setting.numbers[number].mean, "share"), _verdict(sweep, setting, beside, number)]
        yield f"| {' | '.join(cells)} |"
    yield from ("", _source(sweep))


def _cost(setting: StoredSetting) -> float:
    return float(setting.parameters["epsilon"] or 0.0)


def _name(setting: StoredSetting) -> str:
    schedule, method = str(setting.parameters["schedule"]), str(setting.parameters["sampling.method"])
    return f"`{method}`" if schedule == "constant" else f"`{schedule}`, `{method}`"


def _verdict(sweep: StoredSweep, setting: StoredSetting, beside: StoredSetting, number: str) -> str:
    """The difference that a report states, and its verdict where it has one; "" beside itself."""
    if setting is beside:
        return ""
    for found in sweep.differences:
        if found.metric == number and {found.one, found.other} == {setting.name, beside.name}:
            sign = 1.0 if found.one == setting.name else -1.0
            ends = sorted((sign * found.low, sign * found.high))
            turned = {"better": "worse", "worse": "better"}
            word = found.verdict if sign > 0.0 else turned.get(found.verdict, found.verdict)
            words = (_shown(Number((sign * found.value,), *ends), "change"), "" if word == _UNTOLD else word)
            return " ".join(filter(None, words))
    return "one of both learnt nothing"


def _setting(sweep: StoredSweep, name: str) -> StoredSetting | None:
    return next((each for each in sweep.settings if each.name == name), None)


def _told(found: re.Match[str], stored: Mapping[str, StoredSweep]) -> str:
    """A number of the text. Raises: ValueError where nothing of that name is stored."""
    name, settings, number, form = found.groups()
    one, other = ([_setting(stored[name], each) for each in settings.split(" − ")] + [None])[:2]
    if one is None or ("−" in settings and other is None):
        known = [setting.name for setting in stored[name].settings]
        raise ValueError(f"{found.group()} names no setting of {name}, which has {known}")
    value = one.numbers[number] if other is None else difference(stored[name], one, other, number)
    return _shown(value, _form(form, number, settings))


def _form(form: str | None, number: str, settings: str) -> Form:
    forms: Mapping[str | None, Form] = {"share": "share", "change": "change", "plain": "plain"}
    usual: Form = "change" if "change" in number or "−" in settings else "share"
    return forms.get(form, usual)


def _shown(number: Number, form: Form) -> str:
    """The mean, and its interval where it is known and runs differ.

    >>> _shown(Number((0.5, 0.25), 0.25, 0.5), "share")
    '.375 [.250, .500]'
    """
    known = number.ends is not None and number.ends[0] < number.ends[1]
    ends = f" [{', '.join(_one(end, form) for end in number.ends)}]" if number.ends and known else ""
    return f"{_one(number.mean, form)}{ends}"


def _one(value: float, form: Form) -> str:
    if form == "plain":
        return f"{value:.3g}"
    text = f"{value:+.3f}" if form == "change" else f"{value:.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 1.0 else text


def main() -> None:
    stored = stored_results()
    for name, svg in figures(stored).items():
        (DOCS / "images" / name).write_text(svg)
    (DOCS / TABLE).write_text(table(stored))
    for name in PAGES:
        (DOCS / f"{name}.md").write_text(page((DOCS / f"{name}.txt").read_text(), stored))


if __name__ == "__main__":
    main()
