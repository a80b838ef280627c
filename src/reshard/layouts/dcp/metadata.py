"""Reading `.metadata`: which tensors there are, how they are cut, and where each chunk lies. No torch, nothing called.

The pickle is a `Metadata` object of three large dicts: state_dict_metadata (key -> tensor with its list of chunks),
planner_data (key -> nested path) and storage_data (MetadataIndex -> _StorageInfo). They are never built: their
entries go into compact arrays as they are read, and of keys that are not kept nothing stays. Which keys are kept
depends on planner_data, which comes after the chunks, so a large file is read twice: `scan` lists keys, `load`
collects chunks."""

from __future__ import annotations

import os
import stat
from array import array
from bisect import bisect_left
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.errors import Damaged, Refused
from reshard.layouts.dcp.ahead import LookAhead
from reshard.layouts.dcp.entries import ChunkList, DcpMetadata, Sink, TensorEntry
from reshard.layouts.dcp.light import MEGATRON, METADATA_GLOBALS, Global, Instance, printable, resolver
from reshard.layouts.dcp.pickle_vm import Machine, Unrecorded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# Files up to this size are read once, with the chunks of all keys.
SMALL = 64 << 20
MOST = 1 << 62
SINKS = ("state_dict_metadata", "planner_data", "storage_data")


class _Enough(Exception):
    """All that this pass is for has been read."""


class MetadataMachine(LookAhead, Machine):
    """The machine with sinks for the large dicts.

    keep:    the keys whose chunks are collected; None for all
    listing: stop before storage_data
    """

    def __init__(
        self,
        file: str,
        fd: int,
        size: int,
        keep: Collection[str] | None,
        listing: bool = False,
        everything: bool = False,
    ) -> None:
        resolve = resolver(METADATA_GLOBALS, file)
        super().__init__(file, resolve, fd=fd, size=size, everything=everything, sweep=size > SMALL and not everything)
        self.keep = keep
        self.listing = listing
        self.with_paths = listing or keep is None
        self.meta = DcpMetadata()
        self.sinks: dict[str, Sink] = {}
        self.kept: dict[str, TensorEntry] = {}
        self.shapes: set[tuple[int, ...]] = set()  # found possible
        self.file_numbers: dict[str, int] = {}
        self._places: dict[int, dict[tuple[int, ...], int]] = {}
        # Keys whose texts were passed over in storage_data: memo numbers, and which kept entry each is.
        code = "I" if size < 1 << 32 else "Q"
        self.kept_order: list[TensorEntry] = []
        self.numbers: dict[bytes, int] = {}
        self.kept_numbers = array(code)
        self.kept_entries = array("i")
        self.dropped_numbers = array(code)

    def wanted(self, key: Any) -> bool:
        return self.keep is None or key in self.keep

    # Sinks ------------------------------------------------------------------------------------------------------

    def new_dict(self) -> Any:
        stack, outer = self.stack, self.outer
        if len(outer) != 1 or not stack or type(stack[-1]) is not str or stack[-1] not in SINKS:
            return {}
        root = outer[0][0]
        if type(root) is not Instance or root.kind != "metadata":
            return {}
        name = stack[-1]
        if name in self.sinks:
            raise ValueError(f"{name} twice")
        if name == "storage_data":
            if self.listing and "planner_data" in stack and "state_dict_metadata" in self.sinks:
                raise _Enough
            self._index_kept()
        elif name == "planner_data":
            self.meta.paths = {}
        sink = self.sinks[name] = Sink(name)
        if name == "planner_data":
            self.watched = sink
        return sink

    def _index_kept(self) -> None:
        self.kept = {key: entry for key, entry in self.meta.tensors.items() if self.wanted(key)}
        self.kept_order = list(self.kept.values())
        self.numbers = {key.encode(): i for i, key in enumerate(self.kept)}

    def new_list(self) -> Any:
        stack = self.stack
        if not stack or stack[-1] != "chunks":
            return []
        # The key stands below the tensor and its state, in the stack below the mark.
        below = self.outer[-1] if self.outer else []
        in_place = len(below) >= 3 and type(below[-2]) is Instance and type(below[-3]) is str
        return ChunkList(self.wanted(below[-3]) if in_place else True)

    def add_elements(self, target: Any, items: list[Any]) -> None:
        if type(target) is not ChunkList:
            super().add_elements(target, items)
            return
        for item in items:
            if type(item) is not Instance or item.kind != "chunk":
                raise ValueError("a chunk that is none")
            target.add(item.state["offsets"], item.state["sizes"])
        self.forget()

    def add_items(self, target: Any, items: list[Any]) -> None:
        if type(target) is not Sink:
            super().add_items(target, items)
            return
        if len(items) % 2:
            raise ValueError("a key without a value")
        add: Callable[[Any, Any], None] = {
            "state_dict_metadata": self._add_state,
            "planner_data": self._add_path,
            "storage_data": self._add_storage,
        }[target.name]
        for key, value in zip(items[::2], items[1::2], strict=True):
            add(key, value)
        self.forget()

    def _add_state(self, key: Any, value: Any) -> None:
        if type(key) is not str or type(value) is not Instance:
            raise ValueError("a key or item of the wrong kind")
        if value.kind == "bytes":
            self.meta.bytes_items.append(key)
            return
        if value.kind != "tensor":
            raise ValueError("an item of the wrong kind")
        state = value.state
        properties = state["properties"]
        if type(properties) is not Instance or properties.kind != "properties" or len(properties.state) != 5:
            raise ValueError("a tensor without properties")
        if type(state["chunks"]) is not ChunkList:
            raise ValueError("a tensor without chunks")
        self.add_tensor(key, properties.state[0], state["size"], state["chunks"])

    def add_tensor(self, key: str, dtype: Any, shape: Any, chunks: ChunkList) -> None:
        if type(dtype) is not Global or dtype.dtype is None:
            raise ValueError("a tensor without a dtype")
        if type(shape) is not tuple or any(type(n) is not int for n in shape) or chunks.axes not in (-1, len(shape)):
            raise ValueError("chunks of another rank than their tensor")
        if shape not in self.shapes:
            if any(n < 0 for n in shape) or 8 * prod(max(n, 1) for n in shape) > MOST:
                raise ValueError("a tensor of an impossible size")
            self.shapes.add(shape)
        if key in self.meta.tensors:
            raise Damaged("duplicate", self.where, f"lists {printable(key)!r} twice")
        data = chunks.data if chunks.data is not None and self.wanted(key) else array("q")
        self.meta.tensors[key] = TensorEntry(dtype.dtype, shape, data)

    def _add_path(self, key: Any, value: Any) -> None:
        if type(key) is not str or type(value) is not tuple or any(type(part) not in (str, int) for part in value):
            raise ValueError("a path that is none")
        if self.meta.paths is not None and self.with_paths:
            self.meta.paths[key] = value

    def _add_storage(self, key: Any, value: Any) -> None:
        if (
            type(key) is not Instance
            or key.kind != "index"
            or type(value) is not Instance
            or value.kind != "storage info"
        ):
            raise ValueError("a storage entry of the wrong kind")
        index, info = key.state, value.state
        name, file = index["fqn"], info["relative_path"]
        if type(name) is not str or type(file) is not str:
            raise ValueError("a storage entry without names")
        offset, length = info["offset"], info["length"]
        if type(offset) is not int or type(length) is not int:
            raise ValueError("an extent that is none")
        entry = self.kept.get(name)
        number = self.file_number(file)
        self.extent(number, offset, length)
        if entry is None:
            return
        if info.get("transform_descriptors"):
            raise Refused(
                "transform", name, f"is stored through {printable(str(info['transform_descriptors'][0]))}",
                "save it without stream transforms; this version reads plain items only",
            )  # fmt: skip
        self.place(entry, index.get("index"), index.get("offset"), number, offset, length)

    # Placing ----------------------------------------------------------------------------------------------------

    def file_number(self, path: str) -> int:
        number = self.file_numbers.get(path)
        if number is None:
            number = self.file_numbers[path] = len(self.file_numbers)
            self.meta.files.append(path)
            self.meta.extents.append(0)
        return number

    def extent(self, number: int, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > MOST:
            raise ValueError("an extent that is none")
        self.meta.extents[number] = max(self.meta.extents[number], offset + length)

    def place(self, entry: TensorEntry, hint: Any, start: Any, number: int, offset: int, length: int) -> None:
        """Notes where the chunk at `start` lies. The hint, when right, saves a search."""
        axes = len(entry.shape)
        places = entry.places
        at = 2 * axes * hint if type(hint) is int and 0 <= 3 * hint < len(places) else -1
        i = hint
        if at < 0 or tuple(entry.boxes[at : at + axes]) != start or places[3 * i] >= 0:
            i = self._search(entry, start)
        if i is None or places[3 * i] >= 0:
            name = next(key for key, value in self.meta.tensors.items() if value is entry)
            what = "a chunk that it does not have" if i is None else "one chunk twice"
            raise Damaged("coverage", self.where, f"stores {what}: {printable(name)} at {str(start)[:80]}")
        i *= 3
        places[i] = number
        places[i + 1] = offset
        places[i + 2] = length

    def _search(self, entry: TensorEntry, start: Any) -> int | None:
        places = self._places.get(id(entry))
        if places is None:
            places = self._places[id(entry)] = {}
            for i in range(len(entry)):
                places.setdefault(entry.start(i), i)
                if 0 not in entry.sizes(i):
                    places[entry.start(i)] = i
        return places.get(start) if type(start) is tuple else None

    def recall_key(self, number: int) -> TensorEntry | None:
        """The kept entry whose key has this memo number, or None for a key that is left out."""
        value = self.memo.get(number) or self.young.get(number)
        if value is not None:
            if type(value) is not str:
                raise ValueError("a key that is no text")
            return self.kept.get(value)
        for numbers in (self.kept_numbers, self.dropped_numbers):
            i = bisect_left(numbers, number)
            if i < len(numbers) and numbers[i] == number:
                return self.kept_order[self.kept_entries[i]] if numbers is self.kept_numbers else None
        raise Unrecorded

    def result(self) -> DcpMetadata:
        try:
            root = self.run()
        except _Enough:
            return self.meta
        if type(root) is not Instance or root.kind != "metadata" or type(root.state) is not dict:
            raise Damaged("pickle", self.where, "does not hold the metadata of a checkpoint")
        if "mcore_data" in root.state:
            raise Refused("layout", self.where, *MEGATRON)
        for name in ("state_dict_metadata", "storage_data"):
            if name not in self.sinks or root.state.get(name) is not self.sinks[name]:
                raise Damaged(
                    "pickle", self.where, f"has no {name}", "the save did not complete, or the file was altered"
                )
        if "planner_data" not in root.state or root.state["planner_data"] is not self.sinks.get("planner_data"):
            raise Damaged("pickle", self.where, "has planner data of an unknown form")
        return self.meta


def _read(file: str, keep: Collection[str] | None, listing: bool) -> tuple[DcpMetadata, int]:
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hang
    except OSError as error:
        raise Damaged("missing", file, f"cannot be opened ({error.strerror})") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("missing", file, "is not a regular file")
        size = status.st_size
        if keep is None and size > SMALL:
            keep, listing = (), True
        try:
            return MetadataMachine(file, fd, size, keep, listing).result(), size
        except Unrecorded:
            # Objects are shared in a way that torch's own files do not show.
            return MetadataMachine(file, fd, size, keep, listing, everything=True).result(), size
    except OSError as error:
        raise Damaged("read", file, f"cannot be read ({error.strerror})") from error
    finally:
        os.close(fd)


def scan(file: str) -> tuple[DcpMetadata, bool]:
    """What is in a `.metadata` file, and whether that includes all chunks (else `load` gets those of chosen keys).

    Raises Refused (a name off the allow list, Megatron) or Damaged (not a sound pickle, no metadata).
    """
    meta, size = _read(file, None, False)
    return meta, size <= SMALL


def load(file: str, keep: Collection[str]) -> DcpMetadata:
    """The metadata with the chunks of the keys in `keep`; paths are not collected again."""
    return _read(file, frozenset(keep), False)[0]
