"""One item of a `.distcp` file: a `torch.save` zip archive that holds one tensor.

The raw bytes of the tensor are one uncompressed member. Where it lies is taken from the zip's central directory at
the end of the item and confirmed by the member's local header; what it is (dtype, shape, strides) is read from the
member `data.pkl` by the same restricted machine that reads metadata. Two small reads an item; nothing is decompressed
or called.

Sources: the zip format (PKWARE APPNOTE 6.3, sections 4.3 and 4.5.3), and archives written by torch.
"""

from __future__ import annotations

import struct
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import Damaged, Refused
from reshard.layouts.dcp.light import ITEM_GLOBALS, Global, Instance, resolver
from reshard.layouts.dcp.pickle_vm import Machine
from reshard.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from reshard.tensors.read import Files

HEAD = 4096  # holds data.pkl and the local headers before the payload
TAIL = 4096  # holds the central directory
MAX_PICKLE = 1 << 20
MAX_DIRECTORY = 1 << 20
LIMIT = 1 << 62

END = struct.Struct("<4sHHHHIIH")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
LOCAL = struct.Struct("<4sHHHHHIIIHH")


class Layout(NamedTuple):
    """What data.pkl says: dtype (safetensors' name), first element, shape and element strides, bytes of its storage."""

    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int


class Item(NamedTuple):
    """A stored tensor. payload: position of its first element in the file; strides: in elements, None if C-ordered.

    begin, nbytes, crc: where its storage lies in the file, and the CRC-32 that the archive records of it
    """

    dtype: str
    shape: tuple[int, ...]
    payload: int
    strides: tuple[int, ...] | None
    begin: int
    nbytes: int
    crc: int


class _Broken(Exception):
    """What is wrong with an item, in one clause."""


class Reader:
    """The bytes of one item, of which its head and tail are read at once."""

    def __init__(self, files: Files, path: str, begin: int, length: int) -> None:
        self.files = files
        self.path = path
        self.begin = begin
        self.length = length
        if length <= HEAD + TAIL:
            self.head = self.tail = self._read(0, length)
            self.tail_at = 0
        else:
            self.tail_at = length - TAIL
            self.tail = self._read(self.tail_at, TAIL)
            self.head = self._read(0, HEAD)

    def _read(self, at: int, count: int) -> bytes:
        out = bytearray(count)
        if count:
            self.files.read_into(self.path, self.begin + at, memoryview(out))
        return bytes(out)

    def read(self, at: int, count: int) -> bytes:
        if at < 0 or count < 0 or at + count > self.length:
            raise _Broken("a part of its archive lies outside it")
        if at + count <= len(self.head):
            return self.head[at : at + count]
        if at >= self.tail_at:
            return self.tail[at - self.tail_at : at - self.tail_at + count]
        return self._read(at, count)


class Member(NamedTuple):
    name: bytes
    header: int  # position of its local header
    size: int
    crc: int


def _members(item: Reader) -> tuple[list[Member], int]:
    """(members, position of the central directory)."""
    end = item.length - END.size
    mark, disk, first_disk, here, count, size, start, comment = END.unpack(item.read(end, END.size))
    if mark != b"PK\5\6" or comment:
        raise _Broken("its archive does not end where its extent does")
    locator = item.read(end - LOCATOR.size, LOCATOR.size) if end >= LOCATOR.size + END64.size else b""
    if locator[:4] == b"PK\6\7":
        _, _, at, _ = LOCATOR.unpack(locator)
        mark, _, _, _, disk, first_disk, here, count, size, start = END64.unpack(item.read(at, END64.size))
        if mark != b"PK\6\6" or at + END64.size > end:
            raise _Broken("its archive has a broken 64-bit end record")
        end = at
    if disk or first_disk or here != count or size > MAX_DIRECTORY or start + size != end:
        raise _Broken("its archive has a broken end record")
    data = item.read(start, size)
    members = []
    at = 0
    for _ in range(count):
        fields = CENTRAL.unpack_from(data, at)
        mark, flags, method, packed, plain = fields[0], fields[3], fields[4], fields[8], fields[9]
        name_size, extra_size, comment_size, header = fields[10], fields[11], fields[12], fields[16]
        name = data[at + CENTRAL.size : at + CENTRAL.size + name_size]
        extra = data[at + CENTRAL.size + name_size : at + CENTRAL.size + name_size + extra_size]
        at += CENTRAL.size + name_size + extra_size + comment_size
        if mark != b"PK\1\2" or at > size:
            raise _Broken("its archive has a broken directory")
        plain, packed, header = _wide(extra, plain, packed, header)
        if method or flags & 1 or packed != plain:
            raise _Broken("its archive is compressed or encrypted, which torch never writes")
        if header + LOCAL.size + name_size + plain > start:
            raise _Broken("a member of its archive lies outside it")
        members.append(Member(name, header, plain, fields[7]))
    if at != size:
        raise _Broken("its archive has a broken directory")
    return members, start


def _wide(extra: bytes, plain: int, packed: int, header: int) -> tuple[int, int, int]:
    """Sizes and position, from the zip64 field where the 32-bit ones are full."""
    values = [plain, packed, header]
    if 0xFFFFFFFF not in values:
        return plain, packed, header
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = at + 4
            for i, value in enumerate(values):
                if value == 0xFFFFFFFF:
                    if field + 8 > at + 4 + size:
                        break
                    values[i] = struct.unpack_from("<Q", extra, field)[0]
                    field += 8
            return values[0], values[1], values[2]
        at += 4 + size
    raise _Broken("its archive has a broken directory")


def _data(item: Reader, member: Member, directory: int) -> int:
    """Where a member's bytes begin in the item, by its local header, which must agree with the directory."""
    fields = LOCAL.unpack(item.read(member.header, LOCAL.size))
    name_size, extra_size = fields[9], fields[10]
    name = item.read(member.header + LOCAL.size, name_size)
    if fields[0] != b"PK\3\4" or fields[3] or fields[2] & 1 or name != member.name:
        raise _Broken("a member of its archive is not where the directory says")
    streamed = fields[2] & 8  # sizes come after the data
    if not streamed and fields[8] not in (member.size, 0xFFFFFFFF):
        raise _Broken("a member of its archive has another size than the directory says")
    begin: int = member.header + LOCAL.size + name_size + extra_size
    if begin + member.size > directory:
        raise _Broken("a member of its archive lies outside it")
    # What follows is a data descriptor, the next member or the directory: so the lengths in the local header are right.
    if item.read(begin + member.size, 4) not in (b"PK\7\x08", b"PK\3\4", b"PK\1\2"):
        raise _Broken("a member of its archive does not end where the directory says")
    return begin


class _ItemMachine(Machine):
    """data.pkl: the tensor, its storage as a persistent id."""

    storages = 0

    def persistent(self, key: Any) -> Any:
        if type(key) is not tuple or len(key) not in (5, 6) or key[0] != "storage":
            raise ValueError("a persistent id of another kind")
        kind, name, numel = key[1], key[2], key[4]
        if type(kind) is not Global or kind.kind != "storage" or type(name) is not str or type(numel) is not int:
            raise ValueError("a storage that is none")
        self.storages += 1
        return Instance("storage", (kind.dtype, name, numel))


def _layout(data: bytes, where: str) -> tuple[Layout, str]:
    """What a data.pkl says, and the key of the storage."""
    machine = _ItemMachine(where, resolver(ITEM_GLOBALS, where), data=data)
    root = machine.run()
    if type(root) is not Instance or root.kind not in ("tensor v2", "tensor v3"):
        raise Damaged("item", where, "does not hold a tensor")
    args = root.state
    v3 = root.kind == "tensor v3"
    if len(args) < 6 + v3 or machine.storages != 1:
        raise _Broken("its pickle does not describe one tensor")
    if len(args) > 6 + v3 and args[6 + v3]:
        raise Refused("item", where, "is a conjugate, negated or otherwise special view", "save it as a plain tensor")
    storage, offset, shape, strides = args[:4]
    if (
        type(storage) is not Instance
        or storage.kind != "storage"
        or type(shape) is not tuple
        or type(strides) is not tuple
    ):
        raise _Broken("its pickle does not describe one tensor")
    kind, key, numel = storage.state
    if v3:
        dtype = args[6].dtype if type(args[6]) is Global and args[6].kind == "dtype" else None
        if kind or dtype is None:
            raise _Broken("its pickle does not describe one tensor")
    else:
        dtype = kind
    if not dtype:
        raise Refused("dtype", where, "has a dtype that safetensors cannot hold")
    itemsize = max(DTYPES[dtype].bits // 8, 1)
    nbytes = numel if v3 else numel * itemsize
    numbers = (offset, numel, *shape, *strides)
    if len(shape) != len(strides) or any(type(n) is not int or not 0 <= n < LIMIT for n in numbers):
        raise _Broken("its pickle has impossible sizes")
    if prod(shape):
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if (last + 1) * itemsize > nbytes:
            raise _Broken("its elements lie outside its storage")
    return Layout(dtype, offset, shape, strides, nbytes), key


_known: dict[bytes, tuple[Layout, str]] = {}
MAX_KNOWN = 4096


def _described(data: bytes, where: str) -> tuple[Layout, str]:
    """Items of one dtype and shape have equal pickles; each is run once."""
    found = _known.get(data)
    if found is None:
        found = _layout(data, where)
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[data] = found
    return found


def c_ordered(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether element strides are those of a C-ordered tensor; axes of length 1 and empty tensors have no say."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return 0 in shape
        step *= size
    return True


def read_item(files: Files, path: str, begin: int, length: int, tensor: str) -> Item:
    """The tensor at [begin, begin + length) of a `.distcp` file.

    Raises Damaged (a broken archive) or Refused (big-endian, a special kind of tensor), naming file and tensor.
    """
    where = f"{path} ({tensor})"
    try:
        item = Reader(files, path, begin, length)
        members, directory = _members(item)
        by_name = {member.name: member for member in members}
        if len(by_name) != len(members):
            raise _Broken("its archive holds a member twice")
        pickles = [name for name in by_name if name.count(b"/") == 1 and name.endswith(b"/data.pkl")]
        if len(pickles) != 1:
            raise _Broken("its archive holds no data.pkl")
        prefix = pickles[0][: -len(b"data.pkl")]
        payloads = [member for member in members if member.name.startswith(prefix + b"data/")]
        if len(payloads) != 1:
            raise _Broken(f"its archive holds {len(payloads)} storages where a tensor has one")
        order = by_name.get(prefix + b"byteorder")
        if order is not None and item.read(_data(item, order, directory), order.size) != b"little":
            raise Refused("byteorder", where, "is stored big-endian", "save it on a little-endian machine")
        pickle = by_name[pickles[0]]
        if pickle.size > MAX_PICKLE:
            raise _Broken("its pickle is too large for one tensor")
        layout, key = _described(item.read(_data(item, pickle, directory), pickle.size), where)
        payload = payloads[0]
        if payload.name != prefix + b"data/" + key.encode() or payload.size != layout.storage:
            raise _Broken("its storage is not the one that its pickle describes")
        data = begin + _data(item, payload, directory)
        start = data + layout.offset * max(DTYPES[layout.dtype].bits // 8, 1)
    except _Broken as error:
        raise Damaged("item", where, str(error), "the file was altered or cut short; use another copy") from None
    except (struct.error, ValueError, OverflowError) as error:
        raise Damaged("item", where, "is not a sound archive", "the file was altered; use another copy") from error
    strides = None if c_ordered(layout.shape, layout.strides) else layout.strides
    return Item(layout.dtype, layout.shape, start, strides, data, payload.size, payload.crc)
