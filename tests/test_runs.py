"""A run directory from beginning to end: torch DCP in it, config and tokenizer found, the export beside the step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.stateful import Stateful

import mini_models
import reshard
from mini_models import assert_same
from reshard.errors import Damaged, Refused, ReshardError

SIDE = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


class App(Stateful):
    """The state of a trainer, as prime-rl gives it to torch."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        moments = {name: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)} for name in list(self.tensors)[:3]}
        return {
            "model": self.tensors,
            "optimizers": {"state": moments, "param_groups": [{"lr": 1e-3, "params": list(moments)}]},
            "scheduler": {"last_epoch": 7},
            "progress": {"step": 10, "total_tokens": 4096, "total_samples": 2},
        }


def save(step: Path, tensors: dict[str, torch.Tensor]) -> None:
    """By torch itself, without a process group."""
    dcp.save({"app": App(tensors)}, checkpoint_id=step / "trainer", no_dist=True)
    (step / "dataloader").mkdir()
    (step / "dataloader/rank_0.pt").write_bytes(b"state of the data loader")


def resolve(run: Path, config: dict[str, Any], name: str = "configs/resolved/trainer.json") -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(json.dumps(config))


class Trained:
    """A run directory in `home` and what its newest step (10) must export; fp32 masters of a bf16 release."""

    def __init__(self, home: Path) -> None:
        self.home, self.run, self.base = home, home / "run", home / "base"
        self.hub = {n: t.float() for n, t in load_file(self.base / "model.safetensors").items()}
        self.right = {n: t.bfloat16() for n, t in self.hub.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 9 and 10 of a Qwen3 MoE, in memory as prime-rl keeps it: stacks of experts, a router of another name."""
    home = tmp_path_factory.mktemp("runs")
    mini_models.write("qwen3_moe", home / "base")
    config = json.loads((home / "base/config.json").read_text())
    config |= {
        "use_cache": False,
        "use_grouped_mm": True,
        "_attn_implementation": "flash_attention_2",
        "dtype": "bfloat16",
    }
    (home / "base/config.json").write_text(json.dumps(config))
    hub = {n: t.float() for n, t in load_file(home / "base/model.safetensors").items()}
    mine = {}
    for name, tensor in hub.items():
        layer, found, rest = name.partition(".mlp.experts.")
        if not found:
            mine[name.replace(".mlp.gate.", ".mlp.router.gate.")] = tensor
        elif rest.startswith("0."):
            role = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[rest.split(".")[1]]
            parts = [hub[name.replace(".experts.0.", f".experts.{e}.")] for e in range(4)]
            mine[f"{layer}.mlp.experts.{role}"] = torch.stack(parts)
    for step in (9, 10):
        scaled = {name: tensor * (1 if step == 10 else 2) for name, tensor in mine.items()}
        save(home / f"run/checkpoints/step_{step}", scaled)
    resolve(home / "run", {"model": {"name": str(home / "base")}, "tokenizer": {"name": str(home / "base")}})
    return home


@pytest.fixture
def trained(made: Path, tmp_path: Path) -> Trained:
    shutil.copytree(made, tmp_path / "home")
    trained = Trained(tmp_path / "home")
    resolve(trained.run, {"model": {"name": str(trained.base)}, "tokenizer": {"name": str(trained.base)}})
    return trained


def exported(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def test_the_run_becomes_a_model_beside_its_newest_step(trained: Trained) -> None:
    plan = reshard.plan_convert(str(trained.run))
    assert plan.out == str(trained.run / "checkpoints/step_10/weights")
    assert not Path(plan.out).exists()
    report = plan.run()
    out = Path(report["output"])
    assert_same(exported(out), trained.right)
    assert {path.name for path in out.iterdir()} >= SIDE | {"config.json", "reshard.json"}
    assert not list(out.rglob("*.pt"))
    config = json.loads((out / "config.json").read_text())
    before = json.loads((trained.base / "config.json").read_text())
    assert config["use_cache"] is True and config["dtype"] == "bfloat16"
    assert "use_grouped_mm" not in config and "_attn_implementation" not in config
    same = set(before) - {"use_cache", "use_grouped_mm", "_attn_implementation"}
    assert {key: config[key] for key in same} == {key: before[key] for key in same} and set(config) == same | {
        "use_cache"
    }
    for key in ("use_cache", "use_grouped_mm", "_attn_implementation"):
        assert any(key in note for note in report["warnings"])
    reasons = {row["name"]: row["reason"] for row in report["dropped"]}
    assert set(reasons) == {"app.optimizers", "app.scheduler", "app.progress"}
    assert all(name.removeprefix("app.").rstrip("s") in reason for name, reason in reasons.items())
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_what_is_opened_says_where_it_came_from(trained: Trained) -> None:
    found = reshard.open(str(trained.run))
    assert found.layout == "dcp" and found.training and found.trainer == "prime-rl"
    assert found.home == str(trained.run / "checkpoints/step_10")
    assert "step_10" in found.why and "configs/resolved/trainer.json" in found.why
    assert found.config is not None and found.config["model_type"] == "qwen3_moe"
    assert found.config_dir == str(trained.base)
    assert set(found.side_files) >= SIDE
    assert "model.layers.0.mlp.experts.w1" in found and "model.layers.0.mlp.router.gate.weight" in found


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/step_10", "checkpoints/step_10/trainer"])
def test_every_level_of_the_run_may_be_named(place: str, trained: Trained) -> None:
    plan = reshard.plan_convert(str(trained.run / place))
    assert plan.out == str(trained.run / "checkpoints/step_10/weights")
    assert sorted(plan.tensors) == sorted(trained.hub)


def test_an_older_step_is_another_model(trained: Trained, tmp_path: Path) -> None:
    reshard.convert(str(trained.run / "checkpoints/step_9"), str(tmp_path / "out"), dtype="keep")
    assert_same(exported(tmp_path / "out"), {name: tensor * 2 for name, tensor in trained.hub.items()})


@pytest.mark.parametrize("fault", ["no marker", "empty marker"])
def test_incomplete_newer_steps_are_passed_over_and_named(fault: str, trained: Trained) -> None:
    steps = trained.run / "checkpoints"
    shutil.copytree(steps / "step_10", steps / "step_200")
    marker = steps / "step_200/trainer/.metadata"
    marker.unlink() if fault == "no marker" else marker.write_bytes(b"")
    found = reshard.open(str(trained.run))
    assert found.home == str(steps / "step_10") and "step_200" in found.why


def test_a_step_whose_data_is_cut_short_is_damage_and_nothing_is_written(trained: Trained) -> None:
    data = next((trained.run / "checkpoints/step_10/trainer").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(Damaged, match=data.name):
        reshard.convert(str(trained.run))
    assert not (trained.run / "checkpoints/step_10/weights").exists()


@pytest.mark.parametrize("name", ["configs/resolved/sft.json", "configs/latest/resolved/trainer.json"])
@pytest.mark.parametrize("model", ["model", "../base"])
def test_names_relative_to_the_run_outlive_a_move(model: str, name: str, trained: Trained) -> None:
    (trained.run / "configs/resolved/trainer.json").unlink()
    resolve(trained.run, {"model": {"name": model}}, name)
    if model == "model":
        shutil.copytree(trained.base, trained.run / "model")
    moved = trained.home / "archive"
    moved.mkdir()
    trained.run.rename(moved / "run")
    if model == "../base":
        trained.base.rename(moved / "base")
    found = reshard.open(str(moved / "run"))
    assert found.config is not None and name in found.why and set(found.side_files) >= SIDE


def test_a_run_whose_model_is_gone_asks_for_a_config(trained: Trained, tmp_path: Path) -> None:
    resolve(trained.run, {"model": {"name": str(tmp_path / "gone")}})
    with pytest.raises(Refused, match="--config-from"):
        reshard.plan_convert(str(trained.run))
    plan = reshard.plan_convert(str(trained.run), config_from=str(trained.base))
    plan.run()
    assert_same(exported(Path(plan.out)), trained.right)


def test_a_step_moved_out_of_its_run_asks_for_a_config(trained: Trained) -> None:
    step = trained.home / "alone/step_10"
    step.parent.mkdir()
    (trained.run / "checkpoints/step_10").rename(step)
    with pytest.raises(Refused, match="--config-from") as error:
        reshard.plan_convert(str(step))
    assert error.value.exit_status == 3
    plan = reshard.plan_convert(str(step), config_from=str(trained.base))
    assert plan.out == str(step / "weights")


def test_the_tokenizer_may_come_from_another_directory(trained: Trained) -> None:
    words = trained.home / "words"
    words.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (trained.base / name).unlink()
        (words / name).write_text(f"{name} of its own")
    resolve(trained.run, {"model": {"name": str(trained.base)}, "tokenizer": {"name": str(words)}})
    out = Path(reshard.convert(str(trained.run))["output"])
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_text() == f"{name} of its own"


@pytest.mark.parametrize("config", [{"model": {"lora": {"rank": 8}}}, {"lora": {"rank": 8}}])
def test_runs_of_adapters_are_refused_by_their_configuration(config: dict[str, Any], trained: Trained) -> None:
    resolve(trained.run, config | {"tokenizer": {"name": str(trained.base)}})
    with pytest.raises(Refused, match="adapter"):
        reshard.plan_convert(str(trained.run))


def test_adapters_are_refused_by_their_tensors(trained: Trained) -> None:
    step = trained.run / "checkpoints/step_11"
    save(
        step,
        {
            "model.layers.0.q_proj.base_layer.weight": torch.ones(2, 2),
            "model.layers.0.q_proj.lora_A.weight": torch.ones(2),
        },
    )
    with pytest.raises(Refused, match="LoRA"):
        reshard.plan_convert(str(trained.run))
    assert not (step / "weights").exists()


def test_odd_tensors_of_a_training_checkpoint_keep_shape_and_kind(tmp_path: Path) -> None:
    """A bias that must stay fp32, whole numbers, booleans, a scalar and an empty tensor, through torch DCP to bf16."""
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": torch.rand(4, 3),
        f"{layer}mlp.gate.e_score_correction_bias": torch.tensor([7.0, 7.01, 7.005, 7.002]),
        f"{layer}position_ids": torch.arange(4),
        f"{layer}flag": torch.tensor([True, False]),
        f"{layer}scalar": torch.tensor(1.5),
        f"{layer}empty": torch.empty(0, 4),
    }
    save(tmp_path / "step", tensors)
    base = tmp_path / "base"
    base.mkdir()
    config = {"model_type": "deepseek_v3", "torch_dtype": "bfloat16", "num_hidden_layers": 1, "n_routed_experts": 4}
    (base / "config.json").write_text(json.dumps(config))
    reshard.convert(str(tmp_path / "step/trainer"), str(tmp_path / "out"), config_from=str(base))
    floats = ("model.embed_tokens.weight", f"{layer}scalar", f"{layer}empty")
    assert_same(exported(tmp_path / "out"), {n: t.bfloat16() if n in floats else t for n, t in tensors.items()})
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_wrapper_levels_inside_names_are_gone(tmp_path: Path) -> None:
    tensors = {
        "module.model.embed_tokens.weight": torch.rand(4, 3),
        "module.model.layers.0._orig_mod.norm.weight": torch.rand(3),
    }
    save(tmp_path / "a", tensors)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    reshard.convert(str(tmp_path / "a/trainer"), str(tmp_path / "out"), config_from=str(base))
    right = {"model.embed_tokens.weight", "model.layers.0.norm.weight"}
    assert set(exported(tmp_path / "out")) == right
    save(tmp_path / "b", tensors | {"module.model.layers.0.norm.weight": torch.rand(3)})
    with pytest.raises(ReshardError, match=r"model\.layers\.0\.norm\.weight"):
        reshard.convert(str(tmp_path / "b/trainer"), str(tmp_path / "none"), config_from=str(base))


def test_stacked_experts_of_an_unknown_family_are_refused_with_the_way_out(trained: Trained, tmp_path: Path) -> None:
    config = json.loads((trained.base / "config.json").read_text()) | {"model_type": "nobody_knows"}
    (trained.base / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match="--experts keep"):
        reshard.plan_convert(str(trained.run))
    reshard.convert(str(trained.run), str(tmp_path / "out"), experts="keep")
    assert "model.layers.0.mlp.experts.w1" in exported(tmp_path / "out")
