"""The dtype policy: what a cast applies to, and what keeps the dtype it is stored in."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.tensors.dtypes import is_float

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.families import Family
    from reshard.tensors.lazy import LazyTensor

# A module is a norm when its name ends in "norm" or "layernorm", perhaps numbered (q_norm, norm1, ln_f, input_layernorm).
NORM = re.compile(r"(^|[._])(layer_?norm|rms_?norm|norm|ln)(_?\w{1,2})?\.(weight|bias)$", re.IGNORECASE)


def target_dtypes(
    tensors: Mapping[str, LazyTensor], wanted: str, norms: str | None, family: Family | None
) -> dict[str, str]:
    """The dtype that each tensor is written in.

    wanted: "keep", or a floating dtype that floating tensors of any rank are cast to. Integers, booleans, complex numbers
    and 8-bit floats pass unchanged, and so does what the family pins. norms="float32" leaves norms stored in fp32 alone.
    """
    if wanted == "keep":
        return {name: tensor.dtype for name, tensor in tensors.items()}
    pins = re.compile("|".join(family.fp32_pins)) if family and family.fp32_pins else None
    found = {}
    for name, tensor in tensors.items():
        pinned = pins is not None and pins.search(name) is not None
        stored_norm = norms == "float32" and tensor.dtype == "F32" and NORM.search(name) is not None
        found[name] = wanted if is_float(tensor.dtype) and not pinned and not stored_norm else tensor.dtype
    return found
