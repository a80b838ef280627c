"""Hashes against accidental damage: xxh3_128 of each segment, and of each tensor wherever it is placed.

A tensor's digest is the sum, modulo 2**128, of xxh3_128(block, seed=i) over its 64 KiB blocks i. A sum does not depend
on order, so any writers may share the blocks of a tensor, and the same tensor has the same digest in any file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

SEGMENT_BYTES = 16 << 20
BLOCK = 64 << 10
MODULUS = 1 << 128


def segment_digest(data: bytes | bytearray | memoryview) -> str:
    return str(xxhash.xxh3_128_hexdigest(data))


def file_digest(path: str | PathLike[str]) -> str:
    """xxh3_128 of a whole small file, read in pieces."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            state.update(data)
    return str(state.hexdigest())


def hex_digest(total: int) -> str:
    return f"{total % MODULUS:032x}"


class TensorHasher:
    """Sums the blocks of one tensor that start in [begin, end), fed in order with bytes from `begin` on.

    The block that straddles `end` is completed by `finish`, through `fetch(begin, end)`; the one that straddles `begin`
    belongs to whoever holds its first byte.
    """

    __slots__ = ("_at", "_block", "_skip", "_state", "nbytes", "total")

    def __init__(self, nbytes: int, begin: int) -> None:
        self.nbytes = nbytes
        self.total = 0
        self._at = begin
        self._skip = -begin % BLOCK
        self._block = (begin + BLOCK - 1) // BLOCK
        self._state: xxhash.xxh3_128 | None = None

    def update(self, data: memoryview) -> None:
        size = len(data)
        at = min(self._skip, size)
        self._skip -= at
        while at < size:
            room = BLOCK - (self._at + at) % BLOCK
            step = min(room, size - at)
            if step == BLOCK and self._state is None:
                self.total += xxhash.xxh3_128_intdigest(data[at : at + step], seed=self._block)
                self._block += 1
            else:
                if self._state is None:
                    self._state = xxhash.xxh3_128(seed=self._block)
                self._state.update(data[at : at + step])
                if step == room:
                    self._close()
            at += step
        self._at += size

    def finish(self, fetch: Callable[[int, int], bytes | bytearray]) -> int:
        """The sum over the blocks begun; `fetch` gives tensor bytes beyond what was fed, to complete the last one."""
        if self._state is not None:
            end = min((self._block + 1) * BLOCK, self.nbytes)
            if end > self._at:
                self._state.update(fetch(self._at, end))
            self._close()
        return self.total % MODULUS

    def _close(self) -> None:
        assert self._state is not None
        self.total += self._state.intdigest()
        self._state = None
        self._block += 1


def tensor_digest(data: bytes | bytearray | memoryview) -> str:
    """The digest of a whole tensor that lies in memory."""
    hasher = TensorHasher(len(data), 0)
    hasher.update(memoryview(data))
    return hex_digest(hasher.finish(lambda begin, end: b""))
