"""inspect: what a checkpoint is, from headers and metadata alone."""

from __future__ import annotations

import gc
import shlex
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reshard.errors import Damaged
from reshard.families import find_family
from reshard.opening import open_checkpoint
from reshard.transforms.adapters import ADAPTER
from reshard.verbs import checks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.checkpoint import Checkpoint


def inspect(source: str, *, config_from: str | None = None, model_key: str | None = None) -> dict[str, Any]:
    """Describes a checkpoint in any layout, or the newest one of a run. Reads headers and metadata, never a tensor.

    Returns "layout", "family" (or None), "model_type", "tensors", "parameters", "bytes", "dtypes" {name: count},
    "complete", "problems" [{"kind", "file", "tensor", "detail"}], "next" (the command to type next, or ""), and besides
    "path" (the checkpoint directory), "config" (where config.json was found), "trainer", "why" (how the path led
    there), "expert_layout", "left_out" [{"name", "reason"}] and "warnings". A damaged checkpoint is described as far as
    it goes: counts that it no longer tells are None.

    Raises UsageError (no such path), Refused (no checkpoint, or one that is not read), and Damaged where not even the
    layout can be told.
    """
    with _no_collector():
        problems: list[dict[str, Any]] = []
        try:
            checkpoint = open_checkpoint(source, config_from=config_from, model_key=model_key)
        except Damaged as error:
            found, problems = checks.salvage(source, error)
            if found is None:
                raise
            checkpoint = found
        else:
            problems = [*checks.check_layers(checkpoint), *checks.check_experts(checkpoint)[0]]
        return _report(source, checkpoint, problems)


@contextmanager
def _no_collector() -> Iterator[None]:
    # Headers make many small objects and no cycles: the collector would only walk them, for a quarter of the time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _report(source: str, checkpoint: Checkpoint, problems: list[dict[str, Any]]) -> dict[str, Any]:
    family = find_family(checkpoint.config)
    known = bool(checkpoint.tensors) or checkpoint.layout == "hf"
    warnings = list(checkpoint.warnings)
    adapter = next((name for name in checkpoint.tensors if ADAPTER.search(name)), None)
    if adapter is not None:
        warnings.append(f"{adapter}: this is a LoRA checkpoint; merge the adapter in the trainer and save again")
    return {
        "layout": checkpoint.layout,
        "family": family.name if family else None,
        "model_type": checkpoint.model_type,
        "tensors": len(checkpoint) if known else None,
        "parameters": checkpoint.parameters if known else None,
        "bytes": checkpoint.nbytes if known else None,
        "dtypes": dict(sorted(Counter(tensor.dtype for tensor in checkpoint.tensors.values()).items())),
        "complete": not problems,
        "problems": problems,
        "next": "" if problems or adapter else _next(source, checkpoint),
        "path": checkpoint.path,
        "config": checkpoint.config_dir,
        "trainer": checkpoint.trainer,
        "why": checkpoint.why,
        "expert_layout": checks.expert_layout(checkpoint, family),
        "left_out": [{"name": row.name, "reason": row.reason} for row in checkpoint.left_out],
        "warnings": warnings,
    }


def _next(source: str, checkpoint: Checkpoint) -> str:
    """The command that most people want now."""
    if not checkpoint.training:
        return f"reshard verify {shlex.quote(source)}"
    command = f"reshard convert {shlex.quote(source)}"
    return command if checkpoint.config is not None else f"{command} --config-from DIR"
