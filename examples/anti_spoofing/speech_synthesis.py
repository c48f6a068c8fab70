"""Simulated speech, bona fide and spoofed, written in the layout of the ASVspoof challenges.

    glottal pulses ─┐
                    ├─ formants of a sequence of phones ── [attack of a vocoder] ── channel and noise ── 16-bit wav
    breath noise ───┘

An attack has a strength: weak ones can hardly be told from bona fide speech, so the task does not become trivial.
"""

from __future__ import annotations

import functools
import math
import wave
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLE_RATE_HZ = 16_000
TRAIN_CLIPS, DEV_CLIPS = 1_280, 400
ATTACKS = ("A01", "A02", "A03", "A04")
"""A buzz: regular pulses, in fricatives too; a smoothed and quantised envelope; phases lost; a mirrored upper band."""

_SEED = 2019
_BATCH = 40
_SPEAKERS = 20
_SHORTEST, _LONGEST = SAMPLE_RATE_HZ, 2 * SAMPLE_RATE_HZ
_WINDOW, _HOP = 512, 128
_BINS, _FRAMES = _WINDOW // 2 + 1, _LONGEST // _HOP + 1
_WEAKEST = 0.5
# Formants (Hz) of ten American English vowels, averages over men: Peterson and Barney, 1952, table II.
_VOWELS = (
    (270, 2290, 3010), (390, 1990, 2550), (530, 1840, 2480), (660, 1720, 2410), (730, 1090, 2440),
    (570, 840, 2410), (440, 1020, 2240), (300, 870, 2240), (640, 1190, 2390), (490, 1350, 1690),
)  # fmt: skip
_FRICATIVES_HZ = (2_500.0, 4_000.0, 5_500.0)
_BANDWIDTHS_HZ = (60.0, 90.0, 150.0, 250.0, 350.0)
_PHONES = 24


@dataclass(frozen=True)
class Voices:
    """How the speakers of a batch of clips speak, each a tensor `[clips]`.

    Attributes:
        pitch_hz: mean fundamental frequency.
        tract_scale: formants relative to the average man's.
        jitter: standard deviation of a period, relative.
        shimmer: standard deviation of a pulse's height, relative.
        breath: height of the noise beside the pulses.
    """

    pitch_hz: Tensor
    tract_scale: Tensor
    jitter: Tensor
    shimmer: Tensor
    breath: Tensor


def write_corpus(folder: Path, *, train_clips: int, dev_clips: int) -> None:
    """Write `protocol/{train,dev}.txt` and the clips in `{train,dev}/`; no speaker is in both.

    Args:
        folder: to write to.
        train_clips: in the training part, every second one spoofed.
        dev_clips: in the held-out part, likewise.
    """
    (folder / "protocol").mkdir(parents=True)
    for part, count in (("train", train_clips), ("dev", dev_clips)):
        (folder / part).mkdir()
        lines = []
        for index, (speaker, attack, clip) in enumerate(synthesise_clips(part, count)):
            name = f"{part.upper()}_{index:05d}"
            _write_wav(folder / part / f"{name}.wav", clip)
            lines.append(f"{part.upper()}_S{speaker:02d} {name} - {attack} {'bonafide' if attack == '-' else 'spoof'}")
        (folder / "protocol" / f"{part}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def synthesise_clips(part: str, count: int) -> Iterator[tuple[int, str, Tensor]]:
    """Yield speaker, attack (`-` for bona fide) and int16 audio `[samples]` of 1 to 2 s of so many clips."""
    generator = torch.Generator().manual_seed(_SEED + (part == "dev"))
    speakers = draw_voices(_SPEAKERS, generator)
    for start in range(0, count, _BATCH):
        chosen = torch.randint(_SPEAKERS, (_BATCH,), generator=generator)
        # Two clips of each attack to eight bona fide ones, whichever way a corpus is cut.
        attacks = ["-" if index % 2 == 0 else ATTACKS[index // 2 % len(ATTACKS)] for index in range(_BATCH)]
        audio = synthesise_batch(_pick_voices(speakers, chosen), attacks, generator)
        lengths = torch.randint(_SHORTEST, _LONGEST, (_BATCH,), generator=generator).tolist()
        for index in range(min(_BATCH, count - start)):
            yield int(chosen[index]), attacks[index], audio[index, : lengths[index]]


def draw_voices(count: int, generator: torch.Generator) -> Voices:
    """Return so many speakers, drawn at random."""
    share = torch.rand(5, count, generator=generator)
    pitch_hz = 95.0 * 2.0 ** (1.3 * share[0])
    return Voices(
        pitch_hz=pitch_hz,
        # Higher voices come from shorter vocal tracts.
        tract_scale=0.92 + 0.12 * torch.log2(pitch_hz / 95.0) + 0.08 * share[1],
        jitter=0.006 + 0.012 * share[2],
        shimmer=0.04 + 0.08 * share[3],
        breath=0.05 + 0.15 * share[4],
    )


def synthesise_batch(voices: Voices, attacks: list[str], generator: torch.Generator) -> Tensor:
    """Return int16 audio `[clips, 32000]`.

    Args:
        voices: of the clips.
        attacks: one of `ATTACKS` or `-` for each clip.
        generator: what is random is drawn from it.
    """
    count = len(attacks)
    strength = _WEAKEST + (1 - _WEAKEST) * torch.rand(count, generator=generator)
    is_attack = {attack: torch.tensor([one == attack for one in attacks]) for attack in ATTACKS}
    human = 1 - strength * is_attack["A01"]
    steady = replace(voices, jitter=voices.jitter * human, shimmer=voices.shimmer * human, breath=voices.breath * human)
    spectrum = _speak(steady, human, generator)
    for attack, change in (("A02", smooth_envelope), ("A03", lose_phases), ("A04", mirror_upper_band)):
        chosen = is_attack[attack]
        spectrum[chosen] = change(spectrum[chosen], strength[chosen], generator)
    return _record(_to_audio(spectrum), generator)


def smooth_envelope(spectrum: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Return spectra whose magnitudes are averaged over 9 frames and quantised, as statistical vocoders have them.

    Args:
        spectrum: complex `[clips, bins, frames]`.
        strength: of the attack, 0 to 1, `[clips]`.
        generator: not used.
    """
    level = spectrum.abs().clamp_min(1e-6).log()
    steps = (6.0 * strength * math.log(10) / 20)[:, None, None]  # up to 6 dB
    coded = (F.avg_pool1d(level, 9, stride=1, padding=4, count_include_pad=False) / steps).round() * steps
    return torch.polar((level + strength[:, None, None] * (coded - level)).exp(), spectrum.angle())


def lose_phases(spectrum: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Return spectra with disturbed phases and two rounds of Griffin and Lim (1984); arguments as above."""
    magnitude = spectrum.abs()
    shift = math.pi * strength[:, None, None] * (2 * torch.rand(spectrum.shape, generator=generator) - 1)
    phase = spectrum.angle() + shift
    for _ in range(2):
        phase = _to_spectrum(_to_audio(torch.polar(magnitude, phase))).angle()
    return torch.polar(magnitude, phase)


def mirror_upper_band(spectrum: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Return spectra that end at 4 to 6 kHz and go on as a faint mirror image; arguments as above.

    That is what upsampling without a good low-pass filter leaves: a metallic ring.
    """
    cutoff = (_BINS * (4 + 2 * torch.rand(len(spectrum), generator=generator)) / 8).long()
    bins = torch.arange(_BINS)
    is_above = bins > cutoff[:, None]
    source = torch.where(is_above, 2 * cutoff[:, None] - bins, bins)
    image = spectrum.gather(1, source[:, :, None].expand_as(spectrum))
    share = (strength[:, None] * is_above)[:, :, None]
    return (1 - share) * spectrum + 0.3 * share * image


def _speak(voices: Voices, human: Tensor, generator: torch.Generator) -> Tensor:
    """Return the spectrum, complex `[clips, bins, frames]`; `human` `[clips]` is the noise' share of what hisses."""
    count = len(voices.pitch_hz)
    pulses = _to_spectrum(_make_pulses(voices, generator))
    noise = _to_spectrum(0.05 * torch.randn(count, _LONGEST, generator=generator))
    formants, voiced, hiss, centre = _draw_phones(voices, generator)
    hertz = torch.linspace(0, SAMPLE_RATE_HZ / 2, _BINS)[:, None]
    tract = torch.ones(count, _BINS, _FRAMES)
    for index, bandwidth in enumerate(_BANDWIDTHS_HZ):
        tract *= _resonance(hertz, formants[:, index : index + 1], bandwidth)
    tract /= 1 + hertz / 500  # the glottis' -12 dB and the lips' +6 dB an octave
    fricative = torch.exp(-(((hertz - centre[:, None]) / 1_200) ** 2))
    breath = voices.breath[:, None, None]
    share = human[:, None, None]
    hissing = (share * noise + (1 - share) * pulses) * fricative * hiss[:, None]
    return (pulses + breath * noise) * tract * voiced[:, None] + hissing


def _resonance(hertz: Tensor, centre: Tensor, bandwidth: float) -> Tensor:
    """Return the magnitude of a second-order resonator, 1 at 0 Hz: one of a cascade (Klatt, 1980)."""
    squared = centre**2
    return squared * torch.rsqrt((hertz**2 - squared) ** 2 + (hertz * bandwidth) ** 2)


def _make_pulses(voices: Voices, generator: torch.Generator) -> Tensor:
    """Return one pulse a period, `[clips, samples]`, with a rise and fall of the pitch."""
    count, most = len(voices.pitch_hz), int(2.0 * 320)
    progress = torch.linspace(0, 1, most)
    turns, phase = (span * torch.rand(count, 1, generator=generator) for span in (3.0, 1.0))
    contour = 1 + 0.12 * torch.sin(2 * math.pi * (turns * progress + phase)) - 0.1 * progress
    jitter, shimmer = torch.randn(2, count, most, generator=generator)
    periods = SAMPLE_RATE_HZ / (voices.pitch_hz[:, None] * contour) * (1 + voices.jitter[:, None] * jitter)
    onset = periods.cumsum(1)
    height = (1 + voices.shimmer[:, None] * shimmer) * (onset < _LONGEST - 1)
    onset = onset.clamp_max(_LONGEST - 2)
    whole = onset.long()
    late = onset - whole  # between two samples: a share for each
    pulses = torch.zeros(count, _LONGEST)
    pulses.scatter_add_(1, whole, height * (1 - late))
    return pulses.scatter_add_(1, whole + 1, height * late)


def _draw_phones(voices: Voices, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return formants in Hz `[clips, 5, frames]`, and voicing, hiss and the hiss' centre in Hz, each `[clips, frames]`.

    A phone takes 60 to 200 ms: a vowel (60 %), a voiced murmur, a fricative or a pause.
    """
    count = len(voices.pitch_hz)
    shape = (count, _PHONES)
    vowels = torch.tensor(_VOWELS)[torch.randint(len(_VOWELS), shape, generator=generator)]
    upper = torch.tensor([3_500.0, 4_500.0]).expand(*shape, 2)
    formants = torch.cat([vowels, upper], dim=2) * voices.tract_scale[:, None, None]
    kind, loudness = torch.rand(2, *shape, generator=generator)
    voiced = torch.where(kind < 0.6, 0.6 + 0.8 * loudness, torch.where(kind < 0.72, 0.15, 0.0))
    hiss = torch.where((kind >= 0.72) & (kind < 0.9), 0.5 + loudness, 0.0)
    centres = torch.tensor(_FRICATIVES_HZ)[torch.randint(len(_FRICATIVES_HZ), shape, generator=generator)]
    table = torch.cat([formants, voiced[..., None], hiss[..., None], centres[..., None]], dim=2)

    seconds = 0.06 + 0.14 * torch.rand(shape, generator=generator)
    ends = (seconds * SAMPLE_RATE_HZ / _HOP).cumsum(1)
    frames = torch.arange(_FRAMES, dtype=torch.float32).expand(count, -1).contiguous()
    phone = torch.searchsorted(ends, frames).clamp_max(_PHONES - 1)
    track = table.gather(1, phone[..., None].expand(-1, -1, table.shape[2])).transpose(1, 2)
    track = F.avg_pool1d(track, 5, stride=1, padding=2, count_include_pad=False)  # articulation takes 40 ms
    return track[:, :5], track[:, 5], track[:, 6], track[:, 7]


def _record(audio: Tensor, generator: torch.Generator) -> Tensor:
    """Return int16 audio as a microphone would take it: a tilt, noise 30 to 50 dB below the speech, a level."""
    count = len(audio)
    tilt, ratio_db, peak = (low + span * torch.rand(count, 1, generator=generator)
                            for low, span in ((-0.3, 0.6), (30.0, 20.0), (0.3, 0.6)))  # fmt: skip
    audio = audio + tilt * F.pad(audio, (1, 0))[:, :-1]
    noise = torch.randn(audio.shape, generator=generator)
    audio = audio + noise * audio.std(dim=1, keepdim=True) * 10 ** (-ratio_db / 20)
    return (peak * 32_767 * audio / audio.abs().amax(dim=1, keepdim=True)).to(torch.int16)


def _pick_voices(voices: Voices, chosen: Tensor) -> Voices:
    return Voices(*(getattr(voices, name)[chosen] for name in Voices.__dataclass_fields__))


@functools.cache
def _window() -> Tensor:
    return torch.hann_window(_WINDOW)


def _to_spectrum(audio: Tensor) -> Tensor:
    return torch.stft(audio, _WINDOW, _HOP, window=_window(), return_complex=True)


def _to_audio(spectrum: Tensor) -> Tensor:
    return torch.istft(spectrum, _WINDOW, _HOP, window=_window(), length=_LONGEST)


def _write_wav(path: Path, clip: Tensor) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE_HZ)
        file.writeframes(clip.numpy().astype("<i2").tobytes())
