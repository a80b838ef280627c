"""Writes a torch DCP checkpoint of a Llama-like model by real gloo ranks, each with its FSDP-style row shards.

    python benchmarks/make_dcp.py OUT --gigabytes 3 --dtype float32 --ranks 2

Run by itself it starts torchrun on itself. A config.json for `--config-from` is written beside OUT, in OUT-config.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path


def shapes(hidden: int, layers: int, vocab: int) -> dict[str, tuple[int, ...]]:
    wide = hidden * 3
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        found |= {f"{stem}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        found |= {f"{stem}mlp.{name}_proj.weight": (wide, hidden) for name in ("gate", "up")}
        found[f"{stem}mlp.down_proj.weight"] = (hidden, wide)
        found |= {f"{stem}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def config(hidden: int, layers: int, vocab: int, dtype: str) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": dtype, "hidden_size": hidden,
        "intermediate_size": hidden * 3, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128, "head_dim": 128, "vocab_size": vocab, "tie_word_embeddings": False,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    }  # fmt: skip


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kind = getattr(torch, args.dtype)
    state = {}
    for number, (name, shape) in enumerate(shapes(args.hidden, args.layers, args.vocab).items()):
        whole = -(-shape[0] // dist.get_world_size())
        local = min(whole, max(0, shape[0] - whole * dist.get_rank()))
        generator = torch.Generator().manual_seed(number * 1000 + dist.get_rank())
        values = torch.empty((local, *shape[1:]), dtype=kind).normal_(generator=generator)
        stride = (shape[1], 1) if len(shape) == 2 else (1,)
        state[name] = DTensor.from_local(
            values, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
    dcp.save({"model": state}, checkpoint_id=args.out)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--layers", type=int, default=0)
    args = parser.parse_args()
    if "RANK" in os.environ:
        worker(args)
        return
    width = {"float32": 4, "bfloat16": 2}[args.dtype]
    per_layer = args.hidden * args.hidden * 13 * width
    args.layers = max(1, int((args.gigabytes * 1e9 - 2 * args.vocab * args.hidden * width) / per_layer))
    home = args.out.with_name(args.out.name + "-config")
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json.dumps(config(args.hidden, args.layers, args.vocab, args.dtype), indent=2))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(args.ranks),
        __file__,
    ]
    flags = [
        "--dtype",
        args.dtype,
        "--hidden",
        str(args.hidden),
        "--vocab",
        str(args.vocab),
        "--layers",
        str(args.layers),
    ]
    subprocess.run([*command, str(args.out), *flags], check=True)


if __name__ == "__main__":
    main()
