"""Lines that several commands say: tensors by reason, and problems."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

SHOWN = 20


def folded(label: str, rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """One line a reason, with the first name, however many tensors there are."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row["reason"], []).append(row["name"])
    for reason, names in reasons.items():
        yield f"{label:<9} {_names(names)}: {reason}"


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"


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
    first = problem_text(problems[0])
    if len(problems) > 1:
        return f"{source}: {len(problems):,} problems, the first: {first}"
    return first if first.startswith(source) else f"{source}: {first}"
