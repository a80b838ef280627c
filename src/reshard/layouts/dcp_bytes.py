"""The bytes of torch DCP, made by hand: pickles and zip archives that torch reads as its own.

An item is a complete `torch.save` archive: an uncompressed zip whose `data/0` holds the raw bytes of a tensor. The
format was established from archives written by torch 2.13, and an item equals torch's own byte for byte, but for the
last record, an id that torch does not need.
`.metadata` is a pickle of torch's `Metadata`.
"""

from __future__ import annotations

import struct
import zlib
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard.errors import Refused
from reshard.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from reshard.tensors.boxes import Box

# Payloads start at multiples of this in their archive.
ALIGNMENT = 64

VERSION = "1.0.0"
# Items of a dict that a pickler writes at a time.
BATCH = 1000
T = TypeVar("T")
METADATA = "torch.distributed.checkpoint.metadata"

# Dtypes with a storage class of their own in torch; the others are saved as untyped storage with the dtype beside it.
TYPED_STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
    "C64": "ComplexFloatStorage",
}

# Memo keys of shared objects; texts are their own keys, so these are tuples.
STRIDED = ("layout",)
CONTIGUOUS = ("memory format",)


def torch_shape(name: str, dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that torch gives a tensor: its 4-bit dtype counts pairs. Refused where torch has no such dtype."""
    row = DTYPES[dtype]
    if not row.torch:
        raise Refused("dtype", name, f"torch has no dtype for {dtype}", "--drop it, or write --to hf")
    if row.bits == 4:
        if not shape or shape[-1] % 2:
            raise Refused("dtype", name, f"{dtype} {list(shape)} has an odd last axis", "--drop it, or write --to hf")
        return (*shape[:-1], shape[-1] // 2)
    return tuple(shape)


def item_size(dtype: str) -> int:
    """Bytes of one element as torch counts them."""
    return max(DTYPES[dtype].bits // 8, 1)


class _Pickle:
    """A pickle written opcode by opcode with a memo, so that its bytes depend on nothing but the calls.

    Protocol 2 is what torch.save writes, 4 what torch's DCP writes its metadata in.
    """

    def __init__(self, protocol: int = 2) -> None:
        self.protocol = protocol
        self.out = bytearray(b"\x80" + bytes([protocol]))
        self._memo: dict[Hashable, int] = {}
        self._count = 0

    def raw(self, code: bytes) -> _Pickle:
        self.out += code
        return self

    def put(self, key: Hashable = None) -> _Pickle:
        """Memoises the top of the stack, as picklers do; under `key` it can be fetched again."""
        if self.protocol == 4:
            self.out += b"\x94"
        else:
            self.out += b"q" + bytes([self._count]) if self._count < 256 else b"r" + struct.pack("<I", self._count)
        if key is not None:
            self._memo[key] = self._count
        self._count += 1
        return self

    def get(self, key: Hashable) -> bool:
        """Pushes what was memoised under `key`, if anything was."""
        number = self._memo.get(key)
        if number is None:
            return False
        self.out += b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)
        return True

    def text(self, value: str) -> _Pickle:
        if self.get(value):
            return self
        data = value.encode("utf-8", "surrogatepass")
        if self.protocol == 4 and len(data) < 256:
            return self.raw(b"\x8c" + bytes([len(data)]) + data).put(value)
        return self.raw(b"X" + struct.pack("<I", len(data)) + data).put(value)

    def name(self, module: str, name: str) -> _Pickle:
        """A class or function."""
        if self.get((module, name)):
            return self
        if self.protocol == 4:
            return self.text(module).text(name).raw(b"\x93").put((module, name))
        return self.raw(f"c{module}\n{name}\n".encode()).put((module, name))

    def number(self, value: int) -> _Pickle:
        if value < 1 << 8:
            return self.raw(b"K" + bytes([value]))
        if value < 1 << 16:
            return self.raw(b"M" + struct.pack("<H", value))
        if value < 1 << 31:
            return self.raw(b"J" + struct.pack("<i", value))
        data = value.to_bytes(value.bit_length() // 8 + 1, "little")
        return self.raw(b"\x8a" + bytes([len(data)]) + data)

    def numbers(self, values: Sequence[int]) -> _Pickle:
        """A tuple of integers."""
        if not values:
            return self.raw(b")")
        if len(values) > 3:
            self.raw(b"(")
        for value in values:
            self.number(value)
        return self.raw({1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(values), b"t")).put()

    def size(self, values: tuple[int, ...]) -> _Pickle:
        """A torch.Size, a new object each time, as torch has them."""
        return self.name("torch", "Size").numbers(values).raw(b"\x85").put().raw(b"R").put()

    def new(self, module: str, name: str) -> _Pickle:
        """An instance, and the beginning of its state; `raw(b"ub")` ends it."""
        return self.name(module, name).raw(b")\x81").put().raw(b"}").put().raw(b"(")

    def entries(self, items: Iterable[T], write: Callable[[T], object]) -> _Pickle:
        """A dict of items, each written as key and value, in batches as picklers make them."""
        self.raw(b"}").put()
        rows = list(items)
        for first in range(0, len(rows), BATCH):
            self.raw(b"(")
            for row in rows[first : first + BATCH]:
                write(row)
            self.raw(b"u")
        return self


def tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """`data.pkl` of a contiguous CPU tensor that is alone in its archive, as `torch.save` writes it."""
    storage = TYPED_STORAGES.get(dtype)
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    p = _Pickle()
    p.name("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3").raw(b"((").text("storage")
    p.name(*(("torch", storage) if storage else ("torch.storage", "UntypedStorage"))).text("0").text("cpu")
    # An untyped storage is counted in bytes.
    p.number(prod(shape) * (1 if storage else item_size(dtype))).raw(b"t").put().raw(b"Q").number(0)
    p.numbers(shape).numbers(strides[::-1]).raw(b"\x89").name("collections", "OrderedDict").raw(b")R").put()
    if not storage:
        p.name("torch", DTYPES[dtype].torch)
    return bytes(p.raw(b"t").put().raw(b"R").put().raw(b".").out)


class _Record(NamedTuple):
    name: bytes
    offset: int
    crc: int
    nbytes: int


def _flags(nbytes: int) -> int:
    """UTF-8 names; sizes and CRC after the data, where there is data."""
    return 0x0808 if nbytes else 0x0800


def _local_header(name: bytes, offset: int, nbytes: int) -> bytes:
    """A zip local header, padded so that what follows it is aligned."""
    fixed = 30 + len(name) + 4
    pad = -(offset + fixed) % ALIGNMENT
    header = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, _flags(nbytes), 0, 0, 0, 0, 0, 0, len(name), 4 + pad)
    return header + name + struct.pack("<2sH", b"FB", pad) + b"Z" * pad


def _descriptor(record: _Record) -> bytes:
    if not record.nbytes:
        return b""
    return struct.pack("<4sIII", b"PK\7\x08", record.crc, record.nbytes, record.nbytes)


def item_bytes(dtype: str, shape: tuple[int, ...], crc: int) -> tuple[bytes, bytes]:
    """What stands before and after the payload of one item."""
    size = prod(shape) * item_size(dtype)
    out = bytearray()
    records: list[_Record] = []
    tail_at = 0
    for name, data in (
        (b"archive/data.pkl", tensor_pickle(dtype, shape)),
        (b"archive/.format_version", b"1"),
        (b"archive/.storage_alignment", str(ALIGNMENT).encode()),
        (b"archive/byteorder", b"little"),
        (b"archive/data/0", None),
        (b"archive/version", b"3\n"),
    ):
        # `out` leaves the payload out: offsets after it are `size` further on.
        offset = len(out) + (size if tail_at else 0)
        out += _local_header(name, offset, size if data is None else len(data))
        if data is None:
            record = _Record(name, offset, crc, size)
            tail_at = len(out)
        else:
            record = _Record(name, offset, zlib.crc32(data), len(data))
            out += data
        out += _descriptor(record)
        records.append(record)
    directory = len(out) + size
    for name, offset, value, length in records:
        out += struct.pack(
            "<4sHHHHHHIIIHHHHHII",
            *(b"PK\1\2", 0, 0, _flags(length), 0, 0, 0, value, length, length, len(name), 0, 0, 0, 0, 0, offset),
        )
        out += name
    end = len(out) + size
    out += struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, len(records), len(records), end - directory, directory, 0)
    return bytes(out[:tail_at]), bytes(out[tail_at:])


class Placed(NamedTuple):
    """A chunk and the item that holds it."""

    box: Box
    file: str
    offset: int
    nbytes: int


def metadata_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], placed: Mapping[str, Sequence[Placed]], wrapper: tuple[str, ...]
) -> bytes:
    """`.metadata`: the pickle of torch's `Metadata`, with the key paths from which torch rebuilds nested dicts.

    tensors: (dtype, shape) by name, in the order of writing; placed: the chunks of each; wrapper: keys around the names

    No save path and no save id are recorded (torch accepts that), so that equal checkpoints are equal files.
    """
    keys = {name: ".".join((*wrapper, name)) for name in tensors}
    p = _Pickle(4)

    def tensor(name: str) -> None:
        dtype, shape = tensors[name]
        p.text(keys[name]).new(METADATA, "TensorStorageMetadata").text("properties")
        _properties(p, dtype)
        p.text("size").size(torch_shape(name, dtype, shape)).text("chunks").raw(b"]").put()
        several = len(placed[name]) > 1
        p.raw(b"(" if several else b"")
        for box, *_ in placed[name]:
            p.new(METADATA, "ChunkStorageMetadata")
            p.text("offsets").size(box.start).text("sizes").size(box.shape).raw(b"ub")
        p.raw(b"eub" if several else b"aub")

    def path(name: str) -> None:
        p.text(keys[name]).raw(b"(" if len(wrapper) > 2 else b"")
        for part in (*wrapper, name):
            p.text(part)
        p.raw((b"\x85", b"\x86", b"\x87")[len(wrapper)] if len(wrapper) < 3 else b"t").put()

    def storage(row: tuple[str, int, Placed]) -> None:
        name, index, (box, file, offset, size) = row
        p.new(METADATA, "MetadataIndex").text("fqn").text(keys[name])
        p.text("index").number(index).text("offset").size(box.start).raw(b"ub")
        p.new("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        p.text("relative_path").text(file).text("offset").number(offset).text("length").number(size).raw(b"ub")

    p.new(METADATA, "Metadata").text("state_dict_metadata").entries(tensors, tensor)
    p.text("planner_data").entries(tensors, path)
    rows = ((name, index, place) for name in tensors for index, place in enumerate(placed[name]))
    p.text("storage_data").entries(rows, storage)
    p.text("storage_meta").raw(b"N").text("version").text(VERSION).raw(b"ub.")
    return bytes(p.out)


def _properties(p: _Pickle, dtype: str) -> None:
    """TensorProperties: only the dtype says anything; the rest is what torch writes for every plain tensor."""
    p.name(METADATA, "TensorProperties").raw(b")\x81").put().raw(b"(").name("torch", DTYPES[dtype].torch)
    if not p.get(STRIDED):
        p.name("torch.serialization", "_get_layout").text("torch.strided").raw(b"\x85").put().raw(b"R").put(STRIDED)
    p.raw(b"\x89")
    if not p.get(CONTIGUOUS):
        p.name(METADATA, "_MEM_FORMAT_ENCODING").number(0).raw(b"\x85").put().raw(b"R").put(CONTIGUOUS)
    p.raw(b"\x89t").put().raw(b"b")
