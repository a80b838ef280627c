"""`--like`: the names, shapes, dtypes and files of a reference checkpoint, followed and checked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reshard.errors import Refused
from reshard.tensors.dtypes import is_float
from reshard.tensors.lazy import Stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.checkpoint import Checkpoint
    from reshard.tensors.lazy import LazyTensor

LISTED = 5


def follow(
    tensors: Mapping[str, LazyTensor], dtypes: Mapping[str, str], reference: Checkpoint, tie: tuple[str, str] | None
) -> tuple[dict[str, str], dict[str, str] | None, tuple[str, str] | None]:
    """(dtype of each tensor, file of each tensor or None where the reference is no set of files, the tied pair).

    Names and shapes must be the reference's; the head of a tied pair may be missing there, and must then prove equal.
    Refused with the differences listed, also where a dtype differs that no cast bridges.
    """
    alias = tie[0] if tie else None
    missing = [name for name in reference if name not in tensors]
    extra = [name for name in tensors if name not in reference and name != alias]
    if missing or extra:
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"has {_some(extra)} that it lacks"] if extra else []
        raise Refused("like", reference.path, f"the result {' and '.join(parts)}", "--drop or --experts may help")
    wanted: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name not in reference:
            wanted[name] = dtypes[name]
            continue
        other = reference[name]
        if tensor.shape != other.shape:
            raise Refused("like", name, f"is {list(tensor.shape)} here, {list(other.shape)} in {reference.path}")
        if tensor.dtype != other.dtype and not (is_float(tensor.dtype) and is_float(other.dtype)):
            raise Refused(
                "like", name, f"is {tensor.dtype} here, {other.dtype} in {reference.path}", "no cast bridges that"
            )
        wanted[name] = other.dtype
    files: dict[str, str] = {}
    for name in reference:
        tensor = reference[name]
        if not isinstance(tensor, Stored):
            return wanted, None, tie
        files[name] = os.path.basename(tensor.path)
    if alias is not None and alias not in reference:
        assert tie is not None
        files[alias] = files[tie[1]]
    return wanted, files, tie


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    return ", ".join(listed[:LISTED]) + more
