"""diff: what sets two checkpoints apart, tensor by tensor, in whatever layouts they lie."""

from __future__ import annotations

import time
from collections import Counter
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.opening import open_checkpoint
from reshard.tensors.dtypes import DTYPES, numpy_dtype
from reshard.tensors.read import fill
from reshard.verbs.pairs import align
from reshard.verbs.streaming import Meter, Tiles, each, ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reshard.tensors.lazy import LazyTensor
    from reshard.tensors.read import Files
    from reshard.verbs.pairs import Pair

# Elements worked on at a time: their values in fp64, and what is computed of them, stay in the processor's cache.
ELEMENTS = 1 << 18
SHOWN = 20


def diff(
    a: str,
    b: str,
    *,
    config_from: str | None = None,
    model_key: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Compares two checkpoints of any layouts and returns what differs.

    "identical": same names, dtypes, shapes and bytes. "compared", "same": tensors compared, and equal in every value.
    "only_a", "only_b": names that one side lacks. "changed": [{"name", "dtype": [a, b], "shape": [a, b]}] where either
    differs. "tensors": a row for every tensor whose values differ, with "name", "dtype", "shape", "elements" and

    - "differing": elements that differ: bit by bit between equal dtypes (-0.0 is not 0.0), else by value;
    - "max_abs", "rel_l2": the largest |a - b|, and ||a - b|| / ||a||, over elements finite on both sides, in fp64;
    - "nonfinite": differing elements that are infinite or no number on some side.

    A distance is None where there is none: dtypes without arithmetic, or relative to a tensor of zeros.

    config_from and model_key apply to both sides, where they are training checkpoints. Memory stays bounded.
    Raises UsageError, Refused or Damaged when a side cannot be opened or read.
    """
    began = time.monotonic()
    left = open_checkpoint(a, config_from=config_from, model_key=model_key)
    right = open_checkpoint(b, config_from=config_from, model_key=model_key)
    for side in (left, right):
        if side.check is not None:
            side.check()
    aligned = align(left, right)
    changed = [
        {"name": name, "dtype": [x.dtype, y.dtype], "shape": [list(x.shape), list(y.shape)]}
        for name, x, y in aligned.pairs
        if (x.dtype, x.shape) != (y.dtype, y.shape)
    ]
    comparable = [pair for pair in aligned.pairs if pair.a.shape == pair.b.shape]
    meter = Meter(sum(pair.a.nbytes + pair.b.nbytes for pair in comparable), progress)
    rows = list(each(comparable, lambda pair, files, tiles: _compare(pair, files, tiles, meter), workers))
    tensors = [_row(pair, row) for pair, row in zip(comparable, rows, strict=True) if row.differing]
    return {
        "a": a,
        "b": b,
        "identical": not (aligned.only_a or aligned.only_b or changed or tensors),
        "compared": len(comparable),
        "same": sum(not row.differing for row in rows),
        "only_a": list(aligned.only_a),
        "only_b": list(aligned.only_b),
        "changed": changed,
        "tensors": tensors,
        "warnings": [*left.warnings, *right.warnings, *aligned.notes],
        "seconds": round(time.monotonic() - began, 3),
    }


class Distance(NamedTuple):
    """differing: elements that differ. None: there is no such number."""

    differing: int
    max_abs: float | None = None
    rel_l2: float | None = None
    nonfinite: int = 0


def _row(pair: Pair, row: Distance) -> dict[str, Any]:
    return {
        "name": pair.name,
        "dtype": pair.a.dtype,
        "shape": list(pair.a.shape),
        "elements": pair.a.numel,
        "differing": row.differing,
        "max_abs": row.max_abs,
        "rel_l2": row.rel_l2,
        "nonfinite": row.nonfinite,
    }


def _compare(pair: Pair, files: Files, tiles: Tiles, meter: Callable[[int], None]) -> Distance:
    a, b = pair.a, pair.b
    if a.dtype == b.dtype:
        equal = True
        for begin, end in ranges(a.nbytes):
            left, right = tiles.get("a", end - begin), tiles.get("b", end - begin)
            fill(a, begin, end, left, files)
            fill(b, begin, end, right, files)
            if left != right:
                equal = False
                break
            meter(2 * (end - begin))
        if equal:
            return Distance(0)
        meter(2 * (a.nbytes - begin))
    else:
        meter(a.nbytes + b.nbytes)
    return _distance(a, b, files, tiles)


def _arithmetic(tensor: LazyTensor) -> bool:
    """Whether values of this dtype can be told: sub-byte dtypes are compared as bytes."""
    row = DTYPES[tensor.dtype]
    return row.bits >= 8 and bool(row.numpy)


def _distance(a: LazyTensor, b: LazyTensor, files: Files, tiles: Tiles) -> Distance:
    import numpy as np

    values = _arithmetic(a) and _arithmetic(b)
    if not values and a.dtype != b.dtype:
        return Distance(a.numel)
    width_a, width_b = a.storage[1], b.storage[1]
    count = a.nbytes // width_a if not values else a.numel
    differing = nonfinite = 0
    largest = square = norm = 0.0
    for first, last in ranges(count, ELEMENTS):
        left, right = tiles.get("a", (last - first) * width_a), tiles.get("b", (last - first) * width_b)
        fill(a, first * width_a, last * width_a, left, files)
        fill(b, first * width_b, last * width_b, right, files)
        differs = None
        if a.dtype == b.dtype:
            rows = (np.frombuffer(side, np.uint8).reshape(-1, width_a) for side in (left, right))
            differs = np.not_equal(*rows).any(axis=1)
            differing += int(differs.sum())
            if not values:
                continue
        x, y = (_wide(side, tensor.dtype) for side, tensor in ((left, a), (right, b)))
        finite = np.isfinite(x) & np.isfinite(y)
        if differs is None:
            differs = (x != y) & ~(np.isnan(x) & np.isnan(y))
            differing += int(differs.sum())
        nonfinite += int((differs & ~finite).sum())
        gap = np.abs(np.where(finite, x, 0) - np.where(finite, y, 0))
        largest = max(largest, float(gap.max(initial=0.0)))
        square += float(np.square(gap).sum())
        norm += float(np.square(np.abs(np.where(finite, x, 0))).sum())
    if not values:
        return Distance(differing)
    relative = sqrt(square) / sqrt(norm) if norm and isfinite(square) and isfinite(norm) else None
    return Distance(differing, largest if isfinite(largest) else None, relative, nonfinite)


def _wide(data: memoryview, dtype: str) -> Any:
    """The values as fp64 (complex128 for complex dtypes)."""
    import numpy as np

    raw = np.frombuffer(data, numpy_dtype(dtype))
    return raw.astype(np.complex128 if DTYPES[dtype].kind == "complex" else np.float64)


def describe_diff(found: Mapping[str, Any]) -> Iterator[str]:
    """The result in lines for people: what is missing, what changed, and the largest distances."""
    yield f"a  {found['a']}"
    yield f"b  {found['b']}"
    if found["identical"]:
        yield f"identical: {found['compared']:,} tensors, byte for byte"
        return
    differing = len(found["tensors"])
    yield f"{found['compared']:,} tensors compared: {found['same']:,} equal in value, {differing:,} not"
    for key, label in (("only_a", "only in a"), ("only_b", "only in b")):
        yield from _some(found[key], f"{label}  ")
    yield from _changes(found["changed"])
    if differing:
        rows = sorted(found["tensors"], key=lambda row: (-_rank(row), row["name"]))
        yield from _table(rows[:SHOWN])
        if differing > SHOWN:
            yield f"... and {differing - SHOWN:,} more (--json lists them all)"
    for warning in found["warnings"]:
        yield f"note: {warning}"


def _changes(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    """Changed shapes one by one, changed dtypes counted."""
    counts = Counter((row["dtype"][0], row["dtype"][1]) for row in rows if row["dtype"][0] != row["dtype"][1])
    for (a, b), count in sorted(counts.items()):
        yield f"dtype      {a} in a, {b} in b: {count:,} tensors"
    shapes = [f"{row['name']}: {row['shape'][0]} in a, {row['shape'][1]} in b" for row in rows]
    yield from _some(
        [text for text, row in zip(shapes, rows, strict=True) if row["shape"][0] != row["shape"][1]], "shape      "
    )


def _some(items: list[str], label: str) -> Iterator[str]:
    for item in items[:SHOWN]:
        yield f"{label}{item}"
    if len(items) > SHOWN:
        yield f"{label}... and {len(items) - SHOWN:,} more"


def _rank(row: Mapping[str, Any]) -> float:
    """The largest first; a tensor without a distance before all others, since nothing else tells of it."""
    value = row["rel_l2"] if row["rel_l2"] is not None else row["max_abs"]
    return float("inf") if value is None else float(value)


def _table(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    width = max(len(row["name"]) for row in rows)
    yield f"{'tensor':<{width}}  {'max |a-b|':>10}  {'rel. L2':>10}  {'differing':>22}"
    for row in rows:
        share = f"{row['differing']:,} of {row['elements']:,}"
        yield f"{row['name']:<{width}}  {_number(row['max_abs']):>10}  {_number(row['rel_l2']):>10}  {share:>22}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
