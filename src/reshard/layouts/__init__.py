"""Layouts: one module per way in which a checkpoint lies on disk, each opening to a Checkpoint.

A layout module has `detect(path) -> bool`, from names and small marker files alone, and `open(paths, options) ->
Checkpoint`. It is registered in LAYOUTS, whose order is the order of detection.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from reshard.errors import Refused

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from reshard.checkpoint import Checkpoint
    from reshard.layouts.options import OpenOptions

LAYOUTS: dict[str, str] = {
    "dcp": "reshard.layouts.dcp",
    "hf": "reshard.layouts.hf",
}

# Recognised by a marker and named, so that the message helps; reading them comes later.
KNOWN_FOREIGN: tuple[tuple[str, str, str], ...] = (
    ("adapter_config.json", "a PEFT adapter", "merge it into its base first (peft's merge_and_unload)"),
    (
        "latest_checkpointed_iteration.txt",
        "a Megatron checkpoint directory",
        "convert it to Hugging Face with its own tools",
    ),
    ("zero_to_fp32.py", "a DeepSpeed ZeRO checkpoint", "run its zero_to_fp32.py first"),
    ("mp_rank_*_model_states.pt", "a DeepSpeed ZeRO checkpoint", "run its zero_to_fp32.py first"),
    ("model_world_size_*_rank_*.pt", "FSDP per-rank pickle files", "merge them with the trainer's own tool"),
    ("pytorch_model*.bin", "pickled PyTorch weights", "save them as safetensors first"),
    ("adapter_model.safetensors", "a PEFT adapter", "merge it into its base first (peft's merge_and_unload)"),
)


def open_layout(paths: list[Path], options: OpenOptions) -> Checkpoint:
    """Opens directories (or one file) that hold one checkpoint, in whatever layout. Raises Refused or Damaged."""
    name, module = _detect(paths)
    checkpoint: Checkpoint = module.open(paths, options)
    return replace(checkpoint, layout=name)


def _detect(paths: list[Path]) -> tuple[str, ModuleType]:
    for name, target in LAYOUTS.items():
        module = import_module(target)
        if any(module.detect(path) for path in paths):
            if not all(module.detect(path) for path in paths):
                raise Refused("layout", ",".join(map(str, paths)), "the directories are of different layouts")
            return name, module
    path = paths[0]
    if path.is_dir():
        for pattern, what, remedy in KNOWN_FOREIGN:
            if next(path.glob(pattern), None) is not None:
                raise Refused("layout", str(path), f"is {what}, which this version does not read", remedy)
    raise Refused(
        "layout", str(path), "holds no checkpoint that reshard knows", "name the directory with the weight files"
    )
