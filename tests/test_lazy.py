"""Lazy tensors against numpy: any chain of rearrangements over any storage gives numpy's bytes."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reshard.errors import Refused
from reshard.tensors import lazy, read
from reshard.tensors.boxes import Box, find_gap, runs, split_range
from reshard.tensors.lazy import Chunk, Chunked, LazyTensor, Stored

if TYPE_CHECKING:
    from pathlib import Path


def store(values: np.ndarray[Any, Any], path: Path, pick: random.Random) -> LazyTensor:
    """The array on disk: contiguous at an odd offset, in Fortran order, or cut into chunks at random places."""
    kind = pick.randrange(3)
    if kind == 0 or not values.shape:
        path.write_bytes(b"xyz" + values.tobytes())
        return Stored("U16", values.shape, str(path), 3)
    if kind == 1:
        swapped = np.asfortranarray(values)
        path.write_bytes(swapped.tobytes("F"))
        return Stored("U16", values.shape, str(path), 0, tuple(swapped.strides))
    cuts = [sorted({0, n, *(pick.randint(0, n) for _ in range(2))}) for n in values.shape]
    chunks, data = [], b""
    for spans in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts)):
        box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        chunks.append(Chunk(box, str(path), len(data)))
        data += values[tuple(slice(a, b) for a, b in spans)].tobytes()
    assert find_gap([chunk.box for chunk in chunks], values.shape) is None
    path.write_bytes(data)
    pick.shuffle(chunks)
    return Chunked("U16", values.shape, lambda: chunks)


def rearrange(values: Any, tensor: LazyTensor, pick: random.Random) -> tuple[Any, LazyTensor]:
    rank = values.ndim
    step = pick.choice(["narrow", "permute", "concat", "interleave", "stack", "select"])
    if step == "narrow" and rank:
        axis = pick.randrange(rank)
        start = pick.randint(0, values.shape[axis] - 1)
        stop, by = pick.randint(start + 1, values.shape[axis]), pick.randint(1, 3)
        return values.take(range(start, stop, by), axis), lazy.narrow(tensor, axis, start, stop, by)
    if step == "permute" and rank:
        axes = pick.sample(range(rank), rank)
        return values.transpose(axes), lazy.permute(tensor, axes)
    if step == "concat" and rank:
        axis = pick.randrange(rank)
        return np.concatenate([values, values], axis), lazy.concat([tensor, tensor], axis)
    if step == "interleave" and rank:
        axis = pick.randrange(rank)
        return np.repeat(values, 3, axis), lazy.interleave([tensor] * 3, axis)
    if step == "stack" and rank < 4:
        return np.stack([values, values]), lazy.stack([tensor, tensor])
    if step == "select" and rank > 1:
        index = pick.randrange(values.shape[0])
        return values[index], lazy.select(tensor, index)
    return values, tensor


@pytest.mark.parametrize("seed", range(120))
def test_any_rearrangement_reads_as_numpy(seed: int, tmp_path: Path) -> None:
    pick = random.Random(seed)
    shape = [pick.randint(1, 7) for _ in range(pick.randint(0, 4))]
    values: Any = np.random.default_rng(seed).integers(0, 60000, shape).astype("<u2")
    tensor = store(values, tmp_path / "a", pick)
    for _ in range(pick.randint(0, 5)):
        values, tensor = rearrange(values, tensor, pick)
    assert tensor.shape == values.shape
    assert tensor.tobytes() == values.tobytes()
    for _ in range(4):
        begin = pick.randrange(values.size + 1)
        end = pick.randint(begin, values.size)
        assert read.read_bytes(tensor, begin * 2, end * 2) == values.tobytes()[begin * 2 : end * 2]


def test_sparse_and_wide_strides_read_right(tmp_path: Path) -> None:
    """Columns of a wide matrix, a transpose, and a step over megabytes: every way to cut a strided read."""
    values = np.random.default_rng(0).integers(0, 60000, (600, 9000)).astype("<u2")
    (tmp_path / "m").write_bytes(values.tobytes())
    tensor = Stored("U16", values.shape, str(tmp_path / "m"), 0)
    assert lazy.narrow(tensor, 1, 17, 25).tobytes() == values[:, 17:25].tobytes()
    assert lazy.transpose(tensor).tobytes() == values.T.tobytes()
    assert lazy.narrow(tensor, 1, 3, 9000, 2500).tobytes() == values[:, 3::2500].tobytes()
    assert lazy.narrow(lazy.transpose(tensor), 0, 100, 103).tobytes() == values.T[100:103].tobytes()
    assert lazy.narrow(tensor, 0, 1, 600, 2).tobytes() == values[1::2].tobytes()


def test_rows_are_all_that_is_read(tmp_path: Path) -> None:
    import torch

    values = torch.arange(24, dtype=torch.bfloat16).reshape(6, 4)
    data = values.view(torch.int16).numpy().tobytes()
    (tmp_path / "w").write_bytes(data)
    tensor = Stored("BF16", (6, 4), str(tmp_path / "w"), 0)
    assert torch.equal(tensor[1:3], values[1:3])
    assert torch.equal(tensor[-1], values[-1])
    assert np.array_equal(tensor.numpy(slice(2, 4)).astype("f4"), values[2:4].float().numpy())
    (tmp_path / "w").write_bytes(data[:32])  # rows 0 to 3 are left
    assert torch.equal(tensor[0:4], values[0:4])


def test_sub_byte_tensors_copy_but_do_not_rearrange(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(6)))
    tensor = Stored("F4", (3, 4), str(tmp_path / "f"), 0)
    assert tensor.nbytes == 6 and tensor.tobytes() == bytes(range(6))
    with pytest.raises(Refused, match="sub-byte"):
        lazy.transpose(tensor)


def test_runs_of_a_box_by_hand() -> None:
    assert list(runs(Box((0, 0), (2, 3)), (4, 3))) == [(0, 6)]
    assert list(runs(Box((1, 1), (2, 2)), (4, 3))) == [(4, 2), (7, 2)]
    assert list(runs(Box((), ()), ())) == [(0, 1)]
    assert list(runs(Box((0, 1, 0), (2, 1, 2)), (2, 2, 2))) == [(2, 2), (6, 2)]
    assert list(runs(Box((0, 0), (0, 3)), (4, 3))) == []


def test_split_range_by_hand() -> None:
    boxes = list(split_range(2, 11, (4, 3)))
    assert boxes == [Box((0, 2), (1, 1)), Box((1, 0), (2, 3)), Box((3, 0), (1, 2))]


@pytest.mark.parametrize(
    ("boxes", "shape", "problem"),
    [
        ([Box((0, 0), (4, 2))], (6, 2), "indices 4 to 5 of axis 0"),
        ([Box((2, 0), (4, 2))], (6, 2), "indices 0 to 1 of axis 0"),
        ([Box((0, 0), (3, 2)), Box((2, 0), (4, 2))], (6, 2), "2 chunks hold the same elements"),
        ([Box((0, 0), (6, 1)), Box((0, 1), (3, 1))], (6, 2), "indices 1 to 1 of axis 1"),
        ([Box((0, 0), (7, 2))], (6, 2), "outside axis 0"),
        ([Box((0,), (6,))], (6, 2), "1 axes"),
        ([], (6, 2), "no chunk"),
    ],
)
def test_gaps_are_named(boxes: list[Box], shape: tuple[int, ...], problem: str) -> None:
    found = find_gap(boxes, shape)
    assert found is not None and problem in found


def test_exact_tilings_have_no_gap() -> None:
    assert find_gap([], (0, 4)) is None
    assert find_gap([Box((), ())], ()) is None
    # A pinwheel: no single axis separates these five boxes.
    pinwheel = [Box((0, 0), (2, 1)), Box((0, 1), (1, 2)), Box((1, 2), (2, 1)), Box((2, 0), (1, 2)), Box((1, 1), (1, 1))]
    assert find_gap(pinwheel, (3, 3)) is None
    assert find_gap(pinwheel[:-1], (3, 3)) is not None


def test_loaded_chunks_are_bounded_over_all_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tensors of many chunks: those read longest ago forget theirs, and load them again when asked."""
    monkeypatch.setattr(lazy, "MAX_CHUNKS", 25)
    (tmp_path / "d").write_bytes(bytes(range(20)))
    loads = []

    def load(number: int) -> list[Chunk]:
        loads.append(number)
        return [Chunk(Box((i,), (1,)), str(tmp_path / "d"), i) for i in range(10)]

    tensors = [Chunked("U8", (10,), lambda number=n: load(number)) for n in range(4)]
    for tensor in (*tensors, tensors[3], tensors[0]):
        assert tensor.tobytes() == bytes(range(10))
    assert loads == [0, 1, 2, 3, 0]
