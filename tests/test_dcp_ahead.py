"""Large metadata, as many ranks make it: the look-ahead gives what pickle gives, in little memory."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from reshard.errors import Damaged
from reshard.layouts.dcp import metadata, pickle_vm
from reshard.layouts.dcp.metadata import MetadataMachine, load, scan

RANKS = 70
ROWS = 10 * RANKS
SHAPES = ((ROWS,), (ROWS, 70000), (ROWS, 3, 4), (ROWS, 2, 2, 2), (ROWS, 1, 1, 1, 1, 300))


def large(tensors: int, share: bool = False) -> Metadata:
    """Rank by rank, with fresh objects for each rank, as they come out of a gather. share: sizes are shared objects."""
    state, paths, storage = {}, {}, {}
    names = [f"layers.{i}.w" for i in range(tensors)]
    names[3] = "layers.3." + "x" * 400  # longer than a short text
    names[5] = "layers.5.größe"  # not ASCII
    for i, name in enumerate(names):
        for kind, prefix in (("model", ("model",)), ("optimizer", ("optimizer", "state"))):
            path = (*prefix, name) if kind == "model" else (*prefix, name, "exp_avg")
            shape = SHAPES[i % len(SHAPES)]
            chunks = [
                ChunkStorageMetadata(torch.Size((10 * r, *(0,) * (len(shape) - 1))), torch.Size((10, *shape[1:])))
                for r in range(RANKS)
            ]
            properties = TensorProperties(dtype=torch.bfloat16 if i % 3 else torch.float32)
            state[".".join(path)] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
            paths[".".join(path)] = path
    for i in range(tensors):
        key = f"optimizer.param_groups.{i}.lr"
        state[key] = BytesStorageMetadata()
        paths[key] = ("optimizer", "param_groups", i, "lr")
        state[f"model.scale.{i}"] = TensorStorageMetadata(
            TensorProperties(dtype=torch.float32),
            torch.Size(()),
            [ChunkStorageMetadata(torch.Size(()), torch.Size(()))],
        )
        paths[f"model.scale.{i}"] = ("model", f"scale.{i}")
    # Whole tensors one after another, with texts between that come back later.
    for i in range(4 * tensors):
        key, size = f"model.norm.{i}.weight", (300 + i % 2, 7)
        box = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size(size))
        state[key] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size(size), [box])
        paths[key] = ("model", f"norm.{i}.weight")
    for rank in range(RANKS):
        part, at = {}, 0
        for key, item in state.items():
            if isinstance(item, BytesStorageMetadata):
                if rank == 0:
                    part[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", at, 1261)
            elif len(item.chunks) == 1 and rank:
                continue
            else:
                offsets = item.chunks[rank].offsets
                index = MetadataIndex(key, offsets, rank if rank % 7 else None)
                if share:
                    object.__setattr__(index, "offset", offsets)
                # Positions from one byte to beyond 2**40.
                part[index] = _StorageInfo(f"__{rank}_0.distcp", at, 1000 + rank)
            at = at * 2 % (1 << 45) + 7
        storage.update(part if share else pickle.loads(pickle.dumps(part)))
    return Metadata(state, paths, storage, StorageMeta(Path("/home/x")), "1.0.0")


def facts(meta, keys) -> dict:
    """Everything that was read of some keys."""
    found = {}
    for key in keys:
        entry = meta.tensors[key]
        rows = []
        for i in range(len(entry)):
            number, offset, length = entry.place(i)
            rows.append((entry.box(i), meta.files[number], offset, length))
        found[key] = (entry.dtype, entry.shape, rows)
        assert entry.gap() is None
    return found


def wanted(source: Metadata) -> dict:
    found = {}
    for key, item in source.state_dict_metadata.items():
        if isinstance(item, BytesStorageMetadata):
            continue
        rows = []
        for chunk in item.chunks:
            info = source.storage_data[MetadataIndex(key, chunk.offsets)]
            rows.append(((tuple(chunk.offsets), tuple(chunk.sizes)), info.relative_path, info.offset, info.length))
        found[key] = ("BF16" if item.properties.dtype == torch.bfloat16 else "F32", tuple(item.size), rows)
    return found


@pytest.fixture(scope="module")
def source() -> Metadata:
    return large(40)


@pytest.mark.parametrize("window", [1 << 20, 80 << 10])
@pytest.mark.parametrize("small", [64 << 20, 0])
def test_equals_pickle(
    source: Metadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, small: int
) -> None:
    monkeypatch.setattr(pickle_vm, "WINDOW", window)
    monkeypatch.setattr(metadata, "SMALL", small)
    file = tmp_path / ".metadata"
    want = wanted(source)
    for protocol in (2, 4, 5):
        file.write_bytes(pickle.dumps(source, protocol))
        meta, full = scan(str(file))
        assert full is bool(small)
        assert list(meta.tensors) == list(want) and meta.paths == source.planner_data
        assert len(meta.bytes_items) == 40
        keys = [key for key in want if key.startswith("model.")]
        if not full:
            meta = load(str(file), keys)
            assert not any(len(meta.tensors[key]) for key in want if key not in keys)
        assert facts(meta, keys) == {key: want[key] for key in keys}
        ends = {f"__{r}_0.distcp": 0 for r in range(RANKS)}
        for info in source.storage_data.values():
            ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
        assert dict(zip(meta.files, meta.extents, strict=True)) == ends


def test_most_is_recognised_ahead(source: Metadata, tmp_path: Path) -> None:
    """Otherwise everything still works, but slowly and in much memory."""
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(source))
    machine = run(file, keep=())
    assert machine.count > 60_000
    assert len(machine.memo) < machine.count / 8


def run(file: Path, keep, **options) -> MetadataMachine:
    fd = os.open(file, os.O_RDONLY)
    try:
        machine = MetadataMachine(str(file), fd, file.stat().st_size, keep, **options)
        machine.result()
        return machine
    finally:
        os.close(fd)


@pytest.mark.parametrize("small", [64 << 20, 0])
def test_shared_objects_are_read_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """References to what was passed over."""
    monkeypatch.setattr(metadata, "SMALL", small)
    source = large(12, share=True)
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(source))
    with pytest.raises(pickle_vm.Unrecorded):
        run(file, keep=None)
    want = wanted(source)
    meta, full = scan(str(file))
    assert facts(meta if full else load(str(file), want), want) == want


def test_a_chunk_stored_twice_or_unknown(source: Metadata, tmp_path: Path) -> None:
    file = tmp_path / ".metadata"
    data = pickle.dumps(source)
    key = "model.layers.7.w"
    index = next(index for index in source.storage_data if index.fqn == key)
    extra = pickle.loads(data)
    extra.storage_data[MetadataIndex(key, torch.Size((5, 5, 5)))] = source.storage_data[index]
    file.write_bytes(pickle.dumps(extra))
    with pytest.raises(Damaged, match=r"a chunk that it does not have: model\.layers\.7\.w"):
        scan(str(file))
    # Two entries for one chunk cannot be in one dict; make them by hand.
    extra = pickle.loads(data)
    twin = MetadataIndex(key, torch.Size((5, 5, 5)))
    extra.storage_data[twin] = source.storage_data[index]
    object.__setattr__(twin, "offset", index.offset)
    file.write_bytes(pickle.dumps(extra))
    with pytest.raises(Damaged, match=r"one chunk twice: model\.layers\.7\.w"):
        scan(str(file))
