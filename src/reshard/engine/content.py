"""Contents: what a stretch of an output file is made of. Anything that can produce its bytes from any offset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from reshard.errors import Refused
from reshard.tensors.cast import cast_array
from reshard.tensors.dtypes import DTYPES, nbytes, numpy_dtype
from reshard.tensors.read import fill

if TYPE_CHECKING:
    from reshard.tensors.lazy import LazyTensor
    from reshard.tensors.read import Files

# Elements that a cast handles at a time: small enough to stay in cache, large enough for cheap reads.
CAST_BLOCK = 1 << 19
# Most scratch that reading strided pieces needs (`tensors.read.SCRATCH`) and a little for odd ends.
READ_SCRATCH = 5 << 20


class Content(Protocol):
    """Bytes of known length that any stretch can be produced of, by any thread, with the same result always."""

    @property
    def nbytes(self) -> int: ...

    def fill(self, begin: int, end: int, out: memoryview, files: Files) -> None:
        """Writes bytes [begin, end) into `out`, which has exactly that length."""

    def scratch(self) -> int:
        """Most bytes of memory that one `fill` needs beside `out`."""

    def recipe(self) -> str:
        """What is done, for the plan's digest and for people; no paths."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes known beforehand: headers, padding."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def fill(self, begin: int, end: int, out: memoryview, files: Files) -> None:
        out[:] = self.data[begin:end]

    def scratch(self) -> int:
        return 0

    def recipe(self) -> str:
        return "literal"


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor's bytes as they are stored."""

    tensor: LazyTensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def fill(self, begin: int, end: int, out: memoryview, files: Files) -> None:
        itemsize = self.tensor.storage[1]
        head, tail = -begin % itemsize, end % itemsize
        if begin + head > end - tail:  # inside one item
            _odd_end(self, begin - begin % itemsize, begin, end, out, files, itemsize)
            return
        if head:
            _odd_end(self, begin - begin % itemsize, begin, begin + head, out[:head], files, itemsize)
        if tail:
            _odd_end(self, end - tail, end - tail, end, out[len(out) - tail :], files, itemsize)
        fill(self.tensor, begin + head, end - tail, out[head : len(out) - tail], files)

    def scratch(self) -> int:
        return READ_SCRATCH

    def recipe(self) -> str:
        return f"copy {self.tensor.dtype} {list(self.tensor.shape)}"


def _odd_end(
    content: Copy | Cast, item: int, begin: int, end: int, out: memoryview, files: Files, itemsize: int
) -> None:
    """Bytes [begin, end) inside the one item that starts at `item`."""
    whole = bytearray(itemsize)
    content.fill(item, item + itemsize, memoryview(whole), files)
    out[:] = whole[begin - item : end - item]


@dataclass(frozen=True, slots=True)
class Cast:
    """A floating tensor rounded once (to nearest, ties to even) to another floating dtype."""

    tensor: LazyTensor
    dtype: str

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.tensor.shape)

    def fill(self, begin: int, end: int, out: memoryview, files: Files) -> None:
        import numpy as np

        source, target = numpy_dtype(self.tensor.dtype), numpy_dtype(self.dtype)
        size = target.itemsize
        if begin % size or end % size:
            wide_begin, wide_end = begin - begin % size, end + -end % size
            wide = bytearray(wide_end - wide_begin)
            self.fill(wide_begin, wide_end, memoryview(wide), files)
            out[:] = wide[begin - wide_begin : end - wide_begin]
            return
        result = np.frombuffer(out, dtype=target)
        first = begin // size
        block = np.empty(min(CAST_BLOCK, len(result)), dtype=source)
        for at in range(0, len(result), CAST_BLOCK):
            part = block[: min(CAST_BLOCK, len(result) - at)]
            start = (first + at) * source.itemsize
            fill(self.tensor, start, start + part.nbytes, part.view(np.uint8).data, files)
            result[at : at + len(part)] = cast_array(part, target, self.tensor.dtype)

    def scratch(self) -> int:
        return READ_SCRATCH + 3 * CAST_BLOCK * DTYPES[self.tensor.dtype].bits // 8

    def recipe(self) -> str:
        return f"cast {self.tensor.dtype} to {self.dtype} {list(self.tensor.shape)}"


def make_content(tensor: LazyTensor, dtype: str) -> Content:
    """A copy where the dtype stays, else a cast. Refused where no cast exists."""
    if tensor.dtype == dtype:
        return Copy(tensor)
    if DTYPES[tensor.dtype].kind != "float" or DTYPES[dtype].kind != "float":
        raise Refused("dtype", "", f"{tensor.dtype} cannot be cast to {dtype}")
    return Cast(tensor, dtype)
