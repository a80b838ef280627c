"""inspect: what it says of sound and damaged checkpoints, from headers alone and fast."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reshard
from reshard.errors import Refused, UsageError
from written import INDEX, LLAMA, write_hf

if TYPE_CHECKING:
    from pathlib import Path

DESIGN_KEYS = {
    "layout", "family", "model_type", "tensors", "parameters", "bytes", "dtypes", "complete", "problems", "next",
}  # fmt: skip


def model(layers: int = 1) -> dict[str, np.ndarray]:
    some = {"model.embed_tokens.weight": np.zeros((8, 4), np.float16), "lm_head.weight": np.zeros((8, 4), np.float16)}
    for layer in range(layers):
        some[f"model.layers.{layer}.mlp.up_proj.weight"] = np.zeros((6, 4), np.float16)
        some[f"model.layers.{layer}.position_ids"] = np.arange(3)
    return some


def test_counts(tmp_path: Path) -> None:
    found = reshard.inspect(str(write_hf(tmp_path / "a b", model(), config=LLAMA)))
    assert found.keys() >= DESIGN_KEYS
    assert (found["layout"], found["family"], found["model_type"]) == ("hf", "llama", "llama")
    assert (found["tensors"], found["parameters"], found["bytes"]) == (4, 32 + 32 + 24 + 3, 2 * 88 + 24)
    assert found["dtypes"] == {"F16": 3, "I64": 1}
    assert found["complete"] is True and found["problems"] == []
    assert found["next"] == f"reshard verify '{tmp_path}/a b'"
    json.dumps(found, allow_nan=False)


def test_an_unknown_model_and_one_file(tmp_path: Path) -> None:
    found = reshard.inspect(str(write_hf(tmp_path / "a", model(), config={"model_type": "brand_new"})))
    assert (found["family"], found["model_type"], found["complete"]) == (None, "brand_new", True)
    found = reshard.inspect(str(tmp_path / "a" / "model.safetensors"))
    assert (found["layout"], found["tensors"]) == ("hf", 4)


def test_missing_layers_and_head(tmp_path: Path) -> None:
    some = model(3)
    del some["model.layers.1.mlp.up_proj.weight"], some["model.layers.1.position_ids"], some["lm_head.weight"]
    found = reshard.inspect(str(write_hf(tmp_path / "a", some, config=LLAMA | {"num_hidden_layers": 4})))
    assert not found["complete"] and found["next"] == ""
    assert [row["kind"] for row in found["problems"]] == ["layers", "missing"]
    assert "1, 3 are absent" in found["problems"][0]["detail"]


def test_a_damaged_directory_is_still_described(tmp_path: Path) -> None:
    some = model(2)
    first = {name: some.pop(name) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    home = write_hf(tmp_path / "a", first, some, config=LLAMA | {"num_hidden_layers": 2})
    (home / "model-00002-of-00002.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    found = reshard.inspect(str(home))
    assert (found["layout"], found["family"], found["tensors"], found["complete"]) == ("hf", "llama", 2, False)
    assert len(found["problems"]) == 1 and "git-LFS" in found["problems"][0]["detail"]
    (home / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert len(reshard.inspect(str(home))["problems"]) == 2
    (home / INDEX).write_text("[")
    found = reshard.inspect(str(home))
    assert found["complete"] is False and found["tensors"] == 0


def test_a_training_checkpoint(mini_dirs: Path, tmp_path: Path) -> None:
    reshard.convert(str(mini_dirs / "qwen3_moe"), str(tmp_path / "step"), to="dcp", experts="fused")
    found = reshard.inspect(str(tmp_path / "step"))
    assert (found["layout"], found["family"], found["expert_layout"]) == ("dcp", "qwen3_moe", "fused")
    assert found["next"] == f"reshard convert {tmp_path}/step"
    hub = reshard.inspect(str(mini_dirs / "qwen3_moe"))
    assert hub["expert_layout"] == "per-expert" and hub["bytes"] == found["bytes"]
    (tmp_path / "step" / "config.json").unlink()
    assert reshard.inspect(str(tmp_path / "step"))["next"].endswith("--config-from DIR")
    found = reshard.inspect(str(tmp_path / "step"), config_from=str(mini_dirs / "qwen3_moe"))
    assert found["model_type"] == "qwen3_moe"
    next((tmp_path / "step").glob("*.distcp")).unlink()
    found = reshard.inspect(str(tmp_path / "step"))
    assert (found["layout"], found["tensors"], found["complete"], found["next"]) == ("dcp", None, False, "")


def test_an_adapter_is_recognised(tmp_path: Path) -> None:
    some = {"model.layers.0.self_attn.q_proj.lora_A.default.weight": np.zeros((2, 4), np.float32)}
    found = reshard.inspect(str(write_hf(tmp_path / "a", some, config={"model_type": "other"})))
    assert any("LoRA" in warning for warning in found["warnings"]) and found["next"] == ""


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        reshard.inspect(str(tmp_path / "absent"))
    with pytest.raises(Refused):
        reshard.inspect(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(Refused, match="PEFT"):
        reshard.inspect(str(tmp_path))


def test_fifty_thousand_tensors(tmp_path: Path) -> None:
    """The whole process, three times. The goal is one second; a busy machine may take longer."""
    files = []
    for shard in range(4):
        names = [divmod(shard * 12_525 + i, 501) for i in range(12_525)]
        kinds = ("gate", "up", "down")
        files.append({
            f"model.layers.{layer}.mlp.experts.{k // 3}.{kinds[k % 3]}_proj.weight": np.zeros((2, 2), np.float16)
            for layer, k in names
        })  # fmt: skip
    files[0] |= {"model.embed_tokens.weight": np.zeros((2, 2)), "lm_head.weight": np.zeros((2, 2))}
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 100}
    home = write_hf(tmp_path / "large", *files, config=config)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "reshard", "inspect", str(home), "--json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        took.append(time.perf_counter() - began)
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert not {"torch", "transformers", "numpy"} & imported
        assert json.loads(done.stdout)["tensors"] == 50_102
    print(f"inspect of 50,102 tensors: {min(took):.2f} s")
    assert min(took) < 3


def test_no_tensor_byte_is_read(tmp_path: Path) -> None:
    home = write_hf(tmp_path / "a", model(), config=LLAMA)
    weights = home / "model.safetensors"
    code = (
        "import os, sys, reshard\n"
        "reads = []\n"
        "real = os.pread\n"
        "os.pread = lambda fd, n, at: (reads.append((n, at)), real(fd, n, at))[1]\n"
        "reshard.inspect(sys.argv[1])\n"
        "print(max(n + at for n, at in reads))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(home)], capture_output=True, text=True, check=True)
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    assert re.fullmatch(r"\d+\n", done.stdout) and int(done.stdout) <= max(header, 64)
