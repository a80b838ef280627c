"""Trains the demo's model with FSDP2 and saves it with torch DCP in the run directory of a prime-rl style trainer.

    python -m torch.distributed.run --nproc-per-node 2 --standalone -m reshard.demo.train RUN [--steps N]

What it leaves behind:

    RUN/base/                               config and tokenizer of the model that training started from
    RUN/configs/resolved/trainer.json       the trainer's resolved configuration; its paths are relative to RUN
    RUN/checkpoints/step_N/trainer/         torch DCP: model, optimizer, scheduler and progress, keys under `app.`
    RUN/scores.json                         the scores of the live model on the held-out strings

The fp32 score comes from the sharded model as it stands in training. The bf16 score comes from a copy of the same
weights, cast to bf16, and is what an export to bf16 must repeat answer by answer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

from reshard.demo.task import VOCAB, accuracy, answers, batch, held_out, write_score, write_tokenizer

STEPS = 1000
SCORE_EVERY = 50
ENOUGH = 0.99
BATCH_PER_RANK = 32
LEARNING_RATE = 4e-3
WARMUP = 50

CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_run(run: Path, steps: int) -> None:
    """The base model's config and tokenizer, and the resolved configuration that names them."""
    from transformers import Qwen3MoeConfig

    base = run / "base"
    base.mkdir(parents=True, exist_ok=True)
    Qwen3MoeConfig(**CONFIG, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16").save_pretrained(str(base))
    write_tokenizer(base)
    resolved = {
        "model": {"name": "base", "attn": "sdpa", "optimization_dtype": "float32", "reduce_dtype": "float32"},
        "tokenizer": {"name": "base", "trust_remote_code": False},
        "optim": {"type": "adamw", "lr": LEARNING_RATE},
        "max_steps": steps,
        "output_dir": ".",
    }
    configs = run / "configs" / "resolved"
    configs.mkdir(parents=True, exist_ok=True)
    (configs / "trainer.json").write_text(json.dumps(resolved, indent=2) + "\n")


class AppState:
    """What the trainer gives to DCP under the key `app`, so that the model's keys read `app.model.<name>`."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, progress: dict[str, int]) -> None:
        self.model, self.optimizer, self.scheduler, self.progress = model, optimizer, scheduler, progress

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, [self.optimizer])
        return {
            "model": model,
            "optimizers": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "progress": self.progress,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self.model, [self.optimizer], model_state_dict=state["model"], optim_state_dict=state["optimizers"]
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.progress.update(state["progress"])


def build_model(run: Path, world: int) -> Any:
    """The model from its config, the same on every rank, sharded over them; fp32 master weights."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(str(run / "base"))
    auto: Any = AutoModelForCausalLM  # untyped in transformers
    model = auto.from_config(config, dtype=torch.float32, experts_implementation="eager")
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def live_answers(model: Any, tokenizer: Any, strings: list[str]) -> list[str]:
    """The sharded model's answers: the ranks take turns at the strings, and each gets all answers."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    own = answers(model, tokenizer, strings[rank::world])
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, own)
    replies = [""] * len(strings)
    for turn, part in enumerate(parts):
        replies[turn::world] = part
    return replies


def cast_answers(model: Any, run: Path, tokenizer: Any, strings: list[str]) -> list[str]:
    """The answers of a bf16 copy of the live weights, built as `from_pretrained` would build it. Rank 0 answers."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    full: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank():
        return []
    config = AutoConfig.from_pretrained(str(run / "base"))
    auto: Any = AutoModelForCausalLM
    copy = auto.from_config(config, dtype=torch.bfloat16).eval()
    copy.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in full.items()})
    return answers(copy, tokenizer, strings)


def train(run: Path, steps: int) -> None:
    """Trains until the live model reverses, or for `steps` steps; saves; scores. Collective."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_run(run, steps)
    dist.barrier()
    tokenizer = AutoTokenizer.from_pretrained(str(run / "base"))
    model = build_model(run, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * step / max(steps, 1)))
    )
    progress = {"step": 0, "total_tokens": 0, "total_samples": 0}
    source = random.Random(1000 + rank)
    strings = held_out()
    barred = frozenset(strings)
    reached = 0.0
    for step in range(1, steps + 1):
        ids, labels = batch(source, tokenizer, BATCH_PER_RANK, barred)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss: Any = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress["step"] = step
        progress["total_tokens"] += ids.numel() * world
        progress["total_samples"] += len(ids) * world
        if step % SCORE_EVERY == 0 or step == steps:
            model.eval()
            replies = live_answers(model, tokenizer, strings)
            model.train()
            reached = accuracy(strings, replies)
            if rank == 0:
                print(f"step {step:4d}  loss {loss.item():.4f}  reversed {reached:6.1%}", flush=True)
            if reached >= ENOUGH:
                break
    checkpoint = run / "checkpoints" / f"step_{progress['step']}" / "trainer"
    save({"app": AppState(model, optimizer, scheduler, progress)}, checkpoint_id=str(checkpoint))
    model.eval()
    replies = live_answers(model, tokenizer, strings)
    cast = cast_answers(model, run, tokenizer, strings)
    if rank == 0:
        write_score(
            run / "scores.json",
            step=progress["step"],
            ranks=world,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            float32={"accuracy": accuracy(strings, replies), "answers": replies},
            bfloat16={"accuracy": accuracy(strings, cast), "answers": cast},
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's model; start it with torchrun.")
    parser.add_argument("run", type=Path, help="run directory to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="most steps to train for")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    train(arguments.run.resolve(), arguments.steps)
    # All is saved and the ranks have met. gloo's threads, kept alive by the device mesh, now and then abort a process
    # that leaves in the usual way ("terminate called without an active exception").
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
