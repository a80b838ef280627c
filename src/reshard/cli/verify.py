"""`reshard verify`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from reshard.cli import options
from reshard.cli.progress import progress
from reshard.cli.run import Answer, Flags, run
from reshard.cli.text import problem_lines, problems_line
from reshard.errors import Damaged


def verify(
    source: options.Source,
    against: Annotated[
        str | None, typer.Option(metavar="REF", help="A checkpoint that has to hold the same tensors.")
    ] = None,
    allow_cast: Annotated[
        bool, typer.Option("--allow-cast", help="With --against: values may have been rounded once to another dtype.")
    ] = False,
    load: Annotated[bool, typer.Option("--load", help="Also load the model and compare what it holds.")] = False,
    target: Annotated[
        str | None, typer.Option(metavar="transformers|vllm|sglang", help="Check against what this loader accepts.")
    ] = None,
    config_from: options.ConfigFrom = None,
    model_key: options.ModelKey = None,
    workers: options.Workers = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Check every byte and every tensor of a checkpoint. Exit status 4 when something is wrong."""
    flags = Flags(json, quiet, debug)

    def body() -> Answer:
        from reshard.verbs.verify import verify as check

        with progress("verify", flags) as report:
            found = check(
                source,
                against=against,
                load=load,
                target=target,
                config_from=config_from,
                model_key=model_key,
                allow_cast=allow_cast,
                workers=workers,
                trust_remote_code=trust_remote_code,
                progress=report,
            )
        if found["status"] == "ok":
            return Answer(lambda: found, lambda: lines(source, found))
        problems = found["problems"]
        error = problems_line(source, problems) if problems else f"{source}: verification failed"
        return Answer(lambda: found, lambda: lines(source, found), Damaged.exit_status, error)

    run("verify", flags, body, source=source)


def lines(source: str, found: Mapping[str, Any]) -> Iterator[str]:
    from reshard.verbs.describe import size_text

    yield f"{found['status']:<10}{source}"
    done = f" ({', '.join(found['checks'])})" if found.get("checks") else ""
    yield f"checked   {found['checked_tensors']:,} tensors, {size_text(found['checked_bytes'])} of data{done}"
    yield from problem_lines(found["problems"], "problem   ")
    for warning in found.get("warnings", ()):
        yield f"note      {warning}"
