"""From a plan to a published directory: refuse, stage, run the segments, write the small files, publish."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.engine.journal import Journal, read_journals
from reshard.engine.link import copy_file, link_file
from reshard.engine.manifest import build_manifest
from reshard.engine.memory import current_rss, plan_budget
from reshard.engine.plan import MANIFEST, Plan, Segment
from reshard.engine.ranks import Ranks
from reshard.engine.run import Stopped, run_segments, write_error
from reshard.engine.staging import (
    Staging,
    check_out,
    check_place,
    discard,
    discard_leftovers,
    finished_digest,
    fsync_directory,
    open_staging,
    publish,
    recover_output,
    staging_of,
    write_durably,
)
from reshard.errors import Refused, ReshardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.engine.journal import Finished
    from reshard.engine.memory import Budget


@dataclass(frozen=True)
class RunOptions:
    """How to run a plan; none of it changes the bytes.

    max_memory: bytes that each process may use for the run, or hold in all when `whole_process` (a command's)
    """

    workers: int | None = None
    max_memory: int = 1 << 30
    whole_process: bool = False
    overwrite: bool = False
    resume: bool = False
    link: str = "auto"
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True)
class RunReport:
    """What a run did: bytes that its ranks wrote now, bytes found finished, how whole files were placed."""

    written: int
    reused: int
    linked: dict[str, str]


def execute(plan: Plan, out: str | Path, options: RunOptions, ranks: Ranks, inputs: Sequence[str] = ()) -> RunReport:
    """Runs `plan` into `out`. Collective over `ranks`. Raises ReshardError; whatever happens, `out` is either what it
    was before or complete, and finished segments stay in the staging directory for a resumed run."""
    out = Path(os.path.abspath(out))
    staging: Staging | None = None
    verdict: ReshardError | None = None
    already = False
    fingerprint: dict[str, list[int]] = {}
    budget: Budget | None = None
    try:
        budget = _budget(plan, options)
        check_place(out, [Path(path) for path in inputs])
        fingerprint = _fingerprint(plan)
        if ranks.first:
            recover_output(out)
            if options.resume and finished_digest(out) == plan.digest:
                already = True  # the run was cut off after its last step
                discard_leftovers(out)
            else:
                check_out(out, overwrite=options.overwrite)
                identity: dict[str, Any] = {"plan": plan.digest, "sources": fingerprint}
                staging = open_staging(out, identity, overwrite=options.overwrite, resume=options.resume)
                _check_space(plan, staging)
    except (ReshardError, OSError) as error:
        verdict = _as_error(error, str(out))
    try:
        ranks.agree(verdict)
        if ranks.exchange(already)[0]:
            return RunReport(0, plan.nbytes, {})
        assert budget is not None
        return _run(plan, staging or staging_of(out), options, ranks, fingerprint, budget)
    finally:
        if staging is not None:
            staging.close()


def _budget(plan: Plan, options: RunOptions) -> Budget:
    scratch = max((part.content.scratch() for file in plan.files for part in file.parts), default=0)
    return plan_budget(options.max_memory, options.workers, scratch, current_rss() if options.whole_process else 0)


def _as_error(error: ReshardError | OSError, where: str) -> ReshardError:
    return error if isinstance(error, ReshardError) else write_error(error, where)


def _run(
    plan: Plan,
    staging: Staging,
    options: RunOptions,
    ranks: Ranks,
    fingerprint: dict[str, list[int]],
    budget: Budget,
) -> RunReport:
    known = read_journals(staging.journal)
    ranks.agree(None)  # every rank has read the journals before any of them writes to its own
    verdict: ReshardError | None = None
    written = 0
    linked: dict[str, str] = {}
    try:
        if ranks.first:
            linked = _link_whole_files(plan, staging, options.link)
    except (ReshardError, OSError) as error:
        verdict = _as_error(error, str(staging.out))
    ranks.agree(verdict)
    linked = ranks.exchange(linked)[0]
    todo = [segment for segment in plan.segments if plan.files[segment.file].name not in linked]
    mine = share(todo, ranks.rank, ranks.world)
    total = sum(segment.end - segment.begin for segment in mine)
    try:
        journal = Journal(staging.journal, ranks.rank)
        try:
            advance = _counter(total, options.progress)
            written = run_segments(plan, mine, staging.data, journal, known, budget, advance)
        finally:
            journal.close()
        _check_unchanged(fingerprint)
    except (ReshardError, OSError) as error:
        verdict = _as_error(error, str(staging.out))
    except Stopped:
        verdict = ReshardError("stopped", str(staging.out), "was stopped", "run again with --resume")
    ranks.agree(verdict)
    try:
        if ranks.first:
            _finish(plan, staging, read_journals(staging.journal), linked)
            publish(staging, overwrite=options.overwrite)
    except (ReshardError, OSError) as error:
        verdict = _as_error(error, str(staging.out))
    ranks.agree(verdict)
    return RunReport(sum(ranks.exchange(written)), sum(ranks.exchange(total - written)), linked)


def _link_whole_files(plan: Plan, staging: Staging, how: str) -> dict[str, str]:
    """Links what can be linked; file name -> "reflink" or "hard"."""
    linked = {}
    for file in plan.files:
        done = link_file(file.source, staging.data / file.name, how) if file.source is not None else None
        if done is not None:
            linked[file.name] = done
    return linked


def share(segments: Sequence[Segment], rank: int, world: int) -> Sequence[Segment]:
    """A rank's share: a contiguous run of segments, equal but for one."""
    return segments[len(segments) * rank // world : len(segments) * (rank + 1) // world]


def _counter(total: int, progress: Callable[[int, int], None] | None) -> Callable[[int], None]:
    done = 0
    lock = threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress is not None:
                progress(done, total)

    if progress is not None:
        progress(0, total)
    return advance


def _finish(plan: Plan, staging: Staging, finished: dict[int, Finished], linked: dict[str, str]) -> None:
    """The small files, in an order in which an index never precedes what it names; the manifest last."""
    wanted = {file.name for file in plan.files} | set(plan.copies) | set(plan.texts)
    for path in staging.data.rglob("*"):  # nothing that an earlier attempt may have left
        if path.is_file() and path.relative_to(staging.data).as_posix() not in wanted:
            path.unlink()
    for name, source in plan.copies.items():
        copy_file(source, staging.data / name)
    for name, text in plan.texts.items():
        (staging.data / name).parent.mkdir(parents=True, exist_ok=True)
        write_durably(staging.data / name, text)
    for directory in {path.parent for path in staging.data.rglob("*") if path.is_file()}:
        fsync_directory(directory)
    written = [segment for segment in plan.segments if plan.files[segment.file].name not in linked]
    missing = [segment.number for segment in written if segment.number not in finished]
    if missing:
        raise ReshardError("journal", str(staging.journal), f"lacks {len(missing)} segments", "run again with --resume")
    write_durably(staging.data / MANIFEST, build_manifest(plan, finished, staging.data))


def _fingerprint(plan: Plan) -> dict[str, list[int]]:
    """Size and modification time of every source, which must hold until the end."""
    found = {}
    for path in plan.copies.values():
        if not os.access(path, os.R_OK):
            raise ReshardError("read", path, "cannot be read (no permission)", "make it readable, or remove it")
    for path, size in plan.sources.items():
        try:
            state = os.stat(path)
        except OSError as error:
            raise ReshardError("read", path, f"has gone ({error.strerror})") from error
        if state.st_size != size:
            raise ReshardError("changed", path, "changed while it was read", "run again when nothing writes to it")
        found[path] = [state.st_size, state.st_mtime_ns]
    return found


def _check_unchanged(fingerprint: dict[str, list[int]]) -> None:
    for path, state in fingerprint.items():
        now = os.stat(path)
        if [now.st_size, now.st_mtime_ns] != state:
            raise ReshardError("changed", path, "changed while it was read", "run again when nothing writes to it")


def _check_space(plan: Plan, staging: Staging) -> None:
    held = sum(path.stat().st_blocks * 512 for path in staging.data.rglob("*") if path.is_file())
    free = shutil.disk_usage(staging.root).free
    need = plan.nbytes + sum(os.stat(path).st_size for path in plan.copies.values()) - held
    if need > free:
        if not held:
            discard(staging)
        raise Refused(
            "space", str(staging.out), f"needs {need:,} bytes, {free:,} are free", "free some or choose another disk"
        )
