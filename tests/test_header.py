"""safetensors headers against the safetensors library, and every lie that a header can tell."""

from __future__ import annotations

import json
import random
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from reshard.errors import Damaged
from reshard.tensors.dtypes import DTYPES, nbytes
from reshard.tensors.header import build_header, read_header, write_order

if TYPE_CHECKING:
    from pathlib import Path

SPELLINGS = {name: row.torch for name, row in DTYPES.items() if row.torch}


def write(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_order_and_offsets_are_the_library_s() -> None:
    """Every dtype, with names whose order differs from the dtypes': same order, same offsets as the library's file."""
    zeros = np.zeros(64, "u1")
    names = {f"{'zyxwvutsrqponmlkjihgfedcba'[i]}.{kind}": kind for i, kind in enumerate(SPELLINGS)}
    names |= {"b.2": "F32", "a.10": "F32"}
    specs = {}
    for name, kind in names.items():
        shape = [4] if kind == "F4" else [8]
        specs[name] = TensorSpec(
            dtype=SPELLINGS[kind], shape=shape, data_ptr=zeros.ctypes.data, data_len=nbytes(kind, [8])
        )
    theirs = serialize(specs)
    length = int.from_bytes(theirs[:8], "little")
    expected = json.loads(theirs[8 : 8 + length])
    ours, total = build_header({n: (names[n], (8,)) for n in write_order(names.items())}, {})
    assert json.loads(ours[8:]) == expected
    assert total == len(theirs) - 8 - length
    assert len(ours) % 4096 == 0


def test_the_library_reads_what_is_built() -> None:
    """All dtypes, scalars and empty tensors: the library accepts the file, names, shapes and bytes."""
    tensors = {f"t.{kind}": (kind, (8,)) for kind in DTYPES} | {"scalar": ("F32", ()), "empty": ("I64", (0, 4))}
    order = write_order((name, kind) for name, (kind, _) in tensors.items())
    header, total = build_header({name: tensors[name] for name in order}, {"format": "pt"})
    data = bytes(i % 251 for i in range(total))
    found = dict(deserialize(header + data))
    assert found.keys() == tensors.keys()
    at = 0
    for name in order:
        kind, shape = tensors[name]
        assert found[name]["dtype"] == kind and found[name]["shape"] == list(shape)
        size = nbytes(kind, shape)
        assert bytes(found[name]["data"]) == data[at : at + size]
        if DTYPES[kind].bits >= 8:
            assert (len(header) + at) % (DTYPES[kind].bits // 8) == 0, f"{name} is not aligned"
        at += size


ONE_BYTE = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'

LIES: dict[str, tuple[Any, bytes]] = {
    "two names on the same bytes": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}, b"\0" * 8),
    "trailing bytes": ({"a": entry("F32", [2], 0, 8)}, b"\0" * 12),
    "shape larger than the bytes": ({"a": entry("F32", [1000], 0, 8)}, b"\0" * 8),
    "data cut off": ({"a": entry("F32", [2], 0, 8)}, b"\0" * 4),
    "no dtype": ({"a": entry("", [2], 0, 8)}, b"\0" * 8),
    "same key twice": (b'{"a":' + ONE_BYTE + b',"a":' + ONE_BYTE + b"}", b"\0"),
    "hole": ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"\0" * 3),
    "hole in front": ({"a": entry("U8", [1], 1, 2)}, b"\0" * 2),
    "offsets reversed": ({"a": entry("U8", [1], 1, 0)}, b"\0"),
    "negative shape": ({"a": entry("U8", [-1, -1], 0, 1)}, b"\0"),
    "shape of booleans": ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"\0"),
    "shape of floats": ({"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}, b"\0"),
    "product overflows": ({"a": entry("U8", [1 << 61, 1 << 61], 0, 1)}, b"\0"),
    "huge number": (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', b"\0"),
    "half bytes": ({"a": entry("F4", [3], 0, 2)}, b"\0" * 2),
    "missing field": ({"a": {"dtype": "U8", "shape": [1]}}, b"\0"),
    "surplus field": ({"a": entry("U8", [1], 0, 1) | {"strides": [1]}}, b"\0"),
    "entry is a list": ({"a": [1, 2]}, b""),
    "header is a list": ([1], b""),
    "not JSON": (b"{nope", b""),
    "not UTF-8": (b'{"\xff\xfe": 1}', b""),
    "deep nesting": (b"[" * 100_000, b""),
    "metadata not strings": ({"__metadata__": {"format": 1}}, b""),
    "metadata a list": ({"__metadata__": []}, b""),
}  # fmt: skip


# What the library lets pass.
LAXER = ("same key twice", "surplus field")


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_with_the_file_named(lie: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", *LIES[lie])
    with pytest.raises(Damaged) as caught:
        read_header(str(path))
    assert str(path) in caught.value.line() and "\n" not in caught.value.line()
    if lie not in LAXER:
        with pytest.raises(SafetensorError):
            deserialize(path.read_bytes())


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"abc", "too few"),
        (struct.pack("<Q", 1 << 40) + b"{}", "claims a header"),
        (struct.pack("<Q", 90_000_000) + b"{}", "claims a header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "git-LFS"),
    ],
)
def test_things_that_are_no_safetensors_file(content: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(Damaged, match=word):
        read_header(str(path))


def test_scalar_and_empty_shapes_are_sound(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"s": entry("F32", [], 0, 4), "e": entry("F32", [0, 4], 4, 4)}, b"\0" * 4)
    header = read_header(str(path))
    assert header.entries["s"].shape == () and header.entries["e"].shape == (0, 4)
    empty = write(tmp_path / "y", {"__metadata__": {"format": "pt"}}, b"")
    assert read_header(str(empty)).metadata == {"format": "pt"}


def test_header_as_large_as_allowed_is_refused_in_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = write(tmp_path / "x", b'{"a":[' + b"1," * 20_000_000 + b"1]}", b"")
    tracemalloc.start()
    with pytest.raises(Damaged, match="more than"):
        read_header(str(path))
    assert tracemalloc.get_traced_memory()[1] < 150 << 20
    tracemalloc.stop()


def test_byte_flips_never_escape(tmp_path: Path) -> None:
    """Any single flipped byte: either the same tensors' bounds still hold, or Damaged. Never another exception."""
    tensors = {f"model.layers.{i}.w": ("BF16", (3, 2 + i)) for i in range(5)}
    header, total = build_header(tensors, {"format": "pt"})
    whole = header[: header.rindex(b"}") + 1]
    whole = struct.pack("<Q", len(whole) - 8) + whole[8:] + b"\0" * total
    pick = random.Random(0)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(whole)
        damaged[pick.randrange(len(whole) - total)] ^= 1 << pick.randrange(8)
        (tmp_path / "x").write_bytes(damaged)
        try:
            found = read_header(str(tmp_path / "x"))
            assert all(e.end <= len(whole) for e in found.entries.values())
        except Damaged:
            refused += 1
    assert refused > 700
