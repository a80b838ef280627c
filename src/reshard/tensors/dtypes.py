"""The one table of element types, under the names that safetensors gives them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    name:  safetensors' spelling ("BF16"); this string is how a dtype is named everywhere in reshard
    bits:  width of one element
    kind:  "float", "narrow" (8-bit and smaller floats, only ever moved or (de)quantised), "int", "bool" or "complex"
    torch: attribute of the torch module, or "" where torch has no such dtype
    numpy: numpy dtype string, or an attribute of ml_dtypes when it starts with "ml:"
    """

    name: str
    bits: int
    kind: str
    torch: str
    numpy: str


DTYPES: dict[str, DType] = {
    row.name: row
    for row in (
        DType("BOOL", 8, "bool", "bool", "?"),
        DType("U8", 8, "int", "uint8", "u1"),
        DType("I8", 8, "int", "int8", "i1"),
        DType("U16", 16, "int", "uint16", "<u2"),
        DType("I16", 16, "int", "int16", "<i2"),
        DType("U32", 32, "int", "uint32", "<u4"),
        DType("I32", 32, "int", "int32", "<i4"),
        DType("U64", 64, "int", "uint64", "<u8"),
        DType("I64", 64, "int", "int64", "<i8"),
        DType("F4", 4, "narrow", "float4_e2m1fn_x2", "ml:float4_e2m1fn"),
        DType("F8_E8M0", 8, "narrow", "float8_e8m0fnu", "ml:float8_e8m0fnu"),
        DType("F8_E4M3", 8, "narrow", "float8_e4m3fn", "ml:float8_e4m3fn"),
        DType("F8_E5M2", 8, "narrow", "float8_e5m2", "ml:float8_e5m2"),
        DType("F8_E4M3FNUZ", 8, "narrow", "float8_e4m3fnuz", "ml:float8_e4m3fnuz"),
        DType("F8_E5M2FNUZ", 8, "narrow", "float8_e5m2fnuz", "ml:float8_e5m2fnuz"),
        DType("F6_E2M3", 6, "narrow", "", ""),
        DType("F6_E3M2", 6, "narrow", "", ""),
        DType("F16", 16, "float", "float16", "<f2"),
        DType("BF16", 16, "float", "bfloat16", "ml:bfloat16"),
        DType("F32", 32, "float", "float32", "<f4"),
        DType("F64", 64, "float", "float64", "<f8"),
        DType("C64", 64, "complex", "complex64", "<c8"),
    )
}

BY_TORCH: dict[str, DType] = {row.torch: row for row in DTYPES.values() if row.torch}

# What people type on the command line or find in a config, besides torch's own spelling.
ALIASES = {"bf16": "BF16", "fp16": "F16", "half": "F16", "fp32": "F32", "float": "F32", "fp64": "F64", "double": "F64"}


def dtype(name: str) -> DType:
    """The row for a dtype by any usual spelling ("BF16", "bfloat16", "torch.bfloat16", "bf16")."""
    plain = name.removeprefix("torch.")
    row = DTYPES.get(plain) or DTYPES.get(plain.upper()) or BY_TORCH.get(plain) or DTYPES.get(ALIASES.get(plain, ""))
    if row is None:
        raise Refused("dtype", name, "unknown dtype", f"one of {', '.join(sorted(DTYPES))}")
    return row


def is_float(name: str) -> bool:
    """Whether a cast applies to this dtype: 16-bit floats and wider."""
    return DTYPES[name].kind == "float"


def numel(shape: Sequence[int]) -> int:
    return prod(shape)


def nbytes(name: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor. Sub-byte dtypes are packed over the whole tensor, which must fill whole bytes."""
    bits = DTYPES[name].bits * prod(shape)
    if bits % 8:
        raise Refused("dtype", name, f"shape {list(shape)} does not fill whole bytes")
    return bits // 8


def numpy_dtype(name: str) -> Any:
    """The numpy dtype object (ml_dtypes is imported only for types that numpy lacks)."""
    import numpy as np

    spelling = DTYPES[name].numpy
    if not spelling:
        raise Refused("dtype", name, "no arithmetic exists for this dtype; it can only be copied")
    if spelling.startswith("ml:"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, spelling[3:]))
    return np.dtype(spelling)
