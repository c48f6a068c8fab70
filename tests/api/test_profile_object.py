"""What an answer says of itself in Python, and where it can be taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from emit_records import make_report
from record_factory import MIB, make_check, make_interval, make_profile, make_state, make_target
from typer.testing import CliRunner

import autotune
from autotune.cli import app
from autotune.errors import UsageError
from autotune.records import Evidence, PeakMemory, TrainConfig
from autotune.records import Profile as Record
from autotune.search.store.folder import create_search_folder

HOSTILE = "train.py:<script>alert(1)</script>\x1b[31m"


def make_answer(**changes: Any) -> autotune.Profile:
    return autotune.Profile.of(make_profile(**changes))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_read_and_written_as_the_record_is(folder: Path) -> None:
    record = make_profile()
    record.save(folder / "best.json")
    profile = autotune.Profile.load(folder / "best.json")
    assert isinstance(profile, Record)
    assert isinstance(profile, autotune.Profile)
    assert profile.to_json() == record.to_json()
    assert type(profile.replace(verdict="keep")) is autotune.Profile


def test_it_shows_itself_in_a_line() -> None:
    assert repr(make_answer()) == "<Profile improved: at least 1.20x faster (point 1.30x, 0 pairs): precision=bf16>"
    kept = make_answer(verdict="keep", speedup=None)
    assert repr(kept) == "<Profile keep your settings: nothing that was measured beat them>"
    assert "\x1b" not in repr(make_answer(config=TrainConfig(user_knobs={"name": "\x1b[31m"})))


def test_its_summary_is_what_show_prints(folder: Path) -> None:
    profile = make_answer(memory=PeakMemory(host_bytes=MIB), quality=(make_check(),))
    profile.save("best.json")
    shown = CliRunner().invoke(app, ["show"]).stdout
    assert profile.summary() + "\n" == shown
    assert str(profile) == profile.summary()


def test_a_notebook_gets_a_table() -> None:
    before, after = (PeakMemory(host_bytes=size * MIB) for size in (292, 439))
    html = make_answer(memory=after, baseline_memory=before, quality=(make_check(),))._repr_html_()
    assert "<b>improved</b>: at least 1.20x faster" in html
    assert "<tr><th>throughput</th><td>1,000 samples/s</td><td>1,300 samples/s</td></tr>" in html
    assert "<tr><th>peak memory</th><td>292 MiB</td><td>439 MiB</td></tr>" in html
    assert "<tr><th>precision</th><td>fp32</td><td>bf16</td></tr>" in html
    assert "<tr><th>loss check</th>" in html


def test_a_table_of_what_is_kept_has_one_column() -> None:
    kept = make_answer(
        verdict="keep",
        config=TrainConfig(),
        baseline_config=TrainConfig(),
        speedup=None,
        evidence=Evidence(baseline_samples_per_second=1000.0),
    )._repr_html_()
    assert "<b>keep your settings</b>" in kept
    assert '<tr><th>throughput</th><td colspan="2" style="text-align:left">1,000 samples/s</td></tr>' in kept


def test_what_files_say_is_no_markup() -> None:
    html = make_answer(
        config=TrainConfig(user_knobs={"<b>": "<img src=x>"}), quality=(make_check(metric="<i>loss"),)
    )._repr_html_()
    assert "<img" not in html
    assert "<i>" not in html
    assert "&lt;img src=x&gt;" in html


def test_it_writes_the_report_of_its_search(folder: Path) -> None:
    profile = make_answer()
    search = create_search_folder(folder, "toy.py:workload")
    search.write_state(make_state(target=make_target(folder=folder)))
    profile.save(search.profile)
    search.write_probe(make_report())
    assert profile.report() == Path("report.html")
    first = Path("report.html").read_text()
    assert profile.report().read_text() == first  # its own page is made again
    Path("mine.html").write_text("mine")
    with pytest.raises(UsageError, match=r"mine.html exists"):
        profile.report("mine.html")
    assert profile.report("mine.html", force=True).read_text() == first
    assert CliRunner().invoke(app, ["report", "-o", "same.html"]).exit_code == 0
    assert Path("same.html").read_text() == first
    assert profile.report("elsewhere.html", folder=folder).exists()
    other = make_answer(speedup=make_interval(2.0, 1.9, 2.1))
    with pytest.raises(UsageError, match=r"no search in .* has this answer"):
        other.report("other.html")


def test_it_is_exported_as_the_command_does_it(folder: Path) -> None:
    profile = make_answer()
    profile.save("best.json")
    for tool in ("torch", "hf", "hf-flags", "lightning", "accelerate", "deepspeed", "env"):
        assert profile.export(tool).text == CliRunner().invoke(app, ["export", "--to", tool]).stdout
    with pytest.raises(UsageError, match="no exporter 'pandas'"):
        profile.export("pandas")
