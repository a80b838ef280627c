"""Run by torchrun: saves Hugging Face directories as torch DCP from several ranks, in many placements.

    torchrun --nproc-per-node N distribute.py JOBS.json

JOBS is a list of {"source": HF directory, "out": DCP directory, "names": "hub" | "memory", "mesh": [..], "seed": n}.
"hub" distributes the tensors of the files under their own names; "memory" loads the model in transformers, applies
FSDP2 and saves what `state_dict()` holds (experts fused). Either way tensors are spread over row shards, column shards,
two-dimensional shards and replicas by turns.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def place(name: str, tensor: torch.Tensor, mesh: DeviceMesh, turn: int) -> Any:
    """Placements by turns; None leaves a plain (replicated) tensor."""
    rows, columns = tensor.ndim >= 1 and tensor.numel() > 0, tensor.ndim >= 2 and tensor.numel() > 0
    if mesh.ndim == 2:
        both = [Shard(0), Shard(1)] if columns else None
        options = [both, [Shard(0), Replicate()], [Shard(1), Shard(0)] if columns else None, [Replicate(), Replicate()]]
    else:
        options = [
            [Shard(0)],
            [Shard(1)] if columns else None,
            [Shard(tensor.ndim - 1)] if rows else None,
            [Replicate()],
            None,
        ]
    choice = options[turn % len(options)]
    return choice if rows or choice is None else None


def from_hub(source: Path, mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    values: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        values |= load_file(file)
    for turn, (name, tensor) in enumerate(sorted(values.items())):
        placements = place(name, tensor, mesh, turn + seed)
        state[name] = tensor if placements is None else distribute_tensor(tensor, mesh, placements)
    return state


def from_memory(source: Path, mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    flat = mesh if mesh.ndim == 1 else mesh["a"]
    # Parameters of several dtypes cannot share one FSDP group: the pinned fp32 ones stay as they are.
    kept = {p for p in model.parameters() if p.dtype != torch.bfloat16}
    for layer in model.model.layers:
        fully_shard(layer, mesh=flat, ignored_params=kept)
    fully_shard(model, mesh=flat, ignored_params=kept)
    state: dict[str, Any] = {}
    for turn, (name, tensor) in enumerate(sorted(model.state_dict().items())):
        wanted = place(name, tensor, mesh, turn + seed)
        if isinstance(tensor, DTensor) and mesh.ndim == 1 and wanted is not None and turn % 2:
            state[name] = tensor.redistribute(placements=wanted)
        elif isinstance(tensor, DTensor) and mesh.ndim == 2 and wanted is not None and turn % 2:
            state[name] = distribute_tensor(tensor.full_tensor(), mesh, wanted)
        else:
            state[name] = tensor
    return state


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    for job in jobs:
        shape = tuple(job["mesh"])
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
        build = from_memory if job["names"] == "memory" else from_hub
        state = build(Path(job["source"]), mesh, job.get("seed", 0))
        dcp.save({"app": {"model": state}}, checkpoint_id=job["out"])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that is shutting down


if __name__ == "__main__":
    main()
