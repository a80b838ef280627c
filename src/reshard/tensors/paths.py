"""Paths of untrusted directories: what stays inside and what leads out."""

from __future__ import annotations

import os
from pathlib import Path


def is_plain(name: str) -> bool:
    """A relative path that stays below its directory and ends in a file."""
    return bool(name) and not {"\\", "\0"} & set(name) and all(part not in ("", ".", "..") for part in name.split("/"))


def leads_out(file: Path, directory: Path) -> bool:
    """Whether `file`, links resolved, lies outside `directory`.

    A snapshot of the hub's cache, `<entry>/snapshots/<commit>/`, consists of links to the files in `<entry>/blobs/`;
    those belong to it.
    """
    real, home = Path(os.path.realpath(file)), Path(os.path.realpath(directory))
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    return not real.is_relative_to(home) and not (blobs is not None and real.is_relative_to(blobs))
