"""Files that lie and indexes that lead out of their directory, through every verb of the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from written import INDEX, LLAMA, raw_file, write_hf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EIGHT = bytes(range(8))
TWICE = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'

HEADERS: dict[str, Callable[[Path], object]] = {
    "two names on the same bytes": lambda path: raw_file(path, {"w": ONE, "v": ONE}, EIGHT),
    "trailing bytes": lambda path: raw_file(path, {"w": ONE}, EIGHT + b"1234"),
    "a shape larger than its bytes": lambda path: raw_file(path, {"w": ONE | {"shape": [1000]}}, EIGHT),
    "data cut short": lambda path: raw_file(path, {"w": ONE}, EIGHT[:4]),
    "no dtype": lambda path: raw_file(path, {"w": ONE | {"dtype": ""}}, EIGHT),
    "a key twice": lambda path: raw_file(path, TWICE, EIGHT),
    "a header of 2**40 bytes": lambda path: path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}" + EIGHT),
    "a git-LFS pointer": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
    "an empty file": lambda path: path.write_bytes(b""),
}
VERBS = ("inspect", "verify", "diff", "convert")


def reshard(verb: str, home: Path, tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The verb with `home` as its subject, under a limit of address space that a large allocation would break."""
    more = {"inspect": [], "verify": [], "diff": [home], "convert": [tmp_path / "out"]}[verb]
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)); "
        "from reshard.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", limited, verb, str(home), *map(str, more), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def refused(verb: str, home: Path, tmp_path: Path, named: str, *statuses: int) -> None:
    """Ends with one of the statuses, one line that names the file, no traceback and no output."""
    done = reshard(verb, home, tmp_path)
    assert done.returncode in statuses, (verb, done)
    (line,) = done.stderr.splitlines()
    assert line.startswith("reshard: ") and named in line, line
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if "staging" in path.name]


@pytest.mark.parametrize("what", HEADERS)
def test_a_lying_header(tmp_path: Path, what: str) -> None:
    home = write_hf(tmp_path / "m", {"w": np.zeros(2, np.float32)}, config=LLAMA | {"model_type": "other"})
    path = home / "model.safetensors"
    HEADERS[what](path)
    if what != "a key twice":  # the library takes the last of two equal entries
        with pytest.raises((SafetensorError, OSError)):
            safe_open(path, "np").__enter__()
    for verb in VERBS:
        refused(verb, home, tmp_path, "model.safetensors", 4)


@pytest.mark.parametrize("target", ["../other/model.safetensors", "/etc/passwd", "sub/../../x", "a link"])
def test_an_index_that_leads_out(tmp_path: Path, target: str) -> None:
    other = write_hf(tmp_path / "other", {"w": np.zeros(2, np.float32)}, config=LLAMA)
    home = tmp_path / "m"
    (home / "sub").mkdir(parents=True)
    (home / "config.json").write_text(json.dumps(LLAMA | {"model_type": "other"}))
    save_file({"v": np.zeros(2, np.float32)}, home / "model-00001-of-00002.safetensors")
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "x")
    if target == "a link":
        (home / "model-00002-of-00002.safetensors").symlink_to(other / "model.safetensors")
        target = "model-00002-of-00002.safetensors"
    weight_map = {"v": "model-00001-of-00002.safetensors", "w": target}
    (home / INDEX).write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map}))
    for verb in VERBS:
        refused(verb, home, tmp_path, "m/", 3)


def test_under_json_the_error_is_the_document(tmp_path: Path) -> None:
    home = write_hf(tmp_path / "m", {"w": np.zeros(2, np.float32)}, config=LLAMA)
    (home / "model.safetensors").write_bytes(b"")
    for verb in VERBS:
        done = reshard(verb, home, tmp_path, "--json")
        document = json.loads(done.stdout)
        assert done.returncode == 4 and len(done.stderr.splitlines()) == 1
        assert document.get("error") or document["problems"], verb


def test_scalars_and_empty_tensors_pass(tmp_path: Path) -> None:
    some = {"s": np.array(3, np.float32), "e": np.zeros((0, 4), np.float32), "w": np.ones(2, np.float32)}
    home = write_hf(tmp_path / "m", some, config=LLAMA | {"model_type": "other"})
    for verb in VERBS:
        done = reshard(verb, home, tmp_path)
        assert done.returncode == 0, done
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == {"s": [], "e": [0, 4], "w": [2]}  # noqa: SIM118
