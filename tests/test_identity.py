"""The main promise: what real ranks saved comes back bit for bit, in the hub's layout, and loads in transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mini_models
import reshard

FAMILIES = ("llama", "llama_tied", "qwen3", "qwen3_moe", "deepseek_v3")
WORLDS = Path(__file__).parent / "worlds"


def torchrun(ranks: int, script: Path, *args: str) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(script),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, *args], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        part = load_file(file)
        assert not found.keys() & part.keys()
        found |= part
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(
            found[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        ), name


def assert_loads(path: Path) -> None:
    from transformers import AutoModelForCausalLM

    _, report = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert not {key for key in report["unexpected_keys"] if "mtp" not in key and ".layers.2." not in key}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every family in hub layout, saved from 3 ranks and from a 2 x 2 mesh, under hub names and in-memory names."""
    root = tmp_path_factory.mktemp("identity")
    jobs: dict[int, list[dict[str, Any]]] = {3: [], 4: []}
    for family in FAMILIES:
        source = root / family / "hub"
        mini_models.write(family, source, mtp=family == "deepseek_v3")
        for ranks, mesh in ((3, [3]), (4, [2, 2])):
            for names in ("hub", "memory"):
                out = str(root / family / f"{names}-{ranks}")
                jobs[ranks].append({"source": str(source), "out": out, "names": names, "mesh": mesh, "seed": ranks})
    for ranks, rows in jobs.items():
        (root / f"jobs-{ranks}.json").write_text(json.dumps(rows))
        torchrun(ranks, WORLDS / "distribute.py", str(root / f"jobs-{ranks}.json"))
    return root


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_hub_names_come_back_bit_for_bit(family: str, ranks: int, saved: Path, tmp_path: Path) -> None:
    hub = saved / family / "hub"
    report = reshard.convert(
        str(saved / family / f"hub-{ranks}"), str(tmp_path / "out"), config_from=str(hub), dtype="keep"
    )
    assert report["status"] == "done"
    assert_same(tensors_of(tmp_path / "out"), tensors_of(hub))
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((hub / "config.json").read_text())
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (hub / "tokenizer.json").read_bytes()
    assert_loads(tmp_path / "out")


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_memory_names_come_back_as_the_hub_s(family: str, ranks: int, saved: Path, tmp_path: Path) -> None:
    """What transformers holds in memory: experts fused."""
    hub = saved / family / "hub"
    expected = tensors_of(hub)
    if family == "deepseek_v3":  # the model class has no MTP layer and so never saved it
        expected = {name: t for name, t in expected.items() if ".layers.2." not in name}
    report = reshard.convert(
        str(saved / family / f"memory-{ranks}"), str(tmp_path / "out"), config_from=str(hub), dtype="keep"
    )
    assert report["family"] == family.removesuffix("_tied")
    assert_same(tensors_of(tmp_path / "out"), expected)
    assert_loads(tmp_path / "out")


@pytest.mark.parametrize("family", FAMILIES)
def test_to_dcp_and_back_is_the_identity(family: str, saved: Path, tmp_path: Path) -> None:
    hub = saved / family / "hub"
    reshard.convert(str(hub), str(tmp_path / "dcp"), to="dcp", key_prefix="app.model.")
    reshard.convert(str(tmp_path / "dcp"), str(tmp_path / "back"), dtype="keep")
    assert_same(tensors_of(tmp_path / "back"), tensors_of(hub))
    assert_loads(tmp_path / "back")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fused_and_back_is_the_identity(family: str, saved: Path, tmp_path: Path) -> None:
    hub = saved / family / "hub"
    reshard.convert(str(hub), str(tmp_path / "fused"), experts="fused")
    fused = tensors_of(tmp_path / "fused")
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    reshard.convert(str(tmp_path / "fused"), str(tmp_path / "back"))
    assert_same(tensors_of(tmp_path / "back"), tensors_of(hub))


def test_ranks_workers_and_memory_change_no_byte(saved: Path, tmp_path: Path) -> None:
    source, hub = saved / "qwen3_moe" / "memory-3", saved / "qwen3_moe" / "hub"
    trees = []
    for workers, memory in ((1, "1GiB"), (4, "1GiB"), (16, "1GiB"), (4, "80MiB")):
        out = tmp_path / f"{workers}-{memory}"
        reshard.convert(
            str(source), str(out), config_from=str(hub), dtype="float32", workers=workers, max_memory=memory,
            max_shard_size="200KB",
        )  # fmt: skip
        trees.append({p.name: p.read_bytes() for p in out.iterdir()})
    for ranks in (1, 2):
        out = tmp_path / f"ranks-{ranks}"
        flags = ["--config-from", str(hub), "--dtype", "float32", "--max-shard-size", "200KB", "--quiet"]
        module = tmp_path / "run.py"
        module.write_text("import runpy; runpy.run_module('reshard', run_name='__main__', alter_sys=True)")
        torchrun(ranks, module, "convert", str(source), str(out), *flags)
        trees.append({p.name: p.read_bytes() for p in out.iterdir()})
    assert len(trees[0]) > 5
    assert all(other == trees[0] for other in trees[1:])


@pytest.mark.parametrize("memory", ["300MiB", "1GiB"])
def test_command_line_keeps_its_memory_and_its_bytes(memory: str, saved: Path, tmp_path: Path) -> None:
    source, hub = saved / "qwen3_moe" / "memory-3", saved / "qwen3_moe" / "hub"
    reshard.convert(str(source), str(tmp_path / "whole"), config_from=str(hub), dtype="float32")
    flags = ["--config-from", str(hub), "--dtype", "float32", "--max-memory", memory, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "reshard", "convert", str(source), str(tmp_path / "out"), *flags],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    report = json.loads(done.stdout)
    limit = {"300MiB": 300 << 20, "1GiB": 1 << 30}[memory]
    assert report["peak_rss_bytes"] < limit
    whole, out = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("whole", "out"))
    assert whole == out
