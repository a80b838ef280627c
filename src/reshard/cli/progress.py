"""How far a long job is: a bar on a terminal, otherwise one line a minute. On stderr, and never a reason to fail."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from reshard.cli.run import Flags, first_rank

if TYPE_CHECKING:
    from rich.progress import Progress

EVERY = 60.0

Report = Callable[[int, int], None]


@contextmanager
def progress(what: str, flags: Flags) -> Iterator[Report | None]:
    """Gives progress(done, total) in bytes, callable from any thread, or None where nothing is to be shown."""
    if flags.json or flags.quiet or sys.stderr is None or not first_rank():
        yield None
    elif sys.stderr.isatty():
        with _bar() as bar:
            yield _safely(_on_bar(bar, what))
    else:
        yield _safely(_by_lines(what, time.monotonic))


def _safely(report: Report) -> Report:
    """A display that breaks, say because the terminal went away, is given up; the job goes on."""
    lock = threading.Lock()
    broken = False

    def call(done: int, total: int) -> None:
        nonlocal broken
        with lock:
            if broken:
                return
            try:
                report(done, total)
            except Exception:
                broken = True

    return call


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    with suppress(OSError):
        bar.start()
    try:
        yield bar
    finally:
        with suppress(OSError):
            bar.stop()


def _on_bar(bar: Progress, what: str) -> Report:
    task = bar.add_task(what, total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    return report


def _by_lines(what: str, clock: Callable[[], float]) -> Report:
    began = last = clock()
    first: int | None = None

    def report(done: int, total: int) -> None:
        nonlocal last, first
        now = clock()
        # A resumed job begins in the middle: the rate counts what this run did.
        first = done if first is None else first
        if now - last < EVERY:
            return
        last = now
        rate = (done - first) / (now - began)
        left = f", {(total - done) / rate / 60:.0f} min left" if rate > 0 else ""
        share = done / total if total else 1.0
        print(
            f"reshard: {what} {share:.0%}, {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s{left}",
            file=sys.stderr,
            flush=True,
        )

    return report
