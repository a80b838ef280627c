"""The config of an output: the model's own, with what belonged to the training run put back to portable values."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from reshard.transforms.ties import untie

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.families import Family

# Keys that only say how a training run computed: attention kernels, fused or grouped expert kernels, expert communication.
# Readers choose their own, so the keys go.
RUN_ONLY = (
    "_attn_implementation",
    "attn_implementation",
    "_attn_implementation_internal",
    "_attn_implementation_autoset",
    "_experts_implementation",
    "experts_implementation",
    "use_grouped_mm",
    "use_grouped_gemm",
    "moe_use_grouped_mm",
    "fused_moe",
    "use_fused_moe",
    "moe_implementation",
    "ep_comm_backend",
    "moe_ep_comm_backend",
    "use_deepep",
    "enable_deepep",
    "deepep",
    "ep_size",
    "gradient_checkpointing",
)
# Values that training changes and serving needs: key -> (value of the run, portable value).
RUN_VALUES: dict[str, tuple[Any, Any]] = {
    "use_cache": (False, True),
    "output_router_logits": (True, False),
}
NESTED = ("text_config", "vision_config", "audio_config", "llm_config", "language_config")


def export_config(
    config: Mapping[str, Any],
    *,
    family: Family | None,
    dtype_written: str | None,
    tied: bool | None,
    training: bool,
    has_mtp: bool | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """(config to write, notes). The given config is not changed; the order of keys is.

    dtype_written: torch's name of the dtype that most floating bytes are written in; None leaves the field.
    tied: False when head and embedding turned out to differ, so that the flag becomes false wherever it stands.
    training: whether the config comes from a training run, whose own values are replaced.
    has_mtp: False when no multi-token-prediction tensor is written, so that the count of such layers becomes 0.
    """
    result = deepcopy(dict(config))
    notes: list[str] = []
    levels = [("", result), *((f"{key}.", result[key]) for key in NESTED if isinstance(result.get(key), dict))]
    for stem, level in levels:
        if dtype_written is not None:
            for key in ("dtype", "torch_dtype"):
                if isinstance(level.get(key), str):
                    level[key] = dtype_written
        if training:
            for key in RUN_ONLY:
                if key in level:
                    del level[key]
                    notes.append(f"config: {stem}{key} belonged to the training run and is left out")
            for key, (run, portable) in RUN_VALUES.items():
                if key in level and level[key] is run:
                    level[key] = portable
                    notes.append(f"config: {stem}{key} is set to {portable} again")
        if has_mtp is False and family is not None and family.mtp is not None and level.get(family.mtp.count):
            level[family.mtp.count] = 0
            notes.append(f"config: {stem}{family.mtp.count} is 0 now, since no such layer is in the checkpoint")
    if dtype_written is not None and "dtype" not in result and "torch_dtype" not in result:
        result["dtype"] = dtype_written
    if tied is False:
        result = untie(result)
        notes.append("config: tie_word_embeddings is false now, since head and embedding differ")
    return result, notes


def has_mtp_tensors(names: Mapping[str, Any], family: Family | None, config: Mapping[str, Any] | None) -> bool | None:
    """Whether any multi-token-prediction tensor is there; None where the family has no such layers."""
    if family is None or family.mtp is None:
        return None
    if family.mtp.prefix is not None:
        return any(name.startswith(family.mtp.prefix) for name in names)
    layers = (config or {}).get("num_hidden_layers")
    if not isinstance(layers, int):
        return None
    for name in names:
        if name.startswith(family.layers):
            number = name[len(family.layers) :].split(".", 1)[0]
            if number.isdecimal() and int(number) >= layers:
                return True
    return False
