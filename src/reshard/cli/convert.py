"""`reshard convert`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from reshard.cli import options
from reshard.cli.progress import progress
from reshard.cli.run import Answer, Flags, run
from reshard.cli.text import folded

WHAT = "What to write"


def convert(
    source: options.Source,
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="OUT",
            help="The directory to make. Left out: SRC/weights for a training checkpoint, a sibling of SRC otherwise.",
        ),
    ] = None,
    to: Annotated[str, typer.Option(metavar="hf|dcp", rich_help_panel=WHAT, help="The layout.")] = "hf",
    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|keep|bfloat16|float16|float32",
            rich_help_panel=WHAT,
            help="auto: what the model's config declares for a training checkpoint, otherwise keep.",
        ),
    ] = "auto",
    norms: Annotated[
        str | None, typer.Option(metavar="float32", rich_help_panel=WHAT, help="Another dtype for norms.")
    ] = None,
    experts: Annotated[
        str,
        typer.Option(
            metavar="hub|keep|per-expert|fused",
            rich_help_panel=WHAT,
            help="How experts are stored. hub: as in the family's releases.",
        ),
    ] = "hub",
    like: Annotated[
        str | None,
        typer.Option(metavar="REF", rich_help_panel=WHAT, help="Names, dtypes, shapes and files as this checkpoint's."),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="RE", rich_help_panel=WHAT, help="Leave out tensors whose name matches. Repeatable."),
    ] = None,
    key_prefix: Annotated[
        str, typer.Option(metavar="PREFIX", rich_help_panel=WHAT, help="Put before every key, with --to dcp.")
    ] = "",
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", rich_help_panel=WHAT, help="The most bytes in one file.")
    ] = "5GB",
    config_from: options.ConfigFrom = None,
    model_key: options.ModelKey = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", rich_help_panel=options.HOW, help="Print the plan and write nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", rich_help_panel=options.HOW, help="Replace OUT when it is there.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=options.HOW, help="Continue an interrupted run.")
    ] = False,
    workers: options.Workers = None,
    max_memory: Annotated[
        str, typer.Option(metavar="SIZE", rich_help_panel=options.HOW, help="Most memory of one process.")
    ] = "1GiB",
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", rich_help_panel=options.HOW, help="Where numbers are computed.")
    ] = "cpu",
    link: Annotated[
        str,
        typer.Option(
            metavar="auto|hard|copy",
            rich_help_panel=options.HOW,
            help="Files that stay as they are. auto: reflink where the file system has it, else copy.",
        ),
    ] = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Convert any checkpoint to Hugging Face or torch DCP files.

    Shards are merged, tied heads are written once, the optimizer stays out. OUT appears whole or not at all.

    torchrun --nproc-per-node N -m reshard convert ... gives the same bytes as one process.
    """
    del trust_remote_code  # a conversion runs no model code
    flags = Flags(json, quiet, debug)

    def body() -> Answer:
        from reshard.verbs.convert import plan_convert

        _check_device(device)
        with progress("convert", flags) as report:
            planned = plan_convert(
                source, out, to=to, dtype=dtype, norms=norms, experts=experts, like=like, config_from=config_from,
                model_key=model_key, drop=tuple(drop or ()), key_prefix=key_prefix, max_shard_size=max_shard_size,
                workers=workers, max_memory=max_memory, whole_process=True, overwrite=overwrite,
                resume=resume, link=link, progress=report,
            )  # fmt: skip
            if dry_run:
                return Answer(planned.to_json, lambda: str(planned).split("\n"))
            done = planned.run()
        return Answer(lambda: done, lambda: summary(done))

    run("convert", flags, body, source=source, out=out)


def _check_device(device: str) -> None:
    from reshard.errors import Refused, UsageError

    if device not in ("cpu", "cuda"):
        raise UsageError("flag", "--device", f"is {device!r}", "one of cpu, cuda")
    if device == "cuda":
        raise Refused("device", "--device", "cuda is not used by convert, which only casts", "leave it out")


def summary(report: Mapping[str, Any]) -> Iterator[str]:
    """What a finished conversion says."""
    from reshard.verbs.describe import size_text

    seconds = report["seconds"]
    # Of a few megabytes the rate says nothing.
    rate = f", {report['bytes'] / seconds / 1e9:.2f} GB/s" if seconds > 0 and report["bytes"] >= 10**7 else ""
    family = f", {report['family']}" if report["family"] else ""
    yield f"wrote     {report['output']} ({report['layout']}{family})"
    yield f"tensors   {report['tensors']:,}, {size_text(report['bytes'])} in {seconds:.1f} s{rate}"
    yield from folded("left out", report["dropped"])
    yield from folded("kept", report["kept"])
    for warning in report["warnings"]:
        yield f"note      {warning}"
    yield f"next      reshard verify {shlex.quote(report['output'])}"
