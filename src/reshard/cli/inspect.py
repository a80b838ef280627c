"""`reshard inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.cli import options
from reshard.cli.run import Answer, Flags, run
from reshard.cli.text import folded, problem_lines, problems_line
from reshard.errors import Damaged


def inspect(
    source: options.Source,
    config_from: options.ConfigFrom = None,
    model_key: options.ModelKey = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Say what a checkpoint is: layout, family, size, dtypes, whether it is whole, and the next command.

    Reads headers and metadata only. Exit status 4 when something is missing or damaged.
    """

    def body() -> Answer:
        from reshard.verbs.inspect import inspect as look

        found = look(source, config_from=config_from, model_key=model_key)
        problems = found["problems"]
        error = problems_line(source, problems) if problems else ""
        return Answer(lambda: found, lambda: lines(found), Damaged.exit_status if problems else 0, error)

    run("inspect", Flags(json, quiet, debug), body, source=source)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    from reshard.verbs.describe import size_text

    family, model_type = found["family"] or "unknown", found["model_type"]
    dtypes = sorted(found["dtypes"].items(), key=lambda item: (-item[1], item[0]))
    yield f"path      {found['path']}" + (f" ({found['why']})" if found["why"] else "")
    yield f"layout    {found['layout']}" + (f", saved by {found['trainer']}" if found["trainer"] else "")
    yield f"family    {family}" + (f" (model type {model_type})" if model_type and model_type != family else "")
    if found["expert_layout"]:
        yield f"experts   {found['expert_layout']}"
    if found["tensors"] is None:
        yield "tensors   not known"
    else:
        size = size_text(found["bytes"])
        yield f"tensors   {found['tensors']:,}, {found['parameters']:,} parameters, {size}"
    if dtypes:
        yield f"dtypes    {', '.join(f'{name} {count:,}' for name, count in dtypes)}"
    yield f"config    {found['config'] or 'none'}"
    yield from folded("left out", found["left_out"])
    yield f"complete  {'yes' if found['complete'] else 'no'}"
    yield from problem_lines(found["problems"], "problem   ")
    for warning in found["warnings"]:
        yield f"note      {warning}"
    if found["next"]:
        yield f"next      {found['next']}"
