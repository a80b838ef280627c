"""`reshard inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.cli import options
from reshard.cli.run import Answer, Flags, run
from reshard.errors import Damaged

SHOWN = 20


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

    family = found.get("family") or "unknown"
    model_type = found.get("model_type")
    dtypes = sorted(found["dtypes"].items(), key=lambda item: (-item[1], item[0]))
    yield f"layout      {found['layout']}"
    yield f"family      {family}" + (f" (model type {model_type})" if model_type and model_type != family else "")
    yield f"tensors     {found['tensors']:,}, {found['parameters']:,} parameters, {size_text(found['bytes'])}"
    yield f"dtypes      {', '.join(f'{name} {count:,}' for name, count in dtypes) or 'none'}"
    yield f"complete    {'yes' if found['complete'] else 'no'}"
    yield from problem_lines(found["problems"], "problem     ")
    for warning in found.get("warnings", ()):
        yield f"note        {warning}"
    if found.get("next"):
        yield f"next        {found['next']}"


def problem_text(problem: Any) -> str:
    """A problem as one line; problems are words, or {"kind", "file", "tensor", "detail"}."""
    if not isinstance(problem, dict):
        return str(problem)
    place = ", ".join(str(problem[key]) for key in ("file", "tensor") if problem.get(key))
    detail = str(problem.get("detail") or problem.get("kind") or "")
    return f"{place}: {detail}" if place else detail


def problem_lines(problems: list[Any], label: str) -> Iterator[str]:
    for problem in problems[:SHOWN]:
        yield f"{label}{problem_text(problem)}"
    if len(problems) > SHOWN:
        yield f"{label}... and {len(problems) - SHOWN:,} more (--json lists them all)"


def problems_line(source: str, problems: list[Any]) -> str:
    """The one line for stderr, with the first problem."""
    if len(problems) == 1:
        return f"{source}: {problem_text(problems[0])}"
    return f"{source}: {len(problems):,} problems, the first: {problem_text(problems[0])}"
