"""Tensors that the user leaves out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.checkpoint import Dropped
from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.tensors.lazy import LazyTensor


def drop(
    tensors: Mapping[str, LazyTensor], patterns: Iterable[str]
) -> tuple[dict[str, LazyTensor], tuple[Dropped, ...]]:
    """(what is left, what goes): `re.search` of each pattern in the name. UsageError for one that finds nothing."""
    left = dict(tensors)
    gone = []
    for text in patterns:
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise UsageError("drop", f"--drop {text}", f"is not a regular expression ({error})") from error
        found = [name for name in left if pattern.search(name)]
        if not found:
            raise UsageError(
                "drop", f"--drop {text}", "matches no tensor", "`reshard convert --dry-run --json` lists the names"
            )
        for name in found:
            del left[name]
            gone.append(Dropped(name, f"--drop {text}"))
    return left, tuple(gone)
