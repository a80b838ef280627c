"""The commands put together, and wrong usage told in one line."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from reshard.cli import convert, demo, diff, families, inspect, verify
from reshard.cli.run import Flags, catch_signals, report_usage

COMMANDS: dict[str, Callable[..., Any]] = {
    "inspect": inspect.inspect,
    "verify": verify.verify,
    "diff": diff.diff,
    "convert": convert.convert,
    "families": families.families,
    "demo": demo.demo,
}

app = typer.Typer(
    name="reshard",
    help="Checkpoints of large models, from what a trainer leaves to what the next step needs.",
    epilog="Exit status: 0 done; 2 wrong usage; 3 refused; 4 damaged input or failed check; 1 anything else.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, function in COMMANDS.items():
    app.command(name)(function)


def _show_version(wanted: bool) -> None:
    if wanted:
        from reshard._version import __version__

        typer.echo(f"reshard {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    # Only holds the options that stand before a command.
    del version


# The base of everything that typer raises over wrong usage. Newer typers no longer take it from the package click.
_WrongUsage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def run_app(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit status."""
    catch_signals()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names hold what no terminal's encoding may have
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    flags = Flags(json="--json" in before, quiet=False, debug="--debug" in before)
    command = next((word for word in before if word in COMMANDS), "reshard")
    try:
        return int(typer.main.get_command(app).main(list(arguments), "reshard", standalone_mode=False) or 0)
    except _WrongUsage as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # `reshard` alone; typer with rich has shown the help
            if text := error.format_message():
                typer.echo(text)
            return 2
        return report_usage(command, flags, error.format_message())
    except KeyboardInterrupt:
        print("reshard: interrupted", file=sys.stderr)
        return 130
