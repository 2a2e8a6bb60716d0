"""Writes the pages on the papers and their figures from what is stored: ``python -m docs.reproduction``."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.experiments import EXPERIMENTS, PLANNED_ONLY
from benchmarks.figures import FIGURES
from benchmarks.printed import Experiment, Form, Item
from benchmarks.reproduced import Number, StoredSetting, StoredSweep, difference, read_stored
from benchmarks.scorecard import MISSING, RESULTS, RULE, Result, judged, number_of, verdict

DOCS: Final = Path(__file__).parent
PAGES: Final = ("reproduction", "reproduction-tables", "beyond")
"""The pages, each from a text of its name. A line ``@table NAMES`` stands for one table of sweeps, ``@figure NAME`` for
a figure, and ``{NAME: setting: number}`` for a number; ``one − other`` as the setting is a paired difference. The words
`_PARTS` stand for the scorecard and what belongs to it."""
_USUAL_ROWS: Final = "60,000 + 10,000 rows"
_NOT_HERE: Final = "795eb17334"
"""The commit of stored results whose history is lost; they were not trained again."""
_LACKING: Final = "not measured"
"""Stands for a number that no run gave; a row of nothing else is left out."""
_CORNER: Final = re.compile(r"^Table \d+(?=: )")
_PLACE: Final = re.compile(r"\{([\w-]+): ([^:{}]+): ([^:{}]+?)(?:: (share|change|plain))?\}")


def page(text: str, stored: Mapping[str, StoredSweep]) -> str:
    """The page of a text with its tables, links to figures and numbers."""
    lines: list[str] = []
    for line in text.splitlines():
        word, _, name = line.partition(" ")
        if word == "@table":
            lines += _table([(EXPERIMENTS[each], stored[each]) for each in name.split()])
        elif word in _PARTS:
            lines += _PARTS[word](stored)
        elif word == "@figure":
            lines.append(f"![{FIGURES[name].title}](images/{name}.svg)")
        else:
            lines.append(_PLACE.sub(lambda found: _told(found, stored), line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def figures(stored: Mapping[str, StoredSweep]) -> dict[str, str]:
    """The figures as SVG by the name of the file in docs/images."""
    known = {name: figure for name, figure in FIGURES.items() if all(sweep in stored for sweep in figure.sweeps)}
    return {f"{name}.svg": figure.draw(stored) for name, figure in known.items()}


def stored_results() -> dict[str, StoredSweep]:
    """By name, what is stored of the sweeps that were trained."""
    found = {name: read_stored(name) for name in EXPERIMENTS}
    return {name: sweep for name, sweep in found.items() if sweep is not None}


_Parts = Sequence[tuple[Experiment, StoredSweep]]
"""Sweeps that share a table."""


def _table(parts: _Parts) -> Iterator[str]:
    """Yield the sources of sweeps' results and their numbers, as a grid of settings by numbers where they form one.

    Where the paper prints no number, the sources stand alone.
    """
    yield from (_source(*part) for part in parts)
    if not any(item.printed for experiment, _ in parts for item in experiment.items):
        return
    cells = [(item.item, _cell(item, sweep)) for experiment, sweep in parts for item in experiment.items]
    grids = [
        _grid(corner, {name.removeprefix(f"{corner}: "): cell for name, cell in of})
        for corner, of in itertools.groupby(cells, lambda each: "".join(_CORNER.findall(each[0])))
    ]
    for table in grids if all(grids) else [_list(parts)]:
        yield from ("", *table)
    yield ""


def _source(experiment: Experiment, sweep: StoredSweep) -> str:
    minutes = sweep.cpu_seconds / 60.0
    spent = f"{minutes:.0f} CPU minutes" if sweep.cpu_seconds >= 90 else f"{sweep.cpu_seconds:.0f} CPU s"
    trials = "trial" if sweep.asked == 1 else "trials"
    finished = "" if sweep.finished == sweep.asked else f"{sweep.finished} of "
    rows = f"{sweep.train_size:,} + {sweep.test_size:,} rows"
    command = sweep.command.removeprefix("python -m benchmarks.reproduce ")
    found = (
        f"{finished}{sweep.asked} {trials}",
        _runs(experiment, sweep),
        spent,
        rows if rows != _USUAL_ROWS else "",
    )
    return f"`{command}`, `{sweep.commit}`: {'; '.join(filter(None, found))}."


def _list(parts: _Parts) -> list[str]:
    """Return a table of numbers by sweeps."""
    columns = [{item.item: _cell(item, sweep) for item in experiment.items} for experiment, sweep in parts]
    heads = [f"`{sweep.sweep}`" for _, sweep in parts] if len(parts) > 1 else ["printed → measured"]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "–") for column in columns)] for name in names]
    return [
        f"| item | {' | '.join(heads)} |",
        f"|---{'|---' * len(heads)}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _runs(experiment: Experiment, sweep: StoredSweep) -> str:
    numbers = [number for item in experiment.items if (number := number_of(sweep, item)) is not None]
    runs = sorted({len(number.values) for number in numbers})
    return f"{' or '.join(map(str, runs))} a setting" if runs and runs != [1] else ""


def _cell(item: Item, sweep: StoredSweep) -> str:
    """Return the printed number, if any, and the measured one, in bold if its interval holds the printed one."""
    number = number_of(sweep, item)
    measured = _shown(number, item.form) if number else _LACKING
    bold = "**" if verdict(item, number) == "inside" else ""
    return f"{item.printed} → {bold}{measured}{bold}" if item.printed not in ("", "none") else measured


def _grid(corner: str, items: Mapping[str, str]) -> list[str]:
    """Return a table of settings by numbers; empty where the names of the items do not form a grid.

    >>> _grid("", {"SGD, all": "1", "SGD, 8": "2", "Naive, all": "3", "Naive, 8": "4"})[2:]
    ['| SGD | 1 | 2 |', '| Naive | 3 | 4 |']
    """
    for cut in (": ", r", (?!.*, )", ", "):
        places = {tuple(re.split(cut, name, maxsplit=1)): cell for name, cell in items.items()}
        if {len(place) for place in places} != {2}:
            continue
        rows, columns = (list(dict.fromkeys(place[axis] for place in places)) for axis in (0, 1))
        if min(len(rows), len(columns)) > 1 and len(places) == len(items) == len(rows) * len(columns):
            rows = [row for row in rows if not all(places[row, each].endswith(_LACKING) for each in columns)]
            head = [f"| {corner} | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
            return head + [f"| {row} | {' | '.join(places[row, column] for column in columns)} |" for row in rows]
    return []


def _made(stored: Mapping[str, StoredSweep]) -> Iterator[str]:
    """Yield what the lines above the tables have in common, and how to read them."""
    hardware, versions = ({getattr(sweep, name) for sweep in stored.values()} for name in ("hardware", "version"))
    yield f"All were trained on {' or '.join(sorted(hardware))} by dpsweep {' or '.join(sorted(versions))}."
    yield (
        "Above each table: its sweeps in the order of their rows, the commits that trained them, trials, CPU time, and "
        f"rows for training and test, unless these are {_USUAL_ROWS.removesuffix(' rows')}."
    )
    if any(sweep.commit == _NOT_HERE for sweep in stored.values()):
        yield f"The commit `{_NOT_HERE}` is not in this repository."


def _counted(stored: Mapping[str, StoredSweep]) -> Iterator[str]:
    """Count tables and figures, and printed numbers, by verdict."""
    results = [each for paper in RESULTS.values() for each in paper]
    outcomes = Counter(judged(each.of(), stored.get(each.sweep)).outcome for each in results)
    said = Counter(found for name, sweep in stored.items() for found in judged(EXPERIMENTS[name].items, sweep).said)
    yield (
        f"Of {len(results)} tables and figures that a sweep tries, {outcomes['reproduced']} are reproduced, "
        f"{outcomes['in shape']} in shape, {outcomes['not']} not. Another {outcomes['cannot be told']} cannot be told "
        f"from one run, {outcomes['not judged']} print no number, {outcomes['cannot be tried']} cannot be tried here."
    )
    yield (
        f"Of {said.total()} printed numbers of trained models, {said['inside']} lie inside our interval and "
        f"{said['outside']} outside; {said['no interval']} are held against a single run, which has none, and "
        f"{said['not measured']} are not measured."
    )


def _scorecard(stored: Mapping[str, StoredSweep]) -> Iterator[str]:
    for paper, results in RESULTS.items():
        yield from (
            f"### {paper}",
            "",
            "| item | printed → ours | inside, order | verdict | why |",
            "|---|---|---|---|---|",
        )
        for result in results:
            sweep = stored.get(result.sweep)
            found = judged(result.of(), sweep)
            item = next((each for each in result.of() if each.item == result.headline), None)
            number = number_of(sweep, item) if sweep is not None and item is not None else None
            ours = _shown(number, item.form) if number and item else "–"
            shown = f"{item.printed} → {ours}" if item and item.printed else ours
            said = [each for each in found.said if each in ("inside", "outside")]
            inside = f"{said.count('inside')} of {len(said)}" if said else "–"
            order = f", {sum(found.orders)} of {len(found.orders)}" if found.orders else ""
            named = f"{result.item}: {_headline(result)}" if item else result.item
            yield f"| {named} | {shown} | {inside}{order} | {found.outcome} | {result.why} |"
        yield ""


def _headline(result: Result) -> str:
    """The name of the number shown, without that of its table."""
    return re.sub(r"^(Table|Figure|Appendix) \w+: ", "", result.headline)


def _missing(_: Mapping[str, StoredSweep]) -> Iterator[str]:
    yield from (f"- {each.item}: {each.why}.\n" for each in MISSING)


def _planned(_: Mapping[str, StoredSweep]) -> Iterator[str]:
    yield from (f"- `{name}`, {EXPERIMENTS[name].title}: {reason}.\n" for name, reason in PLANNED_ONLY.items())


_PARTS: Final[Mapping[str, Callable[[Mapping[str, StoredSweep]], Iterator[str]]]] = {
    "@made": _made,
    "@counts": _counted,
    "@rule": lambda _: iter([RULE]),
    "@scorecard": _scorecard,
    "@missing": _missing,
    "@planned": _planned,
}


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
    for name in PAGES:
        (DOCS / f"{name}.md").write_text(page((DOCS / f"{name}.txt").read_text(), stored))


if __name__ == "__main__":
    main()
