"""The config of an output: the model's own, with what belonged to the training run put back to portable values."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from reshard.families import config_int
from reshard.transforms.ties import untie

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reshard.families import Family

# Keys that only say how a training run computed: attention kernels, fused or grouped expert kernels, expert
# communication, load balancing. Readers choose their own, so the keys go.
RUN_ONLY = (
    "_attn_implementation",
    "attn_implementation",
    "_attn_implementation_internal",
    "_attn_implementation_autoset",
    "_experts_implementation",
    "_experts_implementation_internal",
    "experts_implementation",
    "use_grouped_mm",
    "use_grouped_gemm",
    "moe_use_grouped_mm",
    "fused_moe",
    "use_fused_moe",
    "moe_implementation",
    "_moe_implementation",
    "ep_comm_backend",
    "moe_ep_comm_backend",
    "use_deepep",
    "enable_deepep",
    "deepep",
    "load_balance_coeff",
    "gradient_checkpointing",
)
# Values that training changes and serving needs: key -> (values of the run, portable value). None: any other value.
RUN_VALUES: dict[str, tuple[tuple[Any, ...] | None, Any]] = {
    "use_cache": ((False,), True),
    "output_router_logits": ((True,), False),
    # DeepSeek's releases carry it with this value.
    "ep_size": (None, 1),
}
# Nested tables that are not the config of a part of the model.
NOT_MODELS = ("quantization_config", "compression_config", "generation_config")
DTYPE_KEYS = ("dtype", "torch_dtype")


def export_config(
    config: Mapping[str, Any],
    *,
    family: Family | None,
    dtype_written: str | None,
    tied: bool | None,
    training: bool,
    has_mtp: bool | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """(config to write, notes). The given config is not changed; the order of keys and all other values are kept.

    dtype_written: torch's name of the dtype that most floating bytes are written in; None leaves the field.
    tied: False when head and embedding turned out to differ, so that the flag becomes false wherever it stands.
    training: whether the config comes from a training run, whose own values are replaced.
    has_mtp: False when no multi-token-prediction tensor is written, so that the count of such layers becomes 0.
    """
    result = deepcopy(dict(config))
    notes: list[str] = []
    for stem, level in list(_levels(result, "")):
        if dtype_written is not None:
            for key in DTYPE_KEYS:
                if isinstance(level.get(key), str):
                    level[key] = dtype_written
        if training:
            notes += _portable(level, stem)
        if has_mtp is False and family is not None and family.mtp is not None and level.get(family.mtp.count):
            level[family.mtp.count] = 0
            notes.append(f"config: {stem}{family.mtp.count} is 0 now, since no such layer is in the checkpoint")
    if dtype_written is not None and not any(isinstance(result.get(key), str) for key in DTYPE_KEYS):
        result["dtype"] = dtype_written
    if tied is False:
        result = untie(result)
        notes.append("config: tie_word_embeddings is false now, since head and embedding differ")
    return result, notes


def _levels(table: dict[str, Any], stem: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config and the configs of its parts, with the path of each."""
    yield stem, table
    for key, value in table.items():
        if key.endswith("_config") and key not in NOT_MODELS and isinstance(value, dict) and stem.count(".") < 4:
            yield from _levels(value, f"{stem}{key}.")


def _portable(level: dict[str, Any], stem: str) -> list[str]:
    notes = []
    for key in RUN_ONLY:
        if key in level:
            del level[key]
            notes.append(f"config: {stem}{key} belonged to the training run and is left out")
    for key, (run, portable) in RUN_VALUES.items():
        value = level.get(key)
        ours = value is not None and (value in run if run is not None else value != portable)
        if ours:
            level[key] = portable
            notes.append(f"config: {stem}{key} is set to {portable} again")
    return notes


def has_mtp_tensors(names: Iterable[str], family: Family | None, config: Mapping[str, Any] | None) -> bool | None:
    """Whether any multi-token-prediction tensor is there; None where the family has no such layers, or where they
    cannot be told from others."""
    if family is None or family.mtp is None:
        return None
    if family.mtp.prefix is not None:
        prefix = family.mtp.prefix
        return any(name.startswith(prefix) for name in names)
    layers = config_int(config, ("num_hidden_layers",))
    if layers is None:
        return None
    seen = False
    for name in names:
        if name.startswith(family.layers):
            number = name[len(family.layers) :].partition(".")[0]
            seen = seen or number.isdecimal()
            if number.isdecimal() and int(number) >= layers:
                return True
    # No decoder layer under this prefix: the names are another writer's, and say nothing.
    return False if seen else None
