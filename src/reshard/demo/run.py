"""The demo from beginning to end: train, look, convert, verify, load, score, compare.

Everything after training goes through the command line, as it would by hand; the commands are shown. The demo fails
when the model did not learn, when a command fails, or when an export answers a single held-out string differently from
the live model.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.demo.task import EOS, held_out, read_score
from reshard.errors import Damaged, Refused, ReshardError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

RANKS = 2
LEARNED = 0.95
EXAMPLES = 3
NEEDS = ("torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class Export:
    """One way to export the checkpoint, and one row of the summary.

    command: arguments of `reshard`; "{checkpoint}" stands for the step's directory
    folder:  where the result is, in the step's directory
    equals:  the live score that it must repeat, answer by answer; a key of the scores that training leaves
    why:     what is shown before the command
    """

    name: str
    command: tuple[str, ...]
    folder: str
    equals: str
    why: str


EXPORTS = (
    Export(
        name="bf16",
        command=("convert", "{checkpoint}", "--dtype", "bfloat16"),
        folder="weights",
        equals="bfloat16",
        why="Joins the shards, splits fused experts to the hub's names, rounds fp32 once to bf16; no optimizer.",
    ),
)


def run_demo(
    out_dir: str | Path | None = None,
    keep: bool = False,
    steps: int | None = None,
    echo: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Runs the demo and returns its figures.

    out_dir: where to work: a new or empty directory, which is kept. None: a temporary one, removed unless `keep`
    steps:   most training steps; fewer than the default may not be enough to learn, and that is then not an error
    echo:    called with each line to show

    Raises UsageError when torch or transformers is missing, and a ReshardError when anything does not come out right.
    """
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError("extra", "demo", f"needs {' and '.join(missing)}", "pip install 'reshard[torch,hf]'")
    if out_dir is None:
        root = Path(tempfile.mkdtemp(prefix="reshard-demo-"))
    else:
        root, keep = Path(out_dir).absolute(), True
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise Refused("exists", str(root), "already exists", "give a new or empty directory")
        root.mkdir(parents=True, exist_ok=True)
    try:
        figures = _Demo(root, echo).run(steps)
        if keep:
            echo(f"Everything is in {root}")
        return figures
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)


class _Demo:
    """One run of the demo in the directory `root`."""

    def __init__(self, root: Path, echo: Callable[[str], object]) -> None:
        self.root = root
        self.echo = echo
        self.began = time.perf_counter()
        # Ranks and scoring see one thread each, so that equal weights give equal answers; loopback needs no network.
        self.env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        if os.path.exists("/sys/class/net/lo"):
            self.env.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def run(self, steps: int | None) -> dict[str, Any]:
        self.echo(
            "A tiny Qwen3-MoE learns to reverse strings on two ranks, is saved in shards, and is exported and checked."
        )
        self.title("Train")
        self.say(
            f"{RANKS} processes, FSDP2, fp32 weights, AdamW. Scored on {len(held_out())} strings kept out of training."
        )
        seconds = self.train(steps)
        scores = read_score(self.root / "run" / "scores.json")
        checkpoint = f"run/checkpoints/step_{scores['step']}"
        self.say(f"Saved by torch DCP: {checkpoint}, {_megabytes(self.root / checkpoint)} with the optimizer.")
        live = float(scores["float32"]["accuracy"])
        if steps is None and live < LEARNED:
            raise ReshardError(
                "demo", "training", f"reached {live:.1%} where {LEARNED:.0%} was expected", "run it again"
            )
        rows = [
            {"name": "in training, fp32", "accuracy": live, "bytes": _size(self.root / checkpoint), "seconds": seconds},
            {
                "name": "in training, cast to bf16",
                "accuracy": scores["bfloat16"]["accuracy"],
                "bytes": None,
                "seconds": None,
            },
        ]
        self.title("Look")
        self.reshard("inspect", checkpoint)
        exports = [self.export(export, checkpoint, scores) for export in EXPORTS]
        rows += [{key: row[key] for key in ("name", "accuracy", "bytes", "seconds")} for row in exports]
        self.title("Summary")
        for line in table(rows):
            self.say(line)
        total = time.perf_counter() - self.began
        self.say(f"Equal answers, string by string. Done in {total:.0f} s.")
        return {
            "status": "done",
            "step": scores["step"],
            "ranks": scores["ranks"],
            "parameters": scores["parameters"],
            "strings": len(held_out()),
            "accuracy": {"float32": live, "bfloat16": scores["bfloat16"]["accuracy"]},
            "exports": exports,
            "seconds": total,
        }

    def train(self, steps: int | None) -> float:
        began = time.perf_counter()
        command = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
        command += ["--local-addr", "127.0.0.1", "-m", "reshard.demo.train", "run"]
        command += [] if steps is None else ["--steps", str(steps)]
        self.python(command, f"torchrun {' '.join(command[2:])}")
        return time.perf_counter() - began

    def export(self, export: Export, checkpoint: str, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Converts, verifies, scores and compares. Raises Damaged where an answer differs."""
        self.title(f"Export: {export.name}")
        self.say(export.why)
        began = time.perf_counter()
        self.reshard(*(word.format(checkpoint=checkpoint) for word in export.command))
        seconds = time.perf_counter() - began
        out = f"{checkpoint}/{export.folder}"
        self.reshard("verify", out)
        self.reshard("verify", out, "--load")
        self.say("Loaded with transformers' from_pretrained, asked the same strings, greedy decoding:")
        name = f"score-{export.folder}.json"
        self.python(["-m", "reshard.demo.score", out, name], f"python -m reshard.demo.score {out} {name}")
        score = read_score(self.root / name)
        strings = held_out()
        for text, reply in list(zip(strings, score["answers"], strict=True))[:: len(strings) // EXAMPLES][:EXAMPLES]:
            self.say(f"  {text}| -> {reply.removesuffix(EOS)}")
        expected = scores[export.equals]["answers"]
        differing = [text for text, a, b in zip(strings, expected, score["answers"], strict=True) if a != b]
        if differing:
            raise Damaged(
                "demo",
                out,
                f"answers {len(differing)} strings unlike the live model at {export.equals}, {differing[0]} first",
            )
        self.say(f"All {len(strings)} answers equal the live model's at {export.equals}.")
        return {
            "name": f"export, {export.name}",
            "out": out,
            "accuracy": score["accuracy"],
            "equal": True,
            "bytes": _size(self.root / out),
            "seconds": seconds,
        }

    def reshard(self, *arguments: str) -> None:
        self.python(["-m", "reshard", *arguments], f"reshard {' '.join(arguments)}")

    def python(self, arguments: Sequence[str], shown: str) -> None:
        """Shows a command, runs it in the demo's directory, shows what it prints. Raises ReshardError when it fails."""
        self.say(f"$ {shown}")
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    self.say(f"  {line.rstrip()}")
                status = process.wait()
            except BaseException:
                process.terminate()
                raise
        if status:
            raise ReshardError("demo", shown, f"failed with exit status {status}")

    def title(self, text: str) -> None:
        self.echo("")
        self.echo(text)

    def say(self, text: str) -> None:
        self.echo(f"  {text}".rstrip())


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of {"name", "accuracy", "bytes", "seconds"} as aligned lines; None is left blank."""
    width = max(len(str(row["name"])) for row in rows)
    lines = [f"{'':{width}}  accuracy      size     time"]
    for row in rows:
        size = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.2f} MB"
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f} s"
        lines.append(f"{row['name']:{width}}  {row['accuracy']:8.1%}  {size:>8}  {seconds:>7}".rstrip())
    return lines


def _size(directory: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _megabytes(directory: Path) -> str:
    return f"{_size(directory) / 1e6:.1f} MB"
