from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_records import (
    GPU_CEILINGS,
    H100,
    MEMORY,
    WORK,
    make_cpu_report,
    make_facts,
    make_hardware,
    make_machine,
    make_measurement,
    make_report,
)
from rich.cells import cell_len
from rich.console import Console

from autotune.cli.pages import layout as pages
from autotune.cli.pages.probe import print_machine, print_report
from autotune.records import (
    Advice,
    Caution,
    Ceilings,
    DataFacts,
    GainRange,
    GpuInfo,
    Issue,
    MatmulRate,
    MemoryMode,
    ProbeReport,
    RuledOut,
    StepPhases,
    StepWork,
    Verdict,
)

HOSTILE = "[bold]name[/bold] :smile: \x1b[31mred\x07\r\nnext\tline \u202e\ud800 {x} %s \N{SNOWMAN}"
SECTIONS = ["machine", "limits", "step", "roofline", "memory", "input", "ruled out", "notes", "verdict", "troubles"]


class Show:
    """Prints records as if stdout were a terminal or a pipe of some encoding, and returns what was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        self._monkeypatch = monkeypatch

    def __call__(
        self, record: Any, *, width: int | None = None, encoding: str = "utf-8", full: bool = True, **environment: str
    ) -> str:
        for name, value in environment.items():
            self._monkeypatch.setenv(name, value)
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
        is_terminal = width is not None
        # Like terminal.result_console; the colours are told, there being no terminal to ask.
        console = Console(
            file=stream,
            highlight=False,
            emoji=False,
            soft_wrap=not is_terminal,
            force_terminal=is_terminal,
            width=width,
            color_system="standard" if is_terminal and environment.get("TERM") != "dumb" else None,
        )
        self._monkeypatch.setattr(pages, "result_console", lambda: console)
        if isinstance(record, ProbeReport):
            print_report(record, full=full)
        else:
            print_machine(record)
        stream.flush()
        return raw.getvalue().decode(encoding)


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    return Show(monkeypatch)


def strip(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def words(text: str) -> str:
    return " ".join(strip(text).split())


def headings(text: str) -> list[str]:
    return [line.partition(" (")[0] for line in text.splitlines() if line and not line.startswith(" ")]


# ---- what fits a screen


@pytest.mark.parametrize("width", [None, 80, 120])
def test_a_short_page_fits_a_screen_and_says_the_verdict_first(show: Show, width: int | None) -> None:
    shown = strip(show(make_report(), full=False, width=width))
    assert len(shown.splitlines()) <= 40
    places = [shown.index(word) for word in ("speed", "bottleneck", "headroom", "memory", "phases", "try first")]
    assert places == sorted(places)
    assert "--full: " in shown
    assert "ruled out" in shown


def test_a_short_page_says_no_other_figure_than_the_full_one(show: Show) -> None:
    full, short = words(show(make_report())), show(make_report(), full=False)
    for line in short.splitlines():
        for figure in re.findall(r"\d[\d,.]* (?:samples/s|ms|GiB|MiB)", line):
            assert figure in full, line


def test_a_short_page_of_little_is_short(show: Show) -> None:
    report = make_report(advice=(), ruled_out=(), troubles=())
    shown = show(report, full=False)
    assert "nothing that this evidence speaks for" in shown
    assert "--full: all that was found" in shown


# ---- in a pipe


def test_a_pipe_gets_plain_facts_one_a_line(show: Show) -> None:
    shown = show(make_report())
    assert shown.isascii()
    assert "\x1b" not in shown
    assert headings(shown) == [*SECTIONS, "worth trying"]
    for line in (
        "  CPU             quota of 16",
        "  GPU 0           clock held down (power-cap)",
        "  bf16 products   650 TFLOP/s sustained, burst 740 TFLOP/s",
        "  host to device  page-locked 54 GB/s",
        "  launch          4.2 us to call a tiny operation",
        "  speed           89 ms a step of 32 samples",
        "  phases          data wait   31 ms 35 %",
        "  work            overhead        9.38 ms 17 %",
        "  real loop       89 ms a step",
        "  arithmetic      MFU 32 %: 15.8 of 50 TFLOP/s in fp32; the products alone take 28.2 of 89 ms",
        "  settings        fp32 (yours): peak at 32 19.5 GiB, a sample 410 MiB, largest batch 168",
        "  loader          8 batches in flight need 144 MiB and /dev/shm has 60 MiB free",
        "  at most 3.07x is possible here: 16 CPUs cannot load faster than 18.6 ms a step, and the products take "
        "2.2 ms in bf16",
        "  shared-memory              do: give the container more: docker run --shm-size=8g",
        "  attention                  the model calls scaled_dot_product_attention",
    ):
        assert line in shown.splitlines()
    assert "limits (measured 3 days ago)" in shown


def test_what_a_pipe_gets_depends_on_no_terminal(show: Show) -> None:
    plain = show(make_report())
    assert show(make_report(), COLUMNS="40") == plain
    assert show(make_report(), NO_COLOR="1", TERM="dumb") == plain
    assert show(make_report(), encoding="ascii") == plain


def test_a_reason_is_said_once_for_all_that_it_rules_out(show: Show) -> None:
    shown = show(make_report())
    assert "  layout=channels_last, cudnn_benchmark=True: the model has no 2-d convolution\n" in shown
    assert "  malloc=jemalloc/tcmalloc: activations" in shown
    assert "  width: it changes what is learned\n" in shown


# ---- on a terminal


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 300])
@pytest.mark.parametrize("make", [make_report, make_cpu_report, make_machine])
def test_no_line_is_wider_than_the_terminal(show: Show, make: Callable[[], Any], width: int) -> None:
    shown = strip(show(make(), width=width))
    assert max(cell_len(line) for line in shown.splitlines()) <= min(width, 120)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_width_says_the_same(show: Show, width: int) -> None:
    shown = words(show(make_report(), width=width))
    for text in (
        "128 of 1007 GiB usable",
        "650 TFLOP/s sustained, burst 740",
        "optimizer 8.3 ms 9 %",
        "activations 12.8 GiB 16 %",
        "a pass over twice the micro batch takes 1.64x the time",
        "- matrix products reach 32 % of the sustained fp32 rate",
        "> nothing within this training; compare timings only",
        "workers 1.2-1.6x",
        "optimizer 1.01-1.06x",
    ):
        assert text in shown
    assert shown.endswith("attention the model calls scaled_dot_product_attention")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_bar_is_as_wide_as_the_page_and_in_proportion(show: Show, width: int) -> None:
    facts = make_facts(phases=make_facts().phases.replace(data_wait_seconds=0.0))
    lines = strip(show(make_report(target=facts), width=width, NO_COLOR="1")).splitlines()
    bar = next(line for line in lines if line.lstrip().startswith("phases")).split()[1]
    room = width - 2 - min(15, width // 3) - 1
    assert len(bar) == room
    fills = {sign: bar.count(sign) for sign in dict.fromkeys(bar)}
    shares = [share for share in (1.9, 15.1, 31.2, 8.3) if share]
    assert list(fills.values()) == pytest.approx([room * share / sum(shares) for share in shares], abs=1.01)


def test_colours_are_left_out_where_they_are_not_wanted(show: Show) -> None:
    colour = re.compile(r"\x1b\[(?:\d;)?[39]\dm")
    assert colour.search(show(make_report(), width=80))
    without = show(make_report(), width=80, NO_COLOR="1")
    assert not colour.search(without)
    bar = next(line for line in strip(without).splitlines() if line.startswith("  phases")).split()[1]
    assert len(set(bar)) == 5  # told apart without colours


@pytest.mark.parametrize("dumb", [True, False])
def test_signs_are_those_the_terminal_has(show: Show, dumb: bool) -> None:
    shown = show(make_report(), width=80, **({"TERM": "dumb"} if dumb else {"encoding": "latin-1"}))
    assert shown.isascii()
    assert "#" in shown
    if dumb:
        assert "\x1b" not in shown


def test_a_forced_terminal_in_a_pipe_is_wrapped_too(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    page = pages.TerminalPage(Console(file=io.StringIO(), force_terminal=True, width=60, soft_wrap=True))
    page.facts("label", ["word " * 60])
    written = page._console.file.getvalue()
    assert max(map(len, strip(written).splitlines())) <= 60


# ---- what is not known, and what nobody expects


def test_what_is_not_known_is_left_out(show: Show) -> None:
    shown = show(make_cpu_report())
    assert headings(shown) == ["machine", "limits", "step", "memory", "input", "verdict", "worth trying"]
    assert "None" not in shown
    assert "nothing that this evidence speaks for" in shown
    assert "at most" not in shown
    assert "of the time aside" in shown
    assert "no workers" in shown


def test_a_machine_of_which_nothing_was_measured(show: Show) -> None:
    shown = show(make_machine(ceilings=Ceilings(), troubles=(), hardware=make_hardware(missing=("no /proc",))))
    assert headings(shown) == ["machine", "notes", "next"]


@pytest.mark.parametrize("width", [None, 60])
@pytest.mark.parametrize("number", [0.0, 1e-9, 1.0, 1e15])
def test_no_number_breaks_the_page(show: Show, number: float, width: int | None) -> None:
    size = int(number)
    mode = MemoryMode(precision="fp32", activation_checkpointing="off", fixed_bytes=number, bytes_per_sample=number)
    target = make_facts(
        model=make_facts().model.replace(flops_per_sample=number, parameter_count=size),
        data=DataFacts(
            sample_count=size,
            seconds_per_sample=number,
            random_sources=(),
            iterable=False,
            batch_bytes=size,
            loader_seconds_per_step=number,
            epoch_start_seconds=number,
            slow_batch_ratio=number,
            worker_bytes=size,
            disk_read_bytes_per_second=number,
        ),
        phases=StepPhases(
            data_wait_seconds=number,
            copy_seconds=number,
            forward_seconds=number,
            backward_seconds=number,
            optimizer_seconds=number,
            other_seconds=number,
        ),
        compute_seconds_per_step=number,
        ceilings=Ceilings(
            matmul=(MatmulRate(dtype="fp32", flops_per_second=number, sustained_flops_per_second=number),),
            memory_bytes_per_second=number,
            launch_seconds=number,
            all_reduce_bytes_per_second=number,
        ),
        work=StepWork(
            products_fraction=0.0,
            traffic_fraction=0.0,
            overhead_fraction=1.0,
            operations_per_step=number,
            host_syncs_per_step=number,
            bytes_per_second=number,
            device_busy_fraction=1.0,
            enqueue_fraction=0.0,
        ),
        memory=MEMORY.replace(
            base_bytes=number,
            weights_bytes=number,
            gradient_bytes=number,
            optimizer_bytes=number,
            activation_bytes_per_sample=number,
            limit_bytes=number,
            modes=(mode,),
            calibration_error=number,
        ),
        batch_elasticity=-number,
    )
    hardware = make_hardware(
        memory_limit_bytes=size, memory_total_bytes=size, swap_used_bytes=size, last_level_cache_bytes=size,
        cpu_quota=number, gpus=(GpuInfo(name="", memory_total_bytes=size, memory_free_bytes=size),),
    )  # fmt: skip
    advice = Advice(knob="precision", reason="", gain=GainRange(low=number or 1e-9, high=number or 1e-9))
    report = make_report(
        target=target,
        hardware=hardware,
        measurement=make_measurement(step_ms=max(1e-9, number)),
        verdict=Verdict(limit="unknown", sentence="", speedup_ceiling=number),
        advice=(advice,),
        ceilings_age_seconds=number,
    )
    shown = strip(show(report, width=width))
    assert "worth trying" in shown
    if width is not None:
        assert max(map(cell_len, shown.splitlines())) <= width


def make_hostile(text: str) -> ProbeReport:
    return make_report(
        hardware=make_hardware(
            cpu_name=text,
            environment=(text,),
            missing=(text,),
            host_allocators={text: text},
            gpus=(H100.replace(name=text, slowdowns=(text,)),),
        ),
        target=make_facts(label=text, warnings=(text,), memory=MEMORY.replace(missing=text)),
        verdict=Verdict(limit="input", sentence=text, evidence=(text,), speedup_ceiling=2.0, ceiling_reason=text),
        advice=(Advice(knob=text, reason=text),),
        ruled_out=(RuledOut(knob=text, value=text, reason=text),),
        troubles=(Issue(name=text, sentence=text, remedy=text),),
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [None, 60])
def test_hostile_text_is_shown_as_it_is_and_harmless(show: Show, width: int | None, encoding: str) -> None:
    shown = strip(show(make_hostile(HOSTILE), width=width, encoding=encoding))
    assert words(shown).count("[bold]name[/bold] :smile:") >= 15
    assert not set(shown) & {"\x1b", "\x07", "\r", "\t", "\u202e"}
    if width is None:
        assert "\nnext" not in shown


@pytest.mark.parametrize("text", ["x" * 3000, "wide \N{CJK UNIFIED IDEOGRAPH-4E2D}" * 300, ""])
def test_long_text_stays_inside_the_page(show: Show, text: str) -> None:
    shown = strip(show(make_hostile(text), width=60))
    assert max(map(cell_len, shown.splitlines())) <= 60


@settings(max_examples=10)
@given(text=st.text(max_size=40))
def test_any_text_can_be_printed(text: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        show = Show(monkeypatch)
        for width in (None, 60):
            assert "worth trying" in show(make_hostile(text), width=width, encoding="latin-1")


# ---- the machine


def test_a_machine_alone_ends_with_what_to_do_next(show: Show) -> None:
    shown = show(make_machine())
    assert headings(shown) == ["machine", "limits", "troubles", "next"]
    assert "limits (measured 5 hours ago)" in shown
    assert "  autotune probe -- python train.py " in shown


def test_gpus_of_one_kind_are_described_once_and_others_apart(show: Show) -> None:
    alike = show(make_machine(hardware=make_hardware(gpus=(H100, H100, H100))))
    assert alike.count("80GB HBM3") == 1
    assert "  GPUs            3 x NVIDIA H100 80GB HBM3\n" in alike
    small = H100.replace(name="NVIDIA T4", mig="slice", memory_total_bytes=0)
    unlike = show(make_machine(hardware=make_hardware(gpus=(H100, small))))
    assert "  GPU 0           NVIDIA H100 80GB HBM3\n" in unlike
    assert "  GPU 1           NVIDIA T4\n" in unlike
    assert "  GPU 1           memory not known\n" in unlike
    assert "  GPU 1           a MIG slice\n" in unlike
    assert "  GPU             none\n" in show(make_machine(hardware=make_hardware(gpus=())))


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"usable_cpu_count": 1, "cpu_quota": 0.5}, ["1 usable CPU", "32 threads on 16 cores", "quota of 0.5"]),
        ({"affinity_cpu_count": 16}, ["16 cores"]),
        ({"affinity_cpu_count": 32, "core_count": None}, ["may run on 32"]),
        ({"cpu_features": ("avx2", "fma")}, ["avx2"]),
        ({"memory_limit_bytes": 1007 * 2**30}, ["1007 GiB"]),
    ],
)
def test_a_cpu_is_described_as_usable(show: Show, changes: dict[str, Any], facts: list[str]) -> None:
    lines = show(make_machine(hardware=make_hardware(**changes))).splitlines()
    for fact in facts:
        assert any(line.endswith(f"  {fact}") for line in lines), fact


def test_a_rate_without_a_sustained_one(show: Show) -> None:
    rates = Ceilings(matmul=(MatmulRate(dtype="fp32", flops_per_second=1e11),))
    assert "  fp32 products   100 GFLOP/s\n" in show(make_machine(ceilings=rates))
    both = Ceilings(matmul=(rates.matmul[0].replace(convolution_flops_per_second=1.5e11),))
    assert "100 GFLOP/s; convolutions 150 GFLOP/s\n" in show(make_machine(ceilings=both))


# ---- the training


def test_what_is_emulated_is_told_with_its_rate_and_leads_nothing(show: Show) -> None:
    plain = MatmulRate(dtype="fp32", flops_per_second=122e9, sustained_flops_per_second=118e9)
    emulated = MatmulRate(dtype="bf16", flops_per_second=0.94e9, emulated=True)
    report = make_report()
    memory = report.target.memory
    assert memory is not None
    assert {mode.precision for mode in memory.modes} == {"fp32", "bf16"}
    target = report.target.replace(
        ceilings=Ceilings(matmul=(plain, emulated)), baseline=report.target.baseline.replace(precision="fp32")
    )
    refused = RuledOut(knob="precision", value="bf16", reason="emulated here")
    modes = tuple(sorted(memory.modes, key=lambda mode: mode.precision != "fp32"))
    target = target.replace(memory=memory.replace(modes=modes))
    text = show(report.replace(target=target, ruled_out=(refused,)))
    assert re.search(r"bf16 products .* 940 MFLOP/s: emulated, 1/130 of fp32\n", text)
    table = text[text.index("largest batch") : text.index("\ninput")]
    assert "bf16" not in table
    assert "fp32" in table


def test_what_was_not_measured_is_said(show: Show) -> None:
    caution = Caution(knob="precision", value="bf16", reason="bf16 products were not measured here")
    assert "precision=bf16: bf16 products were not measured here" in show(make_report().replace(cautions=(caution,)))


def test_instructions_that_are_held_back_are_named(show: Show) -> None:
    hardware = make_hardware().replace(instruction_limits={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert "held back by ONEDNN_MAX_CPU_ISA=AVX2" in show(make_report().replace(hardware=hardware))


def test_a_cpu_has_operations_and_a_gpu_kernels(show: Show) -> None:
    work = WORK.replace(device_busy_fraction=None, enqueue_fraction=None, host_syncs_per_step=0.0)
    shown = show(make_report(target=make_facts(work=work)))
    assert "1,204 operations a step" in shown
    assert "kernels" not in shown
    assert "the host asks" not in shown
    assert "1,204 kernels a step" in show(make_report())


@pytest.mark.parametrize("known", ["arithmetic", "memory"])
def test_half_a_roofline(show: Show, known: str) -> None:
    changes: dict[str, Any] = {"ceilings": GPU_CEILINGS.replace(memory_bytes_per_second=None)}
    if known == "memory":
        changes = {"ceilings": GPU_CEILINGS.replace(matmul=())}
    part = show(make_report(target=make_facts(**changes))).split("roofline (")[1].split("\nmemory (")[0]
    assert [line.split()[0] for line in part.splitlines()[1:] if line] == [known]


def test_memory_that_could_not_be_predicted(show: Show) -> None:
    memory = MEMORY.replace(modes=(), missing="the loss depends on the batch", calibration_error=None)
    shown = show(make_report(target=make_facts(memory=memory)))
    assert "  not predicted   the loss depends on the batch\n" in shown
    assert "largest batch" not in shown


def test_memory_beyond_its_limit_leaves_none_free(show: Show) -> None:
    memory = MEMORY.replace(limit_bytes=2**30)
    assert re.search(r"free +0 B +0 %", show(make_report(target=make_facts(memory=memory))))


def test_a_measurement_that_did_not_settle_is_marked(show: Show) -> None:
    unsettled = make_measurement().replace(steady=False, unsettled="step times still fell")
    assert "  speed           not steady (step times still fell)\n" in show(make_report(measurement=unsettled))


def test_phases_that_do_not_add_up_to_the_step_say_so(show: Show) -> None:
    assert "their sum" not in show(make_report())
    shown = show(make_report(measurement=make_measurement(step_ms=40.0)))
    assert "  their sum       87.5 ms, timed apart from the real loop and one after the other\n" in shown


def test_even_batches_are_not_worth_a_line(show: Show) -> None:
    data = make_facts().data.replace(slow_batch_ratio=1.1)
    assert "slow batches" not in show(make_report(target=make_facts(data=data)))
