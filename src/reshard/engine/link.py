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
CHUNK = 8 << 20
CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


def place_file(source: str, target: Path, how: str) -> str:
    """Makes `target` equal `source`. how: "auto" (reflink where the file system has it, else copy), "hard" (hard link,
    else as auto) or "copy". Returns what was done: "reflink", "hard" or "copy"."""
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
            if how != "copy" and _reflink(read.fileno(), write.fileno()):
                return "reflink"
            buffer = memoryview(bytearray(CHUNK))
            while count := read.readinto(buffer):
                view = buffer[:count]
                while view:
                    view = view[write.write(view) :]
            os.fsync(write.fileno())
    except FileNotFoundError as error:
        raise ReshardError("read", source, f"cannot be copied ({error.strerror})") from error
    return "copy"


def _reflink(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError:
        return False
    return True
