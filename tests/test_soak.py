"""Minutes of damage and gigabytes of data; `make soak`. The quick forms of these run with every test."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path  # noqa: TC003

import numpy as np
import pytest
from safetensors.numpy import save_file

import test_dcp_hostile
from reshard.errors import ReshardError
from reshard.layouts import open_layout
from reshard.layouts.options import OpenOptions
from reshard.tensors.header import build_header
from test_dcp_hostile import copy, sound  # noqa: F401 - fixtures

pytestmark = pytest.mark.soak
RESHARD = [sys.executable, "-m", "reshard"]


@pytest.mark.parametrize("seed", range(2, 8))
def test_flips_of_dcp_metadata(seed: int, copy: Path) -> None:  # noqa: F811
    """12,000 damaged `.metadata` files in all: each is refused, or means the same as before."""
    found = test_dcp_hostile.flips(copy, seed, 2000)
    assert found["damaged"] + found["refused"] + found["equal"] == 2000


def test_flips_of_headers_and_indexes(tmp_path: Path) -> None:
    """20,000 damaged Hugging Face directories: a ReshardError with exit 3 or 4, or a checkpoint of the same names."""
    names = [f"model.layers.{i}.w" for i in range(6)]
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({name: np.ones((2, 3), "f4") for name in names[:3]}, tmp_path / one)
    save_file({name: np.ones((2, 3), "f4") for name in names[3:]}, tmp_path / two)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {name: one if name in names[:3] else two for name in names}
    index.write_text(json.dumps({"metadata": {"total_size": 144}, "weight_map": weight_map}))
    pick = random.Random(5)
    files = [index, tmp_path / one]
    intact = {file: file.read_bytes() for file in files}
    refused = 0
    for number in range(20_000):
        file = files[number % 2]
        damaged = bytearray(intact[file])
        end = len(damaged) if file is index else 8 + int.from_bytes(damaged[:8], "little")
        for _ in range(pick.choice((1, 1, 1, 2, 8))):
            damaged[pick.randrange(end)] = pick.randrange(256)
        file.write_bytes(damaged)
        try:
            found = open_layout([tmp_path], OpenOptions())
            assert sum(tensor.nbytes for tensor in found.tensors.values()) in (72, 144)
        except ReshardError as error:
            assert error.exit_status in (3, 4)
            assert "\n" not in error.line()
            refused += 1
        file.write_bytes(intact[file])
    assert refused > 10_000


@pytest.mark.parametrize("shape", [(1_500_000, 1000), (1_500_000_000,), (1, 1_500_000_000)])
def test_six_gigabytes_in_one_tensor(shape: tuple[int, ...], tmp_path: Path) -> None:
    """To DCP, back, and to bf16, each within 1 GiB by the kernel's own mark."""
    header, size = build_header({"t": ("F32", shape)}, {"format": "pt"})
    (tmp_path / "hf").mkdir()
    with (tmp_path / "hf/model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    (tmp_path / "hf/config.json").write_text(json.dumps({"model_type": "made_up", "dtype": "float32"}))
    for source, out, flags in (
        ("hf", "dcp", ["--to", "dcp"]),
        ("dcp", "back", ["--dtype", "keep"]),
        ("dcp", "half", ["--dtype", "bfloat16"]),
    ):
        command = [*RESHARD, "convert", str(tmp_path / source), str(tmp_path / out), *flags, "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert json.loads(done.stdout)["peak_rss_bytes"] < 1 << 30
        if out != "dcp":
            subprocess.run([*RESHARD, "verify", str(tmp_path / out)], check=True, capture_output=True)
            subprocess.run(["rm", "-r", str(tmp_path / out)], check=True)
