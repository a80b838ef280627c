"""The memory budget: how many workers and how large a tile fit into it."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from reshard.engine.hashes import BLOCK, SEGMENT_BYTES
from reshard.errors import UsageError

MIN_TILE = 1 << 20
# Kept free for what is not counted: thread stacks, allocator slack, the journal, the manifest.
RESERVE = 48 << 20


@dataclass(frozen=True)
class Budget:
    """`workers` threads, each with a buffer of `tile` bytes."""

    workers: int
    tile: int


def current_rss() -> int:
    """Resident bytes of this process now."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return peak_rss()


def peak_rss() -> int:
    """Largest resident bytes of this process so far.

    Linux' own mark where there is one: getrusage's also counts what the parent held when it started this process.
    """
    try:
        with open("/proc/self/status", "rb") as file:
            mark = next(line for line in file if line.startswith(b"VmHWM:"))
        return int(mark.split()[1]) * 1024
    except (OSError, StopIteration, IndexError, ValueError):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plan_budget(max_memory: int, workers: int | None, scratch: int, held: int = 0) -> Budget:
    """Fits workers and tiles into `max_memory` bytes, of which `held` are taken already (what the process holds, when
    the limit is for all of it). scratch: bytes one worker needs beside its tile. Raises UsageError when not even one
    worker fits, saying how much would do."""
    asked = workers if workers is not None else min(8, (os.cpu_count() or 1) * 2)
    if asked < 1:
        raise UsageError("workers", "--workers", f"is {asked}", "give 1 or more")
    room = max_memory - held - RESERVE
    least = scratch + MIN_TILE + BLOCK
    if room < least:
        need = -(-(max_memory - room + least) // (1 << 20))
        raise UsageError(
            "memory", "--max-memory", f"{max_memory >> 20} MiB is too little here", f"give {need}MiB or more"
        )
    workers = min(asked, max(1, room // (scratch + 4 * MIN_TILE)))
    tile = min(SEGMENT_BYTES, room // workers - scratch - BLOCK)
    return Budget(workers, max(MIN_TILE, tile - tile % MIN_TILE))
