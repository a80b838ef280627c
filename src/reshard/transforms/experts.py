"""Routed experts from any layout of a family to any other, as rearrangements of byte ranges.

Every layout is read through one canonical form, expert by expert: gate and up `[I, H]`, down `[H, I]` ([out, in], as a
Linear stores them), biases `[out]`. A layout's table says how to cut that out of what is stored and how to join it again,
so both directions come from the same lines. A layer whose experts already lie as wanted passes through untouched.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.errors import Damaged, Refused
from reshard.families import MATRICES, ExpertLayout, ExpertTensor, Family
from reshard.tensors.lazy import LazyTensor, concat, interleave, narrow, select, stack, transpose
from reshard.transforms.names import rename_to_hub

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.families import Experts

# What looks like experts although no family says so: a tensor of all experts, or numbered ones.
UNKNOWN_EXPERTS = re.compile(r"(^|\.)experts?(\.|_)(?!\d+\.)")


def convert_experts(
    tensors: Mapping[str, LazyTensor],
    family: Family | None,
    config: Mapping[str, Any] | None,
    target: str,
    source_hint: str | None = None,
    training: bool = False,
) -> tuple[dict[str, LazyTensor], list[str]]:
    """(tensors with their experts laid out as `target`, notes).

    target: "hub" (the layout of Hub releases), "fused" (transformers' in-memory layout), "per-expert", or "keep".
    Trainers' own names become the Hub's unless kept. source_hint: name of the layout that the experts are in, where two
    layouts share their names. Raises Refused (ambiguous, or no such layout) or Damaged (experts missing, wrong counts).
    """
    if target == "keep":
        return dict(tensors), []
    if family is None:
        return _unknown(tensors, target, training)
    renamed = rename_to_hub(tensors, family)
    if family.experts is None:
        if target in ("fused", "per-expert"):
            raise Refused("experts", family.name, "has no routed experts", "leave --experts away")
        return renamed, []
    wanted = _wanted(family, family.experts, target)
    result = dict(renamed)
    blocks = _find_blocks(renamed, family.experts)
    for block, names in blocks.items():
        source, members = _recognise(block, names, renamed, family, config, source_hint)
        if source is wanted:
            continue
        _refuse_companions(block, members, renamed)
        for name in members.values():
            del result[name]
        made = _rearrange(block, source, members, renamed, wanted, family, config)
        clash = next((name for name in made if name in result), None)
        if clash is not None:
            raise Refused("collision", clash, "would be written twice")
        result |= made
    return result, []


def _unknown(tensors: Mapping[str, LazyTensor], target: str, training: bool) -> tuple[dict[str, LazyTensor], list[str]]:
    if target in ("fused", "per-expert"):
        raise Refused(
            "family", "", f"experts cannot be made {target} without family data", "`reshard families` lists them"
        )
    if training:
        for name, tensor in tensors.items():
            if len(tensor.shape) >= 3 and UNKNOWN_EXPERTS.search(name):
                raise Refused(
                    "family", name, "looks like fused experts of a family that reshard has no data for",
                    "--experts keep writes them as they are",
                )  # fmt: skip
    return dict(tensors), []


def _wanted(family: Family, experts: Experts, target: str) -> ExpertLayout:
    name = {"hub": experts.hub, "fused": experts.memory}.get(target, target)
    layout = experts.layout(name)
    if layout is None:
        known = ", ".join(sorted({"hub", *(layout.name for layout in experts.layouts)}))
        raise Refused("experts", family.name, f"has no {target} layout", f"one of {known}")
    return layout


def _pattern(template: str) -> re.Pattern[str]:
    number = re.escape(template).replace(re.escape("{e}"), r"(?P<e>0|[1-9]\d{0,5})")
    return re.compile(rf"^(?P<block>(?:.*\.)?){number}$")


Key = tuple[str, int | None]  # (template, expert number or None for all)


def _find_blocks(tensors: Mapping[str, LazyTensor], experts: Experts) -> dict[str, dict[Key, str]]:
    """Decoder layer (as a name prefix) -> (template, expert) -> name, for every name that some layout knows."""
    patterns = {t.name: _pattern(t.name) for layout in experts.layouts for t in layout.tensors}
    # One cheap test first: most names of a model are not experts.
    hint = re.compile("|".join(sorted({re.escape(t.split("{e}")[0].split(".w")[0]) for t in patterns})))
    blocks: dict[str, dict[Key, str]] = defaultdict(dict)
    for name in tensors:
        if not hint.search(name):
            continue
        for template, pattern in patterns.items():
            match = pattern.match(name)
            if match:
                number = match.groupdict().get("e")
                blocks[match["block"]][template, int(number) if number is not None else None] = name
    return dict(blocks)


def _recognise(
    block: str,
    names: Mapping[Key, str],
    tensors: Mapping[str, LazyTensor],
    family: Family,
    config: Mapping[str, Any] | None,
    hint: str | None,
) -> tuple[ExpertLayout, dict[Key, str]]:
    """The layout in which a layer's experts are stored, complete and in the number that the config says."""
    assert family.experts is not None
    present = {template for template, _ in names}
    used = {layout.name: {t.name for t in layout.tensors} & present for layout in family.experts.layouts}
    fitting = [layout for layout in family.experts.layouts if used[layout.name] == present]
    complete = [layout for layout in fitting if len(used[layout.name]) == len(layout.tensors)]
    if not complete:
        if not fitting:
            raise Refused("experts", f"{block}*", "mixes two expert layouts in one layer")
        lacking = sorted({t.name for t in fitting[0].tensors} - present)
        raise Damaged(
            "experts", f"{block}{lacking[0].replace('{e}', '0')}", "is missing beside the other expert tensors"
        )
    if len(complete) > 1:
        complete = _tell_apart(block, complete, names, tensors, family, config, hint)
    layout = complete[0]
    _check_count(block, layout, names, tensors, family, config)
    return layout, dict(names)


def _tell_apart(
    block: str,
    layouts: Sequence[ExpertLayout],
    names: Mapping[Key, str],
    tensors: Mapping[str, LazyTensor],
    family: Family,
    config: Mapping[str, Any] | None,
    hint: str | None,
) -> list[ExpertLayout]:
    """Layouts with the same names: a declaration decides; shapes may only confirm, and must exclude all others."""
    declared = [layout for layout in layouts if layout.name == hint]
    if declared:
        return declared
    hidden, width = _config_value(config, ("hidden_size",)), _intermediate(family, config)
    possible = []
    for layout in layouts:
        shapes = {t.name: _stored_matrix(t, hidden, width) for t in layout.tensors if set(t.holds) <= set(MATRICES)}
        if all(tensors[name].shape[-2:] == shapes[t] for (t, _), name in names.items() if t in shapes):
            possible.append(layout)
    if len(possible) != 1:
        known = " or ".join(repr(layout.name) for layout in layouts)
        raise Refused(
            "experts", f"{block}*", f"may be in the layout {known}, and nothing tells which", "--like or --experts keep"
        )
    return possible


def _stored_matrix(tensor: ExpertTensor, hidden: int | None, width: int | None) -> tuple[int | None, int | None]:
    out, into = (hidden, width) if "down" in tensor.holds else (width, hidden)
    out = out * len(tensor.holds) if out is not None else None
    return (out, into) if tensor.orientation == "out-in" else (into, out)


def _config_value(config: Mapping[str, Any] | None, keys: Sequence[str]) -> int | None:
    config = config or {}
    for level in (config.get("text_config") or {}, config):
        for key in keys:
            if isinstance(level.get(key), int):
                return int(level[key])
    return None


def _intermediate(family: Family, config: Mapping[str, Any] | None) -> int | None:
    return _config_value(config, family.experts.intermediate) if family.experts else None


def _check_count(
    block: str,
    layout: ExpertLayout,
    names: Mapping[Key, str],
    tensors: Mapping[str, LazyTensor],
    family: Family,
    config: Mapping[str, Any] | None,
) -> None:
    """Every expert 0..E-1 has every tensor, and E is the config's."""
    assert family.experts is not None
    expected = _config_value(config, family.experts.count)
    for tensor in layout.tensors:
        if tensor.per_expert:
            numbers = sorted(e for template, e in names if template == tensor.name and e is not None)
            count = expected if expected is not None else numbers[-1] + 1
            missing = sorted(set(range(count)) - set(numbers))
            if missing:
                where = block + tensor.name.replace("{e}", str(missing[0]))
                raise Damaged("experts", where, f"is missing: the model has {count} experts, {len(numbers)} are here")
            if len(numbers) > count:
                where = block + tensor.name.replace("{e}", str(numbers[-1]))
                raise Damaged("experts", where, f"is one too many: the config says {count} experts", "check the config")
        elif expected is not None:
            name = names[tensor.name, None]
            rows = tensors[name].shape[0] if tensors[name].shape else 0
            if (rows % expected if tensor.experts == "rows" else rows != expected) or not rows:
                raise Damaged(
                    "experts",
                    name,
                    f"has {rows} rows of experts where the config says {expected} experts",
                    "check the config",
                )
        elif tensor.experts == "rows":
            raise Refused(
                "experts",
                block + tensor.name,
                "cannot be cut without the config's number of experts",
                "--config-from DIR",
            )


def _refuse_companions(block: str, members: Mapping[Key, str], tensors: Mapping[str, LazyTensor]) -> None:
    """Scales and biases that no layout knows must not be parted from their weights."""
    stems = {name.removesuffix(".weight"): name for name in members.values()}
    known = set(members.values())
    for name in tensors:
        if name.startswith(block) and name not in known:
            stem = next((stem for stem in (name.rpartition(".")[0], _before_suffix(name)) if stem in stems), None)
            if stem is not None:
                raise Refused(
                    "experts", name, f"belongs to {stems[stem]} and cannot be rearranged with it", "--experts keep"
                )


def _before_suffix(name: str) -> str:
    """`a.gate_up_proj_scale_inv` -> `a.gate_up_proj`."""
    return re.sub(r"_(scale_inv|scale|bias|blocks|scales|scale_2|zero_point)$", "", name)


@dataclass(frozen=True)
class _Cutter:
    """Reads canonical tensors out of stored ones."""

    members: Mapping[Key, str]
    tensors: Mapping[str, LazyTensor]
    layout: ExpertLayout
    count: int

    def get(self, role: str, expert: int) -> LazyTensor:
        row = next(t for t in self.layout.tensors if role in t.holds)
        stored = self.tensors[self.members[row.name, expert if row.per_expert else None]]
        if row.per_expert:
            one = stored
        elif row.experts == "stack":
            one = select(stored, expert)
        else:
            size = stored.shape[0] // self.count
            one = narrow(stored, 0, expert * size, (expert + 1) * size)
        if row.orientation == "in-out" and role in MATRICES:
            one = transpose(one)
        turns, index = len(row.holds), row.holds.index(role)
        if turns == 1:
            return one
        if one.shape[0] % turns:
            raise Damaged(
                "experts",
                self.members[row.name, expert if row.per_expert else None],
                f"does not hold {turns} equal parts",
            )
        if row.join == "interleave":
            return narrow(one, 0, index, one.shape[0], turns)
        size = one.shape[0] // turns
        return narrow(one, 0, index * size, (index + 1) * size)


def _rearrange(
    block: str,
    source: ExpertLayout,
    members: Mapping[Key, str],
    tensors: Mapping[str, LazyTensor],
    wanted: ExpertLayout,
    family: Family,
    config: Mapping[str, Any] | None,
) -> dict[str, LazyTensor]:
    assert family.experts is not None
    count = _config_value(config, family.experts.count)
    if count is None:
        first = source.tensors[0]
        numbers = [e for template, e in members if template == first.name and e is not None]
        count = max(numbers) + 1 if first.per_expert else tensors[members[first.name, None]].shape[0]
    cutter = _Cutter(members, tensors, source, count)
    made: dict[str, LazyTensor] = {}
    for row in wanted.tensors:
        ones = [_joined(row, cutter.get, expert) for expert in range(count)]
        if row.per_expert:
            made |= {block + row.name.replace("{e}", str(expert)): one for expert, one in enumerate(ones)}
        else:
            made[block + row.name] = stack(ones) if row.experts == "stack" else concat(ones, 0)
    return made


def _joined(row: ExpertTensor, get: Callable[[str, int], LazyTensor], expert: int) -> LazyTensor:
    parts = [get(role, expert) for role in row.holds]
    one = interleave(parts, 0) if row.join == "interleave" else concat(parts, 0)
    return transpose(one) if row.orientation == "in-out" and row.holds[0] in MATRICES else one
