"""The command line as a shell sees it: exit status, one line on stderr, one JSON document on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from reshard.cli import progress
from reshard.cli.convert import summary
from reshard.cli.run import Flags
from reshard.cli.text import folded
from reshard.errors import UsageError
from reshard.sizes import parse_size

if TYPE_CHECKING:
    from pathlib import Path

RESHARD = [sys.executable, "-m", "reshard"]
REPORT = {
    "command", "status", "source", "output", "layout", "family", "tensors", "bytes", "dropped", "kept", "warnings",
    "seconds", "peak_rss_bytes", "error",
}  # fmt: skip


def reshard(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RESHARD, *map(str, arguments)], capture_output=True, text=True, env={**os.environ, **(env or {})}
    )


def with_fault(fault: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`reshard` with plan_convert replaced by the statements of `fault`."""
    code = (
        "import sys, os, signal, time, reshard.verbs.convert as verb\n"
        f"def fail(*a, **k):\n    {fault}\n"
        "verb.plan_convert = fail\n"
        "from reshard.cli.app import run_app\n"
        "sys.exit(run_app(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """stderr, which must be one line of ours."""
    assert done.stderr.startswith("reshard: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("reshard: ").rstrip("\n")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    home = tmp_path / "src"
    home.mkdir()
    tensors = {f"block.{i}.weight": np.arange(64, dtype="f4").reshape(8, 8) + i for i in range(3)}
    save_file(tensors, home / "model.safetensors", {"format": "pt"})
    (home / "config.json").write_text('{"model_type": "blocks"}')
    return home


@pytest.fixture
def cut(source: Path) -> Path:
    """The same, cut short by a byte."""
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return source


def tree(home: Path) -> dict[str, bytes]:
    return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


# --- what a good run says -------------------------------------------------------------------------------------------


def test_convert_writes_and_says_what_comes_next(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "my out"
    done = reshard("convert", source, out, "--dtype", "bfloat16")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"wrote     {out} (hf)" in done.stdout
    assert "tensors   3, " in done.stdout
    assert done.stdout.splitlines()[-1] == f"next      reshard verify '{out}'"
    with safe_open(out / "model.safetensors", "np") as file:
        assert {name: file.get_slice(name).get_dtype() for name in file.keys()} == {  # noqa: SIM118
            f"block.{i}.weight": "BF16" for i in range(3)
        }


def test_convert_json_is_one_document_and_nothing_else(source: Path, tmp_path: Path) -> None:
    done = reshard("convert", source, tmp_path / "out", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert set(report) >= REPORT
    assert (report["status"], report["tensors"], report["error"]) == ("done", 3, None)
    assert report["output"] == str(tmp_path / "out")


def test_drop_is_repeatable_and_told(source: Path, tmp_path: Path) -> None:
    done = reshard("convert", source, tmp_path / "out", "--drop", r"block\.0", "--drop", r"block\.1", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in json.loads(done.stdout)["dropped"]] == ["block.0.weight", "block.1.weight"]
    assert list(load_file(tmp_path / "out/model.safetensors")) == ["block.2.weight"]


def test_quiet_says_nothing(source: Path, tmp_path: Path) -> None:
    done = reshard("convert", source, tmp_path / "out", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "out/model.safetensors").exists()


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_dry_run_writes_nothing(source: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    before = tree(tmp_path)
    done = reshard("convert", source, tmp_path / "out", "--dtype", "bfloat16", "--dry-run", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert tree(tmp_path) == before and not (tmp_path / "out").exists()
    if flags:
        report = json.loads(done.stdout)
        assert report["status"] == "planned" and report["plan"]
    else:
        assert "block.0.weight" in done.stdout and "model.safetensors" in done.stdout


def test_names_reach_no_terminal_as_codes(tmp_path: Path) -> None:
    save_file({"evil\x1b[31m.weight": np.ones(4, "f4")}, tmp_path / "model.safetensors", {"format": "pt"})
    done = reshard("convert", tmp_path, f"{tmp_path}-out", "--dtype", "bfloat16", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "evil?[31m.weight" in done.stdout and "\x1b" not in done.stdout


def test_only_the_first_rank_speaks(tmp_path: Path) -> None:
    for flags in ((), ("--json",)):
        first = reshard("families", *flags, env={"RANK": "0", "WORLD_SIZE": "2"})
        other = reshard("families", *flags, env={"RANK": "1", "WORLD_SIZE": "2"})
        assert first.stdout and (other.returncode, other.stdout, other.stderr) == (0, "", "")
    failed = reshard("convert", tmp_path / "none", "out", "--json", env={"RANK": "1", "WORLD_SIZE": "2"})
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "does not exist" in one_line(failed)


def test_families() -> None:
    table = reshard("families").stdout.splitlines()
    rows = json.loads(reshard("families", "--json").stdout)["families"]
    assert [row["name"] for row in rows] == [line.split()[0] for line in table[1:]]
    moe = next(row for row in rows if row["name"] == "qwen3_moe")
    assert "qwen3_moe" in moe["model_types"] and moe["experts"]["hub"] == "per-expert"


# --- exit statuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["convert", "--bogus", "x"], "No such option: --bogus"),
        (["convert"], "Missing argument 'SRC'"),
        (["convert", "x", "y", "--workers", "0"], "--workers"),
        (["convert", "x", "y", "--workers", "many"], "--workers"),
        (["convert", "x", "y", "--to", "zip"], "one of hf, dcp"),
        (["convert", "x", "y", "--device", "tpu"], "one of cpu, cuda"),
        (["convert", "x", "y", "--max-shard-size", "big"], "5GB"),
        (["convert", "/does/not/exist", "y"], "/does/not/exist"),
        (["inspect", "a", "b"], "b"),
        (["translate"], "translate"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_wrong_usage_is_2(arguments: list[str], said: str, flags: list[str]) -> None:
    done = reshard(*arguments, *flags)
    assert done.returncode == 2
    assert said in one_line(done)
    if flags:
        report = json.loads(done.stdout)
        assert report["status"] == "refused" and set(report["error"]) == {"kind", "where", "detail", "remedy"}
        assert arguments[0] != "convert" or set(report) == REPORT
    else:
        assert done.stdout == ""


def test_refused_is_3(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    done = reshard("convert", source, out, "--json")
    assert done.returncode == 3
    assert str(out) in one_line(done)
    report = json.loads(done.stdout)
    assert set(report) == REPORT and report["status"] == "refused" and report["output"] == str(out)
    assert tree(out) == {"precious": b"mine"}


def test_damaged_is_4(cut: Path, tmp_path: Path) -> None:
    done = reshard("convert", cut, tmp_path / "out", "--json")
    assert done.returncode == 4
    assert "model.safetensors" in one_line(done)
    report = json.loads(done.stdout)
    assert report["status"] == "failed" and report["error"]["kind"]
    assert not (tmp_path / "out").exists()


def test_debug_adds_the_traceback(cut: Path, tmp_path: Path) -> None:
    done = reshard("convert", cut, tmp_path / "out", "--debug")
    assert done.returncode == 4
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("reshard: ")


def test_an_internal_error_is_1_and_one_line() -> None:
    done = with_fault("raise ZeroDivisionError('by\\nnought \\x1b[31m')", "convert", "x", "y", "--json")
    assert done.returncode == 1
    assert one_line(done) == "internal error: ZeroDivisionError: by nought ?[31m; --debug shows the traceback"
    assert json.loads(done.stdout)["error"]["kind"] == "internal"
    assert "in fail" in with_fault("raise ZeroDivisionError", "convert", "x", "y", "--debug").stderr


def test_the_systems_errors_are_no_internal_errors() -> None:
    done = with_fault("raise PermissionError(13, 'Permission denied', 'model.bin')", "convert", "x", "y")
    assert (done.returncode, one_line(done)) == (1, "model.bin: Permission denied")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_interrupted_is_130(number: str) -> None:
    fault = f"os.kill(os.getpid(), signal.{number}); time.sleep(30)"
    began = time.monotonic()
    done = with_fault(fault, "convert", "x", "y", "--json")
    assert time.monotonic() - began < 20
    assert (done.returncode, one_line(done)) == (130, "interrupted; run again with --resume to continue")
    report = json.loads(done.stdout)
    assert (report["status"], report["error"]["kind"]) == ("failed", "interrupted")


def test_what_libraries_print_does_not_reach_the_document() -> None:
    fault = "print('noise'); os.write(1, b'noise'); os.system('echo noise'); raise ValueError('x')"
    done = with_fault(fault, "convert", "x", "y", "--json")
    assert json.loads(done.stdout)["status"] == "failed"
    assert done.stderr.count("noise") == 3


def test_a_reader_that_goes_away_is_met_in_silence() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*RESHARD, "families"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_under_stdout_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*RESHARD, "families"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, one_line(done)) == (1, "No space left on device")


# --- what starts fast -----------------------------------------------------------------------------------------------


def imports(*arguments: object) -> set[str]:
    """Top-level packages that a command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "reshard", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names = (line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {name.split(".")[0] for name in names}


def test_help_imports_little() -> None:
    for arguments in (["--help"], ["convert", "--help"], ["--version"]):
        found = imports(*arguments)
        assert "typer" in found
        assert not found & {"torch", "transformers", "numpy", "huggingface_hub", "safetensors"}, arguments


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        assert reshard("--help").returncode == 0
        times.append(time.perf_counter() - began)
    assert min(times) < 0.5, times


def test_inspect_imports_no_torch(source: Path) -> None:
    assert not imports("inspect", source) & {"torch", "transformers"}


# --- the other verbs ------------------------------------------------------------------------------------------------


def test_inspect(source: Path) -> None:
    done = reshard("inspect", source, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["layout"], found["tensors"], found["parameters"], found["bytes"]) == ("hf", 3, 192, 768)
    assert found["dtypes"] == {"F32": 3} and found["complete"] is True and found["problems"] == []
    text = reshard("inspect", source)
    assert text.returncode == 0 and "tensors   3, 192 parameters" in text.stdout


def test_inspect_of_damage_is_4(cut: Path) -> None:
    done = reshard("inspect", cut, "--json")
    assert done.returncode == 4
    assert "model.safetensors" in one_line(done)
    json.loads(done.stdout)


def test_verify(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert reshard("convert", source, out, "--quiet").returncode == 0
    done = reshard("verify", out, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["status"], found["checked_tensors"], found["problems"]) == ("ok", 3, [])
    assert reshard("verify", out).stdout.startswith("ok")


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_verify_of_a_flipped_bit_is_4(source: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    assert reshard("convert", source, out, "--dtype", "bfloat16", "--quiet").returncode == 0
    path = out / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = reshard("verify", out, *flags)
    assert done.returncode == 4
    assert "model.safetensors" in one_line(done)
    if flags:
        found = json.loads(done.stdout)
        assert found["status"] == "failed" and found["problems"]
    else:
        assert "problem   " in done.stdout


def test_diff_is_0_even_where_they_differ(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert reshard("convert", source, out, "--drop", r"block\.0", "--quiet").returncode == 0
    done = reshard("diff", source, out, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "block.0.weight" in done.stdout
    json.loads(done.stdout)
    text = reshard("diff", source, out)
    assert text.returncode == 0 and "block.0.weight" in text.stdout


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9), ("1GiB", 1 << 30), ("512MiB", 512 << 20), ("1.1GB", 1_100_000_000), ("4096", 4096),
        (4096, 4096), ("0", 0), (" 2 kb ", 2000), ("1KiB", 1024), ("7B", 7), ("2TB", 2 * 10**12),
    ],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5 GB please", "1e9", "5Gb/s", "5iB", "½GB", "٣GB", -1, True, None])
def test_what_is_not_a_size(text: Any) -> None:
    with pytest.raises(UsageError, match="is not a size; write 5GB"):
        parse_size(text)


def test_progress_by_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    report = progress._by_lines("convert", lambda: now)
    report(10**9, 5 * 10**9)  # a resumed run
    now += 59
    report(2 * 10**9, 5 * 10**9)
    assert capsys.readouterr().err == ""
    now += 41
    report(3 * 10**9, 5 * 10**9)
    report(3 * 10**9, 5 * 10**9)
    assert capsys.readouterr().err == "reshard: convert 60%, 3.0 of 5.0 GB, 0.02 GB/s, 2 min left\n"


def test_progress_never_raises() -> None:
    calls = []

    def broken(done: int, total: int) -> None:
        calls.append(done)
        raise OSError("the terminal went away")

    report = progress._safely(broken)
    report(0, 0)
    report(1, 0)
    assert calls == [0]
    for flags in (Flags(json=True), Flags(quiet=True)):
        with progress.progress("x", flags) as shown:
            assert shown is None


def test_dropped_tensors_are_folded_by_reason() -> None:
    rows = [{"name": f"optim.{i}", "reason": "optimizer state"} for i in range(1000)]
    rows.append({"name": "lm_head.weight", "reason": "tied"})
    assert list(folded("left out", rows)) == [
        "left out  optim.0 and 999 more: optimizer state",
        "left out  lm_head.weight: tied",
    ]


def test_the_summary_of_a_long_run() -> None:
    report = {
        "output": "out", "layout": "hf", "family": "qwen3_moe", "tensors": 18867, "bytes": 61_000_000_000,
        "seconds": 30.5, "dropped": [], "kept": [], "warnings": ["dtype bfloat16"],
    }  # fmt: skip
    assert list(summary(report)) == [
        "wrote     out (hf, qwen3_moe)",
        "tensors   18,867, 61.0 GB in 30.5 s, 2.00 GB/s",
        "note      dtype bfloat16",
        "next      reshard verify out",
    ]
