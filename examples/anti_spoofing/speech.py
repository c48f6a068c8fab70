"""Clips in the layout of ASVspoof, as log power spectrograms: a protocol is read, audio is loaded, an STFT is taken.

DIR/protocol/train.txt, dev.txt      SPEAKER FILE - ATTACK bonafide|spoof     (ASVspoof 2019 LA)
DIR/train/FILE.flac, DIR/dev/FILE.flac     or .wav; one channel, 16 kHz, 16 bits
"""

from __future__ import annotations

import functools
import math
import os
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from autotune.errors import TargetError
from generated_corpus import find_generated_corpus
from speech_synthesis import SAMPLE_RATE_HZ

KEYS = {"spoof": 0, "bonafide": 1}
WINDOW, HOP = 512, 160
BINS = WINDOW // 2 + 1
LARGEST_FREQUENCY_MASK, LARGEST_TIME_MASK = 24, 0.12
"""Bins, and share of the frames."""

_SUFFIXES = (".flac", ".wav")
_QUIETEST = 1e-7  # of a squared bin: below the rounding of 16 bits
_COLUMNS = "SPEAKER FILE - ATTACK bonafide|spoof"
_FORMAT = f"one channel, {SAMPLE_RATE_HZ} Hz, 16 bits"


class Trial(NamedTuple):
    """One clip and what it is.

    Attributes:
        path: the audio file.
        label: 1 for bona fide, 0 for spoofed speech.
    """

    path: Path
    label: int


class SpeechClips(Dataset[tuple[Tensor, int]]):
    """Log power spectrograms `[1, 257, frames]` of crops of one length, and their labels.

    A clip that is shorter than the crop is repeated (Lai et al., 2019). With augmentation the crop's place is drawn
    anew each time, and a band of frequencies and a span of time are masked (Park et al., 2019, SpecAugment).
    """

    def __init__(self, trials: Sequence[Trial], *, crop_seconds: float, augment: bool) -> None:
        """Remember what to load.

        Args:
            trials: the clips.
            crop_seconds: length of a crop.
            augment: draw crop and masks from torch's global generator; else the crop is the clip's beginning.
        """
        self.trials = tuple(trials)
        self._crop_samples = round(crop_seconds * SAMPLE_RATE_HZ)
        self._augment = augment

    def __len__(self) -> int:
        return len(self.trials)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.trials[index]
        if not self._augment:
            return compute_spectrogram(read_crop(path, self._crop_samples)), label
        place, *masks = torch.rand(5).tolist()
        spectrogram = compute_spectrogram(read_crop(path, self._crop_samples, place=place))
        return mask_spectrogram(spectrogram, masks), label

    def class_weights(self) -> tuple[float, float]:
        """Return the weights of spoofed and bona fide clips with which both count alike; 1 on average."""
        bona_fide = sum(trial.label for trial in self.trials)
        spoofed = len(self.trials) - bona_fide
        return len(self.trials) / (2 * spoofed), len(self.trials) / (2 * bona_fide)


def open_clips(data: str | None, part: str, *, crop_seconds: float) -> SpeechClips:
    """Return the clips of a part, augmented if it is the training part.

    Args:
        data: folder in the layout above; None for the generated corpus.
        part: `train` or `dev`.
        crop_seconds: length of a crop.

    Raises:
        TargetError: the protocol cannot be read, an audio file is missing, or the corpus cannot be generated.
    """
    folder = find_generated_corpus() if data is None else Path(data)
    return SpeechClips(read_trials(folder, part), crop_seconds=crop_seconds, augment=part == "train")


def read_trials(folder: Path, part: str) -> list[Trial]:
    """Return the clips that a protocol lists.

    Raises:
        TargetError: the protocol is missing, has a bad line or one class only, or an audio file is missing.
    """
    protocol = folder / "protocol" / f"{part}.txt"
    try:
        lines = protocol.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as reason:
        raise TargetError(
            f"{protocol} cannot be read: {getattr(reason, 'strerror', None) or 'it is not UTF-8 text'}",
            hint=f"it has a line '{_COLUMNS}' for each clip",
        ) from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    named = [_read_line(line, place=f"{protocol}:{number}") for number, line in numbered]
    keys = {key for _, key in named}
    if len(keys) < len(KEYS):
        found = f"lists nothing but {keys.pop()} clips" if keys else "lists no clips"
        raise TargetError(f"{protocol} {found}", hint="a countermeasure needs both bonafide and spoof clips")
    files = _find_files(folder / part, [name for name, _ in named])
    return [Trial(file, KEYS[key]) for file, (_, key) in zip(files, named, strict=True)]


def _read_line(line: str, *, place: str) -> tuple[str, str]:
    """Return file name and key."""
    columns = line.split()
    if len(columns) != 5:
        raise TargetError(f"{place} has {len(columns)} columns instead of 5", hint=f"write {_COLUMNS}")
    if columns[4] not in KEYS:
        raise TargetError(f"{place} has the key {columns[4]!r}", hint=f"the last column is one of {', '.join(KEYS)}")
    return columns[1], columns[4]


def _find_files(folder: Path, names: list[str]) -> list[Path]:
    # One listing of the folder: asking for each of 25,000 files takes long on a network disk.
    try:
        present = set(os.listdir(folder))
    except FileNotFoundError:
        present = set()
    except OSError as reason:
        raise TargetError(f"{folder} cannot be read: {reason.strerror}", hint="the clips lie in it") from None
    found = [next((name + suffix for suffix in _SUFFIXES if name + suffix in present), None) for name in names]
    missing = [name for name, file in zip(names, found, strict=True) if file is None]
    if missing:
        raise TargetError(
            f"{len(missing)} of {len(names)} clips are missing in {folder}, the first is {missing[0]}",
            hint=f"each FILE of the protocol is there as FILE{' or FILE'.join(_SUFFIXES)}",
        )
    return [folder / file for file in found if file is not None]


def read_crop(path: Path, samples: int, *, place: float = 0.0) -> Tensor:
    """Return float32 audio `[samples]` in -1..1, repeated where the file has fewer.

    Args:
        path: a wav or flac file.
        samples: length of the crop.
        place: where it begins, as a share of the way from the first possible place to the last.

    Raises:
        TargetError: the file cannot be read, is not 16 kHz mono with 16 bits, or is empty; or it is flac and the
            package soundfile is missing.
    """
    read = _read_wav if path.suffix == ".wav" else _read_flac
    audio = torch.from_numpy(read(path, samples, place).astype(np.float32) / 32_768)
    if len(audio) == 0:
        raise TargetError(f"{path} has no samples", hint="leave it out of the protocol")
    return audio.repeat(math.ceil(samples / len(audio)))[:samples]


def _read_wav(path: Path, samples: int, place: float) -> NDArray[np.int16]:
    try:
        with wave.open(str(path), "rb") as file:
            _require_format(path, file.getnchannels(), file.getframerate(), 8 * file.getsampwidth())
            file.setpos(int(place * (max(0, file.getnframes() - samples) + 0.999)))
            return np.frombuffer(file.readframes(samples), dtype="<i2")
    except (OSError, EOFError, ValueError, wave.Error) as reason:  # ValueError: it ends within a sample
        raise _unreadable(path, reason) from None


def _read_flac(path: Path, samples: int, place: float) -> NDArray[np.int16]:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: the package is there without its library
        raise TargetError(
            f"{path} is flac, and the package soundfile is not installed", hint="pip install soundfile, or use wav"
        ) from None
    try:
        with soundfile.SoundFile(path) as file:
            _require_format(path, file.channels, file.samplerate, 16 if file.subtype == "PCM_16" else file.subtype)
            file.seek(int(place * (max(0, file.frames - samples) + 0.999)))
            crop: NDArray[np.int16] = file.read(samples, dtype="int16")
            return crop
    except (OSError, soundfile.SoundFileError) as reason:
        raise _unreadable(path, reason) from None


def _require_format(path: Path, channels: int, sample_rate_hz: int, bits: int | str) -> None:
    if (channels, sample_rate_hz, bits) != (1, SAMPLE_RATE_HZ, 16):
        raise TargetError(
            f"{path} has {channels} channel(s), {sample_rate_hz} Hz, {bits} bits; allowed is {_FORMAT}",
            hint=f"ffmpeg -i {path.name} -ac 1 -ar {SAMPLE_RATE_HZ} -sample_fmt s16 OUT{path.suffix}",
        )


def _unreadable(path: Path, reason: Exception) -> TargetError:
    words = " ".join(str(reason).split()) or type(reason).__name__
    return TargetError(f"{path} cannot be read: {words}", hint=f"it has to be {path.suffix[1:]}, {_FORMAT}")


def compute_spectrogram(audio: Tensor) -> Tensor:
    """Return the log power spectrogram `[1, 257, frames]` of audio `[samples]`, with mean 0 and deviation 1."""
    spectrum = torch.stft(audio, WINDOW, HOP, window=_window(), return_complex=True)
    level = torch.log(spectrum.real**2 + spectrum.imag**2 + _QUIETEST)
    return ((level - level.mean()) / level.std().clamp_min(1e-3))[None]


def mask_spectrogram(spectrogram: Tensor, shares: Sequence[float]) -> Tensor:
    """Return a spectrogram `[1, bins, frames]` with a band and a span of time set to its mean, 0.

    Args:
        spectrogram: is changed in place.
        shares: width and place of the band, then of the span, each 0 to 1.
    """
    for axis, largest in ((1, LARGEST_FREQUENCY_MASK), (2, round(LARGEST_TIME_MASK * spectrogram.shape[2]))):
        width_share, place_share = shares[2 * axis - 2 : 2 * axis]
        width = int(width_share * (largest + 1))
        start = int(place_share * (spectrogram.shape[axis] - width))
        spectrogram.narrow(axis, start, width).zero_()
    return spectrogram


@functools.cache
def _window() -> Tensor:
    return torch.hann_window(WINDOW)
