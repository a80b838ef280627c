"""Opening a DCP directory: metadata, the choice of the model's keys, and all checks that headers allow."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import TYPE_CHECKING

from reshard.checkpoint import Checkpoint
from reshard.errors import Damaged, Refused
from reshard.layouts.dcp.chunks import StoredChunks, check_items
from reshard.layouts.dcp.entries import DcpMetadata, TensorEntry
from reshard.layouts.dcp.groups import choose
from reshard.layouts.dcp.light import printable
from reshard.layouts.dcp.metadata import load, scan
from reshard.tensors.lazy import Chunked, LazyTensor
from reshard.tensors.paths import is_plain, leads_out

if TYPE_CHECKING:
    from array import array
    from pathlib import Path

    from reshard.layouts.options import OpenOptions

RANK_METADATA = re.compile(r"__(\d+)\.metadata")
RANK_DATA = re.compile(r"__(\d+)_\d+\.distcp")
FRESH_COPY = "use a complete copy of the checkpoint"


def open_dcp(paths: list[Path], options: OpenOptions) -> Checkpoint:
    """A DCP checkpoint in one directory, or whose files lie in several (per-node parts).

    Tensors keep the names that they had in the model's state dict. Raises Damaged (no or broken metadata, missing or
    short files, chunks that do not tile their tensor) or Refused (a name off the allow list, no single model, unsafe
    paths).
    """
    where = ",".join(map(str, paths))
    metadata = _metadata_files(paths)
    warnings = []
    if metadata[0].name == ".metadata" and any(
        RANK_METADATA.fullmatch(name) for path in paths for name in _names(path)
    ):
        warnings.append("rank-local .metadata files beside .metadata are ignored")
    scans = [scan(str(file)) for file in metadata]
    paths_of, others = _merge_listing([meta for meta, _ in scans], str(metadata[0]))
    keys = dict.fromkeys(key for meta, _ in scans for key in meta.tensors)
    if not keys:
        raise Damaged("empty", where, "holds no tensor", FRESH_COPY)
    chosen = choose(str(metadata[0]), keys, others, paths_of, options.model_key)
    parts = [
        meta if full else load(str(file), chosen.names) for file, (meta, full) in zip(metadata, scans, strict=True)
    ]
    entries, files, extents = _merge(parts, chosen.names, str(metadata[0]))
    resolved, sizes = _resolve(files, extents, paths)
    tensors: dict[str, LazyTensor] = {}
    used: set[int] = set()
    for key, name in chosen.names.items():
        entry = entries[key]
        used.update(_check_entry(entry, name, str(metadata[0])))
        tensors[name] = Chunked(entry.dtype, _shape(entry), StoredChunks(name, entry, resolved))
    used.discard(-1)
    warnings += _stale(paths, files)
    return Checkpoint(
        tensors,
        "dcp",
        str(paths[0]),
        left_out=chosen.left_out,
        training=True,
        warnings=tuple(warnings),
        files={resolved[number]: sizes[number] for number in sorted(used)},
        check=partial(check_items, tensors),
    )


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        raise Damaged("missing", str(path), f"cannot be listed ({error.strerror})") from error


def _metadata_files(paths: list[Path]) -> list[Path]:
    """`.metadata`, or the `__R.metadata` of every rank in order."""
    found = [path / ".metadata" for path in paths if (path / ".metadata").exists()]
    if len(found) > 1:
        raise Refused(
            "ambiguous", ",".join(map(str, found)), "several directories hold a .metadata", "name one checkpoint"
        )
    if found:
        return found
    ranks: dict[int, Path] = {}
    data: set[int] = set()
    for path in paths:
        for name in _names(path):
            if match := RANK_METADATA.fullmatch(name):
                rank = int(match[1])
                if rank in ranks:
                    raise Refused("ambiguous", str(path / name), f"rank {rank} also lies in {ranks[rank].parent}")
                ranks[rank] = path / name
            elif match := RANK_DATA.fullmatch(name):
                data.add(int(match[1]))
    where = ",".join(map(str, paths))
    if not ranks:
        raise Damaged(
            "missing",
            where,
            "has .distcp files but no .metadata: the save did not complete",
            "use an earlier checkpoint",
        )
    count = max(ranks) + 1
    missing = next((rank for rank in range(min(count, len(ranks) + 1)) if rank not in ranks), None)
    if missing is None:
        missing = min((rank for rank in data if rank not in ranks), default=None)
    if missing is not None:
        raise Damaged(
            "missing", where, f"has no __{missing}.metadata: rank {missing} did not complete, or was not copied",
            "name the directories of all nodes, joined by commas, or use an earlier checkpoint",
        )  # fmt: skip
    return [ranks[rank] for rank in range(count)]


def _merge_listing(parts: list[DcpMetadata], where: str) -> tuple[dict[str, tuple[str | int, ...]] | None, list[str]]:
    """(paths of all keys or None, keys of items that are not tensors)."""
    if len(parts) == 1:
        return parts[0].paths, parts[0].bytes_items
    paths: dict[str, tuple[str | int, ...]] = {}
    for meta in parts:
        for key, path in (meta.paths or {}).items():
            if paths.setdefault(key, path) != path:
                raise Damaged("pickle", where, f"ranks disagree on the path of {printable(key)!r}")
    recorded = any(meta.paths is not None for meta in parts)
    return paths if recorded else None, list(dict.fromkeys(key for meta in parts for key in meta.bytes_items))


def _merge(
    parts: list[DcpMetadata], kept: dict[str, str], where: str
) -> tuple[dict[str, TensorEntry], list[str], list[int]]:
    """Entries of the kept keys, and all referenced files with their furthest extents."""
    if len(parts) == 1:
        return parts[0].tensors, parts[0].files, parts[0].extents
    entries: dict[str, TensorEntry] = {}
    numbers: dict[str, int] = {}
    extents: list[int] = []
    for meta in parts:
        mine = []
        for file, extent in zip(meta.files, meta.extents, strict=True):
            number = numbers.setdefault(file, len(numbers))
            if number == len(extents):
                extents.append(0)
            extents[number] = max(extents[number], extent)
            mine.append(number)
        for key, name in kept.items():
            entry = meta.tensors.get(key)
            if entry is None:
                continue
            first = entries.get(key)
            if first is None:
                first = entries[key] = TensorEntry(entry.dtype, entry.shape, type(entry.boxes)("q"))
            if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                raise Damaged(
                    "coverage", where,
                    f"ranks disagree on {name}: {first.dtype} {list(first.shape)}, {entry.dtype} {list(entry.shape)}",
                    FRESH_COPY,
                )  # fmt: skip
            first.extend(entry, mine)
    return entries, list(numbers), extents


def _check_entry(entry: TensorEntry, name: str, where: str) -> array[int]:
    """The file numbers of the chunks, -1 for empty ones. Raises Refused or Damaged for what cannot be read whole."""
    if not entry.dtype:
        raise Refused(
            "dtype", name, "has a dtype that safetensors cannot hold", "leave it out of the model when saving"
        )
    if entry.dtype == "F4" and not entry.shape:
        raise Refused("dtype", name, "is a 0-d tensor of a packed dtype")
    gap = entry.gap()
    if gap is not None:
        raise Damaged(
            "coverage", f"{where} ({name})", f"its chunks do not make up {list(entry.shape)}: {gap}", FRESH_COPY
        )
    numbers = entry.file_numbers()
    if -1 in numbers:
        for i, number in enumerate(numbers):
            if number < 0 and 0 not in entry.sizes(i):
                raise Damaged(
                    "coverage",
                    f"{where} ({name})",
                    f"its chunk at {list(entry.start(i))} is stored nowhere",
                    FRESH_COPY,
                )
    return numbers


def _shape(entry: TensorEntry) -> tuple[int, ...]:
    """torch counts its packed 4-bit dtype in pairs."""
    return (*entry.shape[:-1], entry.shape[-1] * 2) if entry.dtype == "F4" else entry.shape


def _resolve(files: list[str], extents: list[int], paths: list[Path]) -> tuple[list[str], list[int]]:
    """(absolute path, size) of each referenced file: present, regular, inside the directory and long enough."""
    resolved, sizes = [], []
    for name, extent in zip(files, extents, strict=True):
        if len(name) > 1024 or not is_plain(name):
            raise Refused(
                "unsafe", str(paths[0]), f"its metadata names {printable(name)!r}, which is no path inside it"
            )
        found = [path for path in paths if os.path.lexists(path / name)]
        if not found:
            raise Damaged("missing", str(paths[0] / name), "is absent, but the metadata refers to it", FRESH_COPY)
        if len(found) > 1:
            raise Refused("ambiguous", name, f"lies in {found[0]} and in {found[1]}", "name each directory once")
        file = found[0] / name
        if leads_out(file, found[0]):
            raise Refused("unsafe", str(file), "is a link out of the directory", "copy the file into it")
        if not file.is_file():
            raise Damaged("missing", str(file), "is not a regular file", FRESH_COPY)
        size = file.stat().st_size
        if size < extent:
            raise Damaged("truncated", str(file), f"has {size} bytes where the metadata needs {extent}", FRESH_COPY)
        resolved.append(str(file))
        sizes.append(size)
    return resolved, sizes


def _stale(paths: list[Path], files: list[str]) -> list[str]:
    named = set(files)
    stale = [name for path in paths for name in _names(path) if name.endswith(".distcp") and name not in named]
    if not stale:
        return []
    listed = ", ".join(map(printable, stale[:4])) + (", ..." if len(stale) > 4 else "")
    return [f"not of this save, ignored: {listed} ({len(stale)} file{'s' * (len(stale) > 1)})"]
