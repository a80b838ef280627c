"""reshard: checkpoints of large models, from what a trainer leaves to what the next step needs.

    import reshard

    ckpt = reshard.open("run/checkpoints/step_200")     # any layout; a mapping name -> lazy tensor
    ckpt["model.layers.0.mlp.down_proj.weight"][0:128]   # reads only those rows
    reshard.convert("run/checkpoints/step_200", "out", dtype="bfloat16")

Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard._version import __version__
from reshard.errors import Damaged, Refused, ReshardError, UsageError

if TYPE_CHECKING:
    from reshard.checkpoint import Checkpoint
    from reshard.opening import open_checkpoint as open
    from reshard.verbs.convert import ConvertPlan, convert, plan_convert
    from reshard.verbs.diff import diff
    from reshard.verbs.inspect import inspect
    from reshard.verbs.verify import verify

# Public name -> (module, attribute), imported when first used.
_LAZY = {
    "Checkpoint": ("reshard.checkpoint", "Checkpoint"),
    "ConvertPlan": ("reshard.verbs.convert", "ConvertPlan"),
    "convert": ("reshard.verbs.convert", "convert"),
    "plan_convert": ("reshard.verbs.convert", "plan_convert"),
    "diff": ("reshard.verbs.diff", "diff"),
    "inspect": ("reshard.verbs.inspect", "inspect"),
    "open": ("reshard.opening", "open_checkpoint"),
    "verify": ("reshard.verbs.verify", "verify"),
}

__all__ = [
    "Checkpoint",
    "ConvertPlan",
    "Damaged",
    "Refused",
    "ReshardError",
    "UsageError",
    "__version__",
    "convert",
    "diff",
    "inspect",
    "open",
    "plan_convert",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value
