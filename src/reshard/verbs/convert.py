"""convert: any checkpoint that reshard opens becomes a Hugging Face or torch DCP checkpoint."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint import Checkpoint, Dropped
from reshard.engine import stages
from reshard.engine.execute import RunOptions, execute
from reshard.engine.memory import peak_rss
from reshard.engine.plan import Plan
from reshard.engine.ranks import Ranks, current
from reshard.engine.staging import check_out, check_place, finished_digest, recover_output
from reshard.errors import Refused, ReshardError, UsageError
from reshard.layouts import hf
from reshard.opening import open_checkpoint
from reshard.sizes import parse_size
from reshard.tensors.dtypes import DTYPES, is_float
from reshard.tensors.dtypes import dtype as find_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.families import Family
    from reshard.tensors.lazy import LazyTensor

TARGETS = ("hf", "dcp")
EXPERTS = ("hub", "keep", "per-expert", "fused")
LINKS = ("auto", "hard", "copy")


@dataclass(frozen=True)
class ConvertOptions:
    """What to convert to. Spellings as on the command line; see `reshard convert --help`."""

    to: str = "hf"
    dtype: str = "auto"
    norms: str | None = None
    experts: str = "hub"
    like: str | None = None
    config_from: str | None = None
    model_key: str | None = None
    drop: tuple[str, ...] = ()
    max_shard_size: str | int = "5GB"
    key_prefix: str = ""

    def check(self) -> None:
        for flag, value, allowed in (
            ("--to", self.to, TARGETS),
            ("--experts", self.experts, EXPERTS),
            ("--norms", self.norms, (None, "float32")),
        ):
            if value not in allowed:
                raise UsageError("flag", flag, f"is {value!r}", f"one of {', '.join(a for a in allowed if a)}")
        if self.key_prefix and self.to != "dcp":
            raise UsageError("flag", "--key-prefix", "is for --to dcp", "leave it out")
        if self.dtype not in ("auto", "keep"):
            try:
                name = find_dtype(self.dtype).name
            except Refused as error:
                raise UsageError(
                    "flag", "--dtype", f"is {self.dtype!r}", "one of bfloat16, float16, float32"
                ) from error
            if name not in ("BF16", "F16", "F32"):
                raise UsageError("flag", "--dtype", f"is {self.dtype!r}", "one of bfloat16, float16, float32")
        if parse_size(self.max_shard_size) < 1 << 10:
            raise UsageError("flag", "--max-shard-size", f"is {self.max_shard_size!r}", "give 1KB or more")


@dataclass(frozen=True)
class ConvertPlan:
    """A checked conversion, ready to be printed or run.

    `plan` is final unless `tie` is set: then the tied pair's bytes decide, when it runs, whether the alias is written
    too, and `plan` shows the usual case (equal).
    """

    source: str
    out: str
    checkpoint: Checkpoint
    options: ConvertOptions
    run_options: RunOptions
    family: Family | None
    tensors: Mapping[str, LazyTensor]
    dtypes: Mapping[str, str]
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]
    tie: tuple[str, str] | None
    file_map: Mapping[str, str] | None
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        """The JSON of a converting command, status "planned", with the plan itself under "plan"."""
        return self._report("planned", self.plan, 0.0) | {"plan": self.plan.to_json() | {"stages": self.stages()}}

    def stages(self) -> list[str]:
        return [f"compare {self.tie[0]} with {self.tie[1]}: written once when equal"] if self.tie else []

    def __str__(self) -> str:
        from reshard.verbs.describe import describe_plan

        return describe_plan(self)

    def run(self, ranks: Ranks | None = None) -> dict[str, Any]:
        """Runs the plan (collective under torchrun) and returns the report, status "done"."""
        began = time.monotonic()
        ranks = ranks or current()
        plan = self._answered(ranks)
        report = execute(plan, self.out, self.run_options, ranks, [self.checkpoint.path])
        seconds = time.monotonic() - began
        return self._report("done", plan, seconds) | {"written": report.written, "reused": report.reused}

    def _answered(self, ranks: Ranks) -> Plan:
        """The final plan: the statistics that it waits for are gathered first."""
        equal = None
        if self.tie is not None:
            alias, source = self.tie
            equal = stages.same_bytes(self.tensors[alias], self.tensors[source], ranks)
        if self.options.to == "dcp":
            return _build_dcp(self, ranks)
        return self.plan if self.tie is None or equal else build_hf(self, equal)

    def _report(self, status: str, plan: Plan, seconds: float) -> dict[str, Any]:
        return {
            "command": "convert",
            "status": status,
            "source": self.source,
            "output": self.out,
            "layout": self.options.to,
            "family": self.family.name if self.family else None,
            "tensors": len(self.tensors) - sum(row["name"] in self.tensors for row in plan.dropped),
            "bytes": plan.nbytes,
            "dropped": [dict(row) for row in plan.dropped],
            "kept": [dict(row) for row in plan.kept],
            "warnings": [*self.checkpoint.warnings, *self.notes, *plan.notes],
            "seconds": round(seconds, 3),
            "peak_rss_bytes": peak_rss(),
            "error": None,
        }


def convert(source: str, out: str | None = None, **options: Any) -> dict[str, Any]:
    """Plans and runs a conversion; see `plan_convert` for the options. Returns the report as a dict."""
    return plan_convert(source, out, **options).run()


def plan_convert(
    source: str | Checkpoint,
    out: str | None = None,
    *,
    workers: int | None = None,
    max_memory: str | int = "1GiB",
    whole_process: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    link: str = "auto",
    progress: Callable[[int, int], None] | None = None,
    **what: Any,
) -> ConvertPlan:
    """Checks everything that headers allow and plans every output byte. Writes nothing.

    source: path (see `reshard.open`) or an opened Checkpoint. out: directory to make; omitted, a training checkpoint
    goes to its own `weights` folder and a Hugging Face directory to a sibling. The keyword arguments are those of
    ConvertOptions (`to`, `dtype`, `norms`, `experts`, `like`, `config_from`, `model_key`, `drop`, `max_shard_size`,
    `key_prefix`) and how to run (`workers`, `max_memory` for the run or, with `whole_process`, all of this process,
    `overwrite`, `resume`, `link`, `progress(done, total)`).

    Raises UsageError, Refused or Damaged, each with a remedy.
    """
    try:
        options = ConvertOptions(**what)
    except TypeError as error:
        raise UsageError("option", "convert", str(error)) from error
    options = replace(options, drop=tuple(options.drop))
    options.check()
    if link not in LINKS:
        raise UsageError("flag", "--link", f"is {link!r}", f"one of {', '.join(LINKS)}")
    run_options = RunOptions(workers, parse_size(max_memory), whole_process, overwrite, resume, link, progress)
    if isinstance(source, Checkpoint):
        checkpoint, named = source, source.path
    else:
        named = source
        checkpoint = open_checkpoint(source, config_from=options.config_from, model_key=options.model_key)
    target = out or default_out(checkpoint, options)
    planned = _plan(checkpoint, named, target, options, run_options)
    check_place(Path(target), [Path(path) for path in checkpoint.path.split(",")])
    if os.environ.get("RANK", "0") == "0":
        recover_output(Path(target))
    if not (resume and finished_digest(Path(target)) == planned.plan.digest):
        check_out(Path(target), overwrite=overwrite)
    return planned


def _plan(
    checkpoint: Checkpoint, named: str, out: str, options: ConvertOptions, run_options: RunOptions
) -> ConvertPlan:
    from reshard.families import find_family
    from reshard.transforms import adapters, drops, dtypes, experts, like, names, ties
    from reshard.verbs import preflight

    if options.to == "hf" and checkpoint.training and checkpoint.config is None:
        raise Refused(
            "config", checkpoint.path, "no config.json was found for this training checkpoint",
            "--config-from DIR names a model directory that has it",
        )  # fmt: skip
    notes: list[str] = []
    tensors: Mapping[str, LazyTensor] = names.strip_wrappers(checkpoint.tensors)
    adapters.refuse_lora(tensors)
    if options.to == "hf":
        preflight.check_complete(checkpoint, notes)
    tensors, dropped = drops.drop(tensors, options.drop)
    if not tensors:
        raise Refused("empty", checkpoint.path, "no tensor is left to write", "use a narrower --drop")
    family = find_family(checkpoint.config)
    if options.experts != "keep" and any("experts." in name for name in tensors):
        preflight.check_expert_count(checkpoint, family)
    tensors, expert_notes = experts.convert_experts(
        tensors, family, checkpoint.config, options.experts, training=checkpoint.training
    )
    notes += expert_notes
    tie = None
    if options.to == "hf":
        tensors, tie, tie_notes = ties.find_tie(tensors, checkpoint.config, family)
        notes += tie_notes
    wanted = "keep" if options.like is not None else preflight.wanted_dtype(checkpoint, options.dtype, notes)
    target = dtypes.target_dtypes(tensors, wanted, options.norms, family)
    narrow = sum(DTYPES[tensor.dtype].kind == "narrow" for tensor in tensors.values())
    if narrow and wanted != "keep":
        notes.append(f"{narrow} tensors in 8-bit or packed floats are no cast's business and keep their dtype")
    file_map = None
    if options.like is not None:
        reference = open_checkpoint(options.like)
        target, file_map, tie = like.follow(tensors, target, reference, tie)
    if checkpoint.check is not None:
        checkpoint.check()
    draft = ConvertPlan(
        named, out, checkpoint, options, run_options, family, tensors, target, (*checkpoint.left_out, *dropped),
        tuple(notes), tie, file_map, Plan(()),
    )  # fmt: skip
    plan = build_hf(draft, True) if options.to == "hf" else _build_dcp(draft, None)
    return replace(draft, plan=plan)


def build_hf(draft: ConvertPlan, equal: bool | None) -> Plan:
    """The Hugging Face output. equal: whether a tied pair agrees (None when there is none)."""
    from reshard.hf.config import export_config, has_mtp_tensors

    tensors = dict(draft.tensors)
    dropped = [{"name": row.name, "reason": row.reason} for row in draft.dropped]
    tied: bool | None = None
    if draft.tie is not None:
        alias, source = draft.tie
        tied = bool(equal)
        if equal:
            del tensors[alias]
            dropped.append({"name": alias, "reason": f"tied: the same bytes as {source}, which is written"})
    dtypes = {name: draft.dtypes[name] for name in tensors}
    limit = parse_size(draft.options.max_shard_size)
    file_map, whole = draft.file_map, None
    if file_map is None and draft.checkpoint.layout == "hf":
        file_map, whole = hf.keep_files(draft.checkpoint, tensors, dtypes, limit) or (None, None)
    weights = hf.plan_files(tensors, dtypes, limit, file_map, whole)
    texts: dict[str, bytes] = {}
    notes: list[str] = []
    config = draft.checkpoint.config
    if config is not None:
        exported, notes = export_config(
            config,
            family=draft.family,
            dtype_written=_majority(tensors, dtypes),
            tied=tied,
            training=draft.checkpoint.training,
            has_mtp=has_mtp_tensors(tensors, draft.family, config),
        )
        texts["config.json"] = _config_text(draft.checkpoint, exported)
    if weights.index is not None:
        texts[hf.INDEX] = weights.index
    copies = {name: path for name, path in draft.checkpoint.side_files.items() if name not in texts}
    return Plan(weights.files, texts, copies, tuple(dropped), (), draft.checkpoint.files, tuple(notes))


def _config_text(checkpoint: Checkpoint, config: Mapping[str, Any]) -> bytes:
    """config.json: the source's own bytes where nothing changed."""
    if config == checkpoint.config and checkpoint.config_dir is not None:
        return (Path(checkpoint.config_dir) / "config.json").read_bytes()
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"


def _majority(tensors: Mapping[str, LazyTensor], dtypes: Mapping[str, str]) -> str | None:
    """torch's name of the floating dtype that most elements are written in."""
    count: dict[str, int] = {}
    for name, dtype in dtypes.items():
        if is_float(dtype):
            count[dtype] = count.get(dtype, 0) + tensors[name].numel
    best = max(count, key=lambda dtype: (count[dtype], dtype), default=None)
    return find_dtype(best).torch if best else None


def _build_dcp(draft: ConvertPlan, ranks: Ranks | None) -> Plan:
    """The torch DCP output. Without `ranks` checksums are left at zero: sizes and names are final, bytes are not."""
    from reshard.engine.content import make_content
    from reshard.layouts.dcp_write import chunk_contents, plan_dcp

    contents = {name: make_content(tensor, draft.dtypes[name]) for name, tensor in draft.tensors.items()}
    shapes = {name: (draft.dtypes[name], tensor.shape) for name, tensor in draft.tensors.items()}
    pieces = chunk_contents(contents, shapes)
    values = [0] * len(pieces) if ranks is None else stages.crc32_of(list(pieces.values()), ranks)
    crcs = dict(zip(pieces, values, strict=True))
    limit = parse_size(draft.options.max_shard_size)
    files, metadata = plan_dcp(contents, shapes, prefix=draft.options.key_prefix, max_file_bytes=limit, crcs=crcs)
    texts: dict[str, bytes] = {}
    dropped = tuple({"name": row.name, "reason": row.reason} for row in draft.dropped)
    side = dict(draft.checkpoint.side_files)
    if draft.checkpoint.config is not None:
        texts["config.json"] = _config_text(draft.checkpoint, draft.checkpoint.config)
    texts |= metadata  # last: its presence says that the checkpoint is complete
    return Plan(files, texts, side, dropped, (), draft.checkpoint.files)


def default_out(checkpoint: Checkpoint, options: ConvertOptions) -> str:
    """Where the output goes when OUT is not given."""
    home = Path(checkpoint.home or checkpoint.path.split(",")[0])
    if checkpoint.training:
        return str(home / "weights")
    if home.is_file():
        home = home.parent
    home = Path(os.path.abspath(home))
    if options.dtype not in ("auto", "keep"):
        return f"{home}-{find_dtype(options.dtype).torch}"
    if options.to != "hf":
        return f"{home}-{options.to}"
    if options.experts in ("per-expert", "fused"):
        return f"{home}-{options.experts}"
    raise UsageError(
        "output", "OUT", "is missing, and nothing in the flags names a sibling", "name the output directory"
    )


def refusal(command: str, source: str, out: str | None, error: ReshardError) -> dict[str, Any]:
    """The JSON report of a converting command that was refused or failed."""
    status = "failed" if error.exit_status in (1, 4) else "refused"
    return {
        "command": command, "status": status, "source": source, "output": out, "layout": None, "family": None,
        "tensors": 0, "bytes": 0, "dropped": [], "kept": [], "warnings": [], "seconds": 0.0,
        "peak_rss_bytes": peak_rss(), "error": error.to_json(),
    }  # fmt: skip


__all__ = ["ConvertOptions", "ConvertPlan", "convert", "plan_convert", "refusal"]
