"""The manifest held against the bytes on disk: segment by segment, then tensor by tensor where one differs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.engine.hashes import SEGMENT_BYTES, TensorHasher, file_digest, hex_digest, segment_digest
from reshard.engine.manifest import read_manifest
from reshard.engine.plan import MANIFEST
from reshard.errors import ReshardError
from reshard.tensors.boxes import whole
from reshard.tensors.lazy import Stored
from reshard.tensors.paths import is_plain, leads_out
from reshard.tensors.read import fill
from reshard.verbs.checks import of_error
from reshard.verbs.streaming import Meter, Tiles, each, problem, ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.checkpoint import Checkpoint
    from reshard.tensors.read import Files


class _Span(NamedTuple):
    """A segment of a file and the digest that it should have."""

    name: str
    path: str
    begin: int
    end: int
    digest: str


class Hashed(NamedTuple):
    """problems, notes, and how many bytes were read and compared. None where there is no manifest."""

    problems: list[dict[str, Any]]
    notes: list[str]
    nbytes: int


def check_manifest(
    checkpoint: Checkpoint, workers: int | None, progress: Callable[[int, int], None] | None
) -> Hashed | None:
    """Compares every hash of `reshard.json` with the files beside it. Raises Damaged where the manifest is unreadable.

    Files are read once. Where segments of a file differ, or a file is recorded without them, its tensors are hashed
    too, so that a problem names the tensor.
    """
    home = Path(checkpoint.path)
    manifest = read_manifest(home / MANIFEST) if home.is_dir() else None
    if manifest is None:
        return None
    problems: list[dict[str, Any]] = []
    notes: list[str] = []
    # Names in a manifest choose no path: only files that the checkpoint itself consists of are read.
    own = {os.path.relpath(path, home): path for path in checkpoint.files}
    spans: list[_Span] = []
    unhashed: set[str] = set()
    for name, row in manifest["files"].items():
        path = own.get(name)
        if path is None:
            if not (home / name).is_file() or Path(name).suffix == ".safetensors":
                problems.append(problem("manifest", "is in the manifest, but not part of this checkpoint", file=name))
            else:
                notes.append(f"{name} holds nothing that this checkpoint uses and is not checked")
            continue
        size, segments = checkpoint.files[path], row["segments"]
        if size != row["bytes"]:
            problems.append(problem("size", f"has {size} bytes; {row['bytes']} were written", file=path))
            unhashed.add(path)
        elif segments is None:
            unhashed.add(path)
        elif len(segments) != -(-size // SEGMENT_BYTES):
            problems.append(
                problem("manifest", f"has {len(segments)} hashes in the manifest, not one a segment", file=path)
            )
            unhashed.add(path)
        else:
            spans += [
                _Span(name, path, begin, end, digest)
                for (begin, end), digest in zip(ranges(size, SEGMENT_BYTES), segments, strict=True)
            ]
    for name, path in own.items():
        if name not in manifest["files"] and not name.startswith(".."):
            problems.append(problem("manifest", "is not in the manifest", file=path))
    problems += _side_files(home, manifest.get("side_files", {}))
    known = manifest["tensors"]
    problems += [
        problem("manifest", "is in the manifest, but not in the files", tensor=name)
        for name in known
        if name not in checkpoint.tensors
    ]
    meter = Meter(sum(span.end - span.begin for span in spans), progress)
    bad = [span for span, sound in zip(spans, each(spans, _check_span(meter), workers), strict=True) if not sound]
    suspects = _tensors_in(checkpoint, unhashed | {span.path for span in bad}, bad, unhashed)
    hashed = {name: digest for name in suspects if isinstance(digest := known.get(name), str)}
    results = each(list(hashed), lambda name, files, tiles: _digest(checkpoint, name, files, tiles), workers)
    broken: set[str] = set()
    nbytes = meter.done
    for (name, digest), actual in zip(hashed.items(), results, strict=True):
        nbytes += checkpoint[name].nbytes
        if isinstance(actual, ReshardError):
            problems.append(of_error(actual))
        elif actual != digest:
            paths = sorted(checkpoint[name].paths() & {span.path for span in bad} or checkpoint[name].paths())
            broken.update(paths)
            problems.append(
                problem("hash", "its bytes are not those that were written", file=", ".join(paths), tensor=name)
            )
    for span in bad:
        if span.path not in broken:
            problems.append(
                problem("hash", f"bytes {span.begin} to {span.end} are not those that were written", file=span.path)
            )
    bare = [name for name in suspects if name not in hashed and checkpoint[name].paths() & unhashed]
    if bare:
        notes.append(f"{len(bare)} tensors are in files that were taken over unhashed; their bytes are not proven")
    return Hashed(problems, notes, nbytes)


def _side_files(home: Path, rows: dict[str, Any]) -> list[dict[str, Any]]:
    """The small files of an output: config, index, tokenizer. Each is what was written, or a problem."""
    found = []
    for name, row in rows.items():
        path = home / name
        if not is_plain(name) or leads_out(path, home):
            found.append(problem("manifest", "names a path outside the directory", file=name))
        elif not path.is_file():
            found.append(problem("missing", "was written, but is not here as a regular file", file=path))
        elif path.stat().st_size != row["bytes"] or file_digest(path) != row["hash"]:
            found.append(problem("hash", "its bytes are not those that were written", file=path))
    return found


def _check_span(meter: Meter) -> Callable[[_Span, Files, Tiles], bool]:
    def check(span: _Span, files: Files, tiles: Tiles) -> bool:
        view = tiles.get("a", span.end - span.begin)
        try:
            files.read_into(span.path, span.begin, view)
        except ReshardError:
            return False
        meter(span.end - span.begin)
        return segment_digest(view) == span.digest

    return check


def _tensors_in(checkpoint: Checkpoint, paths: set[str], bad: list[_Span], unhashed: set[str]) -> list[str]:
    """Names of the tensors with bytes in broken segments, or in files of which nothing else is known."""
    if not paths:
        return []
    found = []
    for name, tensor in checkpoint.tensors.items():
        if isinstance(tensor, Stored) and tensor.strides is None and tensor.path not in unhashed:
            begin, end = tensor.offset, tensor.offset + tensor.nbytes
            touched = any(span.path == tensor.path and span.begin < end and begin < span.end for span in bad)
        else:
            touched = bool({piece.path for piece in tensor.pieces(whole(tensor.storage[0]))} & paths)
        if touched:
            found.append(name)
    return found


def _digest(checkpoint: Checkpoint, name: str, files: Files, tiles: Tiles) -> str | ReshardError:
    """The digest of a tensor as it is now, or the error of reading it: the other tensors are still worth checking."""
    tensor = checkpoint[name]
    hasher = TensorHasher(tensor.nbytes, 0)
    try:
        for begin, end in ranges(tensor.nbytes):
            view = tiles.get("a", end - begin)
            fill(tensor, begin, end, view, files)
            hasher.update(view)
    except ReshardError as error:
        return error
    return hex_digest(hasher.finish(lambda begin, end: b""))
