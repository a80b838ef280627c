"""What the benchmarks share: timed processes with their peak memory, the copy yardstick, inputs, and medians."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCK = 16 << 20


@dataclass(frozen=True)
class Run:
    """One finished process: wall seconds, and the largest resident bytes of it or any child."""

    seconds: float
    peak: int


def run(command: Sequence[str]) -> Run:
    """Runs a command to its end, failing loudly. Peak memory is asked of the kernel (wait4), as /usr/bin/time does."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    error = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{error.decode(errors='replace')}")
    return Run(seconds, usage.ru_maxrss * 1024)


def reshard(*args: str) -> list[str]:
    return [sys.executable, "-m", "reshard", *args]


def files_below(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def size_of(path: Path) -> int:
    return sum(p.stat().st_size for p in files_below(path))


def drop_caches() -> None:
    """So that every contender reads from the disk and none finds its dirty pages in the way."""
    subprocess.run(["sync"], check=True)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        print("note: page cache not dropped (needs root)", file=sys.stderr)


def copy(inputs: Sequence[Path], out: Path, out_bytes: int) -> Run:
    """The yardstick: dd reads every input byte and writes as many as the job's output holds; `sync -f` follows."""
    out.mkdir(parents=True)
    began = time.monotonic()
    left = out_bytes
    for number, path in enumerate(inputs):
        size = path.stat().st_size
        keep = min(left, size)
        left -= keep
        blocks, odd = divmod(keep, BLOCK)
        if keep == size:
            _dd(f"if={path}", f"of={out / str(number)}")
        else:
            _dd(f"if={path}", f"of={out / str(number)}", f"count={blocks + (odd > 0)}")
            _dd(f"if={path}", "of=/dev/null", f"skip={blocks}")
    subprocess.run(["sync", "-f", str(out)], check=True)
    return Run(time.monotonic() - began, 0)


def _dd(*args: str) -> None:
    subprocess.run(["dd", f"bs={BLOCK}", "status=none", *args], check=True)


def plain_cp(source: Path, out: Path) -> Run:
    """`cp -r` without a sync, shown beside the yardstick."""
    began = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(out)], check=True)
    return Run(time.monotonic() - began, 0)


def compare(contenders: dict[str, Callable[[Path], Run]], work: Path, rounds: int) -> dict[str, list[Run]]:
    """Runs the contenders in turn, `rounds` times, each into a fresh directory with cold caches."""
    results: dict[str, list[Run]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, contender in contenders.items():
            out = work / f"out-{name}"
            shutil.rmtree(out, ignore_errors=True)
            drop_caches()
            results[name].append(contender(out))
            print(f"  round {number + 1} {name}: {results[name][-1].seconds:.2f} s", file=sys.stderr)
            shutil.rmtree(out, ignore_errors=True)
    return results


def table(title: str, results: dict[str, list[Run]], yardstick: str = "copy") -> str:
    """A Markdown table of medians and of the median ratio to the yardstick, round by round."""
    base = results[yardstick]
    lines = [
        f"### {title}",
        "",
        f"| what | seconds (median of {len(base)}) | ratio to copy | peak RSS |",
        "|---|---|---|---|",
    ]
    for name, runs in results.items():
        ratio = statistics.median(run.seconds / other.seconds for run, other in zip(runs, base, strict=True))
        peak = max(run.peak for run in runs)
        memory = f"{peak / (1 << 20):.0f} MiB" if peak else ""
        lines.append(f"| {name} | {statistics.median(run.seconds for run in runs):.2f} | {ratio:.2f} | {memory} |")
    return "\n".join(lines)


def own_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
