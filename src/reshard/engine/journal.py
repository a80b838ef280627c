"""The journal of finished segments: one file a rank, a line a segment, appended after the segment's bytes are written.

Nothing here is trusted without proof: a run that resumes reads each named segment again and compares its hash.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, NamedTuple

from reshard.engine.hashes import segment_digest

if TYPE_CHECKING:
    from pathlib import Path


class Finished(NamedTuple):
    """A written segment: hash of its bytes, and for each tensor the hash sum of the blocks that start in it."""

    number: int
    digest: str
    tensors: dict[str, int]


def line_of(entry: Finished) -> str:
    body = json.dumps([entry.number, entry.digest, {name: f"{value:x}" for name, value in entry.tensors.items()}])
    return f"{segment_digest(body.encode())[:8]} {body}\n"


def parse_line(line: str) -> Finished | None:
    """None for a line that was cut off or damaged."""
    check, _, body = line.rstrip("\n").partition(" ")
    if segment_digest(body.encode())[:8] != check:
        return None
    number, digest, tensors = json.loads(body)
    return Finished(number, digest, {name: int(value, 16) for name, value in tensors.items()})


class Journal:
    """This rank's journal, open for appending."""

    def __init__(self, directory: Path, rank: int) -> None:
        path = directory / f"rank-{rank:05d}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        os.write(self._fd, b"\n")  # ends a line that a crash cut off

    def add(self, entry: Finished) -> None:
        data = memoryview(line_of(entry).encode())
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        os.close(self._fd)


def read_journals(directory: Path) -> dict[int, Finished]:
    """Finished segments of all ranks, by number; the last word on a segment counts."""
    found: dict[int, Finished] = {}
    for path in sorted(directory.glob("rank-*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                entry = parse_line(line)
                if entry is not None:
                    found[entry.number] = entry
    return found
