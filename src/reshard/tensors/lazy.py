"""Lazy tensors: a dtype, a shape, and the strided pieces of files that make up any box of it.

A stored tensor knows where its bytes lie. Rearranging one (slice, transpose, stack, concatenate, interleave)
gives another lazy tensor whose pieces are worked out from its parts', so a rename, a merge of shards, or the
fusing and splitting of experts is never more than a different list of byte ranges. Nothing is read until bytes
are asked for (`reshard.tensors.read`).

Sub-byte dtypes are addressed through their bytes: see `storage_shape`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, ref

from reshard.errors import Refused
from reshard.tensors.boxes import Box, intersect, whole
from reshard.tensors.dtypes import DTYPES, nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Piece(NamedTuple):
    """A strided block of one file that fills a strided block of a tensor.

    Element `i` of the piece (a multi-index below `shape`) lies in the file at `offset + sum(i * strides)` bytes and
    in the tensor at index `at + i * step`. A step other than 1 comes from interleaving.
    """

    path: str
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    at: tuple[int, ...]
    step: tuple[int, ...]


def storage_shape(dtype: str, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """(shape, item size in bytes) under which the bytes of a tensor are addressed.

    Whole-byte dtypes: the shape itself. Sub-byte dtypes: the last axis in bytes where it fills whole bytes, else one
    flat axis of all bytes.
    """
    bits = DTYPES[dtype].bits
    if bits % 8 == 0:
        return tuple(shape), bits // 8
    if shape and shape[-1] * bits % 8 == 0:
        return (*shape[:-1], shape[-1] * bits // 8), 1
    return (nbytes(dtype, shape),), 1


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-ordered tensor."""
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """Base of all lazy tensors. `dtype` is safetensors' name ("BF16"); `pieces` is what a kind of tensor defines.

    `tensor[rows]` reads into a torch tensor, `tensor.numpy(rows)` into a numpy array, `tensor.tobytes()` into bytes;
    rows is an int or a slice of axis 0, and only those rows are read.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def storage(self) -> tuple[tuple[int, ...], int]:
        """The shape in which boxes of this tensor are given, and the bytes of one item."""
        return storage_shape(self.dtype, self.shape)

    def pieces(self, box: Box) -> Iterator[Piece]:
        """The pieces that fill `box` (in `storage` coordinates) exactly, each element once."""
        raise NotImplementedError

    def paths(self) -> set[str]:
        """Every file that holds bytes of this tensor."""
        return {piece.path for piece in self.pieces(whole(self.storage[0]))}

    def tobytes(self) -> bytes:
        """All bytes, C-ordered, little-endian."""
        from reshard.tensors.read import read_bytes

        return read_bytes(self)

    def numpy(self, rows: slice | int | None = None) -> Any:
        from reshard.tensors.read import read_numpy

        return read_numpy(self, rows)

    def torch(self, rows: slice | int | None = None) -> Any:
        from reshard.tensors.read import read_torch

        return read_torch(self, rows)

    def __getitem__(self, rows: slice | int) -> Any:
        return self.torch(rows)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d tensor has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}, {list(self.shape)})"


def _in_box(
    path: str, offset: int, strides: Sequence[int], at: Sequence[int], hit: Box, origin: Sequence[int]
) -> Piece:
    """The piece for the part `hit` of an extent whose first element has index `at`, in coordinates from `origin`."""
    skip = sum((h - a) * s for h, a, s in zip(hit.start, at, strides, strict=True))
    start = tuple(h - o for h, o in zip(hit.start, origin, strict=True))
    return Piece(path, offset + skip, tuple(strides), hit.shape, start, (1,) * len(start))


@dataclass(frozen=True, eq=False, repr=False)
class Stored(LazyTensor):
    """A tensor that lies in one file, contiguous unless `strides` (in bytes, one per axis) says otherwise."""

    path: str
    offset: int
    strides: tuple[int, ...] | None = None

    def pieces(self, box: Box) -> Iterator[Piece]:
        shape, itemsize = self.storage
        if box.numel:
            strides = self.strides if self.strides is not None else c_strides(shape, itemsize)
            yield _in_box(self.path, self.offset, strides, (0,) * len(shape), box, (0,) * len(shape))


class Chunk(NamedTuple):
    """One stored block of a larger tensor: where it lies in the tensor, and where its bytes lie."""

    box: Box
    path: str
    offset: int
    strides: tuple[int, ...] | None = None


# Chunk objects kept over all tensors: a model saved by hundreds of ranks has millions, and each is used in one place.
MAX_CHUNKS = 100_000


class _Loaded:
    """The tensors whose chunks are loaded, those loaded longest ago first."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.total = 0
        self.order: OrderedDict[ReferenceType[Chunked], int] = OrderedDict()

    def add(self, tensor: Chunked, count: int) -> None:
        """Notes that a tensor has loaded its chunks, and makes others forget theirs where there are too many."""
        with self.lock:
            key = ref(tensor)
            self.total += count - self.order.pop(key, 0)
            self.order[key] = count
            while self.total > MAX_CHUNKS and len(self.order) > 1:
                oldest, freed = self.order.popitem(last=False)
                self.total -= freed
                found = oldest()
                if found is not None:
                    found.release()


_loaded = _Loaded()


@dataclass(frozen=True, eq=False, repr=False)
class Chunked(LazyTensor):
    """A tensor cut into boxes that lie in several places: shards of a distributed save.

    `load` gives the chunks when they are first needed, so that a tensor with a thousand shards costs nothing until
    it is read. They tile the tensor (checked by whoever makes this: `boxes.find_gap`). Whole-byte dtypes only.
    """

    load: Callable[[], Sequence[Chunk]]
    _cache: list[Any] = field(default_factory=list, repr=False)

    @property
    def chunks(self) -> Sequence[Chunk]:
        return self._sorted()[0]

    def _sorted(self) -> tuple[list[Chunk], list[int], int]:
        try:
            found: tuple[list[Chunk], list[int], int] = self._cache[0]
            return found
        except IndexError:
            pass
        filled = sorted(chunk for chunk in self.load() if chunk.box.numel)
        first = [chunk.box.start[0] if self.shape else 0 for chunk in filled]
        longest = max((chunk.box.shape[0] for chunk in filled), default=0) if self.shape else 0
        found = filled, first, longest
        self._cache.append(found)
        _loaded.add(self, len(filled))
        return found

    def release(self) -> None:
        """Forgets the loaded chunks; the next read loads them again."""
        self._cache.clear()

    def pieces(self, box: Box) -> Iterator[Piece]:
        if not box.numel:
            return
        itemsize = self.storage[1]
        chunks, first, longest = self._sorted()
        low, high = 0, len(chunks)
        if self.shape:
            low = bisect_right(first, box.start[0] - longest)
            high = bisect_left(first, box.start[0] + box.shape[0])
        for chunk in chunks[low:high]:
            hit = intersect(chunk.box, box)
            if hit is not None:
                strides = chunk.strides if chunk.strides is not None else c_strides(chunk.box.shape, itemsize)
                yield _in_box(chunk.path, chunk.offset, strides, chunk.box.start, hit, (0,) * len(self.shape))


@dataclass(frozen=True, eq=False, repr=False)
class Narrowed(LazyTensor):
    """Indices start, start + step, ... of one axis of another tensor."""

    base: LazyTensor
    axis: int
    start: int
    step: int

    def pieces(self, box: Box) -> Iterator[Piece]:
        if not box.numel:
            return
        axis, n = self.axis, box.shape[self.axis]
        first = self.start + box.start[axis] * self.step
        span = Box(_put(box.start, axis, first), _put(box.shape, axis, (n - 1) * self.step + 1))
        for piece in self.base.pieces(span):
            picked = _pick(piece, axis, first, self.step)
            if picked is not None:
                yield picked._replace(at=_put(picked.at, axis, picked.at[axis] + box.start[axis]))


def _pick(piece: Piece, axis: int, first: int, step: int) -> Piece | None:
    """The elements of `piece` at indices first + k * step of `axis`, renumbered to k."""
    at, own = piece.at[axis], piece.step[axis]
    if step == 1:
        return piece._replace(at=_put(piece.at, axis, at - first))
    # Smallest i with (at + i * own - first) divisible by step; the solutions repeat with period step / gcd.
    for i in range(min(step, piece.shape[axis])):
        if (at + i * own - first) % step == 0:
            break
    else:
        return None
    period = next(p for p in range(1, step + 1) if p * own % step == 0)
    count = (piece.shape[axis] - 1 - i) // period + 1
    return Piece(
        piece.path,
        piece.offset + i * piece.strides[axis],
        _put(piece.strides, axis, piece.strides[axis] * period),
        _put(piece.shape, axis, count),
        _put(piece.at, axis, (at + i * own - first) // step),
        _put(piece.step, axis, own * period // step),
    )


def _put(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


@dataclass(frozen=True, eq=False, repr=False)
class Permuted(LazyTensor):
    """Another tensor with its axes in the order `axes` (axis k of this is axis axes[k] of the base)."""

    base: LazyTensor
    axes: tuple[int, ...]

    def pieces(self, box: Box) -> Iterator[Piece]:
        inverse = [self.axes.index(k) for k in range(len(self.axes))]
        start = tuple(box.start[k] for k in inverse)
        for p in self.base.pieces(Box(start, tuple(box.shape[k] for k in inverse))):
            strides, shape, at, step = (tuple(v[k] for k in self.axes) for v in (p.strides, p.shape, p.at, p.step))
            yield Piece(p.path, p.offset, strides, shape, at, step)


@dataclass(frozen=True, eq=False, repr=False)
class Joined(LazyTensor):
    """Parts laid along one axis: one after the other, or taking turns index by index when `interleaved`."""

    parts: tuple[LazyTensor, ...]
    axis: int
    interleaved: bool = False

    @cached_property
    def edges(self) -> list[int]:
        """Index of each part's first element along the axis (plain joins)."""
        edges = [0]
        for part in self.parts:
            edges.append(edges[-1] + part.storage[0][self.axis])
        return edges

    def pieces(self, box: Box) -> Iterator[Piece]:
        if not box.numel:
            return
        axis, low, high = self.axis, box.start[self.axis], box.start[self.axis] + box.shape[self.axis]
        if self.interleaved:
            turns = len(self.parts)
            for turn, part in enumerate(self.parts):
                first, last = -(-(low - turn) // turns), -(-(high - turn) // turns)
                if last > first:
                    span = Box(_put(box.start, axis, first), _put(box.shape, axis, last - first))
                    for p in part.pieces(span):
                        at = _put(p.at, axis, p.at[axis] * turns + turn)
                        yield p._replace(at=at, step=_put(p.step, axis, p.step[axis] * turns))
            return
        index = max(bisect_right(self.edges, low) - 1, 0)
        while index < len(self.parts) and self.edges[index] < high:
            edge, stop = self.edges[index], self.edges[index + 1]
            begin, end = max(low, edge), min(high, stop)
            if end > begin:
                span = Box(_put(box.start, axis, begin - edge), _put(box.shape, axis, end - begin))
                for p in self.parts[index].pieces(span):
                    yield p._replace(at=_put(p.at, axis, p.at[axis] + edge))
            index += 1


@dataclass(frozen=True, eq=False, repr=False)
class Unsqueezed(LazyTensor):
    """Another tensor with an axis of length 1 put in front."""

    base: LazyTensor

    def pieces(self, box: Box) -> Iterator[Piece]:
        for p in self.base.pieces(Box(box.start[1:], box.shape[1:])):
            yield Piece(p.path, p.offset, (0, *p.strides), (1, *p.shape), (0, *p.at), (1, *p.step))


@dataclass(frozen=True, eq=False, repr=False)
class Selected(LazyTensor):
    """Index `index` of axis 0 of another tensor."""

    base: LazyTensor
    index: int

    def pieces(self, box: Box) -> Iterator[Piece]:
        for p in self.base.pieces(Box((self.index, *box.start), (1, *box.shape))):
            yield Piece(p.path, p.offset, p.strides[1:], p.shape[1:], p.at[1:], p.step[1:])


def narrow(tensor: LazyTensor, axis: int, start: int, stop: int, step: int = 1) -> LazyTensor:
    """`tensor[..., start:stop:step, ...]` on `axis`. IndexError outside the tensor."""
    _whole_bytes(tensor)
    size = tensor.shape[axis]
    if not 0 <= start <= stop <= size:
        raise IndexError(f"[{start}:{stop}] outside axis {axis} of length {size}")
    if (start, stop, step) == (0, size, 1):
        return tensor
    count = -(-(stop - start) // step)
    return Narrowed(tensor.dtype, _put(tensor.shape, axis, count), tensor, axis, start, step)


def select(tensor: LazyTensor, index: int) -> LazyTensor:
    """`tensor[index]`: axis 0 removed."""
    _whole_bytes(tensor)
    if not 0 <= index < tensor.shape[0]:
        raise IndexError(f"index {index} outside axis 0 of length {tensor.shape[0]}")
    if (
        isinstance(tensor, Joined)
        and tensor.axis == 0
        and isinstance(tensor.parts[0], Unsqueezed)
        and not tensor.interleaved
    ):
        part = tensor.parts[index]
        if isinstance(part, Unsqueezed) and tensor.edges[index] == index:
            return part.base
    return Selected(tensor.dtype, tensor.shape[1:], tensor, index)


def permute(tensor: LazyTensor, axes: Sequence[int]) -> LazyTensor:
    """`tensor.permute(axes)`."""
    _whole_bytes(tensor)
    if tuple(axes) == tuple(range(len(tensor.shape))):
        return tensor
    return Permuted(tensor.dtype, tuple(tensor.shape[k] for k in axes), tensor, tuple(axes))


def transpose(tensor: LazyTensor, a: int = -2, b: int = -1) -> LazyTensor:
    """`tensor.transpose(a, b)`; the last two axes unless said."""
    axes = list(range(len(tensor.shape)))
    axes[a], axes[b] = axes[b], axes[a]
    return permute(tensor, axes)


def _join(parts: Sequence[LazyTensor], axis: int, interleaved: bool) -> LazyTensor:
    first = parts[0]
    for part in parts:
        _whole_bytes(part)
        if part.dtype != first.dtype or _put(part.shape, axis, 0) != _put(first.shape, axis, 0):
            raise Refused(
                "shape", "", f"cannot join {part.dtype} {list(part.shape)} with {first.dtype} {list(first.shape)}"
            )
    if len(parts) == 1:
        return first
    total = sum(part.shape[axis] for part in parts)
    return Joined(first.dtype, _put(first.shape, axis, total), tuple(parts), axis, interleaved)


def concat(parts: Sequence[LazyTensor], axis: int = 0) -> LazyTensor:
    """`torch.cat(parts, axis)`; dtypes must agree."""
    return _join(parts, axis, interleaved=False)


def interleave(parts: Sequence[LazyTensor], axis: int = 0) -> LazyTensor:
    """Parts taking turns along `axis`: index i of part k comes at i * len(parts) + k. Equal lengths."""
    if len({part.shape[axis] for part in parts}) > 1:
        raise Refused("shape", "", f"cannot interleave lengths {[part.shape[axis] for part in parts]}")
    return _join(parts, axis, interleaved=True)


def stack(parts: Sequence[LazyTensor]) -> LazyTensor:
    """`torch.stack(parts)`: a new axis 0."""
    return concat([Unsqueezed(part.dtype, (1, *part.shape), part) for part in parts], 0)


def _whole_bytes(tensor: LazyTensor) -> None:
    if DTYPES[tensor.dtype].bits % 8:
        raise Refused("dtype", tensor.dtype, "packed sub-byte tensors can be copied but not rearranged")
