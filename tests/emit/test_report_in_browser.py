"""The report in headless Chromium: nothing is complained of, nothing is fetched, and there is something to see."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import datetime
from html import unescape
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


_CLICKS = """
const told = [];
for (const name of ["Samples/s", "Samples/s", "Status", "No."]) {
  [...document.querySelectorAll("table.sortable button")].find((one) => one.textContent === name).click();
  told.push([...document.querySelectorAll("table.sortable tbody tr")].map((row) => row.cells[0].textContent).join());
}
document.title = told.join("|");
"""


def run_in_page(page: Path, script: str, *options: str) -> str:
    """Open a page with a script of ours in it; return the title that this has set."""
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    page.write_text(html.replace("</body>", f"<script>{script}</script></body>"))
    shown = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", *options, "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    title = re.search("<title>(.*?)</title>", shown, re.DOTALL)
    assert title is not None
    return unescape(title[1])


_AUDIT = """;axe.run().then((found) => {
  const told = found.violations.map((one) => [one.id, one.nodes.map((node) => node.html)]);
  document.title = JSON.stringify({broken: told, passed: found.passes.map((one) => one.id)});
});"""


def audit(page: Path, *options: str) -> dict[str, Any]:
    """Return the accessibility rules of axe-core that a page breaks, and those that it keeps."""
    axe = Path(pytest.importorskip("axe_core_python").__path__[0]) / "axe.min.js"
    found: dict[str, Any] = json.loads(
        run_in_page(page, axe.read_text() + _AUDIT, "--virtual-time-budget=30000", *options)
    )
    return found


@pytest.mark.slow_cases("dark")
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_it_can_be_read_by_everybody(tmp_path: Path, scheme: str) -> None:
    found = audit(write_page(tmp_path), f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}")
    assert found["broken"] == []
    assert {"color-contrast", "html-has-lang", "document-title"} <= {*found["passed"]}


def test_what_some_cannot_read_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<html><body><p style="color:#ccc;background:#fff">faint</p><img src="data:,"></body></html>')
    assert {"color-contrast", "image-alt", "html-has-lang"} <= {rule for rule, _ in audit(page)["broken"]}


def test_its_trials_can_be_sorted_by_any_column(tmp_path: Path) -> None:
    title = run_in_page(write_page(tmp_path), _CLICKS)
    rising, falling, _, by_number = ([int(number) for number in order.split(",")] for order in title.split("|"))
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
