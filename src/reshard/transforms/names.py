"""Names: the wrapper levels that frameworks put into them, and other writers' spellings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.errors import Refused
from reshard.families import MEMORY
from reshard.families.renaming import from_hub, to_hub
from reshard.tensors.lazy import select

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.families import Family
    from reshard.tensors.lazy import LazyTensor

# Levels that torch.compile, DDP, FSDP1 and activation checkpointing add around modules.
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPED = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(WRAPPERS)})\.")


def plain_name(name: str) -> str:
    """The name without wrapper levels, wherever they stand."""
    return _WRAPPED.sub("", name)


def strip_wrappers(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors under their plain names. Refused when two become one."""
    return _renamed(tensors, {name: plain_name(name) for name in tensors}, "without wrapper levels")


def hub_name(name: str, family: Family) -> str:
    """The Hub's name for any writer's name of a tensor that is not a routed expert. Idempotent."""
    return _hub_name(name, family)[0]


def hub_prefix(prefix: str, family: Family) -> str:
    """The Hub's prefix of a decoder layer ("model.layers.3.")."""
    rows = [row for row in family.renames if row.where == "prefix" and to_hub(row, prefix) is not None]
    return to_hub(max(rows, key=lambda row: len(row.name)), prefix) or prefix if rows else prefix


def memory_prefix(prefix: str, family: Family) -> str:
    """The prefix of a decoder layer in transformers' modules, from the Hub's."""
    rows = [row for row in family.renames if row.where == "prefix" and row.source == MEMORY]
    rows = [row for row in rows if from_hub(row, prefix) is not None]
    return from_hub(max(rows, key=lambda row: len(row.hub)), prefix) or prefix if rows else prefix


def rename_to_hub(tensors: Mapping[str, LazyTensor], family: Family) -> dict[str, LazyTensor]:
    """All names as the Hub's. Twice is the same as once; Refused when two names become one, when writers disagree on
    what a name means, or when the Hub has no place for a tensor."""
    _refuse_unplaced(tensors, family)
    if not family.renames:
        return dict(tensors)
    target: dict[str, str] = {}
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        target[name], squeeze = _hub_name(name, family)
        short = squeeze and len(tensor.shape) > 2 and tensor.shape[0] == 1
        found[name] = select(tensor, 0) if short else tensor
    return _renamed(found, target, "under the Hub's names")


def rename_to_memory(tensors: Mapping[str, LazyTensor], family: Family) -> dict[str, LazyTensor]:
    """Hub names as transformers' modules have them. Refused when two names become one."""
    rows = [row for row in family.renames if row.source == MEMORY]
    tails = [row for row in rows if row.where == "tail"]
    target = {}
    for name in tensors:
        new = memory_prefix(name, family)
        for row in reversed(rows):
            if row.where == "module":
                new = from_hub(row, new) or new
        fitting = [row for row in tails if from_hub(row, name) is not None and from_hub(row, new) is not None]
        if fitting:
            new = from_hub(max(fitting, key=lambda row: len(row.hub)), new) or new
        target[name] = new
    return _renamed(tensors, target, "in transformers")


def _hub_name(name: str, family: Family) -> tuple[str, bool]:
    """(the Hub's name, whether a leading axis of length 1 may go): the longest tail, then modules and prefixes."""
    tails = [row for row in family.renames if row.where == "tail" and to_hub(row, name) is not None]
    squeeze = False
    new = name
    if tails:
        best = max(tails, key=lambda row: len(row.name))
        other = next((row for row in tails if row.name == best.name and row.hub != best.hub), None)
        if other is not None:
            raise Refused(
                "rename", name, f"is {best.hub} as {best.source} writes it and {other.hub} as {other.source} does",
                "--experts keep writes it as it is",
            )  # fmt: skip
        new, squeeze = to_hub(best, name) or name, best.squeeze
    for row in family.renames:
        if row.where == "module":
            new = to_hub(row, new) or new
    return hub_prefix(new, family), squeeze


def _refuse_unplaced(tensors: Mapping[str, LazyTensor], family: Family) -> None:
    for row in family.unplaced:
        for name in tensors:
            if name == row.name or name.endswith("." + row.name):
                pattern = row.name.replace(".", r"\.") + "$"
                raise Refused("unplaced", name, f"is {row.why}", f"--drop '{pattern}' leaves it out")


def _renamed(tensors: Mapping[str, LazyTensor], target: Mapping[str, str], how: str) -> dict[str, LazyTensor]:
    owner: dict[str, str] = {}
    for name, new in target.items():
        if new in owner:
            raise Refused("collision", name, f"and {owner[new]} would both be {new!r} {how}", "--drop one of them")
        owner[new] = name
    return {target[name]: tensor for name, tensor in tensors.items()}
