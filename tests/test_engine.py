"""The engine on small plans: one result however it is run, atomic publication, resuming, refusals, a full disk."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save_file

from reshard.engine import staging
from reshard.engine.execute import RunOptions, execute
from reshard.engine.hashes import BLOCK, SEGMENT_BYTES, tensor_digest
from reshard.engine.memory import plan_budget
from reshard.engine.plan import Plan
from reshard.engine.ranks import Ranks
from reshard.errors import Refused, ReshardError, UsageError
from reshard.layouts import hf, open_layout
from reshard.layouts.options import OpenOptions
from reshard.tensors.header import read_header

ROWS = 3000  # 12 MB a tensor in fp32: segments hold parts of several tensors


def make_source(path: Path, tensors: int = 5) -> dict[str, Any]:
    path.mkdir(parents=True)
    rng = np.random.default_rng(7)
    values: dict[str, Any] = {
        f"model.layers.{i}.w": rng.standard_normal((ROWS, 1000 + i), dtype="f4") for i in range(tensors)
    }
    values |= {"scalar": np.array(3.5, "f4"), "empty": np.zeros((0, 4), "f4"), "ids": np.arange(7)}
    save_file(values, path / "model.safetensors", {"format": "pt"})
    return values


def make_plan(source: Path, dtype: str = "F32", shard: int = 30_000_000) -> Plan:
    checkpoint = open_layout([source], OpenOptions())
    kinds = {name: dtype if t.dtype == "F32" else t.dtype for name, t in checkpoint.items()}
    weights = hf.plan_files(checkpoint.tensors, kinds, shard)
    texts = {hf.INDEX: weights.index} if weights.index else {}
    return Plan(weights.files, texts, sources=checkpoint.files)


def tree(path: Path) -> dict[str, str]:
    return {
        p.relative_to(path).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in path.rglob("*")
        if p.is_file()
    }


def leftovers(parent: Path) -> list[str]:
    return [p.name for p in parent.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_same_bytes_however_it_is_run(dtype: str, tmp_path: Path) -> None:
    make_source(tmp_path / "src")
    plan = make_plan(tmp_path / "src", dtype)
    results = []
    for workers, memory in ((1, 1 << 30), (4, 1 << 30), (16, 1 << 30), (3, 80 << 20)):
        execute(plan, tmp_path / "out", RunOptions(workers, memory, overwrite=True), Ranks())
        results.append(tree(tmp_path / "out"))
    assert results[0] == results[1] == results[2] == results[3]
    assert leftovers(tmp_path) == []


def test_content_equals_torch_s_cast_and_the_library_reads_it(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    values = make_source(tmp_path / "src", 2)
    execute(make_plan(tmp_path / "src", "BF16"), tmp_path / "out", RunOptions(), Ranks())
    found: dict[str, Any] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_torch(file)
    assert found.keys() == values.keys()
    for name, value in values.items():
        expected = torch.from_numpy(value)
        expected = expected.bfloat16() if value.dtype == np.float32 else expected
        assert torch.equal(found[name], expected), name


def test_manifest_holds_hashes_worked_out_by_hand(tmp_path: Path) -> None:
    values = make_source(tmp_path / "src", 3)
    execute(make_plan(tmp_path / "src"), tmp_path / "out", RunOptions(workers=2), Ranks())
    manifest = json.loads((tmp_path / "out" / "reshard.json").read_text())
    for name, row in manifest["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        pieces = [data[i : i + SEGMENT_BYTES] for i in range(0, len(data), SEGMENT_BYTES)]
        assert row == {"bytes": len(data), "segments": [xxhash.xxh3_128_hexdigest(piece) for piece in pieces]}
    for name, value in values.items():
        data = value.tobytes()
        total = sum(xxhash.xxh3_128_intdigest(data[i : i + BLOCK], seed=i // BLOCK) for i in range(0, len(data), BLOCK))
        assert manifest["tensors"][name] == f"{total % (1 << 128):032x}" == tensor_digest(data)
    text = json.dumps(manifest)
    assert str(tmp_path) not in text and os.uname().nodename not in text


def test_data_starts_on_a_page_and_modes_follow_the_umask(tmp_path: Path) -> None:
    make_source(tmp_path / "src", 1)
    before = os.umask(0o022)
    try:
        execute(make_plan(tmp_path / "src"), tmp_path / "out", RunOptions(), Ranks())
    finally:
        os.umask(before)
    for path in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        if path.suffix == ".safetensors":
            assert read_header(str(path)).data_start % 4096 == 0


def test_existing_output_is_refused_then_exchanged(tmp_path: Path) -> None:
    make_source(tmp_path / "src", 1)
    plan = make_plan(tmp_path / "src")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep me")
    with pytest.raises(Refused, match="other than a checkpoint"):
        execute(plan, out, RunOptions(overwrite=True), Ranks())
    (out / "config.json").write_text("{}")
    with pytest.raises(Refused, match="already exists"):
        execute(plan, out, RunOptions(), Ranks())
    assert (out / "mine.txt").read_text() == "keep me" and leftovers(tmp_path) == []
    execute(plan, out, RunOptions(overwrite=True), Ranks())
    assert not (out / "mine.txt").exists() and (out / "reshard.json").is_file()
    assert leftovers(tmp_path) == []


def test_overwrite_without_kernel_exchange_recovers_the_old_output(tmp_path: Path, monkeypatch: Any) -> None:
    """Where renameat2 is missing there are two renames; a crash between them must not lose the old output."""
    make_source(tmp_path / "src", 1)
    plan = make_plan(tmp_path / "src")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("old")
    (out / "config.json").write_text("{}")
    monkeypatch.setattr(staging, "_exchange", lambda a, b: False)
    rename = os.rename

    def crash(a: Any, b: Any) -> None:
        rename(a, b)
        if Path(b).name == "displaced":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        execute(plan, out, RunOptions(overwrite=True), Ranks())
    monkeypatch.setattr(os, "rename", rename)
    assert not out.exists()
    with pytest.raises(Refused, match="already exists"):  # the next run puts it back before anything else
        execute(plan, out, RunOptions(resume=True), Ranks())
    assert (out / "mine.txt").read_text() == "old"
    execute(plan, out, RunOptions(resume=True, overwrite=True), Ranks())
    assert (out / "reshard.json").is_file() and leftovers(tmp_path) == []


class Interrupt(Exception):
    pass


def interrupt_after(count: int) -> Any:
    def progress(done: int, total: int) -> None:
        if done >= count:
            raise KeyboardInterrupt

    return progress


def test_resume_continues_and_does_not_redo(tmp_path: Path) -> None:
    make_source(tmp_path / "src")
    plan = make_plan(tmp_path / "src")
    execute(plan, tmp_path / "whole", RunOptions(), Ranks())
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        execute(plan, out, RunOptions(workers=1, progress=interrupt_after(40_000_000)), Ranks())
    assert not out.exists()
    with pytest.raises(Refused, match="interrupted run"):
        execute(plan, out, RunOptions(), Ranks())
    report = execute(plan, out, RunOptions(resume=True), Ranks())
    assert report.reused >= 24_000_000 and report.written + report.reused == plan.nbytes
    assert tree(out) == tree(tmp_path / "whole") and leftovers(tmp_path) == []
    again = execute(plan, out, RunOptions(resume=True), Ranks())  # already complete: nothing to do
    assert again.written == 0


def test_resume_trusts_bytes_not_the_journal(tmp_path: Path) -> None:
    """Segments that were damaged after they were journalled, and a torn journal line, are done again."""
    make_source(tmp_path / "src")
    plan = make_plan(tmp_path / "src")
    execute(plan, tmp_path / "whole", RunOptions(), Ranks())
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        execute(plan, out, RunOptions(workers=1, progress=interrupt_after(60_000_000)), Ranks())
    held = staging.staging_of(out)
    first = sorted(held.data.glob("*.safetensors"))[0]
    with first.open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"garbage")
    journal = held.journal / "rank-00000.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20] + b"\xff\xfe")
    execute(plan, out, RunOptions(resume=True), Ranks())
    assert tree(out) == tree(tmp_path / "whole")


def test_resume_refuses_another_plan_or_changed_sources(tmp_path: Path) -> None:
    make_source(tmp_path / "src")
    plan = make_plan(tmp_path / "src")
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        execute(plan, out, RunOptions(workers=1, progress=interrupt_after(1)), Ranks())
    with pytest.raises(Refused, match="another plan"):
        execute(make_plan(tmp_path / "src", "BF16"), out, RunOptions(resume=True), Ranks())
    os.utime(tmp_path / "src" / "model.safetensors", (1, 1))
    with pytest.raises(Refused, match="changed since"):
        execute(plan, out, RunOptions(resume=True), Ranks())
    execute(plan, out, RunOptions(overwrite=True), Ranks())
    assert leftovers(tmp_path) == []


def test_source_that_changes_underneath_is_noticed(tmp_path: Path) -> None:
    make_source(tmp_path / "src")
    plan = make_plan(tmp_path / "src")

    def touch(done: int, total: int) -> None:
        os.utime(tmp_path / "src" / "model.safetensors", (1, 1))

    with pytest.raises(ReshardError, match="changed while it was read"):
        execute(plan, tmp_path / "out", RunOptions(progress=touch), Ranks())
    assert not (tmp_path / "out").exists()


def test_two_writers_of_one_output(tmp_path: Path) -> None:
    make_source(tmp_path / "src", 1)
    root = staging.staging_of(tmp_path / "out").root
    root.mkdir()
    holder = os.open(root, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(Refused, match="another process"):
        execute(make_plan(tmp_path / "src"), tmp_path / "out", RunOptions(), Ranks())
    os.close(holder)
    execute(make_plan(tmp_path / "src"), tmp_path / "out", RunOptions(), Ranks())


@pytest.mark.parametrize("place", ["src", "src/deeper", "."])
def test_output_in_or_around_the_input_is_refused(place: str, tmp_path: Path) -> None:
    make_source(tmp_path / "home" / "src", 1)
    source = tmp_path / "home" / "src"
    before = tree(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for base in (tmp_path / "home", tmp_path / "link"):
        with pytest.raises(Refused, match="input"):
            execute(make_plan(source), base / place, RunOptions(overwrite=True), Ranks(), [str(source)])
    assert tree(tmp_path / "home") == {k.removeprefix("home/"): v for k, v in before.items()}
    execute(make_plan(source), source / "weights", RunOptions(), Ranks(), [str(source)])
    assert (source / "weights" / "reshard.json").is_file()


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_too_little_space_is_refused_before_writing(tmp_path: Path, small_disk: Path) -> None:
    make_source(tmp_path / "src")
    with pytest.raises(Refused, match="are free"):
        execute(make_plan(tmp_path / "src"), small_disk / "out", RunOptions(), Ranks())
    assert list(small_disk.iterdir()) == []


def test_disk_that_fills_up_while_writing(tmp_path: Path, small_disk: Path, monkeypatch: Any) -> None:
    """ENOSPC in the middle (here the check beforehand is blinded): exit 1, no OUT, the old one intact, resumable."""
    make_source(tmp_path / "src", 2)
    plan = make_plan(tmp_path / "src", shard=13_000_000)
    execute(plan, tmp_path / "whole", RunOptions(), Ranks())
    (small_disk / "hog").write_bytes(b"x" * 10_000_000)
    monkeypatch.setattr("reshard.engine.execute._check_space", lambda plan, staging: None)
    with pytest.raises(ReshardError, match="no space left") as caught:
        execute(plan, small_disk / "out", RunOptions(workers=1), Ranks())
    assert caught.value.exit_status == 1
    assert not (small_disk / "out").exists()
    (small_disk / "hog").unlink()
    # 24 MB of weights on a disk of 25 MB: only possible because what was written is kept
    report = execute(plan, small_disk / "out", RunOptions(resume=True), Ranks())
    assert (small_disk / "out/reshard.json").read_text() == (tmp_path / "whole/reshard.json").read_text()
    assert tree(small_disk / "out") == tree(tmp_path / "whole") and report.written < plan.nbytes


def test_whole_files_are_linked_on_demand_with_one_manifest(tmp_path: Path) -> None:
    make_source(tmp_path / "src", 1)
    checkpoint = open_layout([tmp_path / "src"], OpenOptions())
    kinds = {name: t.dtype for name, t in checkpoint.items()}
    kept = hf.keep_files(checkpoint, checkpoint.tensors, kinds, 1 << 40)
    assert kept is not None
    plan = Plan(hf.plan_files(checkpoint.tensors, kinds, 1 << 40, *kept).files, sources=checkpoint.files)
    for how in ("hard", "copy", "auto"):
        execute(plan, tmp_path / how, RunOptions(link=how), Ranks())
    source = tmp_path / "src" / "model.safetensors"
    assert (tmp_path / "hard" / source.name).samefile(source)
    assert not (tmp_path / "copy" / source.name).samefile(source)
    assert tree(tmp_path / "hard") == tree(tmp_path / "copy") == tree(tmp_path / "auto")
    assert json.loads((tmp_path / "hard" / "reshard.json").read_text())["files"][source.name]["segments"] is None
    assert load_file(tmp_path / "auto" / source.name).keys() == kinds.keys()


def test_hashes_of_the_source_s_manifest_are_carried(tmp_path: Path) -> None:
    make_source(tmp_path / "src", 1)
    execute(make_plan(tmp_path / "src", shard=1 << 40), tmp_path / "one", RunOptions(), Ranks())
    checkpoint = open_layout([tmp_path / "one"], OpenOptions())
    kinds = {name: t.dtype for name, t in checkpoint.items()}
    kept = hf.keep_files(checkpoint, checkpoint.tensors, kinds, 1 << 40)
    assert kept is not None
    plan = Plan(hf.plan_files(checkpoint.tensors, kinds, 1 << 40, *kept).files, sources=checkpoint.files)
    execute(plan, tmp_path / "two", RunOptions(link="hard"), Ranks())
    one, two = (json.loads((tmp_path / n / "reshard.json").read_text()) for n in ("one", "two"))
    assert one["files"] == two["files"] and one["tensors"] == two["tensors"]


def test_memory_budget_is_kept_or_refused() -> None:
    with pytest.raises(UsageError, match="too little"):
        plan_budget(1 << 20, 4, 8 << 20)
    generous = plan_budget(64 << 30, 3, 8 << 20)
    assert (generous.workers, generous.tile) == (3, SEGMENT_BYTES)
    tight = plan_budget(current := (400 << 20), 16, 12 << 20, 100 << 20)
    assert tight.workers * (tight.tile + (12 << 20)) < current - (100 << 20)


def test_staging_that_somebody_else_put_there_is_not_followed(tmp_path: Path) -> None:
    make_source(tmp_path / "src", 1)
    victim = tmp_path / "victim"
    victim.mkdir()
    root = staging.staging_of(tmp_path / "out").root
    root.symlink_to(victim)
    with pytest.raises(Refused, match="own"):
        execute(make_plan(tmp_path / "src"), tmp_path / "out", RunOptions(), Ranks())
    root.unlink()
    root.write_text("a file")
    with pytest.raises(Refused, match="own"):
        execute(make_plan(tmp_path / "src"), tmp_path / "out", RunOptions(), Ranks())
    assert list(victim.iterdir()) == []


def test_long_output_names_work(tmp_path: Path) -> None:
    make_source(tmp_path / "src", 1)
    out = tmp_path / ("x" * 250)
    execute(make_plan(tmp_path / "src"), out, RunOptions(), Ranks())
    assert (out / "reshard.json").is_file()
    assert leftovers(tmp_path) == []
