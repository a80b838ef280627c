"""`reshard diff`."""

from __future__ import annotations

from typing import Annotated

import typer

from reshard.cli import options
from reshard.cli.progress import progress
from reshard.cli.run import Answer, Flags, run


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint in any layout.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    config_from: options.ConfigFrom = None,
    model_key: options.ModelKey = None,
    workers: options.Workers = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, and how far each tensor is from its counterpart."""
    flags = Flags(json, quiet, debug)

    def body() -> Answer:
        from reshard.verbs.diff import describe_diff
        from reshard.verbs.diff import diff as compare

        with progress("diff", flags) as report:
            found = compare(a, b, config_from=config_from, model_key=model_key, workers=workers, progress=report)
        return Answer(lambda: found, lambda: describe_diff(found))

    run("diff", flags, body, source=a)
