from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
import record_factory
from emit_records import (
    BASELINE,
    TUNED,
    make_facts,
    make_finals,
    make_hardware,
    make_interval,
    make_profile,
    make_report,
    make_software,
    make_trial,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from record_factory import make_check, make_gpu, make_memory, make_mode, make_phases

from autotune.emit.report import render_report
from autotune.emit.report.charts import choose_ticks, draw_finals, draw_phases, draw_trials, draw_work, find_pair_ratios
from autotune.emit.report.tables import describe_difference, find_baseline_rate, list_settings
from autotune.emit.report.wording import format_interval, shorten, tally
from autotune.format import format_factor_down
from autotune.records import (
    Advice,
    Candidate,
    Evidence,
    GainRange,
    Issue,
    LossCurve,
    Margin,
    NotTested,
    PeakMemory,
    ProfileTarget,
    RuledOut,
    StepWork,
    TrainConfig,
    TrialResult,
    TrialStatus,
    Verdict,
)
from autotune.records.profile import Confirmation, ParetoPoint
from autotune.sentences.trials import describe_result

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)> {{ 7 * 7 }} \x1b[31m\x00\u202e\ud800</style>"
WORK = StepWork(
    products_fraction=0.5,
    traffic_fraction=0.375,
    overhead_fraction=0.125,
    operations_per_step=900.0,
    host_syncs_per_step=1.0,
)
MEMORY = make_memory(
    make_mode(bytes_per_sample=2**25),
    make_mode(precision="bf16", activation_checkpointing="full", bytes_per_sample=2**20, largest_micro_batch_size=7168),
    make_mode(precision="bf16", fixed_bytes=2**34, bytes_per_sample=2**20, largest_micro_batch_size=0),
    weights_bytes=2**20,
    gradient_bytes=2**20,
    optimizer_bytes=2**21,
    activation_bytes_per_sample=3 * 2**20,
)
VOID = {"meta", "link", "br", "img", "hr", "input", "wbr"}


def plain(text: str) -> str:
    """Return a text with typographic signs in ASCII."""
    return text.replace("\N{MULTIPLICATION SIGN}", "x").replace("\N{EN DASH}", "-")


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in order; keeps elements, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.cells: list[list[str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"style", "script"} & {*self.open}:
            return
        data = plain(data)
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.cells[-1][-1] += data

    def count(self, tag: str, **wanted: str) -> int:
        return sum(name == tag and wanted.items() <= found.items() for name, found in self.elements)

    def words(self) -> str:
        return " ".join(self.text.split())


def search_trials(count: int = 12) -> list[TrialResult]:
    trials = [make_trial(0, None, rate=None, purpose="probe", status=TrialStatus.COMPLETED)]
    trials += [make_trial(1, BASELINE, rate=1000.0)]
    for number in range(2, count):
        config = BASELINE.replace(num_workers=number % 5, precision="bf16")
        trials.append(make_trial(number, config, rate=900.0 + 10 * number))
    return trials


def render(**changes: Any) -> str:
    parts: dict[str, Any] = {"profile": make_profile(), "probe": make_report(), "trials": search_trials()}
    parts |= changes
    return render_report(parts["profile"], parts["probe"], parts["trials"])


# ---- the page as a whole


def test_the_page_is_self_contained() -> None:
    html = render(trials=search_trials() + make_finals((1.3, 1.4)))
    page = Page(html)
    assert html.startswith("<!DOCTYPE html>")
    tags = {tag for tag, _ in page.elements}
    assert page.count("script") == 1
    assert not tags & {"link", "img", "iframe", "object", "embed", "form", "base", "a", "audio", "video"}
    for tag, attributes in page.elements:
        assert not {name for name in attributes if name.startswith("on")}, tag
        assert not attributes.keys() & {"src", "href", "xlink:href", "action", "style", "srcset", "background"}, tag
    assert "http:" not in html
    assert "https:" not in html
    assert "url(" not in html
    assert "@import" not in html


def test_the_page_forbids_resources_and_all_scripts_but_its_own() -> None:
    html = render()
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (
        attributes["content"]
        for tag, attributes in Page(html).elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"


def test_the_page_is_accessible() -> None:
    page = Page(render(trials=search_trials() + make_finals((1.3, 1.4))))
    assert page.count("html", lang="en") == 1
    assert page.count("title") >= 1
    assert page.count("meta", name="viewport", content="width=device-width, initial-scale=1") == 1
    assert page.count("h1") == 1
    for tag, attributes in page.elements:
        if tag == "svg":
            is_mark = "mark" in (attributes.get("class") or "")
            assert is_mark or attributes.get("aria-hidden") == "true" or attributes.get("aria-label")
        if tag == "th":
            assert attributes.get("scope") in ("col", "row")
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = {attributes["aria-labelledby"] for _, attributes in page.elements if "aria-labelledby" in attributes}
    assert labels == set(ids)


def test_light_and_dark() -> None:
    html = render()
    assert "@media screen and (prefers-color-scheme: dark)" in html
    assert "color-scheme: light dark" in html


def test_every_colour_name_used_in_the_style_is_defined_in_both_schemes() -> None:
    style = re.search(r"<style>(.*)</style>", render(), re.DOTALL)
    assert style is not None
    light, dark = style.group(1).split("prefers-color-scheme: dark", 1)
    used = set(re.findall(r"var\((--[\w-]+)\)", style.group(1)))
    assert used
    assert used <= set(re.findall(r"(--[\w-]+):", light))
    assert used <= set(re.findall(r"(--[\w-]+):", dark))


def test_the_page_stays_small_with_many_long_trials() -> None:
    error = HOSTILE * 200
    config = TUNED.replace(user_knobs={f"knob {i} {HOSTILE[:50]}": HOSTILE[:-9] * 20 for i in range(20)})
    trials = [
        make_trial(number, config, rate=None, status=TrialStatus.CRASHED, cause="user-error", error=error)
        for number in range(200)
    ]
    assert len(render(trials=trials).encode()) < 1_000_000


def test_two_hundred_trials_are_all_listed() -> None:
    page = Page(render(trials=search_trials(200)))
    numbers = [row[0] for row in page.cells if len(row) == 8 and row[0].isdigit()]
    assert numbers == [str(number) for number in range(200)]


def test_hostile_text_is_harmless_everywhere() -> None:
    config = BASELINE.replace(user_knobs={HOSTILE: HOSTILE})
    quality = make_check(test="metric", metric=HOSTILE, verdict="inconclusive", reason=HOSTILE)
    hardware = make_hardware(
        cpu_name=HOSTILE,
        cpu_features=(HOSTILE,),
        missing=(HOSTILE,),
        gpus=(make_gpu(name=HOSTILE, compute_capability=HOSTILE),),
    )
    html = render(
        profile=make_profile(
            config=config,
            candidate_config=config,
            quality=(quality,),
            target=ProfileTarget(label=HOSTILE, fingerprint=HOSTILE),
            hardware=hardware,
            software=make_software(platform=HOSTILE, torch=HOSTILE, driver=HOSTILE, cuda=HOSTILE),
            evidence=Evidence(pairs=8, notes=(HOSTILE,)),
        ),
        probe=make_report(
            target=make_facts(label=HOSTILE, warnings=(HOSTILE,), memory=MEMORY.replace(missing=HOSTILE)),
            verdict=Verdict(limit="unknown", sentence=HOSTILE, speedup_ceiling=2.0, ceiling_reason=HOSTILE),
            troubles=(Issue(name=HOSTILE, sentence=HOSTILE, remedy=HOSTILE),),
            advice=(Advice(knob=HOSTILE, reason=HOSTILE),),
            ruled_out=(RuledOut(knob=HOSTILE, value=HOSTILE, reason=HOSTILE),),
        ),
        trials=[
            make_trial(1, config, rate=None, status=TrialStatus.CRASHED, cause="user-error", error=HOSTILE),
            make_trial(2, config, rate=1100.0),
        ],
    )
    page = Page(html)
    full = make_report(target=make_facts(memory=MEMORY))
    clean = {tag for tag, _ in Page(render(probe=full, trials=[*search_trials(), make_trial(99, rate=None)])).elements}
    assert {tag for tag, _ in page.elements} <= clean
    assert html.count("</style>") == 1
    assert not {name for _, attributes in page.elements for name in attributes if name.startswith("on")}
    assert "49" not in page.text
    assert page.text.count("<script>") >= 15
    assert not set(html) & {"\x1b", "\x00", "\u202e", "\ud800"}
    html.encode("utf-8")


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(), max_size=60))
def test_any_text_gives_a_well_formed_page(text: str) -> None:
    target = ProfileTarget(label=text, fingerprint="0" * 12)
    trial = make_trial(1, rate=None, status=TrialStatus.CRASHED, error=text, cause="user-error")
    html = render(profile=make_profile(target=target), trials=[trial])
    Page(html)
    html.encode("utf-8")


def test_the_inputs_may_come_in_any_order() -> None:
    trials = search_trials() + make_finals((1.3, 1.4))
    assert render(trials=trials) == render(trials=trials[::-1])


def test_nothing_was_run() -> None:
    page = Page(render(trials=[], profile=make_profile(quality=()), probe=make_report(ruled_out=(), advice=())))
    words = page.words()
    for sentence in ("No trial was timed.", "No pair of fresh processes was completed.", "No trial was run."):
        assert sentence in words
    assert "Nothing was ruled out beforehand." in words


# ---- the verdict


def test_a_proven_gain_claims_the_lower_end() -> None:
    page = Page(render())
    assert "At least 1.31x faster point 1.38x, 98 % interval 1.31-1.46, 8 pairs" in page.words()
    assert page.count("div", **{"class": "verdict good"}) == 1
    assert "1,380 samples/s" in page.text


def test_a_check_of_what_is_learned_is_claimed_only_where_there_was_one() -> None:
    assert "what is learned was checked" in render()
    assert "no loss check was run" in render(profile=make_profile(quality=()))


@pytest.mark.parametrize("verdict", ["keep", "inconclusive"])
def test_without_a_proven_gain_the_settings_stay(verdict: Any) -> None:
    profile = make_profile(verdict=verdict, config=BASELINE, speedup=make_interval(1.03, 0.98, 1.09))
    page = Page(render(profile=profile))
    assert "Keep your settings" in page.words()
    assert "fastest candidate: point 1.03x, 98 % interval 0.98-1.09, 8 pairs" in page.words()
    assert "At least" not in page.text
    assert page.count("div", **{"class": "verdict neutral"}) == 1
    assert "1,380 samples/s" not in page.text


def test_keep_and_inconclusive_are_told_apart() -> None:
    headlines = {
        verdict: Page(render(profile=make_profile(verdict=verdict, config=BASELINE))).words()
        for verdict in ("keep", "inconclusive")
    }
    assert "no gain could be proven" in headlines["inconclusive"]
    assert "no gain could be proven" not in headlines["keep"]


def test_what_was_not_tested_is_no_verdict_on_it() -> None:
    found = NotTested(outcomes={"timed_out": 1}, settings=("precision",), settings_known=2, budget_needed_seconds=350.0)
    profile = make_profile(
        verdict="not-tested",
        config=BASELINE,
        candidate_config=None,
        speedup=None,
        evidence=Evidence(not_tested=found),
    )
    page = Page(render(profile=profile))
    assert "Not tested: nothing but your own settings could be measured" in page.words()
    assert "Not tried: 1 of 2 settings: precision" in page.words()
    assert "About 6m would try them" in page.words()
    assert "not proven" not in page.words()


def test_pairs_without_an_interval_are_drawn_without_one() -> None:
    confirmation = Confirmation(pairs_planned=4, log_ratios=(0.1, 0.2), hodges_lehmann=1.16)
    profile = make_profile(
        verdict="inconclusive",
        config=BASELINE,
        speedup=None,
        candidate=Candidate(config=TUNED, speedup_estimate=1.16, pairs=2, reason="too few"),
        evidence=Evidence(pairs=2, confirmation=confirmation),
    )
    page = Page(render(profile=profile))
    assert "fastest candidate: about 1.16x, 2 pairs, too few for an interval" in page.words()
    assert page.count("circle", **{"class": "pair-dot"}) == 2
    assert page.count("rect", **{"class": "interval"}) == 0
    assert page.count("line", **{"class": "estimate"}) == 0


def test_no_pairs_is_said() -> None:
    profile = make_profile(verdict="keep", config=BASELINE, evidence=Evidence(pairs=0))
    assert "No candidate was compared with your settings in fresh processes." in Page(render(profile=profile)).text


@pytest.mark.parametrize(
    ("low", "shown"), [(1.31, "1.31x"), (1.3199, "1.31x"), (1.13, "1.13x"), (1.0, "1.00x"), (0.999, "0.99x")]
)
def test_a_claim_is_never_rounded_up(low: float, shown: str) -> None:
    assert plain(format_factor_down(low)) == shown


@given(low=st.floats(0.01, 50), width=st.floats(0, 5))
def test_a_shown_interval_holds_the_interval(low: float, width: float) -> None:
    text = plain(format_interval(make_interval(low, low, low + width)))
    shown_low, shown_high = re.fullmatch(r"98 % interval ([\d.]+)-([\d.]+)", text).groups()  # type: ignore[union-attr]
    assert low - 0.0101 <= float(shown_low) <= low
    assert low + width <= float(shown_high) <= low + width + 0.0101


# ---- what the probe found


def test_troubles_come_with_what_to_do() -> None:
    trouble = Issue(name="swap", sentence="1.5 GiB of swap is in use", remedy="free memory first")
    page = Page(render(probe=make_report(troubles=(trouble,))))
    assert "Slowdowns that no setting can fix 1.5 GiB of swap is in use" in page.words()
    assert page.count("span", **{"class": "error"}) == 1
    assert "free memory first" in page.text
    assert "is no setting" not in Page(render()).text


def test_what_a_step_is_spent_on() -> None:
    page = Page(render(probe=make_report(target=make_facts(work=WORK))))
    assert ["matrix products", "16.9 ms", "50 %"] in page.cells
    assert ["overhead of small operations", "4.21 ms", "12 %"] in page.cells
    assert page.count("svg", **{"class": "bar"}) == 2
    assert [segment.x for segment in draw_work(make_facts(work=WORK))] == [0.0, 50.0, 87.5]
    assert draw_work(make_facts()) == ()
    assert draw_work(make_facts(work=WORK, compute_seconds_per_step=0.0)) == ()


def test_what_the_memory_is_made_of_and_what_else_would_fit() -> None:
    page = Page(render(probe=make_report(target=make_facts(memory=MEMORY))))
    assert "Process 1 GiB, weights 1 MiB, gradients 1 MiB, optimizer 2 MiB" in page.words()
    assert "3 MiB of activations a sample; 8 GiB may be used." in page.words()
    assert ["fp32 yours", "2 GiB", "32 MiB", "not known"] in page.cells
    assert ["bf16, full checkpointing", "1.03 GiB", "1 MiB", "7,168"] in page.cells
    assert ["bf16", "16 GiB", "1 MiB", "none fits"] in page.cells


def test_memory_that_was_not_predicted() -> None:
    memory = MEMORY.replace(modes=(), activation_bytes_per_sample=None, missing="The loss depends on the batch.")
    words = Page(render(probe=make_report(target=make_facts(memory=memory)))).words()
    assert "optimizer 2 MiB; 8 GiB may be used. The loss depends on the batch." in words
    assert "Largest micro batch" not in words
    assert "Memory, part by part" not in Page(render()).words()


def test_advice_has_its_gain_where_there_is_one() -> None:
    advice = (
        Advice(knob="precision", reason="bf16 is faster", gain=GainRange(low=1.1, high=1.8)),
        Advice(knob="memory_format", reason="there are convolutions"),
    )
    words = Page(render(probe=make_report(advice=advice))).words()
    assert "precision 1.1-1.8x: bf16 is faster memory_format: there are convolutions" in words


def test_the_ceiling_has_its_reason() -> None:
    verdict = Verdict(limit="compute", sentence="compute-bound", speedup_ceiling=2.4, ceiling_reason="the products")
    words = Page(render(probe=make_report(verdict=verdict))).words()
    assert "compute-bound. No more than 2.40x is possible on this machine for this model: the products" in words


def test_a_sustained_rate_is_shown_beside_the_best() -> None:
    rate = make_facts().ceilings.matmul[0].replace(sustained_flops_per_second=4.8e13)
    facts = make_facts(ceilings=make_facts().ceilings.replace(matmul=(rate,)))
    cells = Page(render(probe=make_report(target=facts))).cells
    assert ["fp32 products", "48 TFLOP/s sustained, burst 52 TFLOP/s"] in cells


# ---- the tables


def test_settings_that_differ_come_first() -> None:
    rows = list_settings(make_profile())
    changed = [row for row in rows if row.changed]
    assert rows[: len(changed)] == changed
    assert {row.knob: (row.baseline, row.chosen) for row in changed} == {
        "precision": ("fp32", "bf16"),
        "compile_mode": ("off", "default"),
        "optimizer_implementation": ("foreach", "fused"),
        "num_workers": ("0", "4"),
        "pin_memory": ("off", "on"),
    }
    assert {row.knob for row in rows} == TrainConfig.model_fields.keys() - {"user_knobs"}


def test_own_knobs_are_settings_too() -> None:
    profile = make_profile(
        baseline_config=BASELINE.replace(user_knobs={"depth": 2, "kind": "a"}),
        config=BASELINE.replace(user_knobs={"depth": 4, "kind": "a"}),
        candidate_config=None,
    )
    rows = {row.knob: row for row in list_settings(profile)}
    assert (rows["user_knobs.depth"].baseline, rows["user_knobs.depth"].chosen) == ("2", "4")
    assert rows["user_knobs.depth"].changed
    assert not rows["user_knobs.kind"].changed


def test_a_candidate_that_was_not_chosen_is_shown_apart() -> None:
    kept = make_profile(verdict="keep", config=BASELINE)
    assert "Fastest candidate, not chosen" in render(profile=kept)
    assert "Fastest candidate, not chosen" not in render()
    page = Page(render(profile=kept))
    assert ["precision", "fp32", "fp32", "bf16"] in page.cells


def test_a_trial_says_how_it_differs_and_how_it_ended() -> None:
    trials = [
        make_trial(1, BASELINE, rate=1000.0),
        make_trial(2, BASELINE.replace(precision="bf16"), rate=1250.0),
        make_trial(
            3,
            BASELINE.replace(micro_batch_size=64),
            rate=None,
            status=TrialStatus.OUT_OF_MEMORY,
            cause="oom-device",
            error="12 GiB were asked for.",
        ),
    ]
    page = Page(render(trials=trials))
    assert ["1", "measure", "completed", "your settings", "1,000", "-", "9 GiB", "31s"] in page.cells
    assert ["2", "measure", "completed", "precision bf16", "1,250", "1.25x", "9 GiB", "31s"] in page.cells
    failed = "micro_batch 64oom-device: 12 GiB were asked for."
    assert ["3", "measure", "out of memory", f"{failed}trials/0003/log.txt", *"---", "31s"] in page.cells
    assert "2 completed, 1 out of memory in the search" in page.text


def test_the_tally_of_the_search_is_the_answers_own_and_the_other_trials_stand_beside_it() -> None:
    trials = [
        make_trial(1, BASELINE, rate=1000.0),
        make_trial(2, TUNED, rate=None, status=TrialStatus.INTERRUPTED),
        make_trial(3, BASELINE, rate=1000.0, purpose="final"),
        make_trial(4, TUNED, rate=None, purpose="quality"),
    ]
    assert tally(trials) == "1 completed, 1 interrupted in the search; 1 of the loss check, 1 of the proof"
    assert tally([]) == ""


def test_what_was_too_slow_to_be_timed_shows_the_most_it_can_reach() -> None:
    error = "its first step took more than 4.0s: ended"
    slow = make_trial(1, TUNED, rate=None, status=TrialStatus.TOO_SLOW, cause="slow-steps", error=error)
    page = Page(render(trials=[make_trial(2, BASELINE, rate=1000.0), slow.replace(samples_per_second_bound=50.0)]))
    row = next(row for row in page.cells if row[0] == "1")
    assert row[2] == "too slow"
    assert row[3].endswith(f"slow-steps: {error}trials/0001/log.txt")
    assert row[4:6] == ["≤ 50", "≤ 0.05x"]
    assert (
        describe_result(slow.replace(samples_per_second_bound=50.0), None) == f"too slow: at most 50 samples/s; {error}"
    )


@pytest.mark.parametrize("status", TrialStatus)
def test_every_status_can_be_shown(status: TrialStatus) -> None:
    page = Page(render(trials=[make_trial(1, rate=None, status=status)]))
    assert f"1 {status.replace('_', ' ')}" in page.text
    assert page.count("td", **{"class": f"status {status.value}"}) == 1


@pytest.mark.parametrize(
    ("verdict", "shown"), [("non-inferior", "not worse"), ("inferior", "worse"), ("inconclusive", "not proven")]
)
def test_quality_verdicts_in_plain_words(verdict: Any, shown: str) -> None:
    (check,) = make_profile().quality
    page = Page(render(profile=make_profile(quality=(check.replace(verdict=verdict),))))
    row = next(row for row in page.cells if row[0] == "losses, paired seeds")
    assert row == [
        "losses, paired seeds",
        "training loss",
        "+0.04% (-0.10% to +0.18%)",
        "+0.50%",
        "5 seeds, 12,800 samples each",
        shown,
    ]


def test_a_missing_difference_is_not_a_pass() -> None:
    (check,) = make_profile().quality
    check = check.replace(difference=None, verdict="inconclusive", reason="A loss was not finite.")
    page = Page(render(profile=make_profile(quality=(check,))))
    row = next(row for row in page.cells if row[0] == "losses, paired seeds")
    assert row[2] == "not measured"
    assert row[5] == "not provenA loss was not finite."


def test_a_worsening_in_the_metrics_own_unit_is_no_percentage() -> None:
    (check,) = make_profile().quality
    worsening = record_factory.make_interval(0.0012, -0.001, 0.0034, confidence_level=0.9, method="t")
    margin = Margin(amount=-0.01, unit="absolute")
    check = check.replace(test="metric", metric="accuracy", difference=worsening, margin=margin)
    page = Page(render(profile=make_profile(quality=(check,))))
    row = next(row for row in page.cells if row[0] == "metric, paired seeds")
    assert row[1:4] == ["accuracy", "+0.0012 (-0.0010 to +0.0034)", "-0.0100"]


def test_what_was_ruled_out_is_listed_with_its_reason() -> None:
    page = Page(render())
    assert ["memory_format", "channels_last", "The model has no 2-d convolution."] in page.cells
    assert ["host_allocator", "all others", "The step runs on the GPU."] in page.cells


def test_machine_and_versions() -> None:
    page = Page(render())
    assert ["processor", "Xeon Platinum 8480C, 16 usable CPUs"] in page.cells
    assert ["GPU", "NVIDIA H200, 141 GiB, compute capability 9.0, power cap 700 W"] in page.cells
    assert ["PyTorch", "2.13.0+cu130"] in page.cells
    assert ["bf16 products", "690 TFLOP/s"] in page.cells


def test_a_cpu_machine() -> None:
    profile = make_profile(
        hardware=make_hardware(gpus=()),
        software=make_software(cuda=None, driver=None),
        memory=make_profile().memory.replace(device_bytes=None),  # type: ignore[union-attr]
    )
    page = Page(render(profile=profile))
    names = {row[0] for row in page.cells}
    assert not names & {"GPU", "CUDA", "NVIDIA driver"}
    assert "peak device memory" not in page.text


def test_each_note_is_said_once() -> None:
    note = "The clock was throttled."
    profile = make_profile(evidence=Evidence(pairs=8, notes=(note,)))
    page = Page(render(profile=profile, probe=make_report(target=make_facts(warnings=(note,)))))
    assert page.text.count(note) == 1


def test_launches_are_held_against_the_rate_that_the_answer_has() -> None:
    probed = make_report().measurement.samples_per_second
    assert (
        find_baseline_rate(make_profile(evidence=Evidence(baseline_samples_per_second=900.0)), make_report()) == 900.0
    )
    assert find_baseline_rate(make_profile(evidence=Evidence()), make_report()) == probed


def test_differences_in_words() -> None:
    assert describe_difference(BASELINE, BASELINE) == "your settings"
    changed = BASELINE.replace(pin_memory=True, num_threads=None, user_knobs={"depth": 3})
    assert describe_difference(changed, BASELINE) == "threads as it is, pin_memory on, depth 3"
    assert describe_difference(None, BASELINE) == "your settings, being found"


def test_long_text_is_cut() -> None:
    assert shorten("a" * 300) == "a" * 300
    assert shorten("a" * 301) == "a" * 299 + "…"


# ---- the charts


def test_phases_fill_the_bar() -> None:
    segments = draw_phases(make_facts().phases)
    assert [segment.name for segment in segments] == [
        "waiting for data",
        "copy to device",
        "forward",
        "backward",
        "optimizer",
    ]
    assert sum(segment.width for segment in segments) == pytest.approx(100, abs=0.01)
    for left, right in pairwise(segments):
        assert right.x == pytest.approx(left.x + left.width, abs=0.01)
    assert segments[3].width == pytest.approx(100 * 0.0205 / 0.0387, abs=0.01)
    assert (segments[3].time, segments[3].share) == ("20.5 ms", "53 %")


def test_untimed_phases_have_no_bar() -> None:
    zero = make_phases(0.0, 0.0, 0.0, 0.0, 0.0)
    assert draw_phases(zero) == ()
    assert "The phases were not timed." in render(probe=make_report(target=make_facts(phases=zero)))


def test_trials_stand_in_order_and_higher_is_faster() -> None:
    trials = [
        make_trial(1, BASELINE, rate=1000.0),
        make_trial(2, TUNED, rate=1200.0),
        make_trial(3, TUNED.replace(num_workers=8), rate=800.0),
        make_trial(4, TUNED.replace(num_workers=2), rate=None, status=TrialStatus.TIMED_OUT),
    ]
    chart = draw_trials(trials, BASELINE, baseline_rate=1000.0)
    assert chart is not None
    same, faster, slower, failed = chart.dots
    assert same.x < faster.x < slower.x < failed.x
    assert faster.y < same.y < slower.y < failed.y
    assert same.y == chart.baseline_y
    assert [dot.kind for dot in chart.dots] == ["baseline", "tried", "tried", "failed"]
    assert failed.y == chart.failed_y
    assert failed.title.startswith("trial 4, timed out: ")
    assert plain(faster.title).startswith("trial 2, 1.20x: precision bf16")


def test_the_best_so_far_only_rises_and_only_with_other_settings() -> None:
    rates = [1000.0, 1150.0, 1100.0, None, 1300.0, 700.0]
    trials = [make_trial(n, TUNED.replace(num_workers=n), rate=rate) for n, rate in enumerate(rates)]
    trials.append(make_trial(9, BASELINE, rate=2000.0))
    chart = draw_trials(trials, BASELINE, baseline_rate=1000.0)
    assert chart is not None
    heights = [y for line in chart.best for y in (line.y1, line.y2)]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] == chart.baseline_y
    assert heights[-1] == chart.dots[4].y
    assert (chart.best[0].x1, chart.best[-1].x2) == (0.0, 100.0)
    for left, right in pairwise(chart.best):
        assert (left.x2, left.y2) == (right.x1, right.y1)
    assert "the fastest single trial ran at 1.30x" in plain(chart.summary)
    assert chart.summary.startswith("7 timed trials, 1 of them failed")


def test_no_faster_trial_is_said() -> None:
    chart = draw_trials([make_trial(1, TUNED, rate=900.0)], BASELINE, baseline_rate=1000.0)
    assert chart is not None
    assert chart.summary == "1 timed trial, 0 of them failed; no single trial ran faster than your settings."
    assert chart.failed_y is None


def test_only_timed_trials_are_in_the_chart() -> None:
    others = [make_trial(1, None, rate=None, purpose="probe"), make_trial(2, TUNED, rate=None, purpose="quality")]
    assert draw_trials(others + make_finals((1.2,)), BASELINE, baseline_rate=1000.0) is None


@settings(max_examples=60, deadline=None)
@given(rates=st.lists(st.none() | st.floats(1e-3, 1e6), min_size=1, max_size=40))
def test_every_mark_is_inside_the_plot(rates: list[float | None]) -> None:
    trials = [make_trial(n, TUNED, rate=rate) for n, rate in enumerate(rates)]
    chart = draw_trials(trials, BASELINE, baseline_rate=1000.0)
    assert chart is not None
    assert len(chart.dots) == len(rates)
    for dot in chart.dots:
        assert 0 <= dot.x <= 100
        assert 0 <= dot.y <= chart.height
        assert (dot.kind == "failed") == (dot.y == chart.failed_y)


def test_the_page_draws_each_mark() -> None:
    trials = search_trials(12)
    page = Page(render(trials=[*trials, make_trial(50, rate=None), *make_finals((1.2, 1.3, 1.4))]))
    legend = 1
    assert page.count("circle", **{"class": "tried"}) == 10 + legend
    assert page.count("circle", **{"class": "baseline"}) == 1 + legend
    assert page.count("path", **{"class": "failed"}) == 1 + legend
    assert page.count("circle", **{"class": "pair-dot"}) == 3


def test_pairs_are_candidate_over_baseline_in_either_order() -> None:
    assert find_pair_ratios(make_finals((1.2, 0.9, 1.4)), make_profile()) == pytest.approx([1.2, 0.9, 1.4])


def test_a_failed_launch_takes_its_partner_with_it() -> None:
    finals = make_finals((1.2, 1.3, 1.4))
    finals[2] = finals[2].replace(measurement=None, status=TrialStatus.CRASHED)
    assert find_pair_ratios(finals, make_profile()) == pytest.approx([1.2, 1.4])


def test_other_candidates_do_not_disturb_the_pairs() -> None:
    finals = make_finals((1.2, 1.3))
    other = make_trial(500, TUNED.replace(num_workers=8), rate=4000.0, purpose="final")
    assert find_pair_ratios([*finals[:1], other, *finals[1:]], make_profile()) == pytest.approx([1.2, 1.3])


def test_finals_chart_holds_everything_on_one_scale() -> None:
    chart = draw_finals(make_finals((1.36, 1.41, 1.33)), make_profile())
    assert chart is not None
    assert chart.one_x < chart.low_x < chart.estimate_x < chart.high_x
    assert [pair.x < chart.estimate_x for pair in chart.pairs] == [True, False, True]
    assert all(0 <= x <= 100 for x in (chart.one_x, chart.high_x, *(tick.position for tick in chart.ticks)))
    assert plain(chart.summary) == "3 pairs of fresh processes; together 1.38x, 98 % interval 1.31-1.46."


@given(low=st.floats(0.001, 1000), width=st.floats(0, 1000), count=st.integers(2, 8))
def test_ticks_enclose_the_data_in_even_round_steps(low: float, width: float, count: int) -> None:
    ticks = choose_ticks(low, low + width, count=count)
    assert 2 <= len(ticks) <= count + 3
    assert ticks[0] <= low + 1e-6
    assert ticks[-1] >= low + width - 1e-6
    steps = [right - left for left, right in pairwise(ticks)]
    assert min(steps) > 0
    assert max(steps) == pytest.approx(min(steps), rel=1e-6, abs=1e-9)


def test_ticks_are_round() -> None:
    assert choose_ticks(0.93, 1.46) == [0.8, 1.0, 1.2, 1.4, 1.6]
    assert choose_ticks(1.0, 1.0) == [1.0, 1.01]
    assert choose_ticks(0.0011, 0.0042, count=4, least=1e-6) == [0.001, 0.002, 0.003, 0.004, 0.005]


@pytest.mark.parametrize(("limit", "status"), [(None, "drifted"), (0.02, "drifted"), (0.1, "completed")])
def test_a_trial_is_screened_with_the_limit_of_its_search(limit: float | None, status: str) -> None:
    steps = 40
    curves = [LossCurve(seed=0, losses=(loss,) * steps, samples=8 * steps) for loss in (1.0, 1.25)]
    trials = [make_trial(0, None, rate=1000.0, purpose="probe", curves=(curves[0],))]
    trials.append(make_trial(1, TUNED, rate=1200.0, curves=(curves[1],)))
    evidence = make_profile().evidence.replace(loss_limit=None if limit is None else Margin(amount=limit))
    page = Page(render_report(make_profile(evidence=evidence), make_report(), trials))
    (row,) = (cells for cells in page.cells if cells[:2] == ["1", "measure"])
    assert row[2] == status


@pytest.mark.parametrize("rate", [1e-300, 1e20, 1e308])
@pytest.mark.fault("37", injected="rates of 1e-300 and 1e308 in a search's trials", outcome="a page, whatever it says")
def test_rates_that_nobody_measured_are_written_too(rate: float) -> None:
    page = Page(render(trials=[*search_trials(), make_trial(99, TUNED, rate=rate)]))
    assert page.words()


def test_throughput_is_held_against_memory() -> None:
    points = tuple(
        ParetoPoint(config=config, speedup=speedup, memory=PeakMemory(host_bytes=size * 2**20), presets=presets)
        for config, speedup, size, presets in ((TUNED, 1.5, 900, ()), (BASELINE, 1.0, 600, ("low-memory",)))
    )
    shown = render(profile=make_profile(pareto=points))
    part = shown[shown.index("Throughput against memory") : shown.index("The final comparison")]
    for word in ("1.50", "900 MiB", "600 MiB", "preset low-memory", "not proven"):
        assert word in part
    assert "Throughput against memory" not in render(profile=make_profile(pareto=points[:1]))
