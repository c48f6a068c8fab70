"""A mount namespace of the process's own in which folders are overlaid: it sees and changes them, nobody else does.

    unshare ── private mounts ── bind elsewhere what is kept out of it
            ── overlay: parent or folder, and what the folder links to ── bind back what stays real

What is written lands in `scratch/layer-*/upper`; `layer-*/root.json` names the folder that the layer lies over.
"""

from __future__ import annotations

import ctypes
import errno
import filecmp
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18
_CAPABILITY_VERSION_3 = 0x20080522

_NEVER_OVERLAID = ("/", "/tmp", "/var/tmp", "/dev/shm")
"""Processes meet here by name: nobody may be given a copy."""
_ROOT_FILE = "root.json"


def enter_overlay(
    folder: Path, scratch: Path, *, kept: Sequence[Path], moved: Mapping[Path, Path], hidden: Path
) -> None:
    """Move this process into a mount namespace where the working folder and, if possible, its parent are overlaid.

    Folders elsewhere that the working folder links to (`runs -> /scratch/me/runs`) are overlaid too where that works.
    The layers are addressed as /proc/self/fd/N: how a path with `:`, `,` or a backslash is escaped in mount options
    depends on the kernel.

    Args:
        folder: the working folder, resolved.
        scratch: holds the layers; on a file system that overlayfs can write to.
        kept: resolved folders that stay the real ones in their place.
        moved: resolved folders, and for each a new one outside of the overlays where it is found too. In its place the
            overlay has nothing but a copy of it: whoever clears the working folder cannot get at it.
        hidden: file systems mounted below it are not seen any more.

    Raises:
        OSError: the system does not permit it; the process may be left in a namespace of its own.
    """
    is_lent = _unshare()
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    for path, place in moved.items():
        place.mkdir()
        _mount(str(path), str(place), flags=_MS_BIND | _MS_REC)
    kept = [path for path in kept if os.path.exists(path)]
    # The mount that a descriptor refers to must be one of this namespace, hence not before.
    real = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in kept}
    links = [(name, target) for name, target in _find_links(folder) if not _is_below_any(target, kept)]
    spared = [*kept, hidden]
    roots = [_overlay_first(folder, scratch, spared)]
    for name, target in links:
        if any(_is_below(target, other) or _is_below(other, target) for other in roots):
            continue
        try:
            _overlay(target, scratch, name=name, spared=spared)
            roots.append(target)
        except OSError:
            continue  # not protected then: what is written there is reported as written outside
    for path, descriptor in real.items():
        if _is_below_any(path, roots):
            _mount(f"/proc/self/fd/{descriptor}", str(path), flags=_MS_BIND | _MS_REC)
        os.close(descriptor)
    if is_lent and os.geteuid() != 0:
        _drop_capabilities()


def find_roots(scratch: Path) -> list[tuple[Path, Path, str]]:
    """Return each overlaid folder with its upper layer and its name in the working folder (empty: not a link)."""
    found = []
    for file in sorted(scratch.glob(f"layer-*/{_ROOT_FILE}")):
        layer = json.loads(file.read_text(encoding="ascii"))
        found.append((Path(layer["root"]), file.parent / "upper", str(layer["name"])))
    return found


def list_upper(upper: str, root: str) -> Iterator[str]:
    """Yield what a layer adds to, changes in or takes away from the folder below it.

    Args:
        upper: the upper layer.
        root: the folder that it lies over, absolute; paths are yielded below it.
    """
    waiting = [(upper, root)]
    while waiting:
        above, below = waiting.pop()
        try:
            with os.scandir(above) as entries:
                kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:
            yield below  # closed by the script
            continue
        if _read_attribute(above, "opaque") == b"y" and os.path.isdir(below):
            yield from (os.path.join(below, name) for name in os.listdir(below) if name not in kinds)
        for name, is_folder in kinds.items():
            upper, path = os.path.join(above, name), os.path.join(below, name)
            if not is_folder:
                if not _is_same(upper, path):
                    yield path
                continue
            # A folder that was moved, whose layer holds differences only, or one in place of a file.
            if _read_attribute(upper, "redirect") or (os.path.lexists(path) and not _is_real_folder(path)):
                yield path
            waiting.append((upper, path))


def _unshare() -> bool:
    """Return whether it took a user namespace, and so capabilities that the process did not have."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        _call("unshare", _CLONE_NEWNS)
        return False
    except PermissionError:
        _call("unshare", _CLONE_NEWNS | _CLONE_NEWUSER)
    # An unprivileged process may map its group only after it has given up setgroups.
    for name, text in (("uid_map", f"{uid} {uid} 1"), ("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1")):
        Path("/proc/self", name).write_text(text, encoding="ascii")
    return True


def _overlay_first(folder: Path, scratch: Path, spared: Sequence[Path]) -> Path:
    """Overlay the parent, so that `../x` is caught, or else the folder alone."""
    if folder.parent != folder:
        try:
            _overlay(folder.parent, scratch, name="", spared=spared)
            return folder.parent
        except OSError:
            pass
    _overlay(folder, scratch, name="", spared=spared)
    return folder


def _overlay(root: Path, scratch: Path, *, name: str, spared: Sequence[Path]) -> None:
    if str(root) in (*_NEVER_OVERLAID, os.path.realpath(tempfile.gettempdir())) or _is_below(scratch, root):
        raise OSError(errno.EBUSY, "not a folder to overlay", str(root))
    if any(not _is_below_any(point, spared) for point in _find_mounts(root)):
        raise OSError(errno.EBUSY, "other file systems are mounted in it, which an overlay would hide", str(root))
    layer = Path(tempfile.mkdtemp(prefix="layer-", dir=scratch))
    layers = {"lowerdir": root, "upperdir": layer / "upper", "workdir": layer / "work"}
    layers["upperdir"].mkdir()
    layers["workdir"].mkdir()
    options = _choose_attributes(layers["upperdir"])
    _copy_permissions(root, layers["upperdir"])
    descriptors = {key: os.open(path, os.O_PATH | os.O_CLOEXEC) for key, path in layers.items()}
    options += [f"{key}=/proc/self/fd/{descriptor}" for key, descriptor in descriptors.items()]
    try:
        # Volatile: the end of the namespace would otherwise wait until the whole scratch disk is in sync.
        try:
            _mount("overlay", str(root), kind="overlay", options=[*options, "volatile"])
        except OSError:
            _mount("overlay", str(root), kind="overlay", options=options)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    # With nothing but ASCII in the file, names that are no text survive.
    (layer / _ROOT_FILE).write_text(json.dumps({"root": str(root), "name": name}), encoding="ascii")


def _choose_attributes(upper: Path) -> list[str]:
    """Return how overlayfs is to mark its files; only the trusted way, root's, can rename the folders below."""
    try:
        os.setxattr(upper, "trusted.autotune", b"y")
        os.removexattr(upper, "trusted.autotune")
        return ["redirect_dir=on"]
    except OSError:
        os.setxattr(upper, "user.autotune", b"y")
        os.removexattr(upper, "user.autotune")
        return ["userxattr"]


def _copy_permissions(root: Path, upper: Path) -> None:
    """Make the upper folder, which lends the merged one its permissions, look like the one below it."""
    status = root.stat()
    may_write = os.access(root, os.W_OK)
    if os.geteuid() == 0:
        os.chown(upper, status.st_uid, status.st_gid)
    upper.chmod(stat.S_IMODE(status.st_mode) & (0o7777 if may_write else 0o7555))
    os.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))


def _find_links(folder: Path) -> Iterator[tuple[str, Path]]:
    for entry in os.scandir(folder):
        if entry.is_symlink() and entry.is_dir() and os.access(entry.path, os.W_OK):
            yield entry.name, Path(os.path.realpath(entry.path))


def _find_mounts(root: Path) -> Iterator[Path]:
    """Yield the mount points strictly below a folder."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        point = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), line.split()[4])
        path = Path(os.fsdecode(point))
        if path != root and _is_below(path, root):
            yield path


def _is_below(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def _is_below_any(path: Path, folders: Sequence[Path]) -> bool:
    return any(_is_below(path, folder) for folder in folders)


def _is_real_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _is_same(upper: str, path: str) -> bool:
    """Return whether a file of the upper layer is the lower one, copied up but never changed."""
    try:
        above, below = os.lstat(upper), os.lstat(path)
        fields = ("st_mode", "st_size", "st_mtime_ns", "st_rdev")
        if any(getattr(above, field) != getattr(below, field) for field in fields):
            return False
        return not stat.S_ISREG(above.st_mode) or filecmp.cmp(upper, path, shallow=False)
    except OSError:
        return False


def _read_attribute(path: str, name: str) -> bytes:
    for namespace in ("user", "trusted"):
        try:
            return os.getxattr(path, f"{namespace}.overlay.{name}", follow_symlinks=False)
        except OSError:
            continue
    return b""


def _mount(source: str, target: str, *, kind: str = "", flags: int = 0, options: Sequence[str] = ()) -> None:
    words = [os.fsencode(word) or None for word in (source, target, kind)]
    _call("mount", *words, ctypes.c_ulong(flags), ",".join(options).encode() or None)


def _drop_capabilities() -> None:
    """Give up what the namespace lent: an ordinary user's script must meet the permissions that it meets outside."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


def _call(name: str, *arguments: object) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"this system has no {name}")
    if function(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
