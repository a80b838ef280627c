"""Names: the wrapper levels that frameworks put into them, and trainers' own spellings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.errors import Refused
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


def rename_to_hub(tensors: Mapping[str, LazyTensor], family: Family) -> dict[str, LazyTensor]:
    """Trainers' names of a family as the Hub's. Idempotent; refused when two names become one."""
    if not family.renames:
        return dict(tensors)
    table = {rename.name: rename for rename in family.renames}
    pattern = re.compile(r"^((?:.*\.)?)(" + "|".join(map(re.escape, table)) + ")$")
    found: dict[str, LazyTensor] = dict(tensors)
    target = {}
    for name, tensor in tensors.items():
        match = pattern.match(name)
        target[name] = match[1] + table[match[2]].hub if match else name
        if match and table[match[2]].squeeze and len(tensor.shape) > 2 and tensor.shape[0] == 1:
            found[name] = select(tensor, 0)
    return _renamed(found, target, "under the Hub's names")


def _renamed(tensors: Mapping[str, LazyTensor], target: Mapping[str, str], how: str) -> dict[str, LazyTensor]:
    owner: dict[str, str] = {}
    for name, new in target.items():
        if new in owner:
            raise Refused("collision", name, f"and {owner[new]} would both be {new!r} {how}", "--drop one of them")
        owner[new] = name
    return {target[name]: tensor for name, tensor in tensors.items()}
