"""Whether a search was made by this user, here: a seal over what it was asked to do, which nobody else can make.

    key (random, in the user's cache folder, 0600) ──HMAC-SHA256 of the folder's path and search.json──▶ seal

A folder that was checked out or unpacked may hold a search of anybody's. What it says is read, as any data; what it
names is not started, and what it has compiled is not loaded, unless it is sealed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from autotune.records.codec import write_text
from autotune.records.reading import read_bytes
from autotune.search.store.folder import SearchFolder
from autotune.user_cache import find_user_cache

_KEY_FILE = "seal-key"
_KEY_BYTES = 32
_MOST_SEAL_BYTES = 64
_SEAL_FILE = "seal"


def seal_search(search: SearchFolder) -> bool:
    """Seal a search that was just made.

    Returns:
        Whether it is sealed: without a cache folder that can be written, it is not.
    """
    try:
        key = _read_key() or _create_key()
        if key is None:
            return False
        write_text(search.path / _SEAL_FILE, _compute_seal(search, key))
    except OSError:
        return False
    return True


def is_sealed(search: SearchFolder) -> bool:
    """Return whether this user made a search, in this folder, and what it was asked to do is as it was then."""
    try:
        key = _read_key()
        found = read_bytes(search.path / _SEAL_FILE, max_bytes=_MOST_SEAL_BYTES)
        return key is not None and hmac.compare_digest(found, _compute_seal(search, key).encode())
    except OSError:
        return False


def drop_compiled(search: SearchFolder) -> None:
    """Remove what a search has compiled: its next session compiles anew.

    Raises:
        OSError: it cannot be removed.
    """
    if search.compiled.is_symlink():
        search.compiled.unlink()
    elif search.compiled.exists():
        shutil.rmtree(search.compiled)


def _compute_seal(search: SearchFolder, key: bytes) -> str:
    path = os.fsencode(os.path.realpath(search.path))
    # Two digests of a known length: no part of the one can be passed off as part of the other.
    parts = (hashlib.sha256(part).digest() for part in (path, read_bytes(search.state_file)))
    return hmac.new(key, b"".join(parts), hashlib.sha256).hexdigest()


def _read_key() -> bytes | None:
    """Return this user's key; None without one, or where others could have read or written it."""
    folder = find_user_cache()
    if folder is None:
        return None
    try:
        facts = (folder / _KEY_FILE).stat(follow_symlinks=False)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            return None
        key = read_bytes(folder / _KEY_FILE, max_bytes=_KEY_BYTES)
    except OSError:
        return None
    return key if len(key) == _KEY_BYTES else None


def _create_key() -> bytes | None:
    folder = find_user_cache()
    if folder is None:
        return None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{_KEY_FILE}.", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        os.link(name, folder / _KEY_FILE)  # never in the place of one that another process has made just now
    except FileExistsError:
        pass
    finally:
        Path(name).unlink()
    return _read_key()
