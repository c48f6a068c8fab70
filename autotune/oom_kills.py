"""How often the kernel killed for want of memory in this process's control group: a counter, read before and after."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

_PLACES = {
    "v2": (("sys/fs/cgroup", "sys/fs/cgroup/unified"), "memory.events"),
    "v1": (("sys/fs/cgroup/memory",), "memory.oom_control"),
}


def read_oom_kills(root: Path = Path("/")) -> int | None:
    """Return the kernel's count of such kills; None where it cannot be read, so that nothing can be told from it.

    Source: Linux `Documentation/admin-guide/cgroup-v2.rst` (`memory.events`), `cgroup-v1/memory.rst`
    (`memory.oom_control`); both have a line `oom_kill N`.

    Args:
        root: where /proc and /sys are.
    """
    counts = [count for file in _list_files(root) if (count := _read_count(file)) is not None]
    return sum(counts) if counts else None


def _list_files(root: Path) -> list[Path]:
    files = []
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        identifier, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if identifier == "0" and not controllers:
            folders, name = _PLACES["v2"]
        elif "memory" in controllers.split(","):
            folders, name = _PLACES["v1"]
        else:
            continue
        inner = PurePosixPath(path).relative_to("/") if path.startswith("/") else PurePosixPath(path)
        # A container without a namespace of its own sees the host's path, while only its own group is mounted.
        candidates = [root / folder / part / name for folder in folders for part in (inner, PurePosixPath())]
        files += [file for file in candidates if file.is_file()][:1]
    return files


def _read_count(file: Path) -> int | None:
    words = _read_text(file).split()
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    text = pairs.get("oom_kill", "")
    return int(text) if text.isdigit() else None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
