"""Families from TOML: read once, checked field by field."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from reshard.errors import ReshardError
from reshard.families.configs import text_levels
from reshard.families.renaming import to_hub
from reshard.families.tables import (
    BIASES,
    MATRICES,
    ROLES,
    ExpertLayout,
    Experts,
    ExpertTensor,
    Family,
    Join,
    Mtp,
    Rename,
    SparseLayers,
    Unplaced,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHOICES = {
    "join": ("concat", "interleave"),
    "orientation": ("out-in", "in-out"),
    "experts": ("stack", "rows"),
    "where": ("tail", "module", "prefix"),
}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


# Field annotation -> (test of a TOML value, what it must be).
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (_is_text, "a string"),
    "str | None": (_is_text, "a string"),
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "tuple[str, ...]": (_is_texts, "a list of strings"),
    "tuple[tuple[str, ...], ...]": (
        lambda value: isinstance(value, list) and all(map(_is_texts, value)),
        "a list of lists of strings",
    ),
}


def _fault(where: str, detail: str) -> ReshardError:
    return ReshardError("family", where, detail)


def _frozen(kind: type[Any], row: Any, where: str, **built: Any) -> Any:
    """A dataclass from a TOML table; `built` holds the fields that are tables themselves. Raises ReshardError."""
    if not isinstance(row, dict):
        raise _fault(where, f"has {row!r} where a table is needed")
    known = {field.name: str(field.type) for field in fields(kind)}
    values = dict(built)
    for key, value in row.items():
        if key not in known or key in built or known[key] not in KINDS:
            raise _fault(where, f"has the unknown field {key!r}")
        test, needed = KINDS[known[key]]
        if not test(value):
            raise _fault(where, f"has {key} = {value!r}, which must be {needed}")
        if key in CHOICES and value not in CHOICES[key]:
            raise _fault(where, f"has {key} = {value!r}, which must be one of {', '.join(CHOICES[key])}")
        values[key] = _tuples(value)
    try:
        return kind(**values)
    except TypeError as error:
        raise _fault(where, str(error).partition("__init__() ")[2] or str(error)) from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _rows(row: dict[str, Any], key: str, where: str) -> list[Any]:
    value = row.pop(key, [])
    if not isinstance(value, list):
        raise _fault(where, f"has {key} = {value!r}, which must be a list of tables")
    return value


def parse_family(text: str, where: str) -> Family:
    """A family from TOML. Raises ReshardError naming the file and the field."""
    try:
        row: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _fault(where, f"is not TOML ({error})") from error
    built: dict[str, Any] = {
        "renames": tuple(_frozen(Rename, item, where) for item in _rows(row, "renames", where)),
        "joins": tuple(_frozen(Join, item, where) for item in _rows(row, "joins", where)),
        "unplaced": tuple(_frozen(Unplaced, item, where) for item in _rows(row, "unplaced", where)),
    }
    if "mtp" in row:
        built["mtp"] = _frozen(Mtp, row.pop("mtp"), where)
    if "sparse" in row:
        built["sparse"] = _frozen(SparseLayers, row.pop("sparse"), where)
    if "experts" in row:
        built["experts"] = _experts(row.pop("experts"), where)
    family: Family = _frozen(Family, row, where, **built)
    _check(family, where)
    return family


def _experts(row: Any, where: str) -> Experts:
    if not isinstance(row, dict):
        raise _fault(where, f"has {row!r} where the table of experts is needed")
    row = dict(row)
    layouts = []
    for item in _rows(row, "layouts", where):
        if not isinstance(item, dict) or set(item) != {"name", "tensors"} or not _is_text(item["name"]):
            raise _fault(where, "has an expert layout that is not a name and tensors")
        tensors = tuple(_frozen(ExpertTensor, tensor, where) for tensor in _rows(dict(item), "tensors", where))
        layouts.append(ExpertLayout(item["name"], tensors))
    experts: Experts = _frozen(Experts, row, where, layouts=tuple(layouts))
    names = [layout.name for layout in experts.layouts]
    if len(set(names)) != len(names):
        raise _fault(where, "defines an expert layout twice")
    for name in (experts.hub, experts.memory):
        if name not in names:
            raise _fault(where, f"names the expert layout {name!r}, which it does not define")
    roles = {layout.name: sorted(r for t in layout.tensors for r in t.holds) for layout in experts.layouts}
    for layout in experts.layouts:
        for tensor in layout.tensors:
            _check_tensor(tensor, layout, where)
        once = len(set(roles[layout.name])) == len(roles[layout.name])
        if not once or roles[layout.name] != roles[experts.hub] or "down" not in roles[layout.name]:
            raise _fault(where, f"has the layout {layout.name!r}, which does not hold each role once, as the others do")
        if len({tensor.name for tensor in layout.tensors}) != len(layout.tensors):
            raise _fault(where, f"has the layout {layout.name!r}, which uses a name twice")
    return experts


def _check_tensor(tensor: ExpertTensor, layout: ExpertLayout, where: str) -> None:
    what = f"has {tensor.name!r} in layout {layout.name!r}"
    segments = tensor.name.split(".")
    if not all(re.fullmatch(r"\w+|\{e\}", segment) for segment in segments) or segments.count("{e}") > 1:
        raise _fault(where, f"{what}, which is not a name with at most one segment {{e}}")
    if not tensor.holds or not set(tensor.holds) <= set(ROLES):
        raise _fault(where, f"{what}, which must hold some of {', '.join(ROLES)}")
    kinds = {kind for kind in (MATRICES, BIASES) if set(tensor.holds) & set(kind)}
    if len(kinds) > 1 or ("down" in tensor.holds and len(tensor.holds) > 1):
        raise _fault(where, f"{what}, which joins roles of different shapes")
    if tensor.per_expert and tensor.experts == "rows":
        raise _fault(where, f"{what}, which holds one expert and so no rows of others")


def _check(family: Family, where: str) -> None:
    if not family.model_types:
        raise _fault(where, "claims no model type")
    for pattern in (*family.norms, *family.fp32_pins, *family.keep_unquantized):
        try:
            re.compile(pattern)
        except re.error as error:
            raise _fault(where, f"has the pattern {pattern!r}, which is no regular expression ({error})") from error
    for join in family.joins:
        if len(set(join.parts)) < 2 or join.axis < 0 or join.name in join.parts:
            raise _fault(where, f"joins {join.name!r}, which needs two parts or more and an axis from 0 on")
    rows = [(row.source, row.where, row.name) for row in family.renames]
    if len(set(rows)) != len(rows):
        raise _fault(where, "renames a name twice")
    for row in family.renames:
        if row.where != "tail" and not (row.name.endswith(".") and row.hub[-1:] in ("", ".")):
            raise _fault(where, f"renames the {row.where} {row.name!r}, which must end at a dot")
        before, after = {"tail": ("a.", ""), "module": ("a.", "b"), "prefix": ("", "b")}[row.where]
        if any(to_hub(other, before + row.hub + after) is not None for other in family.renames):
            raise _fault(where, f"renames {row.hub!r}, which another row gives as the Hub's name")


@cache
def all_families() -> tuple[Family, ...]:
    """Every family that ships, by name. Raises ReshardError when two claim one model type."""
    found = [
        parse_family(entry.read_text(encoding="utf-8"), entry.name)
        for entry in files("reshard.families").iterdir()
        if entry.name.endswith(".toml")
    ]
    owner: dict[str, str] = {}
    for family in found:
        for kind in family.model_types:
            if owner.setdefault(kind, family.name) != family.name:
                raise _fault(family.name, f"claims the model type {kind!r}, which {owner[kind]} claims too")
    return tuple(sorted(found, key=lambda family: family.name))


def find_family(config: Mapping[str, Any] | None) -> Family | None:
    """The family of a config by exact model_type, the outer one's, else the text config's; None if none claims it."""
    for level in reversed(text_levels(config)):
        kind = level.get("model_type")
        for family in all_families():
            if kind in family.model_types:
                return family
    return None
