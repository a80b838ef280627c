"""`reshard demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from reshard.cli import options
from reshard.cli.run import Answer, Flags, first_rank, printable, run


def demo(
    out: Annotated[
        str | None, typer.Argument(metavar="DIR", help="Where to work. Left out: a temporary directory.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the temporary directory.")] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train fewer steps; it may then not learn.")
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Train a tiny model on two ranks, save it in shards, export it, and check every answer. Needs torch."""
    flags = Flags(json, quiet, debug)

    def show(line: str) -> None:
        if first_rank() and not flags.json and not flags.quiet:
            print(printable(line), flush=True)

    def body() -> Answer:
        from reshard.demo.run import run_demo

        figures = run_demo(out, keep=keep, steps=steps, echo=show)
        return Answer(lambda: figures, lambda: ())

    run("demo", flags, body)
