"""Sizes as people write them: 5GB is 5 * 10^9 bytes, 1GiB is 2^30."""

from __future__ import annotations

import re
from fractions import Fraction

from reshard.errors import UsageError

_PREFIXES = ("", "K", "M", "G", "T", "P")
_UNITS = {
    "": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(_PREFIXES)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate(_PREFIXES) if prefix},
}


def parse_size(text: str | int) -> int:
    """Bytes of "5GB" (decimal), "1.5 GiB" (binary), "4096" or 4096. Raises UsageError on anything else."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise _not_a_size(text)
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    if match is None or match[2].upper() not in _UNITS:
        raise _not_a_size(text)
    # Exact: 1.1GB as a float would be one byte short.
    return int(Fraction(match[1]) * _UNITS[match[2].upper()])


def _not_a_size(text: object) -> UsageError:
    return UsageError("size", repr(text), "is not a size", "write 5GB, 1GiB, 512MiB or a number of bytes")
