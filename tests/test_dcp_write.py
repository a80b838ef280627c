"""DCP written by hand, against torch: its reader, its own archives, its own metadata, and Python's zipfile."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from reshard.engine.content import Content, Literal
from reshard.engine.execute import RunOptions, execute
from reshard.engine.hashes import tensor_digest
from reshard.engine.plan import Plan
from reshard.engine.ranks import Ranks
from reshard.errors import Refused, UsageError
from reshard.layouts.dcp_bytes import item_bytes, tensor_pickle, torch_shape
from reshard.layouts.dcp_write import chunk_contents, cut, plan_dcp, split_boxes
from reshard.tensors.dtypes import DTYPES
from reshard.tensors.read import Files

torch = pytest.importorskip("torch")

SHAPES = [(), (1,), (5,), (3, 4), (0,), (0, 4), (4, 0), (2, 0, 3), (1, 1, 7), (2, 3, 4, 2, 1, 3), (300, 70)]
KINDS = [row for row in DTYPES.values() if row.torch and row.bits >= 8]


def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of any dtype with known random bytes (valid ones for bool)."""
    row = DTYPES[name]
    count = int(torch.tensor(shape).prod()) if shape else 1
    source = random.Random(f"{name}{shape}")
    data = bytearray(source.randbytes(count * row.bits // 8))
    if row.kind == "bool":
        data = bytearray(byte & 1 for byte in data)
    kind = getattr(torch, row.torch)
    return torch.frombuffer(data, dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


def describe(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Literal], dict[str, tuple[str, tuple[int, ...]]]]:
    names = {row.torch: row.name for row in KINDS}
    shapes = {name: (names[str(t.dtype).removeprefix("torch.")], tuple(t.shape)) for name, t in tensors.items()}
    return {name: Literal(raw(t)) for name, t in tensors.items()}, shapes


def read(content: Content) -> bytes:
    data = bytearray(content.nbytes)
    with Files() as files:
        content.fill(0, len(data), memoryview(data), files)
    return bytes(data)


def write(out: Path, tensors: dict[str, torch.Tensor], **options: object) -> Path:
    """Plans, then writes the parts with nothing but `open`."""
    contents, shapes = describe(tensors)
    out.mkdir(parents=True)
    cut = {"chunk_bytes": options["chunk_bytes"]} if "chunk_bytes" in options else {}
    crcs = {key: zlib.crc32(read(content)) for key, content in chunk_contents(contents, shapes, **cut).items()}
    files, texts = plan_dcp(contents, shapes, crcs=crcs, **options)
    for file in files:
        with open(out / file.name, "wb") as stream:
            for offset, content, *_ in file.parts:
                assert stream.tell() == offset
                stream.write(read(content))
        assert os.path.getsize(out / file.name) == file.nbytes
    for name, data in texts.items():
        (out / name).write_bytes(data)
    return out


def many() -> dict[str, torch.Tensor]:
    return {f"layers.{k}.{row.name}": make(row.name, shape) for row in KINDS for k, shape in enumerate(SHAPES)}


def load(out: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    state = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in like.items()}
    dcp.load(state, checkpoint_id=str(out), no_dist=True)
    return state


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


@pytest.mark.parametrize("row", KINDS, ids=lambda row: row.name)
@pytest.mark.parametrize("shape", [*SHAPES, (70_000,), (2**16, 0), (2**33, 0)], ids=str)
def test_the_pickle_in_an_item_is_torchs_own(row, shape) -> None:
    stored = io.BytesIO()
    torch.save(torch.zeros(shape, dtype=getattr(torch, row.torch)), stored)
    assert tensor_pickle(row.name, shape) == zipfile.ZipFile(stored).read("archive/data.pkl")


@pytest.mark.parametrize("row", KINDS, ids=lambda row: row.name)
def test_an_item_is_an_archive_that_torch_and_zipfile_read(row) -> None:
    for shape in SHAPES:
        tensor = make(row.name, shape)
        data = raw(tensor)
        head, tail = item_bytes(row.name, shape, zlib.crc32(data))
        blob = head + data + tail
        assert same(torch.load(io.BytesIO(blob), weights_only=True), tensor)
        archive = zipfile.ZipFile(io.BytesIO(blob))
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == data
        assert len(head) % 64 == 0
        stored = io.BytesIO()
        torch.save(tensor, stored)
        theirs = zipfile.ZipFile(stored)
        # All but the last record, which is an id that torch derives from the others and does not need.
        end = theirs.getinfo("archive/.data/serialization_id").header_offset
        assert blob[:end] == stored.getvalue()[:end]
        assert archive.namelist() == theirs.namelist()[:-1]


def test_a_wrong_crc_is_seen_by_zipfile() -> None:
    data = b"abcd"
    head, tail = item_bytes("F32", (1,), zlib.crc32(data) ^ 1)
    assert zipfile.ZipFile(io.BytesIO(head + data + tail)).testzip() == "archive/data/0"


@pytest.mark.parametrize(
    "options", [{}, {"chunk_bytes": 100}, {"max_file_bytes": 9000}, {"chunk_bytes": 1000, "max_file_bytes": 1}]
)
def test_torch_loads_every_dtype_and_shape(tmp_path, options) -> None:
    tensors = many() if "max_file_bytes" not in options else dict(list(many().items())[::9])
    if options.get("chunk_bytes") == 100:
        tensors = {name: t for name, t in tensors.items() if t.numel() < 1000}
    out = write(tmp_path / "out", tensors, **options)
    loaded = load(out, tensors)
    assert all(same(loaded[name], t) for name, t in tensors.items())
    if "max_file_bytes" in options:
        assert len(list(out.glob("*.distcp"))) > 5


def test_every_item_on_disk_is_sound(tmp_path) -> None:
    limit = 100_000
    out = write(tmp_path / "out", many(), chunk_bytes=20_000, max_file_bytes=limit)
    metadata = pickle.loads((out / ".metadata").read_bytes())
    end: dict[str, int] = {}
    for info in metadata.storage_data.values():
        blob = (out / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        assert len(blob) == info.length
        assert zipfile.ZipFile(io.BytesIO(blob)).testzip() is None
        # Aligned, in order, and close together.
        last = end.get(info.relative_path, 0)
        assert info.offset == last + -last % 64
        end[info.relative_path] = info.offset + info.length
    assert end == {file.name: file.stat().st_size for file in out.glob("*.distcp")}
    sizes = [end[f"__0_{number}.distcp"] for number in range(len(end))]
    assert max(sizes) <= limit and min(sizes[:-1]) > limit - 25_000


def test_metadata_is_what_torch_writes_of_the_same_tensors(tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    tensors = many()
    ours = pickle.loads((write(tmp_path / "ours", tensors, prefix="app.model") / ".metadata").read_bytes())
    dcp.save({"app": {"model": tensors}}, checkpoint_id=str(tmp_path / "torch"), no_dist=True)
    theirs = pickle.loads((tmp_path / "torch" / ".metadata").read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert type(next(iter(ours.storage_data.values()))) is type(next(iter(theirs.storage_data.values())))
    assert ours.version == theirs.version
    assert ours.storage_meta is None
    assert os.fsencode(tmp_path) not in (tmp_path / "ours" / ".metadata").read_bytes()


@pytest.mark.parametrize("prefix", ["", "model.", "app.model", "app.model."])
def test_prefixes_become_nested_dicts(tmp_path, prefix) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    # Names that torch could not tell apart from nesting without the recorded key paths.
    tensors = {"a.b.weight": make("BF16", (3, 4)), "a.b": make("F32", ()), "strided": make("I64", (2,))}
    out = write(tmp_path / "out", tensors, prefix=prefix)
    dcp_to_torch_save(str(out), str(tmp_path / "whole.pt"))
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    for key in [part for part in prefix.split(".") if part]:
        assert list(state) == [key]
        state = state[key]
    assert state.keys() == tensors.keys()
    assert all(same(state[name], t) for name, t in tensors.items())


def test_a_prefix_with_a_hole_is_refused() -> None:
    with pytest.raises(UsageError, match="empty part"):
        plan_dcp({}, {}, crcs={}, prefix="app..model")


def test_names_of_any_kind_survive(tmp_path) -> None:
    tensors = {name: make("F16", (2, 3)) for name in ("", "é.ü", "a b", "layout", "fqn", "offset", "x" * 3000, "日本")}
    loaded = load(write(tmp_path / "out", tensors), tensors)
    assert all(same(loaded[name], t) for name, t in tensors.items())


def test_dtypes_that_torch_lacks_are_refused_by_name() -> None:
    with pytest.raises(Refused, match=r"w: torch has no dtype for F6_E2M3"):
        chunk_contents({"w": Literal(bytes(3))}, {"w": ("F6_E2M3", (4,))})
    with pytest.raises(Refused, match="odd last axis"):
        torch_shape("w", "F4", (2, 3))
    with pytest.raises(Refused, match="has 3 bytes"):
        chunk_contents({"w": Literal(bytes(3))}, {"w": ("F32", (1,))})


def test_four_bit_pairs_are_torchs_shape(tmp_path) -> None:
    (chunk,) = cut({"w": Literal(bytes(range(12)))}, {"w": ("F4", (3, 8))})
    assert chunk.box.shape == (3, 4)
    head, tail = item_bytes("F4", chunk.box.shape, 0)
    tensor = torch.load(io.BytesIO(head + bytes(range(12)) + tail), weights_only=True)
    assert tensor.dtype == torch.float4_e2m1fn_x2 and tensor.shape == (3, 4)
    assert raw(tensor.view(torch.uint8)) == bytes(range(12))


@pytest.mark.parametrize("shape", [(7,), (1, 1, 9), (2, 3, 5), (1, 4, 1, 6), (3, 1, 1000), ()])
@pytest.mark.parametrize("limit", [1, 4, 12, 40, 64, 10**6])
def test_boxes_cover_the_bytes_in_order(shape, limit) -> None:
    itemsize = 4 if limit >= 4 else 1
    values = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape)
    flat: list[int] = []
    for box in split_boxes(shape, itemsize, limit):
        assert box.numel * itemsize <= limit
        part = values[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        flat += part.reshape(-1).tolist()
    assert flat == values.reshape(-1).tolist()


def test_whole_tensors_are_recorded_under_their_names() -> None:
    contents, shapes = describe({"small": make("F32", (4,)), "large": make("F32", (300,)), "empty": make("F32", (0,))})
    crcs = dict.fromkeys(chunk_contents(contents, shapes, chunk_bytes=400), 0)
    assert list(crcs) == ["small[0]", "large[0]", "large[1]", "large[2]", "empty[0]"]
    (file,), _ = plan_dcp(contents, shapes, crcs=crcs, chunk_bytes=400)
    assert [part.tensor for part in file.parts if part.tensor is not None] == ["small", *["large"] * 3, "empty"]
    assert [part.content.nbytes for part in file.parts if "bytes" in part.content.recipe()] == [400, 400, 400]


def test_a_tensor_in_several_items_has_one_hash(tmp_path) -> None:
    """The digest of a tensor does not depend on how it is cut or placed."""
    values = make("F32", (100_003,))
    contents, shapes = describe({"large": values, "small": make("F32", (4,))})
    crcs = dict.fromkeys(chunk_contents(contents, shapes, chunk_bytes=70_000), 0)
    files, texts = plan_dcp(contents, shapes, crcs=crcs, chunk_bytes=70_000)
    execute(Plan(files, texts), tmp_path / "out", RunOptions(workers=2), Ranks())
    manifest = json.loads((tmp_path / "out" / "reshard.json").read_text())
    assert manifest["tensors"]["large"] == tensor_digest(values.numpy().tobytes())


def test_same_bytes_in_every_process(tmp_path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_dcp_write as t; from pathlib import Path;"
        "t.write(Path(sys.argv[2]), t.many(), prefix='app.model', chunk_bytes=3000)"
    )
    for number, seed in enumerate(("1", "2")):
        subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path / str(number))],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
    names = sorted(path.name for path in (tmp_path / "0").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "1").iterdir())
    for name in names:
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "1" / name).read_bytes(), name


def test_writing_needs_no_torch() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from reshard.engine.content import Literal\n"
        "from reshard.layouts.dcp_write import plan_dcp\n"
        "files, texts = plan_dcp({'w': Literal(bytes(4))}, {'w': ('BF16', (2,))}, crcs={'w[0]': 0})\n"
        "assert files and texts['.metadata']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


WORKER = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
dist.init_process_group("gloo")
out, expected = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
mesh = init_device_mesh("cpu", (2,))
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1))
for layer in model: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
placed = {"dim1": [Shard(1)], "dim0": [Shard(0)], "copied": [Replicate()]}
state = dict(model.state_dict())
for name, placement in placed.items():
    state[name] = distribute_tensor(torch.zeros_like(expected[name]), mesh, placement)
dcp.load({"app": {"model": state}}, checkpoint_id=out)
for name, tensor in expected.items():
    assert torch.equal(state[name].full_tensor(), tensor), name
assert len({tuple(t.to_local().shape) for t in state.values()}) > 3
dist.barrier()
os._exit(0)  # gloo's threads, kept alive by the mesh, now and then abort a process that leaves in the usual way
"""


@pytest.mark.parametrize("options", [{}, {"prefix": "app.model", "chunk_bytes": 5000, "max_file_bytes": 50_000}])
def test_our_own_reader_gives_the_same_back(tmp_path, options) -> None:
    from reshard.layouts import open_layout
    from reshard.layouts.options import OpenOptions

    tensors = many()
    opened = open_layout([write(tmp_path / "out", tensors, **options)], OpenOptions())
    assert opened.keys() == tensors.keys() and not opened.left_out
    for name, tensor in tensors.items():
        assert opened[name].shape == tuple(tensor.shape) and opened[name].tobytes() == raw(tensor), name


def test_two_ranks_load_their_shards(tmp_path) -> None:
    shapes = {
        "0.weight": (5, 6),
        "0.bias": (5,),
        "1.weight": (1, 5),
        "1.bias": (1,),
        "dim1": (4, 7),
        "dim0": (7, 3),
        "copied": (3,),
    }
    tensors = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(k))
        for k, (name, shape) in enumerate(shapes.items())
    }
    out = write(tmp_path / "out", tensors, prefix="app.model", chunk_bytes=40)
    torch.save(tensors, tmp_path / "expected.pt")
    (tmp_path / "worker.py").write_text(WORKER)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            str(tmp_path / "worker.py"),
            str(out),
            str(tmp_path / "expected.pt"),
        ],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )


def test_fifty_thousand_tensors_plan_quickly() -> None:
    import time

    names = [f"model.layers.{k}.weight" for k in range(50_000)]
    contents, shapes = dict.fromkeys(names, Literal(bytes(12))), dict.fromkeys(names, ("BF16", (2, 3)))
    begin = time.perf_counter()
    crcs = dict.fromkeys(chunk_contents(contents, shapes), 0)
    _, texts = plan_dcp(contents, shapes, crcs=crcs, prefix="app.model")
    assert time.perf_counter() - begin < 15
    assert len(texts[".metadata"]) < 400 * len(names)
