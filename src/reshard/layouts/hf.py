"""The Hugging Face layout: safetensors files, one or sharded, with or without an index.

Source of the format: safetensors' description, and the index as transformers and huggingface_hub write it:
`{"metadata": {"total_size": sum of tensor bytes}, "weight_map": {name: file}}`.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint import Checkpoint
from reshard.engine.content import Copy, Literal, make_content
from reshard.engine.manifest import read_manifest
from reshard.engine.plan import MANIFEST, OutputFile, Part
from reshard.errors import Damaged, Refused, UsageError
from reshard.layouts.json_files import read_json
from reshard.tensors.dtypes import nbytes
from reshard.tensors.header import Header, build_header, read_header, stored_tensors, write_order
from reshard.tensors.lazy import Stored
from reshard.tensors.paths import is_plain, leads_out

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.layouts.options import OpenOptions
    from reshard.tensors.lazy import LazyTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NUMBERED = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.safetensors$")
SHARD_KEY = re.compile(r"\.shard_\d+$")
# Files that hold something other than the model, although they end in .safetensors.
NOT_MODEL = re.compile(r"^(adapter_model|consolidated|optimizer|training_|resume_adapter|\.)")


def detect(path: Path) -> bool:
    """A .safetensors file, or a directory that holds model files or their index."""
    if path.is_file():
        return path.suffix == ".safetensors"
    return (path / INDEX).is_file() or bool(_model_files(path))


def _model_files(path: Path) -> list[Path]:
    files = [p for p in path.glob("*.safetensors") if not NOT_MODEL.match(p.name)]
    single = [p for p in files if p.name == SINGLE]
    return single or sorted(files)


def open(paths: list[Path], options: OpenOptions) -> Checkpoint:  # the verb of every layout
    """Opens one directory or file, or several directories that together hold one checkpoint. Headers only."""
    if options.model_key is not None:
        raise UsageError("model-key", "--model-key", "is for torch DCP checkpoints; this one holds one model")
    shards: dict[str, Path] = {}
    index: dict[str, str] = {}
    warnings: list[str] = []
    for path in paths:
        found, own_index, notes = _shards_of(path)
        for name, file in found.items():
            if name in shards:
                raise Refused("duplicate", str(file), f"{name} also lies in {shards[name].parent}", "give one of them")
            shards[name] = file
        index.update(own_index)
        warnings += notes
    absent = sorted({file for file in index.values() if file not in shards})
    if absent:
        listed = ", ".join(absent[:4]) + (f" and {len(absent) - 4} more" if len(absent) > 4 else "")
        raise Damaged("missing", str(paths[0]), f"the index names absent files: {listed}", "fetch or gather them")
    _check_numbering([] if index else list(shards.values()))
    tensors: dict[str, LazyTensor] = {}
    owner: dict[str, str] = {}
    headers: dict[str, Header] = {}
    for name, file in shards.items():
        header = headers[name] = read_header(str(file))
        _refuse_foreign(file, header)
        for key, tensor in stored_tensors(str(file), header).items():
            if key in owner:
                raise Damaged("duplicate", str(file), f"{key!r} also lies in {owner[key]}")
            owner[key] = name
            tensors[key] = tensor
    if index:
        _check_index(index, owner, paths[0])
        # The index's order is not the files'; keep the files' order, which readers stream best.
    if not tensors:
        raise Damaged("empty", str(paths[0]), "holds no tensor")
    files = {str(file): headers[name].size for name, file in shards.items()}
    return Checkpoint(tensors, "hf", str(paths[0]), warnings=tuple(warnings), files=files)


def _shards_of(path: Path) -> tuple[dict[str, Path], dict[str, str], list[str]]:
    """(shard name -> file, weight map or {}, warnings) of one directory, or of one file."""
    if path.is_file():
        return {path.name: path}, {}, []
    warnings: list[str] = []
    index: dict[str, str] = {}
    present = _model_files(path)
    if (path / INDEX).is_file():
        index = _read_index(path / INDEX)
        named = set(index.values())
        missing = [name for name in named if not (path / name).exists()]
        single = path / SINGLE
        if single.is_file() and named != {SINGLE}:
            if not missing:
                raise Refused(
                    "ambiguous", str(path), f"holds both {SINGLE} and other files that {INDEX} names",
                    "name the file to use, or remove what is stale",
                )  # fmt: skip
            warnings.append(f"{INDEX} names files that are absent and is ignored; {SINGLE} is used")
            return {SINGLE: _safe(path, SINGLE)}, {}, warnings
        stale = sorted(
            p.name for p in path.glob("*.safetensors") if p.name not in named and not NOT_MODEL.match(p.name)
        )
        if stale:
            warnings.append(
                f"not named by the index, ignored: {', '.join(stale[:4])}" + (" ..." if len(stale) > 4 else "")
            )
        return {name: _safe(path, name) for name in sorted(named) if name not in missing}, index, warnings
    return {file.name: _safe(path, file.name) for file in present}, {}, warnings


def _read_index(path: Path) -> dict[str, str]:
    body = read_json(path)
    weight_map = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise Damaged("index", str(path), "has no weight_map")
    metadata = body.get("metadata") or {}
    kind = metadata.get("format") if isinstance(metadata, dict) else None
    if kind in ("ep_sharded", "reshard_sharded"):
        raise Refused("layout", str(path.parent), f"holds {kind} rank shards, which this version does not merge")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not is_plain(name):
            raise Refused("unsafe", str(path), f"{key!r} is mapped to {str(name)[:80]!r}, outside the directory")
    return weight_map


def _safe(directory: Path, name: str) -> Path:
    """A file of the directory, by links at most to the blobs of the same hub cache entry."""
    file = directory / name
    if leads_out(file, directory):
        raise Refused(
            "unsafe", str(file), f"is a link out of the directory, to {os.path.realpath(file)}", "copy the file"
        )
    if file.exists() and not file.is_file():
        raise Damaged("missing", str(file), "is not a regular file")
    return file


def _check_numbering(files: Sequence[Path]) -> None:
    """Index-less shards say how many they are: all must be there."""
    seen: dict[tuple[str, int], set[int]] = {}
    for file in files:
        match = NUMBERED.match(file.name)
        if match:
            seen.setdefault((match["stem"], int(match["count"])), set()).add(int(match["part"]))
    for (stem, count), parts in seen.items():
        first = 0 if 0 in parts else 1
        missing = sorted(set(range(first, first + count)) - parts)
        if missing:
            name = f"{stem}-{missing[0]:05d}-of-{count:05d}.safetensors"
            raise Damaged("missing", str(files[0].parent), f"{len(missing)} shard files are absent, such as {name}")


def _refuse_foreign(file: Path, header: Header) -> None:
    if "DCP_SHARDING_INFO" in header.metadata:
        raise Refused(
            "layout", str(file), "is a shard of a DCP save as safetensors, which this version does not read",
            "consolidate it with the trainer's tool",
        )  # fmt: skip
    shard = next((name for name in header.entries if SHARD_KEY.search(name)), None)
    if shard is not None:
        raise Refused("layout", str(file), f"holds expert rank shards ({shard!r}), which this version does not merge")


def _check_index(index: Mapping[str, str], owner: Mapping[str, str], path: Path) -> None:
    for name, file in index.items():
        if owner.get(name) != file:
            where = f"it lies in {owner[name]}" if name in owner else "it holds no such tensor"
            raise Damaged("index", str(path / INDEX), f"says that {name!r} lies in {file}, but {where}")
    extra = [name for name in owner if name not in index]
    if extra:
        raise Damaged("index", str(path / INDEX), f"does not list {extra[0]!r}, which lies in {owner[extra[0]]}")


@dataclass(frozen=True)
class HfFiles:
    """Planned weight files and, where there are several, the index."""

    files: tuple[OutputFile, ...]
    index: bytes | None


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key by dotted segments in which numbers count as numbers: layers.2 before layers.10."""
    return [(0, int(part), "") if part.isdecimal() and len(part) < 19 else (1, 0, part) for part in name.split(".")]


def plan_files(
    tensors: Mapping[str, LazyTensor],
    dtypes: Mapping[str, str],
    max_shard_bytes: int,
    file_map: Mapping[str, str] | None = None,
    whole: Mapping[str, OutputFile] | None = None,
) -> HfFiles:
    """Weight files for `tensors` written as `dtypes`.

    file_map: name -> file, to keep a reference's files; else names in natural order fill files of at most
    `max_shard_bytes` (a larger tensor has a file of its own). whole: files of the map that are taken over as they are.
    One file has no index.
    """
    sizes = {name: nbytes(dtypes[name], tensor.shape) for name, tensor in tensors.items()}
    groups: dict[str, list[str]] = {}
    if file_map is not None:
        for name in tensors:
            groups.setdefault(file_map[name], []).append(name)
    else:
        bins: list[list[str]] = [[]]
        room = max_shard_bytes
        for name in sorted(tensors, key=natural):
            if sizes[name] > room and bins[-1]:
                bins.append([])
                room = max_shard_bytes
            bins[-1].append(name)
            room -= sizes[name]
        count = len(bins)
        names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        groups = dict(zip(names, bins, strict=True))
    whole = whole or {}
    files = tuple(
        whole[file] if file in whole else _plan_file(file, members, tensors, dtypes)
        for file, members in sorted(groups.items())
    )
    if list(groups) == [SINGLE]:
        return HfFiles(files, None)
    owner = {name: file for file, members in groups.items() for name in members}
    body: dict[str, Any] = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": dict(sorted(owner.items())),
    }
    return HfFiles(files, json.dumps(body, indent=2, ensure_ascii=False).encode() + b"\n")


def _plan_file(
    name: str, members: Sequence[str], tensors: Mapping[str, LazyTensor], dtypes: Mapping[str, str]
) -> OutputFile:
    order = write_order((key, dtypes[key]) for key in members)
    header, _ = build_header({key: (dtypes[key], tensors[key].shape) for key in order}, {"format": "pt"})
    parts = [Part(0, Literal(header), None)]
    at = len(header)
    for key in order:
        content = make_content(tensors[key], dtypes[key])
        parts.append(Part(at, content, key))
        at += content.nbytes
    return OutputFile(name, tuple(parts))


def keep_files(
    source: Checkpoint, tensors: Mapping[str, LazyTensor], dtypes: Mapping[str, str], max_shard_bytes: int
) -> tuple[dict[str, str], dict[str, OutputFile]] | None:
    """(file map, files to take over whole) where the files of a Hugging Face source can be kept, else None.

    They are kept when only dtypes change or tensors go: every tensor to be written is one of the source's under its own
    name, the files have standard names, and none exceeds `max_shard_bytes`.
    """
    file_map: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    for name, tensor in source.tensors.items():
        if not isinstance(tensor, Stored):
            return None
        members.setdefault(tensor.path, []).append(name)
        if name in tensors:
            file_map[name] = os.path.basename(tensor.path)
    if any(source.tensors.get(name) is not tensor for name, tensor in tensors.items()):
        return None
    counts = {match["count"] for match in map(NUMBERED.match, file_map.values()) if match}
    standard = set(file_map.values()) == {SINGLE} or (
        all(NUMBERED.match(file) for file in file_map.values())
        and len(counts) == 1
        and len(set(file_map.values())) == int(next(iter(counts)))
    )
    weights: dict[str, int] = {}
    for name, file in file_map.items():
        weights[file] = weights.get(file, 0) + nbytes(dtypes[name], tensors[name].shape)
    if not standard or any(weight > max_shard_bytes for weight in weights.values()):
        return None
    whole = {}
    for path, names in members.items():
        if all(name in tensors and dtypes[name] == source.tensors[name].dtype for name in names):
            file = os.path.basename(path)
            raw = Stored("U8", (source.files[path],), path, 0)
            whole[file] = OutputFile(file, (Part(0, Copy(raw), None),), path, _carried(path, names), tuple(names))
    return file_map, whole


def _carried(path: str, names: Sequence[str]) -> tuple[list[str], dict[str, str]] | None:
    """The hashes that the manifest beside a file has for it."""
    try:
        manifest = read_manifest(Path(path).parent / MANIFEST)
    except Damaged:
        return None
    row = manifest["files"].get(os.path.basename(path)) if manifest else None
    if manifest is None or row is None or row["segments"] is None or row["bytes"] != os.path.getsize(path):
        return None
    known = manifest["tensors"]
    return row["segments"], {name: known[name] for name in names if isinstance(known.get(name), str)}
