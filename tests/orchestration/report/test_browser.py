"""The report in a real browser: it draws every picture, answers a reader, and keeps nobody out."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from dpsweep.orchestration.report import page
from dpsweep.orchestration.report.catalogue import figures_for_mlflow
from dpsweep.orchestration.report.page import render
from tests.known import known
from tests.orchestration.report.emulated import PHONE, tab_of
from tests.orchestration.report.pages import Page, rendered
from tests.orchestration.sample_sweeps import sample_sweep

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND"),
)


pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium or chrome to draw the page with")


def opened(html: str, folder: Path, width: int = 1280) -> subprocess.CompletedProcess[str]:
    """The page after its scripts have run in a browser, as HTML."""
    written = folder / "report.html"
    written.write_text(html)
    size, profile = f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}"
    whole = ("--virtual-time-budget=10000", "--enable-logging=stderr", "--dump-dom")
    command = [CHROMIUM, *FLAGS, size, profile, *whole, written.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def drawn(html: str, folder: Path, width: int = 1280) -> str:
    """The same, of a page that drew every picture without complaint."""
    finished = opened(html, folder, width)
    assert f'data-drawn="{len(Page(html).plots)}"' in finished.stdout
    assert finished.stdout.count('class="main-svg"') >= len(Page(html).plots)
    assert not [line for line in finished.stderr.splitlines() if "CONSOLE" in line]
    return finished.stdout


def answers(html: str, folder: Path, width: int) -> dict[str, str]:
    """What a script in the page wrote into the data attributes of its body; the last one is "done" on a phone."""
    if width == PHONE:
        return on_a_phone(html, folder)
    body = known(re.search(r"<body ([^>]*)>", drawn(html, folder, width)))
    data = dict(re.findall(r'data-(\w+)="([^"]*)"', body[1]))
    assert "failed" not in data
    return data


def on_a_phone(html: str, folder: Path) -> dict[str, str]:
    written = folder / "report.html"
    written.write_text(html)
    with tab_of(CHROMIUM, FLAGS, folder) as tab:
        tab.open(written.as_uri(), PHONE)
        tab.wait_for("done")
        assert tab.value("document.querySelectorAll('.main-svg').length") >= len(Page(html).plots)
        assert tab.complaints == []
        return dict(tab.value("({...document.body.dataset})"))


def test_a_figure_for_mlflow_is_drawn_alone(tmp_path: Path) -> None:
    alone = figures_for_mlflow(sample_sweep())["utility-fairness"]
    found = opened(alone, tmp_path)
    assert 'class="main-svg"' in found.stdout
    assert not [line for line in found.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.long
def test_a_browser_unpacks_the_data_of_a_large_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rendered("raw")
    monkeypatch.setattr(page, "_LARGE", 1000)
    html = render(sample_sweep())
    assert 'type="application/json"' not in html
    assert len(html) < len(plain)
    drawn(html, tmp_path)


DRIVE = """
<script>
addEventListener("error", () => document.body.dataset.failed = "yes");
const wait = setInterval(() => {
  if (!document.body.dataset.drawn) return;
  clearInterval(wait);
  const settings = Array.from(document.querySelectorAll("h3")).find(h => h.textContent.startsWith("Settings"));
  const table = settings.parentElement.querySelector(".scroll table");
  const head = Array.from(table.tHead.rows[0].cells).find(cell => cell.textContent === "Test accuracy");
  const column = head.cellIndex, shown = () => Array.from(table.tBodies[0].rows).filter(row => row.offsetParent);
  head.querySelector("button").click();
  document.body.dataset.sorted = shown().map(row => parseFloat(row.cells[column].innerText)).join(" ");
  document.querySelector(".key button[data-value=flat]").click();
  document.body.dataset.filtered = shown().map(row => row.dataset.clipping).join(" ");
  const pick = document.getElementById("explore-x");
  pick.value = "epsilon";
  pick.dispatchEvent(new Event("change"));
  const chart = document.getElementById("explore");
  document.body.dataset.axis = chart.layout.xaxis.title.text;
  document.body.dataset.traces = chart.data.length;
  document.body.dataset.wide = document.documentElement.scrollWidth;
  document.body.dataset.done = "yes";
}, 50);
</script></body>"""


@pytest.mark.thinned(2)
@pytest.mark.parametrize("width", [1280, PHONE])
def test_a_reader_sorts_filters_and_chooses_axes(tmp_path: Path, width: int) -> None:
    data = answers(rendered("none").replace("</body>", DRIVE), tmp_path, width)
    accuracies = [float(each) for each in data["sorted"].split()]
    assert accuracies == sorted(accuracies)
    assert len(accuracies) == 7
    assert sorted(data["filtered"].split()) == ["dpsgd_f", "dpsgd_f", "individual", "individual", "non-private"]
    assert (data["axis"], data["traces"]) == ("Worst-case ε", "4"), "the baseline has no finite ε"
    assert int(data["wide"]) <= width, "no sideways scrolling"


CHECK = """<script>
addEventListener("error", () => document.body.dataset.failed = "yes");
const violations = found => found.violations.map(each => each.impact + " " + each.id).join(", ");
const ready = setInterval(async () => {
  if (!document.body.dataset.drawn) return;
  clearInterval(ready);
  const found = await axe.run(document, {resultTypes: ["violations"]});
  document.body.dataset.passes = found.passes.length;
  document.body.dataset.found = violations(found);
  const nameless = document.createElement("img");
  nameless.src = "data:,";
  document.querySelector("main").append(nameless);
  document.body.dataset.spoilt = violations(await axe.run(nameless));
  document.body.dataset.done = "yes";
}, 50);
</script></body>"""


@pytest.mark.long
@pytest.mark.thinned(2)
@pytest.mark.parametrize("width", [1280, PHONE])
def test_axe_finds_nothing_that_keeps_a_reader_out(tmp_path: Path, width: int) -> None:
    axe = files("axe_core_python").joinpath("axe.min.js").read_text().replace("</script>", "<\\/script>")
    html = rendered("raw").replace("</body>", f"<script>{axe}</script>{CHECK}")
    data = answers(html, tmp_path, width)
    assert int(data["passes"]) > 20
    assert data["found"] == ""
    assert "critical image-alt" in data["spoilt"], "axe finds what is wrong"
