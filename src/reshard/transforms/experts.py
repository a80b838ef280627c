"""Routed experts from any layout of a family to any other.

A layer's layout is found from the set of its names, layer by layer (a multi-token-prediction layer may be stored
otherwise than the rest), and checked: complete, and in the number that the config says. What already lies as wanted
passes through untouched. `expert_views` rearranges the rest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from reshard.errors import Damaged, Refused
from reshard.families import ExpertLayout, ExpertTensor, Family, config_int, sparse_layers
from reshard.tensors.dtypes import DTYPES
from reshard.transforms.expert_views import Key, Source, rearrange
from reshard.transforms.joins import join_split, split_joined
from reshard.transforms.names import hub_prefix, memory_prefix, rename_to_hub, rename_to_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.families import Experts
    from reshard.tensors.lazy import LazyTensor

# What looks like experts although no family says so: a tensor of all experts, with three axes.
UNKNOWN_EXPERTS = re.compile(r"(^|\.)(experts?|moe|block_sparse_moe)(\.|_)(?!\d+\.)")
# Ends of names that belong to a weight and must not be parted from it.
COMPANION = re.compile(r"_(scale_inv|scales?|scale_2|zero_point|bias|blocks|packed|shape|qweight|qzeros)$")
Blocks = dict[str, dict[Key, str]]


def convert_experts(
    tensors: Mapping[str, LazyTensor],
    family: Family | None,
    config: Mapping[str, Any] | None,
    target: str,
    source_hint: str | None = None,
    training: bool = False,
) -> tuple[dict[str, LazyTensor], list[str]]:
    """(tensors under their target names, experts laid out as `target`; notes).

    target: "hub" (names and layout of Hub releases), "fused" (transformers' modules), "per-expert" (or any other layout
    of the family, under the Hub's names) or "keep" (nothing changes). source_hint: name of the layout that the experts
    are in, where two layouts share their names. training: whether the tensors come from a training checkpoint.

    Raises Refused (ambiguous, no such layout, tensors that cannot be parted, two names become one) or Damaged (experts
    missing, wrong counts or shapes).
    """
    if target == "keep":
        return dict(tensors), []
    if family is None:
        return _unknown(tensors, config, target, training)
    if family.experts is None:
        if target not in ("hub", "fused"):
            raise Refused("experts", family.name, "has no routed experts", "leave --experts away")
        result, moved = _rename(tensors, family, target)
        _refuse_companions(moved, tensors, set(moved))
        return result, []
    experts = family.experts
    wanted = _wanted(family, experts, target)
    blocks = find_blocks(tensors, experts)
    _check_layers(tensors, blocks, family, config)
    expert_names = {name for names in blocks.values() for name in names.values()}
    others = {name: tensor for name, tensor in tensors.items() if name not in expert_names}
    result, moved = _rename(others, family, target)
    sources: dict[str, int] = defaultdict(int)
    for block, names in blocks.items():
        layout = recognise(block, names, tensors, family, config, source_hint)
        count = _check_count(block, layout, names, tensors, family, config)
        stem = hub_prefix(block, family)
        stem = memory_prefix(stem, family) if target == "fused" else stem
        if layout is wanted:
            made = {stem + _below(key): tensors[name] for key, name in names.items()}
        else:
            _check_movable(block, layout, names, tensors, family, config, count)
            made = _made(stem, Source(layout, names, tensors, count), wanted)
            moved += names.values()
            sources[layout.name] += 1
        for name, tensor in made.items():
            if name in result:
                raise Refused("collision", name, "would be written twice", "--drop one of them")
            result[name] = tensor
    _refuse_companions(moved, tensors, expert_names.union(moved))
    return result, [
        f"experts of {n} layer{'s' if n > 1 else ''} go from the layout {name!r} to {wanted.name!r}"
        for name, n in sorted(sources.items())
    ]


def _rename(tensors: Mapping[str, LazyTensor], family: Family, target: str) -> tuple[dict[str, LazyTensor], list[str]]:
    """(what is not a routed expert, under its target names; names of what was cut or joined)."""
    if target == "fused":
        found, _ = split_joined(tensors, family)
        joined, moved = join_split(rename_to_hub(found, family), family)
        return rename_to_memory(joined, family), moved
    found, moved = split_joined(tensors, family)
    return rename_to_hub(found, family), moved


def _made(stem: str, source: Source, wanted: ExpertLayout) -> dict[str, LazyTensor]:
    try:
        return {stem + name: tensor for name, tensor in rearrange(source, wanted).items()}
    except Refused as error:
        raise Refused(error.kind, stem + error.where, error.detail, error.remedy) from error


def _below(key: Key) -> str:
    return key[0] if key[1] is None else key[0].replace("{e}", str(key[1]))


def _unknown(
    tensors: Mapping[str, LazyTensor], config: Mapping[str, Any] | None, target: str, training: bool
) -> tuple[dict[str, LazyTensor], list[str]]:
    if target != "hub":
        detail = f"experts cannot be made {target} without family data"
        raise Refused("family", "", detail, "`reshard families` lists the families that reshard knows")
    if training:
        for name, tensor in tensors.items():
            if len(tensor.shape) >= 3 and UNKNOWN_EXPERTS.search(name):
                if config is None:
                    raise Refused(
                        "config", name, "looks like fused experts, and no config.json says of which family",
                        "--config-from DIR names a model directory that has it",
                    )  # fmt: skip
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


def find_blocks(tensors: Iterable[str], experts: Experts) -> Blocks:
    """Decoder layer (as a name prefix) -> (template, expert) -> name, for every name that some layout knows."""
    # Templates by (segments, place of the number); the longest first, so that the most specific one counts.
    shapes: dict[tuple[int, int], set[str]] = defaultdict(set)
    for layout in experts.layouts:
        for row in layout.tensors:
            segments = row.name.split(".")
            shapes[len(segments), segments.index("{e}") if row.per_expert else -1].add(row.name)
    order = sorted(shapes.items(), reverse=True)
    blocks: Blocks = defaultdict(dict)
    for name in tensors:
        segments = name.split(".")
        for (length, place), templates in order:
            tail = segments[-length:]
            if len(tail) < length:
                continue
            expert = None
            if place >= 0:
                number = tail[place]
                if not (number.isascii() and number.isdecimal()) or (number[0] == "0" and number != "0"):
                    continue
                if len(number) > 6:
                    continue
                tail[place], expert = "{e}", int(number)
            template = ".".join(tail)
            if template in templates:
                prefix = segments[: len(segments) - length]
                blocks[".".join(prefix) + "." if prefix else ""][template, expert] = name
                break
    return dict(blocks)


def _check_layers(
    tensors: Mapping[str, LazyTensor], blocks: Blocks, family: Family, config: Mapping[str, Any] | None
) -> None:
    """A layer that is here and has a router, or is sparse by the config, must have its experts here too."""
    assert family.experts is not None
    router = family.router
    present: set[str] = set()
    for name in tensors:
        if router and name.endswith(f".{router}.weight"):
            block = name[: -len(router) - len("weight") - 1]
            if block not in blocks:
                raise Damaged("experts", name, "is a router whose experts are missing", "use a complete checkpoint")
        if name.startswith(family.layers):
            present.add(name[len(family.layers) :].partition(".")[0])
    for number in sorted(sparse_layers(family, config) or ()):
        block = f"{family.layers}{number}."
        if str(number) in present and block not in blocks:
            raise Damaged("experts", f"{block}*", "has no experts, which the config says it has", "check the config")


def recognise(
    block: str,
    names: Mapping[Key, str],
    tensors: Mapping[str, LazyTensor],
    family: Family,
    config: Mapping[str, Any] | None,
    hint: str | None,
) -> ExpertLayout:
    """The layout in which a layer's experts are stored."""
    assert family.experts is not None
    layouts = family.experts.layouts
    present = {template for template, _ in names}
    known = {layout.name: {row.name for row in layout.tensors} for layout in layouts}
    complete = [layout for layout in layouts if known[layout.name] == present]
    if not complete:
        fitting = [layout for layout in layouts if present < known[layout.name]]
        if not fitting:
            some = ", ".join(sorted(name.removeprefix(block) for name in names.values())[:4])
            detail = f"mixes expert layouts in one layer ({some}, ...)"
            raise Refused("experts", f"{block}*", detail, "--drop what is stale")
        lacking = sorted(known[fitting[0].name] - present)
        raise Damaged("experts", block + lacking[0].replace("{e}", "0"), "is missing beside the other expert tensors")
    if len(complete) > 1:
        return _tell_apart(block, complete, names, tensors, family, config, hint)
    return complete[0]


def _tell_apart(
    block: str,
    layouts: Sequence[ExpertLayout],
    names: Mapping[Key, str],
    tensors: Mapping[str, LazyTensor],
    family: Family,
    config: Mapping[str, Any] | None,
    hint: str | None,
) -> ExpertLayout:
    """Layouts with the same names: a declaration decides, which shapes must not contradict. Without one, the dimensions
    that the config gives must exclude all layouts but one, tensor by tensor."""
    stored = {key: tensors[name].shape for key, name in names.items()}

    def fits(layout: ExpertLayout, key: Key) -> bool:
        row = layout.row(key[0])
        return expected_shape(row, family, config, stored[key][:1]) == stored[key]

    possible = [layout for layout in layouts if all(fits(layout, key) for key in stored)]
    # A square matrix may lie either way whatever the others say: each tensor must exclude the other layouts by itself.
    clear = len(possible) == 1 and not any(
        fits(other, key) for other in layouts for key in stored if other.row(key[0]) != possible[0].row(key[0])
    )
    declared = next((layout for layout in layouts if layout.name == hint), None)
    if declared is not None:
        if possible and declared not in possible:
            detail = f"is said to be in the layout {hint!r}, but its shapes are those of {possible[0].name!r}"
            raise Refused("experts", f"{block}*", detail)
        return declared
    if not clear:
        either = " or ".join(repr(layout.name) for layout in layouts)
        raise Refused(
            "experts", f"{block}*", f"may be in the layout {either}, and neither names nor dimensions tell which",
            "--experts keep writes it as it is",
        )  # fmt: skip
    return possible[0]


def expected_shape(
    row: ExpertTensor, family: Family, config: Mapping[str, Any] | None, lead: tuple[int, ...] = ()
) -> tuple[int | None, ...]:
    """The shape of a stored tensor by the config's dimensions, None for a length that cannot be told. lead: the length
    of the leading axis of all experts, where there is one."""
    assert family.experts is not None
    hidden, width = config_int(config, family.experts.hidden), config_int(config, family.experts.intermediate)
    out, into = (hidden, width) if row.holds[0].startswith("down") else (width, hidden)
    out = out * len(row.holds) if out is not None else None
    one = (out,) if row.is_bias else (out, into) if row.orientation == "out-in" else (into, out)
    if row.per_expert:
        return one
    if row.experts == "stack":
        return (*lead, *one)
    count = config_int(config, family.experts.count)
    return (count * one[0] if count is not None and one[0] is not None else None, *one[1:])


def _check_count(
    block: str,
    layout: ExpertLayout,
    names: Mapping[Key, str],
    tensors: Mapping[str, LazyTensor],
    family: Family,
    config: Mapping[str, Any] | None,
) -> int:
    """The number of experts: each of 0..E-1 has every tensor, and E is the config's where there is one."""
    assert family.experts is not None
    said = config_int(config, family.experts.count)
    count = said if said is not None else _count_here(layout, names, tensors)
    here: dict[str, set[int]] = defaultdict(set)
    for template, expert in names:
        if expert is not None:
            here[template].add(expert)
    for row in layout.tensors:
        if row.per_expert:
            _check_numbers(block, row, here[row.name], count)
            continue
        name = names[row.name, None]
        if row.experts == "rows" and said is None:
            remedy = "--config-from DIR names a model directory that has it"
            raise Refused("experts", name, "cannot be cut without the config's number of experts", remedy)
        rows = (tensors[name].shape or (0,))[0]
        if count <= 0 or (rows % count if row.experts == "rows" else rows != count):
            who = "the config says" if said is not None else "another tensor of the layer has"
            detail = f"has {rows} rows of experts where {who} {count} experts"
            raise Damaged("experts", name, detail, "check the config")
    return count


def _count_here(layout: ExpertLayout, names: Mapping[Key, str], tensors: Mapping[str, LazyTensor]) -> int:
    """The number of experts by what is stored; 0 where rows of unknown number hold them."""
    numbers = [expert for _, expert in names if expert is not None]
    if numbers:
        return max(numbers) + 1
    stacked = next((row for row in layout.tensors if row.experts == "stack"), None)
    return (tensors[names[stacked.name, None]].shape or (0,))[0] if stacked is not None else 0


def _check_numbers(block: str, row: ExpertTensor, here: set[int], count: int) -> None:
    missing = next((expert for expert in range(count) if expert not in here), None)
    if missing is not None:
        where = block + row.name.replace("{e}", str(missing))
        raise Damaged("experts", where, f"is missing: the model has {count} experts, {len(here)} are here")
    if len(here) > count:
        where = block + row.name.replace("{e}", str(max(here)))
        raise Damaged("experts", where, f"is one too many: the config says {count} experts", "check the config")


def _check_movable(
    block: str,
    layout: ExpertLayout,
    names: Mapping[Key, str],
    tensors: Mapping[str, LazyTensor],
    family: Family,
    config: Mapping[str, Any] | None,
    count: int,
) -> None:
    """Shapes are the config's, and the numbers are not packed."""
    expected = {row.name: expected_shape(row, family, config, (count,)) for row in layout.tensors}
    for (template, _), name in names.items():
        tensor, shape = tensors[name], expected[template]
        kind = DTYPES[tensor.dtype]
        if kind.kind not in ("float", "narrow") or kind.bits < 8:
            raise Refused("experts", name, f"is packed ({tensor.dtype}) and cannot be rearranged", "--experts keep")
        fits = len(shape) == len(tensor.shape) and all(a in (None, b) for a, b in zip(shape, tensor.shape, strict=True))
        if not fits:
            text = ", ".join("?" if n is None else str(n) for n in shape)
            detail = f"is {list(tensor.shape)} where the config gives [{text}]"
            raise Damaged("experts", name, detail, "check the config")


def _refuse_companions(moved: Iterable[str], tensors: Mapping[str, LazyTensor], known: set[str]) -> None:
    """Scales and biases that no layout knows must not be parted from the weights that were rearranged."""
    stems = {name.removesuffix(".weight"): name for name in moved}
    if not stems:
        return
    for name in tensors:
        if name in known:
            continue
        for stem in (name.rpartition(".")[0], COMPANION.sub("", name)):
            if stem in stems:
                detail = f"belongs to {stems[stem]} and cannot be rearranged with it"
                raise Refused("experts", name, detail, "--experts keep")
