"""Casts between floating dtypes on numpy arrays: one rounding, to nearest, ties to even. No torch is needed."""

from __future__ import annotations

from typing import Any


def cast_array(values: Any, target: Any, source_name: str) -> Any:
    """numpy values as `target`. fp64 goes to bf16 and fp16 through no third type: one rounding."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        if source_name == "F64" and target.name == "bfloat16":
            return _round_to_odd(values).astype(target)
        return values.astype(target)


def _round_to_odd(values: Any) -> Any:
    """fp64 to fp32 such that a second rounding to bf16 gives what one rounding would: the last bit is sticky."""
    import numpy as np

    single = values.astype(np.float32)
    bits = single.view(np.uint32)
    wide = single.astype(np.float64)
    inexact = np.isfinite(single) & (wide != values)
    # Where rounding moved away from zero, step back towards it, then set the sticky bit.
    bits[inexact & (np.abs(wide) > np.abs(values))] -= 1
    bits[inexact] |= 1
    return single
