"""Families whose modules join more than experts, under several prefixes. transformers' own saves are the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import mini_models
import reshard
from mini_models import assert_same, stored
from reshard.errors import Damaged, Refused, ReshardError
from reshard.families import Family, parse_family
from reshard.transforms.experts import convert_experts
from reshard.transforms.names import rename_to_hub

if TYPE_CHECKING:
    from pathlib import Path

EXPERTS = """
[[experts.layouts]]
name = "per-expert"
tensors = [
    { name = "block_sparse_moe.experts.{e}.w1.weight", holds = ["gate"] },
    { name = "block_sparse_moe.experts.{e}.w3.weight", holds = ["up"] },
    { name = "block_sparse_moe.experts.{e}.w2.weight", holds = ["down"] },
]
[[experts.layouts]]
name = "fused"
tensors = [
    { name = "mlp.experts.gate_up_proj", holds = ["gate", "up"] },
    { name = "mlp.experts.down_proj", holds = ["down"] },
]
"""


def rename(name: str, hub: str, where: str) -> str:
    return f'[[renames]]\nsource = "memory"\nname = "{name}"\nhub = "{hub}"\nwhere = "{where}"\n'


def join(name: str, *parts: str) -> str:
    return f'[[joins]]\nsource = "memory"\nname = "{name}"\nparts = {list(parts)}\n'


def minimax() -> Family:
    """Two towers, four prefixes one inside the other, gate and up of dense and shared layers joined."""
    prefixes = {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.vision_tower.layers.": "vision_tower.vision_model.encoder.layers.",
        "model.vision_tower.embeddings.proj.": "vision_tower.vision_model.embeddings.patch_embedding.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }
    tails = {
        "mlp.gate.weight": "block_sparse_moe.gate.weight",
        "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        "mlp.shared_experts.down_proj.weight": "block_sparse_moe.shared_experts.down_proj.weight",
    }
    for n in (1, 2):
        for leaf in ("weight", "bias"):
            tails[f"model.multi_modal_projector.merge_linear_{n}.{leaf}"] = f"patch_merge_mlp.linear_{n}.{leaf}"
    for leaf in ("q_norm", "k_norm", "q_proj", "k_proj"):
        tails[f"self_attn.indexer.{leaf}.weight"] = f"self_attn.index_{leaf}.weight"
    shared = "block_sparse_moe.shared_experts."
    text = 'name = "m3"\nmodel_types = ["m3"]\nlayers = "language_model.model.layers."\n'
    text += "".join(rename(*row, "prefix") for row in prefixes.items())
    text += "".join(rename(*row, "tail") for row in tails.items())
    text += join("mlp.gate_up_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight")
    text += join("mlp.shared_experts.gate_up_proj.weight", f"{shared}gate_proj.weight", f"{shared}up_proj.weight")
    text += '[experts]\ncount = ["num_local_experts"]\nintermediate = ["intermediate_size"]\n'
    return parse_family(f'{text}hub = "per-expert"\nmemory = "fused"\n{EXPERTS}', "m3.toml")


def kimi() -> Family:
    """Three convolutions joined, a level of modules added, another module's name throughout."""
    text = 'name = "k"\nmodel_types = ["k"]\n' + rename("mlp.", "block_sparse_moe.", "module")
    for leaf in ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight"):
        text += rename(f"self_attn.forget_gate.{leaf}", f"self_attn.{leaf}", "tail")
    text += join("self_attn.conv1d.weight", *(f"self_attn.{role}_conv1d.weight" for role in "qkv"))
    text += '[experts]\ncount = ["num_local_experts"]\nintermediate = ["moe_intermediate_size"]\n'
    return parse_family(f'{text}hub = "per-expert"\nmemory = "fused"\n{EXPERTS}', "k.toml")


@pytest.mark.parametrize("kind,make", [("minimax_m3_vl", minimax), ("kimi_linear", kimi)])
def test_names_and_bytes_are_transformers_own_both_ways(kind: str, make: object, tmp_path: Path) -> None:
    family = make() if callable(make) else None
    mini_models.write(kind, tmp_path / "hub")
    mini_models.write(kind, tmp_path / "memory", in_memory_layout=True)
    right = {side: load_file(tmp_path / side / "model.safetensors") for side in ("hub", "memory")}
    assert right["hub"].keys() != right["memory"].keys()
    for side in right:
        opened = reshard.open(str(tmp_path / side))
        for target, wanted in (("hub", "hub"), ("fused", "memory")):
            assert_same(convert_experts(opened.tensors, family, opened.config, target)[0], right[wanted])


DENSE = f"""
name = "d"
model_types = ["d"]
{join("mlp.gate_up_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight")}
"""
STEM = "model.layers.0.mlp."


def dense(*names: str, rows: int = 2) -> dict[str, torch.Tensor]:
    return {STEM + name: torch.full((rows, 3), float(i)) for i, name in enumerate(names)}


@pytest.mark.parametrize(
    "tensors,target,error,says",
    [
        (dense("gate_up_proj.weight", rows=3), "hub", Damaged, "2 equal parts"),
        (dense("gate_up_proj.weight", "up_proj.weight"), "hub", Refused, "there too"),
        (dense("gate_up_proj.weight", "gate_up_proj.weight_scale_inv"), "hub", Refused, "belongs to"),
        (dense("gate_proj.weight"), "fused", Damaged, "is missing beside"),
        (dense("gate_proj.weight", "up_proj.weight", "up_proj.weight_scale_inv"), "fused", Refused, "belongs to"),
        (dense("gate_proj.weight") | dense("up_proj.weight", rows=4), "fused", Damaged, "another shape"),
    ],
)
def test_what_cannot_be_cut_or_joined_is_named(
    tensors: dict[str, torch.Tensor], target: str, error: type[ReshardError], says: str, tmp_path: Path
) -> None:
    family = parse_family(DENSE, "d.toml")
    with pytest.raises(error, match=says) as fault:
        convert_experts(stored(tensors, tmp_path), family, {}, target)
    assert fault.value.where.startswith(STEM)


def test_a_dense_family_is_joined_and_cut_in_order(tmp_path: Path) -> None:
    family = parse_family(DENSE, "d.toml")
    parts = stored(dense("gate_proj.weight", "up_proj.weight", "down_proj.weight"), tmp_path)
    joined, _ = convert_experts(parts, family, {}, "fused")
    assert joined[STEM + "gate_up_proj.weight"].torch().tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3]
    assert set(joined) == {STEM + "gate_up_proj.weight", STEM + "down_proj.weight"}
    back, _ = convert_experts(joined, family, {}, "hub")
    assert_same(back, {name: tensor.torch() for name, tensor in parts.items()})
    assert_same(convert_experts(parts, family, {}, "hub")[0], {name: t.torch() for name, t in parts.items()})


def test_several_prefixes_rename_once(tmp_path: Path) -> None:
    family = minimax()
    names = [
        "model.vision_tower.layers.0.x",
        "model.vision_tower.y",
        "model.language_model.layers.0.z",
        "lm_head.weight",
    ]
    once = rename_to_hub(stored({name: torch.ones(1) for name in names}, tmp_path), family)
    assert list(once) == [
        "language_model.lm_head.weight",
        "language_model.model.layers.0.z",
        "vision_tower.vision_model.encoder.layers.0.x",
        "vision_tower.vision_model.y",
    ]
    assert list(rename_to_hub(once, family)) == list(once)


@pytest.mark.parametrize(
    "row",
    [
        'source = "memory"\nname = "a"\nparts = ["b"]',
        'source = "memory"\nname = "a"\nparts = ["b", "b"]',
        'source = "memory"\nname = "a"\nparts = ["b", "a"]',
        'source = "memory"\nname = "a"\nparts = ["b", "c"]\naxis = -1',
        'source = "memory"\nname = "a"\nparts = ["b", "c"]\naxis = true',
        'name = "a"\nparts = ["b", "c"]',
    ],
)
def test_a_faulty_join_is_refused_on_loading(row: str) -> None:
    with pytest.raises(ReshardError, match=r"odd\.toml"):
        parse_family(f'name = "o"\nmodel_types = ["o"]\n[[joins]]\n{row}', "odd.toml")
