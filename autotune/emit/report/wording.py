"""The report's own sentences, the verdict and the limit among them, with the signs of a page with typography."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.format import EN_DASH, TIMES, count, format_bounds, format_factor
from autotune.records import Interval, ProbeReport, Profile, TrialResult, TrialStatus
from autotune.records.objective import Objective
from autotune.sentences.answer import describe_untested
from autotune.sentences.loss_check import find_extra_samples
from autotune.sentences.objective import describe_gain, describe_least
from autotune.sentences.trials import name_status

ARROW = "\N{RIGHTWARDS ARROW}"
_MAX_LENGTH = 300
_STAGES = {
    "probe": "of the probe",
    "machine": "of the probe",
    "quality": "of the loss check",
    "fidelity": "of the loss check",
    "tape": "of the loss check",
    "final": "of the proof",
}


@dataclass(frozen=True)
class VerdictWords:
    """What the top of the page says.

    Attributes:
        tone: `good` for a proven gain, `neutral` otherwise.
        headline: the answer in a few words.
        evidence: the numbers behind it.
        advice: what to do with it.
    """

    tone: str
    headline: str
    evidence: str
    advice: str


def describe_verdict(profile: Profile) -> VerdictWords:
    """Return the verdict in plain words; a claim is always the lower end of the interval."""
    evidence = _describe_evidence(profile)
    if profile.verdict == "improved" and profile.speedup is not None:
        checked = (
            "what is learned was checked against your own settings" if profile.quality else "no loss check was run"
        )
        least = profile.speedup.low if profile.memory_ratio is None else 1 / profile.memory_ratio.high
        claim = describe_least(profile.objective, least, sign=TIMES)
        return VerdictWords(
            tone="good",
            headline=f"{claim[0].upper()}{claim[1:]}{_describe_net(profile)}",
            evidence=evidence,
            advice=f"Train with the chosen settings below: {checked}.",
        )
    if profile.verdict == "keep":
        return VerdictWords(
            tone="neutral",
            headline="Keep your settings",
            evidence=evidence,
            advice=(
                "Nothing that was tried is proven to need less memory and be as fast and as good as what you run now."
                if profile.objective is Objective.MEMORY
                else "Nothing that was tried is proven faster and as good as what you run now."
            ),
        )
    if profile.verdict == "not-tested":
        told = ". ".join(f"{text[0].upper()}{text[1:]}" for text in describe_untested(profile))
        return VerdictWords(
            tone="neutral",
            headline="Not tested: nothing but your own settings could be measured",
            evidence=f"{told}." if told else evidence,
            advice="Keep your settings; this says nothing about how much faster others would be.",
        )
    return VerdictWords(
        tone="neutral",
        headline="Keep your settings: no gain could be proven",
        evidence=evidence,
        advice="A difference may exist, but it is smaller than what this machine could resolve in the time given.",
    )


def _describe_net(profile: Profile) -> str:
    """Return what was taken off a speed-up that needs more samples for the same loss; empty where it needs no more."""
    extra = find_extra_samples(profile)
    return "" if extra is None else f", net of up to {typeset_factor(extra)} the samples"


def _describe_evidence(profile: Profile) -> str:
    if profile.evidence.pairs == 0:
        return "No candidate was compared with your settings in fresh processes."
    best = "best" if profile.objective is Objective.MEMORY else "fastest"
    whose = "" if profile.verdict == "improved" else f"{best} candidate: "
    pairs = count(profile.evidence.pairs, "pair")
    confirmation = profile.evidence.confirmation
    if profile.speedup is None:
        known = profile.candidate.speedup_estimate if profile.candidate is not None else None
        about = "" if known is None else f"about {typeset_factor(known)}, "
        return f"{whose}{about}{pairs}, too few for an interval"
    interval = (confirmation.interval if confirmation is not None else None) or profile.speedup
    if profile.memory_ratio is not None:
        saved = describe_gain(profile.objective, 1 / profile.memory_ratio.estimate)
        speed = f"{typeset_factor(profile.speedup.estimate)} of your speed"
        return f"{whose}{saved} at {speed} ({format_interval(interval)}), {pairs}"
    return f"{whose}point {typeset_factor(profile.speedup.estimate)}, {format_interval(interval)}, {pairs}"


def tally(trials: Sequence[TrialResult]) -> str:
    """Return how many trials of the search ended how, and those beside it.

    E.g. `20 completed, 2 out of memory in the search; 1 of the probe, 8 of the loss check, 12 of the proof`. The first
    part is what the profile's evidence counts too.
    """
    counts = Counter(trial.status for trial in trials if trial.spec.purpose == "measure")
    ends = ", ".join(f"{counts[status]} {name_status(status)}" for status in TrialStatus if counts[status])
    beside = Counter(_STAGES[trial.spec.purpose] for trial in trials if trial.spec.purpose != "measure")
    others = ", ".join(f"{beside[stage]} {stage}" for stage in dict.fromkeys(_STAGES.values()) if beside[stage])
    return "; ".join(part for part in (f"{ends} in the search" if ends else "", others) if part)


def describe_limit(probe: ProbeReport) -> str:
    """Return the probe's verdict with the speed-up that cannot be passed, where it is known."""
    ceiling = probe.verdict.speedup_ceiling
    sentence = shorten(probe.verdict.sentence)
    if ceiling is None:
        return sentence
    reason = f": {shorten(probe.verdict.ceiling_reason)}" if probe.verdict.ceiling_reason else "."
    return f"{sentence}. No more than {typeset_factor(ceiling)} is possible on this machine for this model{reason}"


def typeset_factor(factor: float) -> str:
    """Return a factor with a multiplication sign, e.g. of 1.38."""
    return format_factor(factor, sign=TIMES)


def format_interval(interval: Interval) -> str:
    """Return an interval of ratios, rounded outwards, e.g. `98 % interval 1.31-1.46` with an en dash."""
    level = f"{100 * interval.confidence_level:.4g}"
    return f"{level} % interval {format_bounds(interval.low, interval.high, dash=EN_DASH)}"


def shorten(text: str, limit: int = _MAX_LENGTH) -> str:
    """Return a text cut to a number of characters, with an ellipsis where it was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"
