"""Tensors that one writer keeps as one and the Hub as several, routed experts apart: cut and joined as views."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import Damaged, Refused
from reshard.families import MEMORY
from reshard.tensors.lazy import concat, narrow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.families import Family
    from reshard.tensors.lazy import LazyTensor


def split_joined(tensors: Mapping[str, LazyTensor], family: Family) -> tuple[dict[str, LazyTensor], list[str]]:
    """(tensors with every joined one cut into the Hub's, names of those that were cut).

    Raises Damaged where the parts would not be equal, Refused where a part is there already.
    """
    found, moved = dict(tensors), []
    for row in family.joins:
        for name in tensors:
            stem = _stem(name, row.name)
            if stem is None:
                continue
            tensor = found.pop(name)
            size = tensor.shape[row.axis] if row.axis < len(tensor.shape) else 0
            if size == 0 or size % len(row.parts):
                detail = f"is {list(tensor.shape)}, which does not hold {len(row.parts)} equal parts on axis {row.axis}"
                raise Damaged("shape", name, detail)
            size //= len(row.parts)
            for number, part in enumerate(row.parts):
                if stem + part in found:
                    raise Refused("collision", name, f"holds {stem + part}, which is there too", "--drop one of them")
                found[stem + part] = narrow(tensor, row.axis, number * size, (number + 1) * size)
            moved.append(name)
    return found, moved


def join_split(tensors: Mapping[str, LazyTensor], family: Family) -> tuple[dict[str, LazyTensor], list[str]]:
    """(tensors with the Hub's parts joined as transformers' modules have them, names of the parts).

    Raises Damaged where a part is missing or its shape is not the others'.
    """
    found, moved = dict(tensors), []
    for row in family.joins:
        if row.source != MEMORY:
            continue
        for name in tensors:
            stem = next((stem for part in row.parts if (stem := _stem(name, part)) is not None), None)
            if stem is None or stem + row.name in found:
                continue
            names = [stem + part for part in row.parts]
            missing = next((part for part in names if part not in found), None)
            if missing is not None:
                raise Damaged("missing", missing, f"is missing beside {name}")
            parts = [found.pop(part) for part in names]
            if len({part.shape for part in parts}) > 1 or row.axis >= len(parts[0].shape):
                raise Damaged("shape", name, f"has another shape than the rest of {stem + row.name}")
            try:
                found[stem + row.name] = concat(parts, row.axis)
            except Refused as error:
                raise Refused("shape", stem + row.name, error.detail) from error
            moved += names
    return found, moved


def _stem(name: str, tail: str) -> str | None:
    """What stands before `tail`, which must be whole segments."""
    if name == tail:
        return ""
    return name[: -len(tail)] if name.endswith("." + tail) else None
