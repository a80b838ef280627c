"""The dtype policy: what a cast applies to, and what keeps the dtype it is stored in."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.families.renaming import to_hub
from reshard.tensors.dtypes import is_float

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.families import Family
    from reshard.tensors.lazy import LazyTensor

# Words of a module's name that say that it is a norm: q_norm, input_layernorm, norm_f, ln_1, DeepSeek's enorm.
NORM_WORDS = frozenset(
    "norm norms layernorm rmsnorm groupnorm batchnorm instancenorm qnorm knorm enorm hnorm ln".split()
)


def is_norm(name: str, shape: tuple[int, ...], family: Family | None = None) -> bool:
    """Whether a tensor is a norm's weight or bias: one axis at most, and a whole word of its module's name says so, or
    a pattern of the family does."""
    if len(shape) > 1:
        return False
    if family is not None and any(re.search(pattern, name) for pattern in family.norms):
        return True
    module = name.rpartition(".")[0].rpartition(".")[2]
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", module).lower().split("_")
    return any(word.rstrip("0123456789") in NORM_WORDS for word in words)


def target_dtypes(
    tensors: Mapping[str, LazyTensor], wanted: str, norms: str | None, family: Family | None
) -> dict[str, str]:
    """The dtype that each tensor is written in.

    wanted: "keep", or a floating dtype that floating tensors of any rank are cast to. Integers, booleans, complex
    numbers and 8-bit floats pass unchanged, and so does what the family pins. norms="float32" leaves norms stored in
    fp32 alone.
    """
    if wanted == "keep":
        return {name: tensor.dtype for name, tensor in tensors.items()}
    pins = re.compile("|".join(f"(?:{pin})" for pin in family.fp32_pins)) if family and family.fp32_pins else None
    found = {}
    for name, tensor in tensors.items():
        kept = not is_float(tensor.dtype) or (pins is not None and _pinned(name, pins, family))
        kept = kept or (norms == "float32" and tensor.dtype == "F32" and is_norm(name, tensor.shape, family))
        found[name] = tensor.dtype if kept else wanted
    return found


def _pinned(name: str, pins: re.Pattern[str], family: Family | None) -> bool:
    """Pins speak of the Hub's names; under `--experts keep` a tensor still has its trainer's."""
    rows = family.renames if family else ()
    names = [name, *filter(None, (to_hub(row, name) for row in rows))]
    return any(pins.search(other) is not None for other in names)
