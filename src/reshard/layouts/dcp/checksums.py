"""The CRC-32 that each item's archive records of its tensor, held against the bytes.

torch computes it by default, and its own readers ignore it. A process that switched it off
(`torch.serialization.set_crc32_options(False)`) records 0: then nothing is proven either way.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from reshard.layouts.dcp.chunks import StoredChunks
from reshard.layouts.dcp.items import read_item
from reshard.tensors.lazy import Chunked
from reshard.tensors.read import Files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reshard.tensors.lazy import LazyTensor

TILE = 4 << 20


class Checked(NamedTuple):
    """Items whose bytes are not those of their checksum, as (tensor, file); items without one; bytes read."""

    broken: list[tuple[str, str]]
    unproven: int
    nbytes: int


def check_payloads(
    tensors: Mapping[str, LazyTensor], workers: int | None, progress: Callable[[int, int], None] | None
) -> Checked:
    """Reads every stored byte of the DCP tensors among `tensors`, in tiles. Raises Damaged where one cannot be read."""
    rows = list(_places(tensors))
    total, done = sum(length for *_, length in rows), 0
    broken, unproven, nbytes = [], 0, 0
    with Files() as files, ThreadPoolExecutor(workers or min(4, os.cpu_count() or 1)) as pool:
        for row, (recorded, actual, size) in zip(rows, pool.map(lambda row: _check(files, *row), rows), strict=True):
            name, path, _, length = row
            nbytes += size
            done += length
            unproven += recorded == 0 and size > 0
            if recorded not in (0, actual):
                broken.append((name, path))
            if progress is not None:
                progress(done, total)
    return Checked(broken, unproven, nbytes)


def _places(tensors: Mapping[str, LazyTensor]) -> Iterator[tuple[str, str, int, int]]:
    """(tensor, file, offset, length) of every item."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Chunked) and isinstance(tensor.load, StoredChunks):
            entry = tensor.load.entry
            for i in range(len(entry)):
                file, offset, length = entry.place(i)
                if file >= 0:
                    yield name, tensor.load.files[file], offset, length


def _check(files: Files, name: str, path: str, offset: int, length: int) -> tuple[int, int, int]:
    """(CRC-32 recorded, CRC-32 of the bytes, bytes)."""
    item = read_item(files, path, offset, length, name)
    buffer = memoryview(bytearray(min(TILE, item.nbytes)))
    value = 0
    for begin in range(0, item.nbytes, TILE):
        view = buffer[: min(TILE, item.nbytes - begin)]
        files.read_into(path, item.begin + begin, view)
        value = zlib.crc32(view, value)
    return item.crc, value, item.nbytes
