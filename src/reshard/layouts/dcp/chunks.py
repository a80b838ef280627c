"""The chunks of a tensor: items looked up when first needed, checked against the metadata, kept as a few numbers."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from reshard.errors import Damaged
from reshard.layouts.dcp.items import read_item
from reshard.tensors.dtypes import DTYPES
from reshard.tensors.lazy import Chunk, Chunked
from reshard.tensors.read import Files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.layouts.dcp.entries import TensorEntry
    from reshard.tensors.lazy import LazyTensor


class StoredChunks:
    """Loads the chunks of one tensor. files: the absolute path of each file number of the metadata."""

    __slots__ = ("entry", "files", "name")

    def __init__(self, name: str, entry: TensorEntry, files: list[str]) -> None:
        self.name = name
        self.entry = entry
        self.files = files

    def check(self, files: Files) -> None:
        """Reads the item of every chunk. Raises Damaged or Refused, naming file and tensor."""
        entry = self.entry
        if entry.payloads is not None:
            return
        payloads = array("q", (0,)) * len(entry)
        strides: dict[int, tuple[int, ...]] = {}
        for i in range(len(entry)):
            file, offset, length = entry.place(i)
            if file < 0:
                continue  # an empty chunk, of which nothing is stored
            path = self.files[file]
            item = read_item(files, path, offset, length, self.name)
            shape = entry.sizes(i)
            if item.dtype != entry.dtype or item.shape != shape:
                raise Damaged(
                    "item", f"{path} ({self.name})",
                    f"holds {item.dtype} {list(item.shape)} where the metadata says {entry.dtype} {list(shape)}",
                    "the file is of another save; use a complete copy of one checkpoint",
                )  # fmt: skip
            payloads[i] = item.payload
            if item.strides is not None:
                strides[i] = item.strides
        entry.strides = strides or None
        entry.payloads = payloads

    def __call__(self) -> list[Chunk]:
        entry = self.entry
        if entry.payloads is None:
            with Files() as files:
                self.check(files)
        assert entry.payloads is not None
        itemsize = max(DTYPES[entry.dtype].bits // 8, 1)
        chunks = []
        for i in range(len(entry)):
            file = entry.places[3 * i]
            if file < 0:
                continue
            strides = (entry.strides or {}).get(i)
            inner = tuple(s * itemsize for s in strides) if strides is not None else None
            chunks.append(Chunk(entry.box(i), self.files[file], entry.payloads[i], inner))
        return chunks


def check_items(tensors: Mapping[str, LazyTensor]) -> None:
    """Reads every item header of the DCP tensors among `tensors` (those that `open` made, not yet rearranged).

    So that a truncated or altered file is found before anything is written. Two small reads a chunk, in file order.
    Raises Damaged or Refused, naming file and tensor.
    """
    stored = [t.load for t in tensors.values() if isinstance(t, Chunked) and isinstance(t.load, StoredChunks)]
    stored.sort(key=lambda chunks: tuple(chunks.entry.places[:2]))
    with Files() as files:
        for chunks in stored:
            chunks.check(files)
