"""The staging directory beside the output, and its atomic exchange with the output.

`<parent>/.<name>.reshard-staging/` holds `data/` (what becomes OUT), `journal/` (what is finished), `plan.json` (of
which plan and which sources), and during an exchange without kernel support `displaced/` (the OUT being replaced). It
is locked by the process that writes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from reshard.engine.hashes import segment_digest
from reshard.engine.plan import MANIFEST
from reshard.errors import Refused, ReshardError

# File systems allow 255 bytes; the staging directory's name is longer than OUT's.
LONGEST_NAME = 230
AT_FDCWD = -100
RENAME_EXCHANGE = 2


@dataclass
class Staging:
    """An open (locked) staging directory."""

    out: Path
    root: Path
    lock: int = -1

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def displaced(self) -> Path:
        return self.root / "displaced"

    def close(self) -> None:
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def staging_of(out: Path) -> Staging:
    """The (unopened) staging directory of an output."""
    out = Path(os.path.abspath(out))
    name = out.name
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = f"{name[:40]}.{segment_digest(os.fsencode(name))}"
    return Staging(out, out.parent / f".{name}.reshard-staging")


def finished_digest(out: Path) -> str | None:
    """The plan digest in an output's manifest, or None where there is no readable manifest."""
    try:
        if not (out / MANIFEST).is_file():
            return None
        manifest = json.loads((out / MANIFEST).read_bytes())
        return str(manifest["plan"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_out(out: Path, *, overwrite: bool) -> None:
    """Refuses an existing output, or one that cannot be made, before anything is written."""
    staging = staging_of(out)
    if os.path.lexists(staging.out) and not overwrite:
        raise Refused("exists", str(out), "already exists", "give another OUT, or --overwrite to replace it")
    if os.path.lexists(staging.out) and not staging.out.is_dir():
        raise Refused("exists", str(out), "exists and is not a directory", "give another OUT")
    if os.path.lexists(staging.out) and not _looks_replaceable(staging.out):
        raise Refused(
            "exists", str(out), "holds something other than a checkpoint, which --overwrite does not replace",
            "remove it yourself, or give another OUT",
        )  # fmt: skip
    parent = staging.out.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise Refused("output", str(out), f"cannot be made: {parent} is not a directory", "give another OUT")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise Refused("output", str(out), f"cannot be made: no permission to write in {parent}", "give another OUT")


def _looks_replaceable(out: Path) -> bool:
    """Whether a directory is empty or a checkpoint, and not one that this process works in."""
    if is_inside(Path.cwd(), out):
        return False
    names = os.listdir(out)
    return not names or any(
        name in (MANIFEST, "config.json", ".metadata") or name.endswith((".safetensors", ".distcp")) for name in names
    )


def open_staging(out: Path, identity: dict[str, object], *, overwrite: bool, resume: bool) -> Staging:
    """Makes or reopens the staging directory of `out` and locks it.

    identity: what a continued run must agree on (plan digest, sources). With `resume` an existing staging directory of
    the same identity is continued; without it one is refused unless `overwrite` says to start again.
    """
    staging = staging_of(out)
    staging.out.parent.mkdir(parents=True, exist_ok=True)
    _lock(staging)
    try:
        _recover(staging)
        check_out(out, overwrite=overwrite)
        known = _identity(staging)
        if known is not None and not resume and not overwrite:
            raise Refused(
                "resume",
                str(staging.root),
                "holds an interrupted run",
                "--resume continues it, --overwrite starts again",
            )
        if known is not None and resume and known != identity:
            what = "another plan" if known.get("plan") != identity.get("plan") else "sources that have changed since"
            raise Refused(
                "resume",
                str(staging.root),
                f"was written for {what}",
                "use the same flags, or --overwrite to start again",
            )
        if known != identity:
            for path in (staging.data, staging.journal):
                shutil.rmtree(path, ignore_errors=True)
        staging.data.mkdir(exist_ok=True)
        staging.journal.mkdir(exist_ok=True)
        write_durably(staging.root / "plan.json", json.dumps(identity).encode())
    except BaseException:
        staging.close()
        raise
    return staging


def _lock(staging: Staging) -> None:
    while True:
        try:
            staging.root.mkdir(exist_ok=True)
            # Its name is known to all: what somebody else put there is not followed.
            fd = os.open(staging.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileExistsError, NotADirectoryError) as error:
            raise Refused("unsafe", str(staging.root), "is not a directory of reshard's own", "remove it") from error
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Refused("unsafe", str(staging.root), "is a link", "remove it") from error
            raise
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise Refused("busy", str(staging.out), "is being written by another process", "wait for it") from error
            raise
        # The directory may have been published and removed between open and lock.
        try:
            if os.path.samestat(os.fstat(fd), os.stat(staging.root)):
                staging.lock = fd
                return
        except FileNotFoundError:
            pass
        os.close(fd)


def _identity(staging: Staging) -> dict[str, object] | None:
    try:
        known = json.loads((staging.root / "plan.json").read_bytes())
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) and staging.data.is_dir() else None


def recover_output(out: Path) -> None:
    """Puts back an output whose replacement was cut off between its two renames, if there is one."""
    staging = staging_of(out)
    if staging.displaced.is_dir():
        _lock(staging)
        try:
            _recover(staging)
        finally:
            staging.close()


def _recover(staging: Staging) -> None:
    if staging.displaced.is_dir():
        if os.path.lexists(staging.out):
            shutil.rmtree(staging.displaced)
        else:
            os.rename(staging.displaced, staging.out)


def publish(staging: Staging, *, overwrite: bool) -> None:
    """Puts `data/` in the place of OUT in one step and removes the staging directory."""
    fsync_directory(staging.data)
    if os.path.lexists(staging.out):
        if not overwrite:
            raise Refused(
                "exists", str(staging.out), "appeared while this was running", "--resume --overwrite replaces it"
            )
        if not _exchange(staging.data, staging.out):
            os.rename(staging.out, staging.displaced)
            os.rename(staging.data, staging.out)
    else:
        os.rename(staging.data, staging.out)
    fsync_directory(staging.out.parent)
    discard(staging)


def discard(staging: Staging) -> None:
    """Removes the staging directory and gives up the lock."""
    (staging.root / "plan.json").unlink(missing_ok=True)
    shutil.rmtree(staging.root, ignore_errors=True)
    staging.close()


def discard_leftovers(out: Path) -> None:
    """Removes the staging directory of an output that is known to be complete."""
    staging = staging_of(out)
    if staging.root.is_dir():
        _lock(staging)
        discard(staging)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two paths atomically; False where the kernel or file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    status = libc.renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE)
    if status == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise ReshardError(
        "publish", str(b), f"could not be replaced ({os.strerror(number)})", "mend that, then --resume --overwrite"
    )


def fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """A small file, complete or absent: written beside, synced, renamed."""
    beside = path.with_name(f".{path.name}.tmp")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(beside, path)


def is_inside(path: Path, parent: Path) -> bool:
    """Whether `path` (which need not exist) lies in `parent`, links resolved."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(parent))


def check_place(out: Path, inputs: list[Path]) -> None:
    """Refuses an output that is an input, holds one, or lies in one; a new `weights*` folder inside is allowed."""
    for source in inputs:
        if source.is_file():
            source = source.parent
        if is_inside(source, out):
            raise Refused("output", str(out), "is or contains the input", "give another OUT")
        if is_inside(out, source):
            new_weights = out.name.startswith("weights") and os.path.realpath(out.parent) == os.path.realpath(source)
            if not new_weights:
                raise Refused("output", str(out), "lies inside the input", "give another OUT, or a new weights* folder")
