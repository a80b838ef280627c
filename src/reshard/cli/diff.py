"""`reshard diff`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from reshard.cli import options
from reshard.cli.progress import progress
from reshard.cli.run import Answer, Flags, run

SHOWN = 20


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint in any layout.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    config_from: options.ConfigFrom = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, and how far each tensor is from its counterpart."""
    flags = Flags(json, quiet, debug)

    def body() -> Answer:
        from reshard.verbs.diff import diff as compare

        with progress("diff", flags) as report:
            found = compare(a, b, config_from=config_from, progress=report)
        return Answer(lambda: found, lambda: lines(found))

    run("diff", flags, body, source=a)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Figures as they are, lists cut short."""
    for key, value in found.items():
        label = f"{key.replace('_', ' '):<18}"
        if isinstance(value, Mapping):
            value = [f"{name}: {_text(item)}" for name, item in value.items()]
        if not isinstance(value, (list, tuple)):
            yield f"{label}{_text(value)}"
            continue
        yield f"{label}{len(value):,}"
        for item in value[:SHOWN]:
            yield f"  {_text(item)}"
        if len(value) > SHOWN:
            yield f"  ... and {len(value) - SHOWN:,} more (--json lists them all)"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return "  ".join(f"{_text(item)}" if key == "name" else f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return str(value)
