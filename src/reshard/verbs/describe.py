"""Plans in words, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.verbs.convert import ConvertPlan

# Tensors listed by name before the rest is only counted.
SHOWN = 40


def size_text(count: float) -> str:
    """Bytes as people read them, in the decimal units that shard sizes are given in."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def describe_plan(planned: ConvertPlan) -> str:
    """The plan that `--dry-run` prints: what is read, every file with its tensors, and what is left out and why."""
    plan, checkpoint = planned.plan, planned.checkpoint
    what = planned.family.name if planned.family else checkpoint.model_type or "unknown family"
    lines = [
        f"{planned.source} ({checkpoint.layout}, {what}) -> {planned.out} ({planned.options.to})",
        f"{len(planned.tensors)} tensors, {size_text(plan.nbytes)} in {len(plan.files)} files, "
        f"{len(plan.segments)} segments, plan {plan.digest}",
    ]
    lines += [f"first: {stage}" for stage in planned.stages()]
    shown = 0
    for file in plan.files:
        tensors = [part for part in file.parts if part.tensor is not None]
        what = "as it is" if file.source is not None else f"{len(tensors)} tensors"
        lines.append(f"  {file.name}  {size_text(file.nbytes)}, {what}")
        for part in tensors[: max(0, SHOWN - shown)]:
            lines.append(f"    {part.tensor}  {part.content.recipe()}")
            shown += 1
        if len(tensors) > SHOWN - shown and shown >= SHOWN:
            lines.append("    ... (--json lists every tensor)")
    lines += [f"  {name}" for name in [*plan.texts, *plan.copies]]
    lines += [f"left out: {row['name']}: {row['reason']}" for row in plan.dropped]
    lines += [f"note: {note}" for note in (*checkpoint.warnings, *planned.notes, *plan.notes)]
    return "\n".join(lines)
