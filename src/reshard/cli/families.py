"""`reshard families`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reshard.cli import options
from reshard.cli.run import Answer, Flags, run

HEADINGS = ("family", "model types", "experts on the hub", "experts in memory")


def families(json: options.Json = False, quiet: options.Quiet = False, debug: options.Debug = False) -> None:
    """List the model families that reshard knows, and how each stores its experts."""

    def body() -> Answer:
        rows = table()
        return Answer(lambda: {"families": rows}, lambda: lines(rows))

    run("families", Flags(json, quiet, debug), body)


def table() -> list[dict[str, Any]]:
    """One row a family: {"name", "model_types", "experts": null | {"hub", "memory", "layouts"}, "mtp"}."""
    from reshard.families import all_families

    return [
        {
            "name": family.name,
            "model_types": list(family.model_types),
            "experts": family.experts
            and {
                "hub": family.experts.hub,
                "memory": family.experts.memory,
                "layouts": [layout.name for layout in family.experts.layouts],
            },
            "mtp": family.mtp is not None,
        }
        for family in sorted(all_families(), key=lambda family: family.name)
    ]


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    cells = [HEADINGS]
    for row in rows:
        experts = row["experts"] or {"hub": "-", "memory": "-"}
        cells.append((row["name"], ", ".join(row["model_types"]), experts["hub"], experts["memory"]))
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    for row_cells in cells:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row_cells, widths, strict=True)).rstrip()
