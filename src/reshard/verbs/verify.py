"""verify: whether a checkpoint is whole and sound, equals another one, and loads."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from reshard.engine.content import make_content
from reshard.errors import Damaged, Refused, ReshardError, UsageError
from reshard.families import find_family
from reshard.opening import open_checkpoint
from reshard.tensors.dtypes import DTYPES, is_float
from reshard.tensors.read import fill
from reshard.transforms.experts import convert_experts
from reshard.transforms.names import strip_wrappers
from reshard.transforms.ties import EMBEDDINGS, HEADS, declares_tie
from reshard.verbs import checks
from reshard.verbs.hashing import check_manifest
from reshard.verbs.pairs import Pair, align
from reshard.verbs.streaming import Meter, Tiles, each, element, problem, ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.checkpoint import Checkpoint
    from reshard.tensors.read import Files

Problem = dict[str, Any]
TARGETS = ("transformers", "vllm", "sglang")


def verify(
    source: str,
    *,
    against: str | None = None,
    load: bool = False,
    target: str | None = None,
    config_from: str | None = None,
    model_key: str | None = None,
    trust_remote_code: bool = False,
    allow_cast: bool = False,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Checks a checkpoint in any layout; memory stays bounded whatever its size.

    Always: headers, index, coverage, config, layers and experts, and every hash of the manifest where there is one.
    against: another checkpoint, in any layout, that must hold the same tensors: names, dtypes, shapes and every byte.
    allow_cast: a floating tensor may differ from it in dtype, if it is its value rounded once.
    load: builds the model with transformers, without weights, and lets transformers' own loader say which keys are
    missing, unexpected or of another shape. target="transformers" is the same. trust_remote_code lets the model's own
    code run.

    Returns "status" ("ok" or "failed"), "checked_tensors", "checked_bytes" (read and compared with a hash or another
    checkpoint), "problems" [{"kind", "file", "tensor", "detail"}], "checks" (what was done), "warnings" and "seconds".
    Raises UsageError and Refused; damage is a result, not an exception.
    """
    began = time.monotonic()
    if target is not None and target not in TARGETS:
        raise UsageError("flag", "--target", f"is {target!r}", f"one of {', '.join(TARGETS)}")
    if target in ("vllm", "sglang"):
        raise Refused(
            "target", "--target", f"{target} comes later", "--target transformers checks what transformers reads"
        )
    problems: list[Problem] = []
    try:
        checkpoint = open_checkpoint(source, config_from=config_from, model_key=model_key)
    except Damaged as error:
        found, problems = checks.salvage(source, error)
        return _report(problems, ["structure"], len(found or ()), 0, list(found.warnings if found else ()), began)
    done, notes = ["structure"], list(checkpoint.warnings)
    problems += checks.check_index(checkpoint) + checks.check_config(checkpoint) + checks.check_layers(checkpoint)
    more, told = checks.check_experts(checkpoint)
    problems, notes = problems + more, notes + told
    unreadable = _items(checkpoint)
    problems += unreadable
    nbytes = 0
    if not unreadable:
        problems += _tied(checkpoint)
        try:
            hashed = check_manifest(checkpoint, workers, progress)
        except Damaged as error:
            problems.append(checks.of_error(error))
        else:
            if hashed is not None:
                done.append("hashes")
                nbytes += hashed.nbytes
                problems, notes = problems + hashed.problems, notes + hashed.notes
            elif checkpoint.layout == "dcp":
                done.append("checksums")
                more, told, count = _checksums(checkpoint, workers, progress)
                problems, notes, nbytes = problems + more, notes + told, nbytes + count
            elif against is None:
                notes.append("there is no reshard.json, so the tensors' bytes are not compared with anything")
        if against is not None:
            done.append("against")
            reference = open_checkpoint(against, model_key=model_key)
            if reference.check is not None:
                reference.check()
            more, told, count = _against(checkpoint, reference, allow_cast, workers, progress)
            problems, notes, nbytes = problems + more, notes + told, nbytes + count
    if load or target == "transformers":
        from reshard.verbs.loading import check_load

        done.append("load")
        problems += check_load(_as_loaded(checkpoint), trust_remote_code=trust_remote_code)
    return _report(problems, done, len(checkpoint), nbytes, notes, began)


def _checksums(
    checkpoint: Checkpoint, workers: int | None, progress: Callable[[int, int], None] | None
) -> tuple[list[Problem], list[str], int]:
    """The checksums inside a DCP checkpoint's items: (problems, notes, bytes read)."""
    from reshard.layouts.dcp.checksums import check_payloads

    found = check_payloads(checkpoint.tensors, workers, progress)
    detail = "its bytes are not those of the checksum that was saved with it"
    rows = [problem("checksum", detail, file=path, tensor=name) for name, path in found.broken]
    notes = []
    if found.unproven:
        notes.append(f"{found.unproven} items were saved without a checksum; their bytes are not proven")
    return rows, notes, found.nbytes


def _report(
    problems: list[Problem], done: list[str], tensors: int, nbytes: int, notes: list[str], began: float
) -> dict[str, Any]:
    return {
        "status": "failed" if problems else "ok",
        "checked_tensors": tensors,
        "checked_bytes": nbytes,
        "problems": problems,
        "checks": done,
        "warnings": notes,
        "seconds": round(time.monotonic() - began, 3),
    }


def _as_loaded(checkpoint: Checkpoint) -> Checkpoint:
    """A training checkpoint as converting it would write it: no library reads it as it lies."""
    if not checkpoint.training:
        return checkpoint
    tensors = strip_wrappers(checkpoint.tensors)
    family = find_family(checkpoint.config)
    return replace(checkpoint, tensors=convert_experts(tensors, family, checkpoint.config, "hub", training=True)[0])


def _items(checkpoint: Checkpoint) -> list[Problem]:
    """What describes each stored item, for layouts whose opening does not read that."""
    try:
        if checkpoint.check is not None:
            checkpoint.check()
    except Damaged as error:
        return [checks.of_error(error)]
    return []


def _tied(checkpoint: Checkpoint) -> list[Problem]:
    """A head beside the embedding that the config ties it to must equal it: loading would replace one by the other.

    Training checkpoints are exempt, since converting them settles it.
    """
    if checkpoint.training or not declares_tie(checkpoint.config):
        return []
    tensors = strip_wrappers(checkpoint.tensors)
    head = next((name for name in HEADS if name in tensors), None)
    embedding = next((name for name in EMBEDDINGS if name in tensors), None)
    if head is None or embedding is None:
        return []
    pair = Pair(head, tensors[head], tensors[embedding])
    detail = next(iter(each([pair], partial(_difference, allow_cast=False, advance=lambda count: None), 1)))
    if detail is None:
        return []
    return [problem("tied", f"is not {embedding}, to which the config ties it: {detail[1]}", tensor=head)]


def _against(
    checkpoint: Checkpoint,
    reference: Checkpoint,
    allow_cast: bool,
    workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[Problem], list[str], int]:
    """(problems, notes, bytes compared)."""
    aligned = align(checkpoint, reference)
    problems = [problem("missing", f"is in {reference.path}, but not here", tensor=name) for name in aligned.only_b]
    problems += [problem("unexpected", f"is not in {reference.path}", tensor=name) for name in aligned.only_a]
    meter = Meter(sum(pair.a.nbytes for pair in aligned.pairs), progress)
    compare = partial(_difference, allow_cast=allow_cast, advance=meter)
    for pair, found in zip(aligned.pairs, each(aligned.pairs, compare, workers), strict=True):
        if found is not None:
            problems.append(problem(found[0], found[1], tensor=pair.name))
    return problems, list(aligned.notes), meter.done


def _difference(
    pair: Pair, files: Files, tiles: Tiles, *, allow_cast: bool, advance: Callable[[int], None]
) -> tuple[str, str] | None:
    """(kind, detail) of the first thing in which a pair differs, or None. An unreadable tensor is one such thing."""
    a, b = pair.a, pair.b
    if a.shape != b.shape:
        return "shape", f"is {list(a.shape)} here, {list(b.shape)} there"
    cast = a.dtype != b.dtype
    if cast and not (allow_cast and is_float(a.dtype) and is_float(b.dtype)):
        hint = "; --allow-cast accepts the value rounded once" if is_float(a.dtype) and is_float(b.dtype) else ""
        return "dtype", f"is {a.dtype} here, {b.dtype} there{hint}"
    expected = make_content(b, a.dtype)
    try:
        for begin, end in ranges(a.nbytes):
            left, right = tiles.get("a", end - begin), tiles.get("b", end - begin)
            fill(a, begin, end, left, files)
            expected.fill(begin, end, right, files)
            if left != right and not (cast and _same_numbers(left, right, a.dtype)):
                where = _first(a, left, right, begin)
                return "bytes", f"differs from the other{', rounded,' if cast else ''} first at {where}"
            advance(end - begin)
    except ReshardError as error:
        return error.kind, error.line()
    return None


def _same_numbers(left: memoryview, right: memoryview, dtype: str) -> bool:
    """Whether the bytes differ only in how they write "not a number", which a cast may change."""
    import numpy as np

    from reshard.tensors.dtypes import numpy_dtype

    a, b = (np.frombuffer(side, numpy_dtype(dtype)) for side in (left, right))
    bits = np.dtype(f"u{DTYPES[dtype].bits // 8}")
    return bool(((a.view(bits) == b.view(bits)) | (np.isnan(a) & np.isnan(b))).all())


def _first(tensor: Any, left: memoryview, right: memoryview, begin: int) -> list[int]:
    """The index of the first element in which two tiles differ."""
    import numpy as np

    at = int(np.argmax(np.frombuffer(left, np.uint8) != np.frombuffer(right, np.uint8)))
    return element(tensor, (begin + at) // tensor.storage[1])
