"""torch DCP (`.metadata` and `.distcp` files), read without torch, a process group or a model class.

`open` reads the metadata alone; where each chunk's bytes lie inside its item is found when a tensor is first read, or
for all of them by `check_items`, which whoever writes an output calls first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.layouts.dcp.chunks import check_items
from reshard.layouts.dcp.opening import open_dcp as open

if TYPE_CHECKING:
    from pathlib import Path

MARKER = re.compile(r"(__\d+)?\.metadata|.*\.distcp")


def detect(path: Path) -> bool:
    """Whether a directory holds DCP metadata, or DCP data without it."""
    if not path.is_dir():
        return False
    if (path / ".metadata").exists():
        return True
    return any(MARKER.fullmatch(child.name) for child in path.iterdir())


__all__ = ["check_items", "detect", "open"]
