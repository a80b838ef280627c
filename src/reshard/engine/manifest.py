"""`reshard.json`: what an output holds and the hashes that prove it. Equal outputs have equal manifests."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from reshard._version import __version__
from reshard.engine.hashes import MODULUS, SEGMENT_BYTES, file_digest, hex_digest
from reshard.errors import Damaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from reshard.engine.journal import Finished
    from reshard.engine.plan import Plan

FORMAT = 1
MAX_MANIFEST = 1 << 30


def build_manifest(plan: Plan, finished: Mapping[int, Finished], data: Path) -> bytes:
    """The manifest of a completed plan whose small files lie in `data`: no paths, times, hosts or worker counts."""
    files: dict[str, Any] = {}
    tensors: dict[str, str | None] = {}
    sums: dict[str, int] = {}
    for file in plan.files:
        files[file.name] = {"bytes": file.nbytes, "segments": []}
        if file.source is not None:
            # Not hashed anew, linked or not: the manifest must not depend on what the file system can do.
            files[file.name]["segments"] = file.carried[0] if file.carried else None
            tensors |= file.carried[1] if file.carried else {}
        sums |= {part.tensor: 0 for part in file.parts if part.tensor is not None}
    for segment in plan.segments:
        file = plan.files[segment.file]
        if file.source is None:
            entry = finished[segment.number]
            files[file.name]["segments"].append(entry.digest)
            for name, value in entry.tensors.items():
                sums[name] = (sums[name] + value) % MODULUS
    tensors |= {name: hex_digest(value) for name, value in sums.items()}
    body = {
        "format": FORMAT,
        "version": __version__,
        "plan": plan.digest,
        "segment_bytes": SEGMENT_BYTES,
        "files": files,
        "tensors": dict(sorted(tensors.items())),
        "side_files": {
            name: {"bytes": (data / name).stat().st_size, "hash": file_digest(data / name)}
            for name in sorted({*plan.texts, *plan.copies})
        },
        "dropped": [dict(row) for row in plan.dropped],
        "kept": [dict(row) for row in plan.kept],
    }
    return json.dumps(body, indent=1, ensure_ascii=False).encode() + b"\n"


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest at `path`, None where there is none. Raises Damaged when it cannot be understood."""
    try:
        if not path.is_file() and os.path.lexists(path):
            raise Damaged("manifest", str(path), "is not a regular file")
        if path.stat().st_size > MAX_MANIFEST:
            raise Damaged("manifest", str(path), "is too large to be a manifest")
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged("manifest", str(path), "is not readable JSON") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise Damaged("manifest", str(path), "is not a manifest that this version reads")
    files, tensors = body.get("files"), body.get("tensors")
    if not isinstance(files, dict) or not isinstance(tensors, dict) or body.get("segment_bytes") != SEGMENT_BYTES:
        raise Damaged("manifest", str(path), "is not a manifest that this version reads")
    for name, row in files.items():
        sound = isinstance(row, dict) and isinstance(row.get("bytes"), int)
        segments = row.get("segments") if sound else 0
        if segments is not None and not (isinstance(segments, list) and all(isinstance(s, str) for s in segments)):
            raise Damaged("manifest", str(path), f"the entry of {name!r} is malformed")
    for name, row in _rows(body.get("side_files", {}), path):
        if not isinstance(row, dict) or not isinstance(row.get("bytes"), int) or not isinstance(row.get("hash"), str):
            raise Damaged("manifest", str(path), f"the entry of {name!r} is malformed")
    return body


def _rows(table: object, path: Path) -> Iterable[tuple[str, Any]]:
    if not isinstance(table, dict):
        raise Damaged("manifest", str(path), "is not a manifest that this version reads")
    return table.items()
