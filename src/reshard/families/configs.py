"""What a model's config says to a family's table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.families.tables import Family


def text_levels(config: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], ...]:
    """The tables of a config that describe the text model, the innermost first."""
    config = config or {}
    text = config.get("text_config")
    return (text, config) if isinstance(text, dict) else (config,)


def config_value(config: Mapping[str, Any] | None, keys: Sequence[str]) -> Any:
    """The value of the first of `keys` that is present: all keys in the text config, then in the outer one. Dots go
    into nested tables. None where there is none."""
    for level in text_levels(config):
        for key in keys:
            value: Any = level
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                return value
    return None


def config_int(config: Mapping[str, Any] | None, keys: Sequence[str]) -> int | None:
    """As `config_value`, where it is a whole number."""
    value = config_value(config, keys)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def sparse_layers(family: Family, config: Mapping[str, Any] | None) -> frozenset[int] | None:
    """The decoder layers that have routed experts by the config; None where that cannot be told."""
    layers = config_int(config, ("num_hidden_layers",))
    if family.experts is None or family.sparse is None or layers is None or layers > 100_000:
        return None
    rule = family.sparse
    kinds = config_value(config, (rule.kinds,)) if rule.kinds else None
    if isinstance(kinds, list):
        return frozenset(number for number, kind in enumerate(kinds[:layers]) if kind == "sparse")
    first = config_int(config, (rule.first,)) if rule.first else 0
    if first is None:
        return None
    step = config_int(config, (rule.step,)) if rule.step else None
    dense = config_value(config, (rule.dense,)) if rule.dense else None
    listed = dense if isinstance(dense, list) else []
    found = range(first, layers)
    return frozenset(n for n in found if (not step or (n + 1) % step == 0) and n not in listed)
