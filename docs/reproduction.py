"""Writes docs/reproduction.md and its figures from what is stored: ``python -m docs.reproduction``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Final, Literal

from benchmarks.experiments import EXPERIMENTS, PLANNED_ONLY
from benchmarks.figures import FIGURES
from benchmarks.printed import Experiment, Form, Item
from benchmarks.reproduced import Number, StoredSetting, StoredSweep, difference, read_stored

DOCS: Final = Path(__file__).parent
TEXT: Final = DOCS / "reproduction.txt"
"""The page without tables and numbers. A line ``@table NAME`` stands for the table of a sweep, ``@figure NAME`` for a
figure, and ``{NAME: setting: number}`` for a number; ``one − other`` as the setting is a paired difference."""
_NOT_HERE: Final = {"795eb17334": " (not in this repository)"}
"""Commits of stored results that were made in a copy whose history is lost; their results were not trained again."""
_PLACE: Final = re.compile(r"\{([\w-]+): ([^:{}]+): ([^:{}]+?)(?:: (share|change|plain))?\}")


def page(text: str, stored: Mapping[str, StoredSweep]) -> str:
    """The page: `TEXT` with its tables, links to figures and numbers."""
    lines: list[str] = []
    for line in text.splitlines():
        word, _, name = line.partition(" ")
        if word == "@table":
            lines += _table(EXPERIMENTS[name], stored[name])
        elif word == "@planned":
            lines += _planned()
        elif word == "@verdicts":
            lines.append(_counted(stored))
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


def _table(experiment: Experiment, sweep: StoredSweep) -> Iterator[str]:
    spent = (
        f"{sweep.cpu_seconds / 60.0:.0f} CPU minutes" if sweep.cpu_seconds >= 90 else f"{sweep.cpu_seconds:.0f} CPU s"
    )
    trials = "trial" if sweep.asked == 1 else "trials"
    done = (
        f"{sweep.finished} {trials}" if sweep.finished == sweep.asked else f"{sweep.finished} of {sweep.asked} {trials}"
    )
    rows = f"{sweep.train_size:,} rows train, {sweep.test_size:,} test"
    commit = f"`{sweep.commit}`{_NOT_HERE.get(sweep.commit, '')}"
    yield f"`{sweep.command}`: {done}, {spent} on {sweep.hardware}; {rows}; dpsweep {sweep.version}, {commit}."
    if experiment.items:
        yield from ("", "| item | printed | measured | verdict | runs |", "|---|---|---|---|---|")
    for item in experiment.items:
        setting = _setting(sweep, item.setting)
        number = setting.numbers.get(item.number) if setting else None
        measured = _shown(number, item.form) if number else "not measured"
        runs = len(number.values) if number else 0
        yield f"| {item.item} | {item.printed or 'plot'} | {measured} | {verdict(item, number) or '–'} | {runs} |"
    if experiment.items:
        yield ""


Verdict = Literal["inside", "outside", "no interval", "not measured"]


def verdict(item: Item, number: Number | None) -> Verdict | None:
    """Return whether a printed number lies inside our interval; None where none is printed.

    ``inside``: what the printed digits may stand for, the number plus or minus half a unit of its last one, meets the
    95 % interval of our mean; a printed lower limit, as in "> .99", is one side of that. ``no interval``: a single run,
    whose difference may be chance.

    >>> item = Item("accuracy", "flat", "accuracy", ".93")
    >>> verdict(item, Number((0.92, 0.94), 0.9251, 0.94)), verdict(item, Number((0.94,), 0.936, 0.944))
    ('inside', 'outside')
    """
    found = re.fullmatch(r"(> )?([-+]?\d*\.?\d+)", item.printed)
    if found is None:
        return None
    if number is None:
        return "not measured"
    if number.ends is None:
        return "no interval"
    is_bound, printed = bool(found[1]), Decimal(found[2])
    half = Decimal(1).scaleb(int(printed.as_tuple().exponent)) / 2
    low, high = number.ends
    return "inside" if float(printed - half) <= high and (is_bound or float(printed + half) >= low) else "outside"


def _counted(stored: Mapping[str, StoredSweep]) -> str:
    """A sentence on how many printed numbers have which verdict."""
    found = Counter[Verdict]()
    for name, sweep in stored.items():
        for item in EXPERIMENTS[name].items:
            setting = _setting(sweep, item.setting)
            said = verdict(item, setting.numbers.get(item.number) if setting else None)
            found.update([said] if said else [])
    return (
        f"Of {found.total()} printed numbers of trained models, {found['inside']} lie inside our interval and "
        f"{found['outside']} outside; {found['no interval']} are held against a single run, which has none, and "
        f"{found['not measured']} are not measured."
    )


def _planned() -> Iterator[str]:
    yield from ("| sweep | experiment | why |", "|---|---|---|")
    for name, reason in PLANNED_ONLY.items():
        yield f"| `{name}` | {EXPERIMENTS[name].title} | {reason} |"


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
    """The mean, and its interval where it is known.

    >>> _shown(Number((0.5, 0.25), 0.25, 0.5), "share")
    '.375 [.250, .500]'
    """
    ends = f" [{', '.join(_one(end, form) for end in number.ends)}]" if number.ends else ""
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
    (DOCS / "reproduction.md").write_text(page(TEXT.read_text(), stored))


if __name__ == "__main__":
    main()
