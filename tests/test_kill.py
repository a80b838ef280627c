"""kill -9 and Ctrl-C at random moments: OUT is never half-written, and --resume ends with the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path  # noqa: TC003

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard.engine.journal import read_journals
from reshard.engine.staging import staging_of

CONVERT = [sys.executable, "-m", "reshard", "convert"]
FLAGS = ["--dtype", "bfloat16", "--workers", "2", "--max-shard-size", "40MB", "--json"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("kill") / "src"
    home.mkdir()
    rng = np.random.default_rng(0)
    for part in range(2):
        save_file(
            {f"model.layers.{part}.{i}.weight": rng.standard_normal((2000, 2000), dtype="f4") for i in range(12)},
            home / f"model-{part + 1:05d}-of-00002.safetensors",
            {"format": "pt"},
        )
    return home


def tree(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.iterdir()}


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, str]:
    out = source.parent / "whole"
    subprocess.run([*CONVERT, str(source), str(out), *FLAGS], check=True, stdout=subprocess.DEVNULL)
    return tree(out)


def attempts(source: Path, out: Path, seed: int, signals: tuple[int, ...]) -> int:
    """Starts and kills until a run survives; the number of kills."""
    pick = random.Random(seed)
    kills = 0
    while True:
        process = subprocess.Popen(
            [*CONVERT, str(source), str(out), *FLAGS, "--resume"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        if kills < 3:
            # Wait for the staging directory, so that most kills fall into the writing, then a random moment.
            limit = time.monotonic() + 20
            while not staging_of(out).data.is_dir() and process.poll() is None and time.monotonic() < limit:
                time.sleep(0.002)
            time.sleep(pick.random() * 0.25)
            process.send_signal(pick.choice(signals))
        stdout, stderr = process.communicate(timeout=120)
        if out.exists():
            assert (out / "reshard.json").is_file() and (out / "model.safetensors.index.json").is_file()
        if process.returncode == 0:
            json.loads(stdout)
            return kills
        # A shell calls death by SIGINT 130 too. Before the program's first line Python answers with a traceback and 1.
        starting = b"KeyboardInterrupt" in stderr and b"reshard/cli/app" not in stderr
        assert process.returncode in (-signal.SIGKILL, -signal.SIGINT, 130) or starting, stderr.decode()
        kills += 1


@pytest.mark.parametrize("seed", range(7))
def test_killed_at_random_moments(seed: int, source: Path, whole: dict[str, str], tmp_path: Path) -> None:
    """Seven rounds of up to three kills each: about twenty kills."""
    out = tmp_path / "out"
    attempts(source, out, seed, (signal.SIGKILL, signal.SIGKILL, signal.SIGINT))
    assert tree(out) == whole
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_finished_segments_are_not_redone(source: Path, whole: dict[str, str], tmp_path: Path) -> None:
    """Stopped when at least three segments are journalled: the resumed run writes only the others."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*CONVERT, str(source), str(out), *FLAGS], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(read_journals(staging_of(out).journal)) < 3 and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.wait()
    if out.exists():
        pytest.skip("the machine was too fast to be interrupted")
    finished = read_journals(staging_of(out).journal)
    done = subprocess.run([*CONVERT, str(source), str(out), *FLAGS, "--resume"], check=True, capture_output=True)
    report = json.loads(done.stdout)
    assert len(finished) >= 3
    assert report["reused"] >= (len(finished) - 3) * (8 << 20)
    assert report["written"] + report["reused"] == report["bytes"]
    assert tree(out) == whole


def test_another_number_of_ranks_continues(source: Path, whole: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*CONVERT, str(source), str(out), *FLAGS], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(read_journals(staging_of(out).journal)) < 2 and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.wait()
    module = tmp_path / "run.py"
    module.write_text("import runpy; runpy.run_module('reshard', run_name='__main__', alter_sys=True)")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(module)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, "convert", str(source), str(out), *FLAGS, "--resume"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert tree(out) == whole


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 160))
def test_killed_very_often(seed: int, source: Path, whole: dict[str, str], tmp_path: Path) -> None:
    attempts(source, tmp_path / "out", seed, (signal.SIGKILL, signal.SIGINT))
    assert tree(tmp_path / "out") == whole
