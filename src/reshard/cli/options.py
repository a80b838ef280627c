"""Flags that several commands share, so that they are spelled and explained in one way."""

from __future__ import annotations

from typing import Annotated

import typer

HOW = "How to run"
READ = "How to read the source"

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="A checkpoint in any layout: a directory, a file, or several directories joined by commas."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", rich_help_panel=HOW, help="Print one JSON document on stdout, and nothing else there.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", rich_help_panel=HOW, help="Print errors only.")]
Debug = Annotated[bool, typer.Option("--debug", rich_help_panel=HOW, help="Show the traceback of an error.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", rich_help_panel=HOW, help="Let code that comes with the model run. Off."),
]
ConfigFrom = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=READ,
        help="A model directory with config.json and tokenizer, when the checkpoint has none.",
    ),
]
ModelKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        rich_help_panel=READ,
        help="Where the model's weights are in a training checkpoint, such as app.model.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", rich_help_panel=HOW, help="Threads.", show_default="by the machine"),
]
