"""Reading lazy tensors: pieces of files into C-ordered buffers, with few system calls and bounded scratch."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.errors import Damaged, ReshardError
from reshard.tensors.boxes import split_range
from reshard.tensors.lazy import c_strides

if TYPE_CHECKING:
    from reshard.tensors.lazy import LazyTensor

# A gap between wanted runs is read through when that is cheaper than another system call.
CHEAP_GAP = 16 << 10
# Most bytes of scratch that one strided read uses.
SCRATCH = 4 << 20


class Files:
    """Open read-only file descriptors, shared by threads, the least recently used closed first."""

    def __init__(self, limit: int = 512) -> None:
        self._limit = limit
        self._open: OrderedDict[str, list[int]] = OrderedDict()  # path -> [fd, users]
        self._lock = threading.Lock()

    def _acquire(self, path: str) -> list[int]:
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                try:
                    entry = [os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0]
                except OSError as error:
                    raise Damaged("missing", path, f"cannot be opened ({error.strerror})") from error
                self._open[path] = entry
                for old, (fd, users) in list(self._open.items()):
                    if len(self._open) <= self._limit:
                        break
                    if not users and old != path:
                        os.close(fd)
                        del self._open[old]
            self._open.move_to_end(path)
            entry[1] += 1
            return entry

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """Fills `out` from `offset` on. Raises Damaged naming the file when it is too short or unreadable."""
        entry = self._acquire(path)
        try:
            done = 0
            while done < len(out):
                count = os.preadv(entry[0], [out[done:]], offset + done)
                if count == 0:
                    raise Damaged("truncated", path, f"ends before byte {offset + len(out)}")
                done += count
        except OSError as error:
            raise ReshardError("read", path, f"cannot be read ({error.strerror})") from error
        finally:
            with self._lock:
                entry[1] -= 1

    def close(self) -> None:
        with self._lock:
            for fd, _ in self._open.values():
                os.close(fd)
            self._open.clear()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def fill(tensor: LazyTensor, begin: int, end: int, out: memoryview, files: Files) -> None:
    """Bytes [begin, end) of the C-ordered tensor into `out` (end - begin bytes). Whole items only."""
    shape, itemsize = tensor.storage
    at = 0
    for box in split_range(begin // itemsize, end // itemsize, shape):
        size = box.numel * itemsize
        target = out[at : at + size]
        strides = c_strides(box.shape, itemsize)
        for piece in tensor.pieces(box):
            start = sum((a - o) * s for a, o, s in zip(piece.at, box.start, strides, strict=True))
            steps = tuple(k * s for k, s in zip(piece.step, strides, strict=True))
            _copy(piece.path, piece.offset, piece.strides, piece.shape, target, start, steps, itemsize, files)
        at += size


def _copy(
    path: str,
    offset: int,
    strides: tuple[int, ...],
    shape: tuple[int, ...],
    out: memoryview,
    start: int,
    steps: tuple[int, ...],
    itemsize: int,
    files: Files,
) -> None:
    """A strided block of a file into a strided block of a buffer."""
    # Axes of length 1 carry nothing; neighbours that are contiguous on both sides are one axis.
    axes: list[tuple[int, int, int]] = []  # (length, file stride, buffer stride), outermost first
    for n, source, target in zip(shape, strides, steps, strict=True):
        if n == 1:
            continue
        if axes:
            length, outer_source, outer_target = axes[-1]
            if outer_source == n * source and outer_target == n * target:
                axes[-1] = (length * n, source, target)
                continue
        axes.append((n, source, target))
    if not axes:
        files.read_into(path, offset, out[start : start + itemsize])
        return
    if len(axes) == 1 and axes[0][1] == itemsize and axes[0][2] == itemsize:
        size = axes[0][0] * itemsize
        files.read_into(path, offset, out[start : start + size])
        return
    _copy_strided(path, offset, axes, out, start, itemsize, files)


def _copy_strided(
    path: str, offset: int, axes: list[tuple[int, int, int]], out: memoryview, start: int, itemsize: int, files: Files
) -> None:
    span = sum((n - 1) * source for n, source, _ in axes) + itemsize
    count = prod(n for n, _, _ in axes)
    system_calls = count // next((n for n, source, _ in axes if source == itemsize), 1)
    through = span <= count * itemsize + system_calls * CHEAP_GAP
    if through and span <= SCRATCH:
        _scatter(path, offset, span, axes, out, start, itemsize, files)
        return
    # Too wide for one read, or too sparse to read through the holes: cut the axis with the widest file stride.
    widest = max(range(len(axes)), key=lambda k: axes[k][1])
    n, source, target = axes[widest]
    rest = axes[:widest] + axes[widest + 1 :]
    inner = sum((m - 1) * s for m, s, _ in rest) + itemsize
    block = max(1, (SCRATCH - inner) // source + 1) if through else 1
    for first in range(0, n, block):
        count = min(block, n - first)
        shape = (count, *(m for m, _, _ in rest))
        _copy(
            path,
            offset + first * source,
            (source, *(s for _, s, _ in rest)),
            shape,
            out,
            start + first * target,
            (target, *(t for _, _, t in rest)),
            itemsize,
            files,
        )


def _scatter(
    path: str,
    offset: int,
    span: int,
    axes: list[tuple[int, int, int]],
    out: memoryview,
    start: int,
    itemsize: int,
    files: Files,
) -> None:
    import numpy as np
    from numpy.lib.stride_tricks import as_strided

    scratch = np.empty(span, dtype=np.uint8)
    files.read_into(path, offset, scratch.data)
    target = np.frombuffer(out, dtype=np.uint8)[start:]
    shape = tuple(n for n, _, _ in axes)
    item = np.dtype(f"u{itemsize}") if itemsize in (1, 2, 4, 8) else np.dtype(f"V{itemsize}")
    source = np.ndarray(shape, item, buffer=scratch, strides=tuple(s for _, s, _ in axes))
    end = sum((n - 1) * t for n, _, t in axes) + itemsize
    goal = as_strided(target[:end].view(np.uint8), shape=(*shape, itemsize), strides=(*(t for _, _, t in axes), 1))
    if start % itemsize == 0 and all(t % itemsize == 0 for _, _, t in axes):
        goal = np.ndarray(shape, item, buffer=out, offset=start, strides=tuple(t for _, _, t in axes))
        goal[...] = source
    else:
        goal[...] = as_strided(scratch, shape=(*shape, itemsize), strides=(*(s for _, s, _ in axes), 1))


def read_bytes(tensor: LazyTensor, begin: int = 0, end: int | None = None) -> bytes:
    """Bytes [begin, end) of a tensor; all of them unless said."""
    out = bytearray((tensor.nbytes if end is None else end) - begin)
    if out:
        with Files() as files:
            fill(tensor, begin, begin + len(out), memoryview(out), files)
    return bytes(out)


def _rows(tensor: LazyTensor, rows: slice | int | None) -> tuple[int, int, tuple[int, ...]]:
    """(first byte, end byte, result shape) of a selection on axis 0."""
    if rows is None:
        return 0, tensor.nbytes, tensor.shape
    if not tensor.shape:
        raise IndexError("a 0-d tensor has no rows; read it whole")
    shape, itemsize = tensor.storage
    row = prod(shape[1:]) * itemsize
    if isinstance(rows, int):
        index = rows + tensor.shape[0] if rows < 0 else rows
        if not 0 <= index < tensor.shape[0]:
            raise IndexError(f"row {rows} of {tensor.shape[0]}")
        return index * row, (index + 1) * row, tensor.shape[1:]
    start, stop, step = rows.indices(tensor.shape[0])
    if step != 1:
        raise IndexError("only slices of step 1 are read; narrow() takes steps")
    stop = max(start, stop)
    return start * row, stop * row, (stop - start, *tensor.shape[1:])


def read_numpy(tensor: LazyTensor, rows: slice | int | None = None) -> Any:
    """Rows as a numpy array (ml_dtypes for bfloat16 and 8-bit floats)."""
    import numpy as np

    from reshard.tensors.dtypes import numpy_dtype

    begin, end, shape = _rows(tensor, rows)
    return np.frombuffer(bytearray(read_bytes(tensor, begin, end)), dtype=numpy_dtype(tensor.dtype)).reshape(shape)


def read_torch(tensor: LazyTensor, rows: slice | int | None = None) -> Any:
    """Rows as a torch tensor."""
    from reshard.tensors.dtypes import DTYPES
    from reshard.tensors.torch_extra import require_torch

    torch = require_torch("reading a tensor into torch")
    begin, end, shape = _rows(tensor, rows)
    kind = getattr(torch, DTYPES[tensor.dtype].torch)
    data = bytearray(read_bytes(tensor, begin, end))
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind).reshape(shape)
