"""Statistics stages: questions about tensor bytes that must be answered before the plan is final.

Each streams its tensors in tiles, shares the tiles among ranks and threads, and exchanges only its small result.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from reshard.errors import ReshardError
from reshard.tensors.read import Files, fill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.engine.content import Content
    from reshard.engine.ranks import Ranks
    from reshard.tensors.lazy import LazyTensor

TILE = 4 << 20


def same_bytes(a: LazyTensor, b: LazyTensor, ranks: Ranks) -> bool:
    """Whether two tensors agree in dtype, shape and every byte. Collective."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    error: ReshardError | None = None
    equal = True
    try:
        with Files() as files:
            left, right = bytearray(TILE), bytearray(TILE)
            for begin in range(ranks.rank * TILE, a.nbytes, ranks.world * TILE):
                size = min(TILE, a.nbytes - begin)
                for tensor, buffer in ((a, left), (b, right)):
                    fill(tensor, begin, begin + size, memoryview(buffer)[:size], files)
                if memoryview(left)[:size] != memoryview(right)[:size]:
                    equal = False
                    break
    except ReshardError as caught:
        error = caught
    ranks.agree(error)
    return all(ranks.exchange(equal))


def crc32_of(contents: Sequence[Content], ranks: Ranks) -> list[int]:
    """CRC-32 of each content's bytes. Collective: ranks share the contents, threads a rank's share."""
    mine = range(ranks.rank, len(contents), ranks.world)
    error: ReshardError | None = None
    found: list[int] = []
    try:
        with Files() as files, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            found = list(pool.map(lambda index: _crc32(contents[index], files), mine))
    except ReshardError as caught:
        error = caught
    ranks.agree(error)
    gathered = ranks.exchange(found)
    return [gathered[index % ranks.world][index // ranks.world] for index in range(len(contents))]


def _crc32(content: Content, files: Files) -> int:
    buffer = memoryview(bytearray(min(TILE, content.nbytes)))
    value = 0
    for begin in range(0, content.nbytes, TILE):
        view = buffer[: min(TILE, content.nbytes - begin)]
        content.fill(begin, begin + len(view), view, files)
        value = zlib.crc32(view, value)
    return value
