"""Whole files that need no change: reflinked, hard-linked or copied."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING

from reshard.errors import ReshardError

if TYPE_CHECKING:
    from pathlib import Path

FICLONE = 0x40049409
CHUNK = 1 << 20
CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


def link_file(source: str, target: Path, how: str) -> str | None:
    """Makes `target` share the bytes of `source` without copying them. how: "auto" (reflink), "hard" (hard link, else
    reflink) or "copy" (never). Returns "reflink", "hard", or None: nothing was done, copy the bytes."""
    if how == "copy":
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    real = os.path.realpath(source)
    if how == "hard":
        try:
            os.link(real, target)
            return "hard"
        except OSError as error:
            if error.errno not in CANNOT_LINK:
                raise
    try:
        with open(real, "rb", buffering=0) as read, open(target, "xb", buffering=0) as write:
            fcntl.ioctl(write.fileno(), FICLONE, read.fileno())
            os.fsync(write.fileno())
        return "reflink"
    except OSError:
        target.unlink(missing_ok=True)
        return None


def copy_file(source: str, target: Path) -> None:
    """A small side file, durably, with the mode bits that the umask gives."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        with open(source, "rb", buffering=0) as read, open(target, "xb", buffering=0) as write:
            buffer = memoryview(bytearray(CHUNK))
            while count := read.readinto(buffer):
                view = buffer[:count]
                while view:
                    view = view[write.write(view) :]
            os.fsync(write.fileno())
    except FileNotFoundError as error:
        raise ReshardError("read", source, f"cannot be copied ({error.strerror})") from error
