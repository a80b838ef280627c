"""Boxes: axis-aligned blocks of a tensor's index space, and the runs of flat bytes that they cover."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Box(NamedTuple):
    """The block that starts at `start` and extends over `shape`; both have one entry per axis."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The common block, or None where it is empty. Two 0-d boxes intersect."""
    start, shape = [], []
    for a0, an, b0, bn in zip(a.start, a.shape, b.start, b.shape, strict=True):
        low, high = max(a0, b0), min(a0 + an, b0 + bn)
        if high <= low:
            return None
        start.append(low)
        shape.append(high - low)
    return Box(tuple(start), tuple(shape))


def runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The (offset, length) runs, in elements, that `box` covers in a C-ordered tensor of `shape`; merged.

    A box is one run only when every axis after its first partial one is whole: a dim-1 shard is one run per row.
    """
    if box.numel == 0:
        return
    # Axes below `inner` are iterated; the axes from it on form one contiguous run.
    inner = len(shape)
    run = 1
    while inner > 0:
        inner -= 1
        run *= box.shape[inner]
        if box.shape[inner] != shape[inner]:
            break
    strides = [0] * len(shape)
    step = 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = step
        step *= shape[axis]
    base = sum(s * o for s, o in zip(strides, box.start, strict=True))
    index = [0] * inner
    while True:
        yield base + sum(i * s for i, s in zip(index, strides, strict=False)), run
        axis = inner - 1
        while axis >= 0:
            index[axis] += 1
            if index[axis] < box.shape[axis]:
                break
            index[axis] = 0
            axis -= 1
        if axis < 0:
            return


def split_range(begin: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    """Boxes that together are the flat element range [begin, end) of a C-ordered tensor, in flat order.

    At most 2 * ndim - 1 of them: ragged head, whole middle, ragged tail, recursively.
    """
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    if len(shape) == 1:
        yield Box((begin,), (end - begin,))
        return
    row = prod(shape[1:])
    first, last = begin // row, end // row
    head, tail = begin % row, end % row
    if first == last:
        for box in split_range(head, tail, shape[1:]):
            yield Box((first, *box.start), (1, *box.shape))
        return
    if head:
        for box in split_range(head, row, shape[1:]):
            yield Box((first, *box.start), (1, *box.shape))
        first += 1
    if last > first:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if tail:
        for box in split_range(0, tail, shape[1:]):
            yield Box((last, *box.start), (1, *box.shape))


def find_gap(boxes: Sequence[Box], shape: Sequence[int]) -> str | None:
    """Why `boxes` do not tile `shape` exactly (each element in exactly one box), or None when they do.

    A sweep over the first axis on which the boxes differ, recursing into the rest: linear in the
    boxes for every grid of shards, and exact for any arrangement.
    """
    for box in boxes:
        if len(box.start) != len(shape):
            return f"chunk has {len(box.start)} axes where the tensor has {len(shape)}"
        for axis, (start, length) in enumerate(zip(box.start, box.shape, strict=True)):
            if start < 0 or length < 0 or start + length > shape[axis]:
                return f"chunk [{start}, {start + length}) lies outside axis {axis} of length {shape[axis]}"
    if prod(shape) == 0:
        return None
    filled = [box for box in boxes if box.numel]
    if not filled:
        return "no chunk holds any of it"
    return _sweep(filled, tuple(shape), 0)


def _sweep(boxes: Sequence[Box], shape: tuple[int, ...], axis: int) -> str | None:
    if axis == len(shape):
        return None if len(boxes) == 1 else f"{len(boxes)} chunks hold the same elements"
    first = boxes[0]
    if all(b.start[axis] == first.start[axis] and b.shape[axis] == first.shape[axis] for b in boxes):
        if first.start[axis] != 0 or first.shape[axis] != shape[axis]:
            missing = (0, first.start[axis]) if first.start[axis] else (first.shape[axis], shape[axis])
            return f"indices {missing[0]} to {missing[1] - 1} of axis {axis} are in no chunk"
        return _sweep(boxes, shape, axis + 1)
    groups: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        groups.setdefault((box.start[axis], box.shape[axis]), []).append(box)
    spans = sorted(groups)
    disjoint = all(a[0] + a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    if not disjoint:
        # Spans overlap on this axis (a mixed arrangement): cut at every edge and check each slab.
        edges = sorted({edge for start, length in spans for edge in (start, start + length)})
        slabs = list(zip(edges, edges[1:], strict=False))
        if len(slabs) * len(boxes) > 10_000_000:
            return "chunks overlap in too many ways to check"
        groups = {
            (low, high - low): [b for b in boxes if b.start[axis] <= low and b.stop[axis] >= high]
            for low, high in slabs
        }
        spans = sorted(groups)
    at = 0
    for start, length in spans:
        if start != at:
            return f"indices {at} to {start - 1} of axis {axis} are in no chunk"
        if not groups[start, length]:
            return f"indices {start} to {start + length - 1} of axis {axis} are in no chunk"
        at = start + length
        problem = _sweep(groups[start, length], shape, axis + 1)
        if problem:
            return problem
    return None if at == shape[axis] else f"indices {at} to {shape[axis] - 1} of axis {axis} are in no chunk"
