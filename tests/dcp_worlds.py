"""Run by torchrun: saves checkpoints of many kinds with torch DCP into one directory, on any number of gloo ranks.

Each case is a directory with `expected.pt` beside it: the full tensors by name, as torch gathers them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


class Model(torch.nn.Module):
    """Odd sizes, so that no world divides them; one expert-like 3-D weight; a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(7, 6)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 5, bias=i == 0) for i in range(2))
        self.experts = torch.nn.Parameter(torch.randn(3, 4, 5))
        self.register_buffer("position_ids", torch.arange(11))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        return sum(layer(hidden).square().sum() for layer in self.layers) + self.experts.square().sum()


class AppState(Stateful):
    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizers": optimizer, "progress": {"step": 3, "total_tokens": 4096}}


def full(value: Any) -> torch.Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone().contiguous()


def placed(world: int) -> dict[str, Any]:
    """One tensor for each way of cutting and each unusual kind of tensor."""
    mesh = init_device_mesh("cpu", (world,))
    tensors: dict[str, Any] = {
        "layers.0.rows": distribute_tensor(torch.randn(7, 4), mesh, [Shard(0)]),
        "layers.0.columns": distribute_tensor(torch.randn(4, 9), mesh, [Shard(1)]),
        "layers.0.few_rows": distribute_tensor(torch.randn(2, 3), mesh, [Shard(0)]),
        "layers.0.middle": distribute_tensor(torch.randn(3, 6, 2).bfloat16(), mesh, [Shard(1)]),
        "layers.0.copies": distribute_tensor(torch.randn(3, 3), mesh, [Replicate()]),
        "layers.0.plain": torch.arange(12, dtype=torch.float16).reshape(3, 4),
        "layers.0.number": torch.tensor(2.5),
        "layers.0.sharded_empty": distribute_tensor(torch.empty(0, 4), mesh, [Shard(0)]),
        "layers.0.empty": torch.empty(0, 4),
        "layers.0.long": distribute_tensor(torch.arange(10), mesh, [Shard(0)]),
        "layers.0.flag": torch.tensor([True, False, True]),
        "layers.0.float8": torch.randn(5, 3).to(torch.float8_e4m3fn),
        "layers.0.unsigned": torch.tensor([1, 65535], dtype=torch.uint16),
        "layers.0.five_axes": distribute_tensor(torch.randn(2, 1, 3, 2, 5), mesh, [Shard(4)]),
        "layers.0.transposed": torch.randn(4, 3).t(),
        "layers.0.permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "layers.0.parameter": torch.nn.Parameter(torch.randn(3)),
        "layers.0.slice": torch.randn(8, 4)[2:5],
    }
    rank = dist.get_rank()
    # Every rank's part is itself a transposed view.
    tensors["layers.0.strided_part"] = DTensor.from_local(torch.randn(5, 2).t() + rank, mesh, [Shard(0)])
    if world == 4:
        square = init_device_mesh("cpu", (2, 2))
        tensors["layers.0.square"] = distribute_tensor(torch.randn(5, 7), square, [Shard(0), Shard(1)])
        tensors["layers.0.hybrid"] = distribute_tensor(torch.randn(5, 7), square, [Replicate(), Shard(0)])
    return tensors


def save(
    out: Path, name: str, state: dict[str, Any], tensors: dict[str, Any], *, local: bool = False, **options: Any
) -> None:
    writer = dcp.FileSystemWriter(out / name, **options)
    dcp.save(state, storage_writer=writer, **({"use_collectives": False} if local else {}))
    expected = {key: full(value) for key, value in tensors.items() if isinstance(value, torch.Tensor)}
    if dist.get_rank() == 0:
        torch.save(expected, out / f"{name}.expected.pt")


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(world)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2, 3]])).backward()
    optimizer.step()
    state = AppState(model, optimizer)
    save(out, "training", {"app": state}, state.state_dict()["model"])

    torch.manual_seed(10 + world)
    tensors = placed(world)
    extra = {"layers.0._extra_state": {"amax": 3}, "layers.1._extra_state": "text"}
    save(out, "placed", {"model": {**tensors, **extra}}, tensors)
    save(out, "threads", {"model": tensors}, tensors, thread_count=2)
    save(out, "files", {"model": tensors}, tensors, single_file_per_rank=False)
    save(out, "local", {"model": tensors}, tensors, local=True)
    save(out, "flat", {**tensors, "optimizer": {"state.layers.0.rows.exp_avg": tensors["layers.0.rows"]}}, tensors)
    # Overwritten by a save that leaves fewer files.
    save(out, "stale", {"model": tensors}, tensors, thread_count=3)
    save(out, "stale", {"model": tensors}, tensors, thread_count=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
