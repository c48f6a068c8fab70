"""The report in headless Chromium: nothing is complained of, nothing is fetched, and there is something to see."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from emit_records import BASELINE, TUNED, make_finals, make_profile, make_report
from record_factory import make_state
from test_report import HOSTILE, search_trials
from test_report_of_search import make_explanation, train

from autotune.emit.report import Origin, render_report
from autotune.records import TrialResult

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_NO_PAGE = "not an origin"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def all_trials() -> list[TrialResult]:
    trained = [train(200, BASELINE, (4.0, 3.0, 2.0)), train(201, TUNED, (4.0, 3.1, 2.0))]
    return [*search_trials(), *make_finals((1.3, 1.4, 1.38)), *trained]


def write_page(folder: Path) -> Path:
    origin = Origin(state=make_state(budget_seconds=1200.0), began=datetime(2026, 11, 24), folder=HOSTILE, price=2.0)
    page = folder / "report.html"
    page.write_text(render_report(make_profile(), make_report(), all_trials(), make_explanation(), origin))
    return page


def browse(page: Path, *options: str) -> tuple[str, list[str]]:
    """Open a page; return what the browser said on its console, and the addresses that it asked for."""
    log = page.with_name("net.json")
    command = [
        str(CHROMIUM),
        *("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *(f"--user-data-dir={page.parent / 'browser'}", f"--log-net-log={log}", *options, page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    console = "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    events: list[dict[str, Any]] = json.loads(log.read_text())["events"]
    asked = [event.get("params", {}) for event in events]
    # The browser's own questions have no page behind them; they do not get out of this machine either.
    return console, [one["url"] for one in asked if one.get("initiator", _NO_PAGE) != _NO_PAGE]


def test_what_a_page_fetches_or_says_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("hi")</script>')
    console, asked = browse(page, f"--screenshot={tmp_path / 'shot.png'}")
    assert '"hi"' in console
    assert {*asked} == {"http://127.0.0.1:9/x.png"}


@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_shown_without_a_complaint_or_a_request(tmp_path: Path, width: int) -> None:
    page, shot = write_page(tmp_path), tmp_path / "shot.png"
    console, asked = browse(page, f"--window-size={width},2000", "--hide-scrollbars", f"--screenshot={shot}")
    assert console == ""
    assert asked == []
    assert shot.stat().st_size > 20_000  # an empty one has 5 kB


_CLICKS = """<script>
const told = [];
for (const name of ["Samples/s", "Samples/s", "Status", "No."]) {
  [...document.querySelectorAll("table.sortable button")].find((one) => one.textContent === name).click();
  told.push([...document.querySelectorAll("table.sortable tbody tr")].map((row) => row.cells[0].textContent).join());
}
document.title = told.join("|");
</script>"""


def test_its_trials_can_be_sorted_by_any_column(tmp_path: Path) -> None:
    page = write_page(tmp_path)
    html = page.read_text()
    page.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html).replace("</body>", _CLICKS))
    shown = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    title = re.search("<title>(.*)</title>", shown)
    assert title is not None
    rising, falling, _, by_number = ([int(number) for number in order.split(",")] for order in title[1].split("|"))
    rates = {trial.spec.number: trial.measurement and trial.measurement.samples_per_second for trial in all_trials()}
    timed = [number for number in rates if rates[number] is not None]
    assert rising[: len(timed)] == sorted(timed, key=lambda number: rates[number] or 0.0)
    assert [rates[number] for number in falling[: len(timed)]] == sorted((rates[n] or 0.0 for n in timed), reverse=True)
    assert by_number == sorted(rates)


def test_it_prints_on_two_pages(tmp_path: Path) -> None:
    page, printed = write_page(tmp_path), tmp_path / "page.pdf"
    browse(page, "--no-pdf-header-footer", f"--print-to-pdf={printed}")
    count = printed.read_bytes().count(b"/Type /Page\n") + printed.read_bytes().count(b"/Type/Page/")
    assert 1 <= count <= 2
