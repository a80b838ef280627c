"""Sizes as people write them."""

from __future__ import annotations

import re

from reshard.errors import UsageError

UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGTP", 1)}, **{f"{p}IB": 1024**i for i, p in enumerate("KMGTP", 1)}}


def parse_size(text: str | int) -> int:
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise UsageError("size", text, "is not a size", "write 5GB, 1GiB or 512MiB")
    return int(float(match[1]) * UNITS[match[2].upper()])
