"""What convert asks of a checkpoint before it plans: is it whole, does its config fit, which dtype is meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import Damaged, Refused
from reshard.families import config_int, find_family
from reshard.tensors.dtypes import BY_TORCH
from reshard.tensors.dtypes import dtype as find_dtype
from reshard.verbs.checks import check_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.checkpoint import Checkpoint
    from reshard.families import Family


def check_complete(checkpoint: Checkpoint, notes: list[str]) -> None:
    """Damaged when layers that the config counts are absent; notes on whatever else does not fit it."""
    for row in check_layers(checkpoint):
        if row["kind"] == "layers":
            where = row["tensor"] or checkpoint.path
            raise Damaged("layers", where, row["detail"], "use a complete checkpoint, or a config that fits it")
        notes.append(f"{row['tensor']} {row['detail']}")
    family = find_family(checkpoint.config)
    if family is not None and not any(family.layers in name for name in checkpoint):
        notes.append(
            f"no name is one of {family.name}'s ({family.layers}*): the config may not belong to these tensors"
        )


def check_expert_count(checkpoint: Checkpoint, family: Family | None) -> None:
    """A family's config must say how many experts there are: what was seen proves nothing."""
    experts = family.experts if family is not None else None
    if experts is not None and config_int(checkpoint.config, experts.count) is None:
        keys = " or ".join(experts.count)
        where = str(checkpoint.config_dir or checkpoint.path)
        raise Refused("config", where, f"has no number of experts ({keys}) to check against", "mend config.json")


def wanted_dtype(checkpoint: Checkpoint, dtype: str, notes: list[str]) -> str:
    """ "keep", or safetensors' name of the dtype asked for or declared."""
    if dtype == "keep":
        return "keep"
    if dtype != "auto":
        return find_dtype(dtype).name
    if not checkpoint.training:
        return "keep"
    declared = _declared_dtype(checkpoint.config)
    if declared is None:
        if checkpoint.config is not None:
            notes.append("the config declares no dtype, so every tensor keeps the one it has")
        return "keep"
    row = BY_TORCH.get(declared.removeprefix("torch."))
    if row is None or row.kind != "float":
        raise Refused(
            "config", str(checkpoint.config_dir), f"declares the dtype {declared!r}, to which nothing is cast",
            "--dtype bfloat16 or --dtype keep decides",
        )  # fmt: skip
    notes.append(f"dtype {row.torch}, as the model's config declares; --dtype keep leaves it as stored")
    return row.name


def _declared_dtype(config: Mapping[str, Any] | None) -> str | None:
    for level in (config or {}, (config or {}).get("text_config") or {}):
        for key in ("dtype", "torch_dtype"):
            value = level.get(key)
            if isinstance(value, str) and value not in ("auto", ""):
                return value
    return None
