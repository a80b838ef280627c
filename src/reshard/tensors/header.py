"""safetensors headers: read with every claim checked, and written byte for byte reproducibly.

Format: 8 bytes little-endian header length, that many bytes of JSON (name -> dtype, shape, data_offsets; optional
`__metadata__` of strings), then the tensors' bytes without holes. Source: the safetensors format description.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import Damaged, Refused
from reshard.tensors.dtypes import DTYPES, nbytes
from reshard.tensors.lazy import Stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# The safetensors library refuses longer headers too.
MAX_HEADER = 100_000_000
# Bounds on what JSON may unfold to in memory: real headers hold about 6 commas and 1 brace a tensor.
MAX_TENSORS = 1_000_000
MAX_COMMAS = 12_000_000
LIMIT = 1 << 62
# Written data starts on a page, so that a reader can map it and a file system can share it.
DATA_ALIGNMENT = 4096

# The order of dtypes in files that the safetensors library writes (version 0.8): wider first, then by this list.
WRITE_ORDER = {
    name: rank
    for rank, name in enumerate(
        "U64 I64 F64 C64 F32 U32 I32 BF16 F16 U16 I16 F8_E5M2FNUZ F8_E4M3FNUZ F8_E8M0 F8_E4M3 F8_E5M2 I8 U8 "
        "F6_E3M2 F6_E2M3 F4 BOOL".split()
    )
}


class Entry(NamedTuple):
    """One tensor of a file: dtype, shape, and its bytes [begin, end) counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself. `data_start` and `size` in bytes."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    size: int


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as read: its pairs in order, so that a repeated key is seen."""


def read_header(path: str) -> Header:
    """The checked header of a file. Raises Damaged, naming the file, for anything that is not exactly sound."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Damaged("missing", path, f"cannot be opened ({error.strerror})") from error
    try:
        size = os.fstat(fd).st_size
        lead = os.pread(fd, 64, 0)
        if size == 0:
            raise Damaged("header", path, "is empty", "fetch or save the file again")
        if lead.startswith(b"version https://git-lfs"):
            raise Damaged("header", path, "is a git-LFS pointer, not the file itself", "run `git lfs pull`")
        if size < 8:
            raise Damaged("header", path, f"has {size} bytes, too few for a safetensors file")
        length = int.from_bytes(lead[:8], "little")
        if length > MAX_HEADER:
            raise Damaged("header", path, f"claims a header of {length} bytes (limit {MAX_HEADER})")
        if length > size - 8:
            raise Damaged("header", path, f"claims a header of {length} bytes but holds {size}")
        text = os.pread(fd, length, 8)
        if len(text) != length:
            raise Damaged("header", path, "changed while it was read")
    except OSError as error:
        raise Damaged("read", path, f"cannot be read ({error.strerror})") from error
    finally:
        os.close(fd)
    return parse_header(text, size, path)


def parse_header(text: bytes, size: int, path: str) -> Header:
    """Checks the JSON `text` of a header against a file of `size` bytes."""
    if text.count(b"{") > MAX_TENSORS or text.count(b",") > MAX_COMMAS or text.count(b"[") > MAX_TENSORS * 2:
        raise Damaged("header", path, f"describes more than {MAX_TENSORS} tensors")
    try:
        top = json.loads(text.decode("utf-8"), object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise Damaged("header", path, "the header is not valid JSON") from error
    if not isinstance(top, _Pairs):
        raise Damaged("header", path, "the header is not a JSON object")
    data_start = 8 + len(text)
    metadata: dict[str, str] = {}
    entries: dict[str, Entry] = {}
    seen_metadata = False
    surrogates = b"\\u" in text
    for name, value in top:
        if name == "__metadata__":
            if seen_metadata or not isinstance(value, _Pairs) or not all(isinstance(v, str) for _, v in value):
                raise Damaged("header", path, "__metadata__ is not one object of strings")
            seen_metadata = True
            metadata = dict(value)
            continue
        if surrogates and not _is_text(name):
            raise Damaged("header", path, f"{name!r} is no text that can be written again")
        if name in entries:
            raise Damaged("header", path, f"lists the tensor {name!r} twice")
        entries[name] = _entry(name, value, data_start, path)
    _check_layout(entries, data_start, size, path)
    return Header(entries, metadata, data_start, size)


def _is_text(name: str) -> bool:
    """JSON may spell half of a surrogate pair, which is no character."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _entry(name: str, value: object, data_start: int, path: str) -> Entry:
    # Run once a tensor, 50,000 times a large model: plain steps, no generators.
    dtype: Any
    shape: Any
    offsets: Any
    try:
        fields = dict(value) if type(value) is _Pairs and len(value) == 3 else {}
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    except KeyError:
        raise Damaged("header", path, f"the entry of {name!r} is not {{dtype, shape, data_offsets}}") from None
    row = DTYPES.get(dtype) if type(dtype) is str else None
    if row is None:
        raise Damaged("header", path, f"{name!r} has the unknown dtype {str(dtype)[:40]!r}")
    if type(shape) is not list or len(shape) > 64:
        raise Damaged("header", path, f"{name!r} has an invalid shape")
    bits = row.bits
    for size in shape:
        if type(size) is not int or not 0 <= size < LIMIT:
            raise Damaged("header", path, f"{name!r} has an invalid shape")
        bits *= size
    if type(offsets) is not list or len(offsets) != 2:
        raise Damaged("header", path, f"{name!r} has invalid data_offsets")
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin < LIMIT or not 0 <= end < LIMIT:
        raise Damaged("header", path, f"{name!r} has invalid data_offsets")
    if bits % 8:
        raise Damaged("header", path, f"{name!r}: shape {shape} of {dtype} does not fill whole bytes")
    if end - begin != bits // 8:
        raise Damaged("header", path, f"{name!r} is {dtype} {shape}, {bits // 8} bytes, but claims {end - begin}")
    return Entry(dtype, tuple(shape), data_start + begin, data_start + end)


def _check_layout(entries: Mapping[str, Entry], data_start: int, size: int, path: str) -> None:
    at = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < at:
            raise Damaged("header", path, f"{name!r} overlaps another tensor")
        if entry.begin > at:
            raise Damaged("header", path, f"{entry.begin - at} bytes before {name!r} belong to no tensor")
        at = entry.end
    if at > size:
        raise Damaged("truncated", path, f"holds {size} bytes where its header needs {at}", "fetch or save it again")
    if at < size:
        raise Damaged("header", path, f"has {size - at} bytes after the last tensor")


def stored_tensors(path: str, header: Header) -> dict[str, Stored]:
    """Lazy tensors of one file, in the file's order."""
    return {name: Stored(e.dtype, e.shape, path, e.begin) for name, e in header.entries.items()}


def write_order(tensors: Iterable[tuple[str, str]]) -> list[str]:
    """Names of (name, dtype) pairs in the order in which a file holds them: wider dtypes first, then name."""
    return [name for name, _ in sorted(tensors, key=lambda item: (WRITE_ORDER[item[1]], item[0]))]


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """(length prefix + JSON, padded so that data starts on a page; total data bytes) of name -> (dtype, shape), in the
    given order. With the order of `write_order` every tensor is aligned to its dtype."""
    top: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = nbytes(dtype, shape)
        top[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(top, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % DATA_ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise Refused("header", "", f"one file cannot describe {len(tensors)} tensors", "lower --max-shard-size")
    return len(text).to_bytes(8, "little") + text, at
