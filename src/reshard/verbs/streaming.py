"""What verify and diff share: tasks over tensors on a few threads, with progress, in bounded memory."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.errors import UsageError
from reshard.tensors.read import Files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reshard.tensors.lazy import LazyTensor

Item = TypeVar("Item")
Result = TypeVar("Result")

# Bytes read at a time: of each of two tensors, by each of a few workers.
TILE = 8 << 20


class Meter:
    """Adds up bytes from several threads and tells `progress(done, total)`."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self.total = total
        self.done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self.done += count
            if self._progress is not None:
                self._progress(self.done, self.total)


def worker_count(workers: int | None) -> int:
    if workers is None:
        return min(4, os.cpu_count() or 1)
    if workers < 1:
        raise UsageError("workers", "--workers", f"is {workers}", "give 1 or more")
    return workers


def each(
    items: Iterable[Item], work: Callable[[Item, Files, Tiles], Result], workers: int | None = None
) -> Iterator[Result]:
    """`work(item, files, tiles)` of every item on threads, results in the order of the items.

    Each thread has its own `tiles`; open files are shared. The first error ends the work that has not begun.
    """
    count = worker_count(workers)
    local = threading.local()
    with Files() as files:

        def one(item: Item) -> Result:
            if not hasattr(local, "tiles"):
                local.tiles = Tiles()
            return work(item, files, local.tiles)

        with ThreadPoolExecutor(count, "reshard") as pool:
            try:
                yield from pool.map(one, items)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


class Tiles:
    """The two buffers of one thread, made when first needed."""

    def __init__(self) -> None:
        self._buffers: dict[str, bytearray] = {}

    def get(self, side: str, nbytes: int) -> memoryview:
        """A buffer of `nbytes`, for "a" or "b"; its content is lost with the next call for the same side."""
        buffer = self._buffers.get(side)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[side] = bytearray(nbytes)
        return memoryview(buffer)[:nbytes]


def ranges(nbytes: int, step: int = TILE) -> Iterator[tuple[int, int]]:
    """[begin, end) of each tile of so many bytes."""
    for begin in range(0, nbytes, step):
        yield begin, min(begin + step, nbytes)


def element(tensor: LazyTensor, number: int) -> list[int]:
    """The index of element `number` in C order, in `storage` coordinates (bytes, for packed dtypes)."""
    index: list[int] = []
    for size in reversed(tensor.storage[0]):
        number, rest = divmod(number, size)
        index.append(rest)
    return index[::-1]


def problem(kind: str, detail: str, *, file: Any = None, tensor: str | None = None) -> dict[str, Any]:
    """One row of "problems"."""
    return {"kind": kind, "file": None if file is None else str(file), "tensor": tensor, "detail": detail}
