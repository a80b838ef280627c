"""Expert tensors cut and joined as views: byte ranges rearranged, nothing read.

Every layout is read through one canonical form: gate and up `[I, H]`, down `[H, I]` ([out, in], as a Linear stores
them), biases `[out]`; for one expert, or with a leading axis of all experts. A layout's table says how to cut that out
of what is stored and how to join it again, so both directions come from the same lines. A matrix is transposed at most
once, and where both layouts stack all experts on an axis, no view of a single expert is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import Damaged, Refused
from reshard.tensors.lazy import LazyTensor, concat, interleave, narrow, select, stack, transpose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.families import ExpertLayout, ExpertTensor

Key = tuple[str, int | None]  # (template, number of the expert or None for all)


class Part(NamedTuple):
    """One role's tensor, in the orientation in which it is stored."""

    tensor: LazyTensor
    orientation: str


class Source(NamedTuple):
    """The stored experts of one decoder layer. members: key -> name; total: number of experts."""

    layout: ExpertLayout
    members: Mapping[Key, str]
    tensors: Mapping[str, LazyTensor]
    total: int


def rearrange(source: Source, wanted: ExpertLayout) -> dict[str, LazyTensor]:
    """Name below the decoder layer -> tensor, for every tensor of the layout `wanted`. Raises Refused or Damaged."""
    made: dict[str, LazyTensor] = {}
    for row in wanted.tensors:
        if row.per_expert:
            for expert in range(source.total):
                made[row.name.replace("{e}", str(expert))] = _one(source, row, expert)
        elif row.experts == "stack" and all(_stacked(source, role) for role in row.holds):
            made[row.name] = _join(row, [_cut_bank(source, role) for role in row.holds], 1)
        else:
            ones = [_one(source, row, expert) for expert in range(source.total)]
            made[row.name] = _agreeing(row, ones, stack if row.experts == "stack" else concat)
    return made


def _row_of(layout: ExpertLayout, role: str) -> ExpertTensor:
    return next(row for row in layout.tensors if role in row.holds)


def _stacked(source: Source, role: str) -> bool:
    row = _row_of(source.layout, role)
    return not row.per_expert and row.experts == "stack"


def _cut_bank(source: Source, role: str) -> Part:
    """A role of all experts: [E, out, in] or its transpose, or [E, out] for a bias."""
    row = _row_of(source.layout, role)
    name = source.members[row.name, None]
    return Part(_cut(source.tensors[name], row, role, 1, name), row.orientation)


def _one(source: Source, wanted: ExpertTensor, expert: int) -> LazyTensor:
    """One expert's tensor as `wanted` stores it."""
    parts = []
    for role in wanted.holds:
        row = _row_of(source.layout, role)
        name = source.members[row.name, expert if row.per_expert else None]
        tensor = source.tensors[name]
        if not row.per_expert:
            if row.experts == "stack":
                tensor = select(tensor, expert)
            else:
                size = tensor.shape[0] // source.total
                tensor = narrow(tensor, 0, expert * size, (expert + 1) * size)
        parts.append(Part(_cut(tensor, row, role, 0, name), row.orientation))
    return _join(wanted, parts, 0)


def _out_axis(row: ExpertTensor, lead: int) -> int:
    return lead if row.is_bias or row.orientation == "out-in" else lead + 1


def _cut(tensor: LazyTensor, row: ExpertTensor, role: str, lead: int, name: str) -> LazyTensor:
    """The share of `role` of a stored tensor with `lead` axes before the matrix."""
    turns, index, axis = len(row.holds), row.holds.index(role), _out_axis(row, lead)
    if turns == 1:
        return tensor
    if tensor.shape[axis] % turns:
        detail = f"is {list(tensor.shape)}, which does not hold {turns} equal parts on axis {axis}"
        raise Damaged("experts", name, detail)
    if row.join == "interleave":
        return narrow(tensor, axis, index, tensor.shape[axis], turns)
    size = tensor.shape[axis] // turns
    return narrow(tensor, axis, index * size, (index + 1) * size)


def _join(row: ExpertTensor, parts: Sequence[Part], lead: int) -> LazyTensor:
    turned = [
        part.tensor if row.is_bias or part.orientation == row.orientation else transpose(part.tensor) for part in parts
    ]
    axis = _out_axis(row, lead)
    put = interleave if row.join == "interleave" else concat
    return _agreeing(row, turned, lambda tensors: put(tensors, axis))


def _agreeing(row: ExpertTensor, parts: list[LazyTensor], put: Callable[[list[LazyTensor]], LazyTensor]) -> LazyTensor:
    try:
        return put(parts)
    except Refused as error:
        raise Refused("experts", row.name, f"cannot be made: {error.detail}") from error
