"""Running a plan: segments on threads, each with one writer, hashed as they are written."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from reshard.engine.hashes import MODULUS, TensorHasher
from reshard.engine.journal import Finished, Journal
from reshard.engine.plan import OutputFile, Plan, Segment
from reshard.errors import ReshardError
from reshard.tensors.read import Files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from reshard.engine.content import Content
    from reshard.engine.memory import Budget


class Stopped(Exception):
    """A worker found that another one failed, or that the user interrupted."""


@dataclass
class Job:
    """What the workers of one rank share."""

    plan: Plan
    data: Path
    budget: Budget
    files: Files
    outputs: OutputFiles
    stop: threading.Event


class OutputFiles:
    """Open descriptors of the files being written; each made at its full size by whoever comes first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()

    def descriptor(self, index: int, file: OutputFile) -> int:
        with self._lock:
            fd = self._open.get(index)
            if fd is None:
                path = self._directory / file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                if os.fstat(fd).st_size != file.nbytes:
                    os.ftruncate(fd, file.nbytes)
                self._open[index] = fd
            return fd

    def sync(self) -> None:
        for fd in self._open.values():
            os.fsync(fd)

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


def run_segments(
    plan: Plan,
    segments: Iterable[Segment],
    data: Path,
    journal: Journal,
    finished: Mapping[int, Finished],
    budget: Budget,
    advance: Callable[[int], None],
) -> int:
    """Writes `segments` into files under `data`; those in `finished` whose bytes on disk still match are left alone.

    Returns the number of bytes written. `advance` is told the bytes of each piece of work done. Every file touched is
    synced before this returns. Raises the first worker's error, after all workers have stopped.
    """
    todo = iter(segments)
    written = 0
    with Files() as files:
        job = Job(plan, data, budget, files, OutputFiles(data), threading.Event())
        try:
            with ThreadPoolExecutor(budget.workers, "reshard") as pool:
                buffers = [bytearray(budget.tile) for _ in range(budget.workers)]
                running: dict[Future[tuple[Finished, bool]], tuple[Segment, bytearray]] = {}
                try:
                    for segment in todo:
                        buffer = buffers.pop()
                        future = pool.submit(_one, job, segment, buffer, finished.get(segment.number), advance)
                        running[future] = (segment, buffer)
                        while not buffers:
                            written += _collect(running, buffers, journal)
                    while running:
                        written += _collect(running, buffers, journal)
                except BaseException:
                    job.stop.set()
                    wait(running)
                    _journal_rest(running, journal)
                    raise
            _syncing(job.outputs.sync)
        finally:
            job.outputs.close()
    return written


def _collect(
    running: dict[Future[tuple[Finished, bool]], tuple[Segment, bytearray]], buffers: list[bytearray], journal: Journal
) -> int:
    """Waits for some segments and journals them; the bytes they wrote."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    written = 0
    for future in done:
        entry, fresh = future.result()
        segment, buffer = running.pop(future)
        buffers.append(buffer)
        if fresh:
            journal.add(entry)
            written += segment.end - segment.begin
    return written


def _journal_rest(running: dict[Future[tuple[Finished, bool]], tuple[Segment, bytearray]], journal: Journal) -> None:
    """Segments that were completed although the run is being given up: a resumed run need not redo them."""
    for future in running:
        if future.done() and not future.cancelled() and future.exception() is None and future.result()[1]:
            journal.add(future.result()[0])


def _syncing(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        raise write_error(error, "the output") from error


def write_error(error: OSError, where: str) -> ReshardError:
    """An error of writing, with what helps."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ReshardError("space", where, "no space left on the disk", "free some and run again with --resume")
    return ReshardError(
        "write", where, f"cannot be written ({error.strerror})", "mend that and run again with --resume"
    )


def _one(
    job: Job, segment: Segment, buffer: bytearray, known: Finished | None, advance: Callable[[int], None]
) -> tuple[Finished, bool]:
    """Proves or writes one segment. Returns its journal entry, and whether it was written now."""
    file = job.plan.files[segment.file]
    try:
        fd = job.outputs.descriptor(segment.file, file)
        if known is not None and _digest_on_disk(fd, segment, buffer, job.stop) == known.digest:
            advance(segment.end - segment.begin)
            return known, False
        return write_segment(job, file, segment, fd, buffer, advance), True
    except OSError as error:
        raise write_error(error, file.name) from error


def _digest_on_disk(fd: int, segment: Segment, buffer: bytearray, stop: threading.Event) -> str:
    state = xxhash.xxh3_128()
    for begin in range(segment.begin, segment.end, len(buffer)):
        if stop.is_set():
            raise Stopped
        view = memoryview(buffer)[: min(len(buffer), segment.end - begin)]
        count = os.preadv(fd, [view], begin)
        state.update(view[:count])
    return str(state.hexdigest())


def write_segment(
    job: Job, file: OutputFile, segment: Segment, fd: int, buffer: bytearray, advance: Callable[[int], None]
) -> Finished:
    """Produces a segment tile by tile: fill, hash, write."""
    state = xxhash.xxh3_128()
    tensors: dict[str, int] = {}
    hasher: TensorHasher | None = None
    for begin in range(segment.begin, segment.end, len(buffer)):
        if job.stop.is_set():
            raise Stopped
        end = min(begin + len(buffer), segment.end)
        view = memoryview(buffer)[: end - begin]
        for offset, content, tensor, whole, at in file.overlapping(begin, end):
            first, last = max(begin, offset), min(end, offset + content.nbytes)
            piece = view[first - begin : last - begin]
            content.fill(first - offset, last - offset, piece, job.files)
            if tensor is None:
                continue
            if first == max(segment.begin, offset):
                hasher = TensorHasher((whole or content).nbytes, at + first - offset)
            assert hasher is not None
            hasher.update(piece)
            if last == min(segment.end, offset + content.nbytes):
                total = hasher.finish(partial(_fetch, whole or content, job.files))
                tensors[tensor] = (tensors.get(tensor, 0) + total) % MODULUS
        state.update(view)
        position = begin
        while view:
            count = os.pwrite(fd, view, position)
            view, position = view[count:], position + count
        start_writeback(fd, begin, end - begin)
        advance(end - begin)
    return Finished(segment.number, str(state.hexdigest()), tensors)


def _fetch(content: Content, files: Files, begin: int, end: int) -> bytearray:
    data = bytearray(end - begin)
    content.fill(begin, end, memoryview(data), files)
    return data


def _load_sync_file_range() -> Callable[[int, int, int], None]:
    import ctypes

    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is None:
        return lambda fd, offset, count: None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    write_only = 2  # SYNC_FILE_RANGE_WRITE: begin writing dirty pages, do not wait

    def start(fd: int, offset: int, count: int) -> None:
        function(fd, offset, count, write_only)

    return start


start_writeback = _load_sync_file_range()
"""Asks the kernel to begin writing pages now, so that the final sync does not find the whole file dirty."""
