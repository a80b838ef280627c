"""Which keys of a DCP checkpoint are the model: trainers' ways of nesting, and what is ambiguous."""

from __future__ import annotations

import pytest

from reshard.errors import Damaged, Refused
from reshard.layouts.dcp.groups import choose

NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight")


def nest(*items: tuple) -> tuple[list[str], dict]:
    """Keys and paths as torch flattens them."""
    paths = {".".join(map(str, path)): path for path in items}
    return list(paths), paths


def pick(tensors: list[tuple], others: list[tuple] = (), model_key: str | None = None):
    keys, paths = nest(*tensors)
    other_keys, other_paths = nest(*others)
    return choose("x/.metadata", keys, other_keys, {**paths, **other_paths}, model_key)


def model(*wrapper: str | int) -> list[tuple]:
    return [(*wrapper, name) for name in NAMES]


# prime-rl, VeOmni and accelerate, torchtitan (flat), a list of models
@pytest.mark.parametrize("wrapper", [("app", "model"), ("model",), (), ("models", 0)])
def test_wrappers(wrapper: tuple) -> None:
    optimizer = [("app", "optimizers", "state", NAMES[1], "exp_avg"), ("optimizer", f"state.{NAMES[1]}.exp_avg")]
    found = pick([*model(*wrapper), *optimizer], [("lr_scheduler", "last_epoch"), ("train_state", "step")])
    assert sorted(found.names.values()) == sorted(NAMES)
    left = {item.name: item.reason for item in found.left_out}
    assert left == {
        "app.optimizers": "optimizer state (1 item)",
        "optimizer": "optimizer state (1 item)",
        "lr_scheduler": "scheduler state (1 item)",
        "train_state": "training progress (1 item)",
    }


def test_optimizers_under_any_name_are_not_the_model() -> None:
    states = [("adam", f"state.{name}.exp_avg") for name in NAMES] + [
        ("muon", "state", name, "momentum_buffer") for name in NAMES
    ]
    found = pick([*model("model"), *states])
    assert found.group == "model" and len(found.names) == 4
    assert sum(int(item.reason.split("(")[1].split()[0]) for item in found.left_out) == 8


def test_two_models_are_refused_unless_one_is_named() -> None:
    both = [*model("model"), *model("ema")]
    with pytest.raises(
        Refused, match=r"several groups that could be the model: ema, model; choose one with --model-key"
    ):
        pick(both)
    found = pick(both, model_key="ema")
    assert found.group == "ema" and all(key.startswith("ema.") for key in found.names)
    assert [(item.name, item.reason) for item in found.left_out] == [("model", "outside the model (4 items)")]
    with pytest.raises(Refused, match="--model-key takes one of: ema, model"):
        pick(both, model_key="student")


def test_only_training_state() -> None:
    with pytest.raises(Refused, match="only training state"):
        pick([("optimizer", "state", NAMES[1], "exp_avg")])


def test_one_unusual_group_is_the_model_but_two_are_not() -> None:
    assert set(pick([("net", "weight"), ("net", "bias")]).names.values()) == {"weight", "bias"}
    with pytest.raises(Refused, match="no group that looks like a model: a, b"):
        pick([("a", "weight"), ("b", "weight")])


def test_non_tensors_in_the_model_are_listed() -> None:
    found = pick(model("model"), [("model", "layers.0._extra_state")])
    assert [(item.name, item.reason) for item in found.left_out] == [("model.layers.0._extra_state", "not a tensor")]


def test_names_with_dots_stay_whole() -> None:
    assert pick([("a.b", "layers.0.c.d")]).names == {"a.b.layers.0.c.d": "layers.0.c.d"}


def test_nested_models_by_prefix() -> None:
    nested = [("model", "layers", 0, "weight"), ("model", "layers", 1, "weight")]
    with pytest.raises(Refused):
        pick(nested)
    assert sorted(pick(nested, model_key="model").names.values()) == ["layers.0.weight", "layers.1.weight"]


def test_path_that_does_not_spell_its_key() -> None:
    with pytest.raises(Damaged, match="does not spell it"):
        choose("x", ["model.layers.0.w"], [], {"model.layers.0.w": ("model", "layers.0.v")}, None)


# Without recorded paths, by names alone ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["", "model.", "app.model."])
def test_guessed_wrapper(wrapper: str) -> None:
    keys = [wrapper + name for name in NAMES] + [f"optimizer.state.{name}.exp_avg" for name in NAMES]
    found = choose("x", keys, ["lr_scheduler.last_epoch"], None, None)
    assert sorted(found.names.values()) == sorted(NAMES) and found.group == wrapper.rstrip(".")
    assert {item.name for item in found.left_out} == {"optimizer", "lr_scheduler"}


def test_guess_keeps_the_prefix_of_a_tied_model() -> None:
    keys = [name for name in NAMES if name != "lm_head.weight"]
    assert sorted(choose("x", keys, [], None, None).names.values()) == sorted(keys)
    titan = ["model.tok_embeddings.weight", "model.layers.0.w", "model.norm.weight"]
    assert "tok_embeddings.weight" in choose("x", titan, [], None, None).names.values()


def test_megatron_names_are_refused() -> None:
    with pytest.raises(Refused, match="Megatron"):
        choose("x", ["decoder.layers.self_attention.linear_qkv.weight"], [], None, None)
