"""One rename applied to one name, in either direction."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.families.tables import Rename


def to_hub(row: Rename, name: str) -> str | None:
    """The Hub's name for `name`, or None where the row does not apply."""
    return _swap(name, row.name, row.hub, row.where)


def from_hub(row: Rename, name: str) -> str | None:
    """The other writer's name for the Hub's `name`, or None where the row does not apply."""
    return _swap(name, row.hub, row.name, row.where)


def _swap(name: str, old: str, new: str, where: str) -> str | None:
    if where == "prefix":
        return new + name[len(old) :] if name.startswith(old) else None
    if where == "tail":
        if name == old:
            return new
        return name[: -len(old)] + new if name.endswith("." + old) else None
    if name.startswith(old):
        return new + name[len(old) :]
    head, found, rest = name.partition("." + old)
    return f"{head}.{new}{rest}" if found else None
