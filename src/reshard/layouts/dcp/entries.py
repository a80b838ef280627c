"""What `.metadata` says of each tensor, in compact form: a few numbers for each chunk, in arrays."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from reshard.tensors.boxes import Box, find_gap

UNPLACED = array("q", (-1, 0, 0))


class TensorEntry:
    """One tensor of the metadata.

    dtype:   safetensors' name, "" for a torch dtype that safetensors lacks
    shape:   global shape, in elements as torch counts them
    boxes:   for each chunk its offsets and then its sizes, 2 * ndim numbers
    places:  for each chunk the number of its file (-1 while unknown), and the offset and length of its item there
    payloads: for each chunk where its first element lies in its file, or None until the items have been read
    strides: element strides of the chunks that are not C-ordered
    """

    __slots__ = ("boxes", "dtype", "payloads", "places", "shape", "strides")

    def __init__(self, dtype: str, shape: tuple[int, ...], boxes: array[int]) -> None:
        width = 2 * len(shape)
        count = len(boxes) // (width or 1)
        self.dtype = dtype
        self.shape = shape
        # A 0-d tensor has boxes without numbers; one placeholder stands for each until here.
        self.boxes = boxes if width else array("q")
        self.places = UNPLACED * count
        self.payloads: array[int] | None = None
        self.strides: dict[int, tuple[int, ...]] | None = None

    def __len__(self) -> int:
        return len(self.places) // 3

    def place(self, i: int) -> tuple[int, int, int]:
        """(file number, offset, length) of a chunk's item."""
        file, offset, length = self.places[3 * i : 3 * i + 3]
        return file, offset, length

    def file_numbers(self) -> array[int]:
        return self.places[::3]

    def start(self, i: int) -> tuple[int, ...]:
        n = len(self.shape)
        return tuple(self.boxes[2 * n * i : 2 * n * i + n])

    def sizes(self, i: int) -> tuple[int, ...]:
        n = len(self.shape)
        return tuple(self.boxes[2 * n * i + n : 2 * n * (i + 1)])

    def box(self, i: int) -> Box:
        return Box(self.start(i), self.sizes(i))

    def extend(self, other: TensorEntry, files: list[int]) -> None:
        """Adds the chunks of another rank's entry. files: the number here of each of its files.

        Ranks that save on their own all save what is replicated: of equal boxes the first is kept.
        """
        known = {self.box(i) for i in range(len(self))}
        for i in range(len(other)):
            box = other.box(i)
            if box in known:
                continue
            known.add(box)
            self.boxes.extend((*box.start, *box.shape))
            file, offset, length = other.place(i)
            self.places.extend((files[file] if file >= 0 else -1, offset, length))

    def gap(self) -> str | None:
        """Why the chunks do not tile the tensor exactly, or None."""
        n = len(self.shape)
        if _slabs(self.boxes, self.shape, len(self)):
            return None
        found = find_gap([self.box(i) for i in range(len(self))], self.shape)
        if found is None and 0 in self.shape:
            # An empty tensor is tiled by anything; its chunks must still reach its edges.
            for axis, size in enumerate(self.shape):
                reach = max(
                    (sum(self.boxes[at : at + n + 1 : n]) for at in range(axis, len(self.boxes), 2 * n)), default=-1
                )
                if reach != size:
                    return f"no chunk reaches the end of axis {axis} of length {size}"
        return found


def _slabs(boxes: array[int], shape: tuple[int, ...], count: int) -> bool:
    """Whether the boxes are plainly a cut along one axis, in any order: the usual case, checked without objects."""
    n = len(shape)
    if count == 1:
        return boxes[:n].count(0) == n and tuple(boxes[n:]) == shape
    cut = -1
    for axis in range(n):
        if boxes[axis :: 2 * n].count(0) == count and boxes[axis + n :: 2 * n].count(shape[axis]) == count:
            continue
        if cut >= 0:
            return False
        cut = axis
    if cut < 0 or 0 in shape:
        return False
    at = 0
    for start, size in sorted(zip(boxes[cut :: 2 * n], boxes[cut + n :: 2 * n], strict=True)):
        if size < 0 or (size and start != at) or start > shape[cut]:
            return False
        at += size
    return at == shape[cut]


class Sink:
    """Stands for one of the large dicts."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class ChunkList:
    """A list of chunks, as numbers: offsets and then sizes of each. data is None where they are not kept."""

    __slots__ = ("axes", "data")

    def __init__(self, keep: bool) -> None:
        self.axes = -1
        self.data: array[int] | None = array("q") if keep else None

    def add(self, offsets: Any, sizes: Any) -> None:
        if type(offsets) is not tuple or type(sizes) is not tuple or len(offsets) != len(sizes):
            raise ValueError("a chunk without a box")
        if self.axes < 0:
            self.axes = len(offsets)
        if self.axes != len(offsets):
            raise ValueError("chunks of different rank")
        if self.data is not None:
            self.data.extend((*offsets, *sizes) if offsets else (0,))


@dataclass
class DcpMetadata:
    """A `.metadata` file, or what is merged from several.

    tensors:     by key; entries of keys that were not asked for have no chunks
    bytes_items: keys of items that are not tensors
    paths:       the nested path of each key, or None where the writer recorded none
    files:       relative path of every referenced file; extents: the furthest byte that any item of it needs
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    bytes_items: list[str] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] | None = None
    files: list[str] = field(default_factory=list)
    extents: list[int] = field(default_factory=list)
