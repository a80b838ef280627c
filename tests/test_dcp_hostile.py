"""Hostile and damaged DCP directories: one clear error, nothing run, bounded memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from reshard.errors import Damaged, Refused, ReshardError
from reshard.layouts import dcp as layout
from reshard.layouts.dcp.light import METADATA_GLOBALS, Instance, resolver
from reshard.layouts.dcp.metadata import scan
from reshard.layouts.dcp.pickle_vm import Machine
from reshard.layouts.options import OpenOptions


def read(path: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """All that a reader learns: name -> dtype, shape, bytes."""
    checkpoint = layout.open([path], OpenOptions())
    layout.check_items(checkpoint.tensors)
    return {name: (t.dtype, t.shape, t.tobytes().hex()) for name, t in checkpoint.items()}


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    path = tmp_path_factory.mktemp("dcp") / "sound"
    model = {
        "layers.0.weight": torch.arange(24, dtype=torch.float32).reshape(6, 4),
        "layers.1.weight": torch.arange(24, 48).reshape(6, 4),
        "layers.1.bias": torch.arange(100, 104).bfloat16(),
        "layers.1.scale": torch.tensor(0.5),
        "layers.1.empty": torch.empty(0, 3),
        "layers.1.float8": torch.ones(3, 2).to(torch.float8_e5m2),
    }
    dcp.save({"app": {"model": model, "optimizers": {"state": {"step": 3, "m": torch.ones(4)}}}}, checkpoint_id=path)
    # One tensor in two chunks, as two ranks would have it.
    meta = pickle.loads((path / ".metadata").read_bytes())
    with (path / "__0_0.distcp").open("ab") as out:
        key = "app.model.layers.0.weight"
        meta.state_dict_metadata[key].chunks.clear()
        for row in (0, 4):
            blob = io.BytesIO()
            part = model["layers.0.weight"][row : row + 4].clone()
            torch.save(part, blob)
            box = ChunkStorageMetadata(torch.Size([row, 0]), part.size())
            meta.state_dict_metadata[key].chunks.append(box)
            info = type(meta.storage_data[MetadataIndex(key, torch.Size([0, 0]))])(
                "__0_0.distcp", out.tell(), len(blob.getvalue())
            )
            meta.storage_data[MetadataIndex(key, box.offsets, row // 4)] = info
            out.write(blob.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(meta))
    assert read(path)["layers.0.weight"][2] == model["layers.0.weight"].numpy().tobytes().hex()
    return path


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    path = tmp_path / "copy"
    shutil.copytree(sound, path)
    return path


def alter(path: Path, change) -> None:
    """Changes the metadata object in place."""
    meta = pickle.loads((path / ".metadata").read_bytes())
    change(meta)
    (path / ".metadata").write_bytes(pickle.dumps(meta))


def entry(meta, key: str, row: int = 0):
    return next(
        v
        for k, v in meta.storage_data.items()
        if k.fqn == f"app.model.{key}" and tuple(k.offset or ())[:1] in ((row,), ())
    )


# The pickle of .metadata ------------------------------------------------------------------------------------------


class Touch:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_nothing_in_metadata_is_run(copy: Path, tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    (copy / ".metadata").write_bytes(pickle.dumps(Touch(marker), protocol=protocol))
    with pytest.raises(ReshardError, match=r"\.metadata") as caught:
        read(copy)
    assert caught.value.exit_status == 3 and "posix.system" in str(caught.value)
    assert not marker.exists()


def test_nothing_inside_real_metadata_is_run(copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    alter(copy, lambda meta: setattr(meta, "storage_meta", Touch(marker)))
    with pytest.raises(Refused, match=r"names posix\.system"):
        read(copy)
    assert not marker.exists()


def payload(path: Path, key: str, row: int = 0) -> tuple[int, int]:
    info = entry(pickle.loads((path / ".metadata").read_bytes()), key, row)
    return info.offset, info.length


def replace_item(path: Path, key: str, blob: bytes) -> None:
    """Puts another item at the end of the file and points the metadata to it."""
    with (path / "__0_0.distcp").open("ab") as out:
        at = out.tell()
        out.write(blob)

    def change(meta) -> None:
        info = entry(meta, key)
        info.offset, info.length = at, len(blob)

    alter(path, change)


def archive(data: bytes, payload: bytes = b"\0" * 8, byteorder: bytes = b"little", **extra: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", extra.pop("compression", zipfile.ZIP_STORED)) as z:
        z.writestr("archive/data.pkl", data)
        z.writestr("archive/byteorder", byteorder)
        z.writestr("archive/data/0", payload)
        for name, value in extra.items():
            z.writestr(f"archive/{name.replace('__', '/')}", value)
    return out.getvalue()


def bias_pickle(
    shape: tuple[int, ...] = (4,),
    stride: tuple[int, ...] = (1,),
    offset: int = 0,
    numel: int = 4,
    name: str = "BFloat16Storage",
) -> bytes:
    """data.pkl of the bias, by hand (protocol 2)."""

    def numbers(values) -> bytes:
        return b"(" + b"".join(b"J" + struct.pack("<i", v) for v in values) + b"t"

    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\n" + name.encode()
        + b"\nX\x01\0\0\x000X\x03\0\0\0cpu"
        + b"J" + struct.pack("<i", numel) + b"tQJ" + struct.pack("<i", offset) + numbers(shape) + numbers(stride)
        + b"\x89ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip


def test_hand_made_item_is_read(copy: Path) -> None:
    replace_item(copy, "layers.1.bias", archive(bias_pickle(), bytes(range(8))))
    assert read(copy)["layers.1.bias"] == ("BF16", (4,), bytes(range(8)).hex())
    # Four elements from the second on, backwards is impossible in torch; every second is not.
    replace_item(copy, "layers.1.bias", archive(bias_pickle(stride=(2,), offset=1, numel=8), bytes(range(16))))
    assert read(copy)["layers.1.bias"] == ("BF16", (4,), "020306070a0b0e0f")


def test_nothing_in_an_item_is_run(copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    replace_item(copy, "layers.1.bias", archive(pickle.dumps(Touch(marker))))
    with pytest.raises(Refused, match=r"__0_0\.distcp \(layers\.1\.bias\): names posix\.system"):
        read(copy)
    assert not marker.exists()


ITEMS = {
    "big-endian": (lambda: archive(bias_pickle(), byteorder=b"big"), Refused, "big-endian"),
    "compressed": (lambda: archive(bias_pickle(), bytes(800), compression=zipfile.ZIP_DEFLATED), Damaged, "compressed"),
    "two storages": (lambda: archive(bias_pickle(), data__1=b"12345678"), Damaged, "2 storages"),
    "shape": (
        lambda: archive(bias_pickle((2,)), bytes(8)),
        Damaged,
        r"holds BF16 \[2\] where the metadata says BF16 \[4\]",
    ),
    "dtype": (lambda: archive(bias_pickle(name="HalfStorage")), Damaged, "holds F16"),
    "outside its storage": (lambda: archive(bias_pickle(offset=1)), Damaged, "outside its storage"),
    "negative": (lambda: archive(bias_pickle(stride=(-1,), offset=3)), Damaged, "impossible sizes"),
    "short storage": (
        lambda: archive(bias_pickle(numel=400), bytes(8)),
        Damaged,
        "not the one that its pickle describes",
    ),
    "no archive": (lambda: b"x" * 1000, Damaged, "does not end where"),
    "nothing": (lambda: b"", Damaged, "outside it"),
    "trailing": (lambda: archive(bias_pickle()) + b"\0", Damaged, "does not end where"),
    "no pickle": (lambda: archive(b""), Damaged, "is empty"),
    "not a tensor": (lambda: archive(pickle.dumps([1, 2])), Damaged, "does not hold a tensor"),
}


@pytest.mark.parametrize("case", ITEMS)
def test_bad_items(copy: Path, case: str) -> None:
    make, error, text = ITEMS[case]
    replace_item(copy, "layers.1.bias", make())
    layout.open([copy], OpenOptions())
    with pytest.raises(error, match=text) as caught:
        read(copy)
    assert "layers.1.bias" in str(caught.value) and "__0_0.distcp" in str(caught.value)


# What the metadata says --------------------------------------------------------------------------------------------


def _drop_chunk(meta) -> None:
    meta.state_dict_metadata["app.model.layers.0.weight"].chunks.pop()


def _drop_storage(meta) -> None:
    meta.storage_data.pop(
        next(k for k in meta.storage_data if k.fqn == "app.model.layers.0.weight" and k.offset[0] == 4)
    )


def _overlap(meta) -> None:
    chunk = meta.state_dict_metadata["app.model.layers.0.weight"].chunks[0]
    chunk.sizes = type(chunk.sizes)([5, 4])


def _set(key: str, field: str, value):
    return lambda meta: setattr(entry(meta, key), field, value)


BAD = {
    "missing chunk": (_drop_chunk, Damaged, "layers.0.weight"),
    "missing item": (_drop_storage, Damaged, r"layers\.0\.weight.*stored nowhere"),
    "overlapping chunk": (_overlap, Damaged, "layers.0.weight"),
    "beyond the file": (
        _set("layers.1.bias", "length", 1 << 40),
        Damaged,
        r"__0_0\.distcp.*bytes where the metadata needs",
    ),
    "negative offset": (_set("layers.1.bias", "offset", -1), Damaged, "metadata"),
    "parent": (_set("layers.1.bias", "relative_path", "../copy/__0_0.distcp"), Refused, "no path inside"),
    "absolute": (_set("layers.1.bias", "relative_path", "/etc/passwd"), Refused, "no path inside"),
    "nested parent": (_set("layers.1.bias", "relative_path", "a/../../x"), Refused, "no path inside"),
    "absent": (_set("layers.1.bias", "relative_path", "__9_0.distcp"), Damaged, r"__9_0\.distcp.*absent"),
    "transform": (
        _set("layers.1.bias", "transform_descriptors", ["stream.zstd/1"]),
        Refused,
        r"stored through stream\.zstd/1",
    ),
    "no storage": (lambda meta: setattr(meta, "storage_data", None), Damaged, "storage_data"),
    "no path": (lambda meta: meta.planner_data.pop("app.model.layers.1.bias"), Damaged, "records no path"),
    "wrong path": (
        lambda meta: meta.planner_data.update({"app.model.layers.1.bias": ("app", "x")}),
        Damaged,
        "does not spell it",
    ),
    "huge shape": (
        lambda meta: setattr(meta.state_dict_metadata["app.model.layers.1.bias"], "size", (1 << 80,)),
        Damaged,
        "metadata",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata(copy: Path, case: str) -> None:
    change, error, text = BAD[case]
    alter(copy, change)
    with pytest.raises(error, match=text):
        layout.open([copy], OpenOptions())


def test_directory_in_place_of_a_file(copy: Path) -> None:
    (copy / "__0_0.distcp").unlink()
    (copy / "__0_0.distcp").mkdir()
    with pytest.raises(Damaged, match="not a regular file"):
        read(copy)


def test_old_metadata(copy: Path) -> None:
    """Without version and storage_meta, in protocol 2, and with the classes of torch 2.2."""
    alter(copy, lambda meta: (meta.__dict__.pop("version"), meta.__dict__.pop("storage_meta")))
    want = read(copy)
    meta = pickle.loads((copy / ".metadata").read_bytes())
    (copy / ".metadata").write_bytes(pickle.dumps(meta, protocol=2))
    assert read(copy) == want
    data = pickle.dumps(meta, protocol=2)
    new, old = (
        b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n",
        b"torch.distributed._shard.sharded_tensor.metadata",
    )
    assert new in data
    data = data.replace(new, b"c" + old + b"\nTensorProperties\n")
    data = data.replace(
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n", b"c" + old + b"\nMEM_FORMAT_ENCODING\n"
    )
    (copy / ".metadata").write_bytes(data)
    assert read(copy) == want


def test_enum_by_name_and_other_getattr(copy: Path) -> None:
    meta = pickle.dumps(pickle.loads((copy / ".metadata").read_bytes()), protocol=2)
    by_value = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    at = meta.index(by_value) + len(by_value)
    rest = meta[at:]
    assert rest[:1] == b"q" and rest[2:5] == b"K\0\x85", rest[:8]
    by_name = b"c__builtin__\ngetattr\n" + by_value + rest[:2] + b"X\x17\0\0\0TORCH_CONTIGUOUS_FORMAT\x86"
    (copy / ".metadata").write_bytes(meta[: at - len(by_value)] + by_name + rest[5:])
    assert len(read(copy)) == 6
    (copy / ".metadata").write_bytes(b"\x80\x02c__builtin__\ngetattr\nctorch\nSize\nX\x08\0\0\0__call__\x86R.")
    with pytest.raises(Refused, match="getattr"):
        read(copy)


def test_paths_do_not_leak(copy: Path) -> None:
    data = (copy / ".metadata").read_bytes()
    assert b"PosixPath" in data
    for module in (b"\x8c\x0epathlib._local", b"\x8c\x07pathlib"):
        (copy / ".metadata").write_bytes(data.replace(b"\x8c\x07pathlib", module))
        try:
            checkpoint = layout.open([copy], OpenOptions())
        except Damaged:  # the frame's length no longer fits: not what is tested
            continue
        assert "sound" not in repr((checkpoint.left_out, checkpoint.warnings, list(checkpoint.files)))


def test_megatron_is_named(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02cmegatron.core.dist_checkpointing\nThing\n)\x81.")
    with pytest.raises(Refused, match="Megatron"):
        layout.open([tmp_path], OpenOptions())


# Pickles by hand ---------------------------------------------------------------------------------------------------


def run(data: bytes):
    return Machine("file", resolver(METADATA_GLOBALS, "file"), data=data).run()


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, 255, 256, 65535, 65536, -1, 1 << 31, -(1 << 63), 1 << 200, 1.5, "", "a" * 300, "é", b"",
        b"x" * 300, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [1, [2]], {"a": {"b": [()]}, 3: 4},
    ],
)  # fmt: skip
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_values(value, protocol: int) -> None:
    if isinstance(value, bytes) and protocol == 2:
        return  # goes through a codec
    assert run(pickle.dumps(value, protocol)) == value
    shared = [value, value, [value]]
    assert run(pickle.dumps(shared, protocol)) == shared


BROKEN = {
    "empty": b"",
    "protocol only": b"\x80\x04",
    "no stop": b"\x80\x04N",
    "garbage": b"\xff" * 64,
    "text of 2**40": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"abc.",
    "text of 2**31": b"\x80\x04X" + struct.pack("<I", 1 << 31) + b"abc.",
    "bytes of 2**62": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"abc.",
    "short text": b"\x80\x04\x8c\xffabc",
    "number of 2**30": b"\x80\x04\x8b" + struct.pack("<i", 1 << 30) + b"abc.",
    "number of negative length": b"\x80\x04\x8b" + struct.pack("<i", -1) + b".",
    "frame of 2**60": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "unknown memo": b"\x80\x04h\x07.",
    "far memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "deep marks": b"\x80\x04" + b"(" * 100_000 + b".",
    "deep tuples": b"\x80\x04)" + b"\x85" * 100_000 + b"}h\x00s.",
    "deep key": b"\x80\x04}(" + b")" + b"\x85" * 1_000_000 + b"Nu.",
    "deep lists": b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "pop of nothing": b"\x80\x040.",
    "two objects": b"\x80\x04NN.",
    "a mark is left": b"\x80\x04(N.",
    "call of a text": b"\x80\x04\x8c\x01a)R.",
    "object of a text": b"\x80\x04\x8c\x01a)\x81.",
    "state of a text": b"\x80\x04\x8c\x01a}b.",
    "items of a text": b"\x80\x04\x8c\x01aNNs.",
    "odd items": b"\x80\x04}(\x8c\x01au.",
    "list as key": b"\x80\x04}]Ns.",
    "a size of texts": b"\x80\x02ctorch\nSize\n(X\x01\0\0\0at\x85R.",
    "bad text": b"\x80\x04\x8c\x02\xff\xfe.",
    "global of numbers": b"\x80\x04K\x01K\x02\x93.",
    "extension": b"\x80\x02\x82\x01.",
    "buffer": b"\x80\x05\x97.",
    "instance": b"\x80\x02(ios\nsystem\n.",
    "protocol 9": b"\x80\x09N.",
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_pickles(tmp_path: Path, case: str) -> None:
    file = tmp_path / ".metadata"
    file.write_bytes(BROKEN[case])
    with pytest.raises(ReshardError, match=r"\.metadata"):
        scan(str(file))
    try:
        assert run(BROKEN[case]) is not None or case == "far memo"
    except ReshardError as error:
        assert error.exit_status in (3, 4)


def test_light_objects() -> None:
    data = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}X\x01\0\0\0aK\x01sb."
    found = run(data)
    assert type(found) is Instance and found.kind == "metadata" and found.state == {"a": 1}


# Flips -------------------------------------------------------------------------------------------------------------


def flips(path: Path, seed: int, count: int) -> dict[str, int]:
    """Flips bytes of .metadata one at a time: each result is equal tensors or a ReshardError."""
    want = read(path)
    file = path / ".metadata"
    data = file.read_bytes()
    rng = random.Random(seed)
    seen = {"equal": 0, "refused": 0, "damaged": 0}
    for _ in range(count):
        at, bit = rng.randrange(len(data)), rng.randrange(1, 256)
        file.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        try:
            got = read(path)
        except ReshardError as error:
            assert error.exit_status in (3, 4) and "\n" not in str(error)
            seen["refused" if error.exit_status == 3 else "damaged"] += 1
            continue
        assert got == want, f"byte {at} ^ {bit}"
        seen["equal"] += 1
    for cut in range(0, len(data), max(1, len(data) // 50)):
        file.write_bytes(data[:cut])
        try:
            read(path)
        except ReshardError as error:
            assert error.exit_status in (3, 4)
        else:
            raise AssertionError(f"cut at {cut} was not found")
    file.write_bytes(data)
    return seen


def test_flips_of_metadata(copy: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_dcp_hostile as t; t.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(copy)], check=False, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["damaged"] > 200 and found["equal"] > 20
    assert found["peak_kb"] < 300 << 10


def main() -> None:
    found = flips(Path(sys.argv[1]), 1, 1500)
    status = Path("/proc/self/status").read_text()
    found["peak_kb"] = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps(found))
