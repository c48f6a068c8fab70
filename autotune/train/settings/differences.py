"""What is not as it was when a profile was measured: machine, versions, target, data. One sentence each.

What a profile says of itself was written elsewhere: it is shown printable and cut short.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from autotune.machine.hardware import read_hardware, read_software
from autotune.records.hardware import HardwareInfo, SoftwareInfo
from autotune.records.profile import Profile
from autotune.targets.source.fingerprint import is_older

_LONGEST = 80
_NAMES = {"cpu": "CPU", "cuda": "GPU"}
_COUNTED = re.compile(r"([0-9]{1,15}):")


def find_differences(
    profile: Profile, *, target_fingerprint: str | None, data_fingerprint: str | None, device: str | None = None
) -> tuple[str, ...]:
    """Return what is not as it was when a profile was measured, one sentence each; empty when everything is.

    Args:
        profile: as read.
        target_fingerprint: of the target as it is now; None to leave it out.
        data_fingerprint: of its data set as it is now; None where it has none.
        device: type of that of the training; None for a script, which chooses it by itself.
    """
    found = [*_compare_hardware(profile), *_compare_device(profile, device), *_compare_software(profile)]
    is_same_machine = not found
    label = printable(profile.target.label)
    if target_fingerprint is not None and is_older(profile.target.fingerprint, target_fingerprint):
        found.append(
            f"the profile is of an older version, which did not look at what {label} imports: search again "
            "to know that it is the same"
        )
    elif target_fingerprint not in (None, profile.target.fingerprint):
        found.append(f"{label} has changed since the search: the speed-up and the loss check may no longer hold")
    before = profile.target.data_fingerprint
    if before is not None and data_fingerprint is not None and before != data_fingerprint:
        found.append(_compare_data(before, data_fingerprint, is_same_machine=is_same_machine))
    return tuple(found)


def is_measured_here(profile: Profile) -> bool:
    """Return whether a profile was measured on a machine like this one, with the same versions."""
    is_same_machine = profile.hardware.fingerprint == read_hardware().fingerprint
    return is_same_machine and profile.software.fingerprint == read_software().fingerprint


def printable(text: str, *, most: int = _LONGEST) -> str:
    """Return what may be shown of a text that somebody else wrote."""
    return "".join(character for character in text if character.isprintable())[:most]


def _compare_hardware(profile: Profile) -> Iterator[str]:
    before, now = profile.hardware, read_hardware()
    if before.fingerprint != now.fingerprint:
        yield f"the profile was measured on other hardware ({_contrast(_name_parts(before), _name_parts(now))})"


def _compare_device(profile: Profile, now: str | None) -> Iterator[str]:
    before = profile.target.device
    if before is not None and now not in (None, before):
        keep = "; --device cpu keeps it there" if before == "cpu" else ""
        yield f"the profile was measured on a {_NAMES[before]}, this training runs on a {_NAMES[now]}{keep}"


def _name_parts(hardware: HardwareInfo) -> tuple[str, ...]:
    """Return in words what a hardware fingerprint is made of."""
    gpus = ", ".join(f"{gpu.name} {_to_gib(gpu.memory_total_bytes)}" for gpu in hardware.gpus)
    limits = ", ".join(f"{name}={value}" for name, value in sorted(hardware.instruction_limits.items()))
    return (
        gpus or "no GPU",
        hardware.cpu_name,
        f"{hardware.usable_cpu_count} usable CPUs",
        f"{_to_gib(hardware.memory_limit_bytes)} of memory",
        limits or "all of its instructions",
    )


def _to_gib(size_bytes: int) -> str:
    return f"{round(size_bytes / 2**30)} GiB"


def _compare_software(profile: Profile) -> Iterator[str]:
    before, now = profile.software, read_software()
    if before.fingerprint != now.fingerprint:
        yield f"the profile was measured with {_contrast(_name_versions(before), _name_versions(now))}"


def _name_versions(software: SoftwareInfo) -> tuple[str, ...]:
    """Return in words what a software fingerprint is made of."""
    cuda, driver = software.cuda, software.driver
    return (
        f"torch {software.torch}",
        f"CUDA {cuda}" if cuda else "no CUDA",
        f"driver {driver}" if driver else "no driver",
    )


def _contrast(before: Sequence[str], now: Sequence[str]) -> str:
    """Return the parts in which two lists differ: as they were, then as they are."""
    differing = [(there, here) for there, here in zip(before, now, strict=True) if there != here]
    then, today = (", ".join(printable(part) for part in side) for side in zip(*differing, strict=True))
    return f"{then}; here {today}"


def _compare_data(before: str, now: str, *, is_same_machine: bool) -> str:
    counted = [_COUNTED.match(text) for text in (before, now)]
    then, today = (int(match[1]) if match else None for match in counted)
    if then is not None and today is not None and then != today:
        return f"the data set has {today:,} samples, and had {then:,} when the profile was measured"
    otherwise = "" if is_same_machine else ", or come out otherwise on this machine"
    return f"some samples of the data set are not what they were when the profile was measured{otherwise}"
