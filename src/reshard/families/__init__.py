"""Model families as data: one TOML file each beside this module, checked once on loading.

A family says how the tensors of its models are named and arranged: on the Hub, in transformers' memory and in trainers.
`docs/families.md` explains every field; `reshard.transforms` turns them into rearrangements.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Mapping

MATRICES = ("gate", "up", "down")
ROLES = (*MATRICES, "gate_bias", "up_bias", "down_bias")


@dataclass(frozen=True)
class ExpertTensor:
    """One stored tensor of an expert layout.

    name:        below the decoder layer; `{e}` stands for the expert number, and without it all experts lie in one tensor
    holds:       roles (gate, up, down, and *_bias), in the order in which they lie along the output axis
    join:        "concat" (one after the other) or "interleave" (rows taking turns), where it holds several
    orientation: "out-in" for [out, in] as in a Linear's weight, "in-out" for its transpose
    experts:     "stack" ([E, ...]) or "rows" ([E * out, in]), where all experts lie in one tensor
    """

    name: str
    holds: tuple[str, ...]
    join: str = "concat"
    orientation: str = "out-in"
    experts: str = "stack"

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.name


@dataclass(frozen=True)
class ExpertLayout:
    """A complete way to store the experts of one layer."""

    name: str
    tensors: tuple[ExpertTensor, ...]


@dataclass(frozen=True)
class Experts:
    """The routed experts of a family.

    count:        config keys that hold the number of routed experts, the first present counts
    intermediate: config keys that hold the width of one expert
    hub, memory:  names of the layouts of Hub releases and of transformers' modules
    """

    count: tuple[str, ...]
    intermediate: tuple[str, ...]
    hub: str
    memory: str
    layouts: tuple[ExpertLayout, ...]

    def layout(self, name: str) -> ExpertLayout | None:
        return next((layout for layout in self.layouts if layout.name == name), None)


@dataclass(frozen=True)
class Rename:
    """A trainer's or module's name below the decoder layer, and the Hub's. squeeze: a leading axis of length 1 goes."""

    name: str
    hub: str
    squeeze: bool = False


@dataclass(frozen=True)
class Mtp:
    """Multi-token-prediction layers. count: config key of their number. Where they lie: `prefix`, or the decoder layers
    from `num_hidden_layers` on where there is none."""

    count: str
    prefix: str | None = None


@dataclass(frozen=True)
class Family:
    """One model family; see the TOML files."""

    name: str
    model_types: tuple[str, ...]
    layers: str = "model.layers."
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    router: str = ""
    correction_bias: str = ""
    shared_experts: str = ""
    fp32_pins: tuple[str, ...] = ()
    keep_unquantized: tuple[str, ...] = ()
    scale_groups: tuple[tuple[str, ...], ...] = ()
    renames: tuple[Rename, ...] = ()
    mtp: Mtp | None = None
    experts: Experts | None = None


def _frozen(kind: type[Any], row: Mapping[str, Any], where: str) -> Any:
    """A dataclass from a TOML table: unknown or missing fields are errors, lists become tuples."""
    known = {field.name for field in fields(kind)}
    unknown = set(row) - known
    if unknown:
        raise ReshardError("family", where, f"has the unknown field {sorted(unknown)[0]!r}")
    try:
        return kind(**{key: _tuples(value) for key, value in row.items()})
    except TypeError as error:
        raise ReshardError("family", where, str(error)) from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def parse_family(text: str, where: str) -> Family:
    """A family from TOML. Raises ReshardError naming the file and the field."""
    row = tomllib.loads(text)
    row["renames"] = [_frozen(Rename, item, where) for item in row.pop("renames", [])]
    if "mtp" in row:
        row["mtp"] = _frozen(Mtp, row["mtp"], where)
    if "experts" in row:
        table = dict(row["experts"])
        layouts = []
        for item in table.pop("layouts", []):
            tensors = tuple(_frozen(ExpertTensor, tensor, where) for tensor in item["tensors"])
            layouts.append(ExpertLayout(item["name"], tensors))
        row["experts"] = _frozen(Experts, table | {"layouts": layouts}, where)
        _check_experts(row["experts"], where)
    family: Family = _frozen(Family, row, where)
    for pattern in (*family.fp32_pins, *family.keep_unquantized):
        re.compile(pattern)
    return family


def _check_experts(experts: Experts, where: str) -> None:
    for name in (experts.hub, experts.memory):
        if experts.layout(name) is None:
            raise ReshardError("family", where, f"names the expert layout {name!r}, which it does not define")
    roles = {
        layout.name: sorted(role for tensor in layout.tensors for role in tensor.holds) for layout in experts.layouts
    }
    for layout in experts.layouts:
        if roles[layout.name] != roles[experts.hub] or len(set(roles[layout.name])) != len(roles[layout.name]):
            raise ReshardError(
                "family", where, f"layout {layout.name!r} does not hold each role once, as the others do"
            )
        for tensor in layout.tensors:
            sound = set(tensor.holds) <= set(ROLES) and tensor.join in ("concat", "interleave")
            sound = sound and tensor.orientation in ("out-in", "in-out") and tensor.experts in ("stack", "rows")
            if not sound:
                raise ReshardError("family", where, f"{tensor.name!r} of layout {layout.name!r} has an unknown value")


@cache
def all_families() -> tuple[Family, ...]:
    """Every family that ships, by name."""
    found = [
        parse_family(entry.read_text(encoding="utf-8"), entry.name)
        for entry in files(__package__).iterdir()
        if entry.name.endswith(".toml")
    ]
    return tuple(sorted(found, key=lambda family: family.name))


def find_family(config: Mapping[str, Any] | None) -> Family | None:
    """The family of a config's model_type, by exact name; None for a type that no file claims."""
    kind = (config or {}).get("model_type")
    return next((family for family in all_families() if kind in family.model_types), None)
