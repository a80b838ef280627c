"""Family tables: what the loader takes and refuses, and what the shipped ones say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from mini_models import stored
from reshard.errors import ReshardError
from reshard.families import all_families, find_family, parse_family
from reshard.families.configs import sparse_layers
from reshard.transforms.names import rename_to_hub

if TYPE_CHECKING:
    from pathlib import Path

PER_EXPERT = """
[[experts.layouts]]
name = "per-expert"
tensors = [
    { name = "mlp.experts.{e}.gate_proj.weight", holds = ["gate"] },
    { name = "mlp.experts.{e}.up_proj.weight", holds = ["up"] },
    { name = "mlp.experts.{e}.down_proj.weight", holds = ["down"] },
]
"""
SIZES = 'count = ["num_experts"]\nintermediate = ["moe_intermediate_size"]\n'
GOOD = f'name = "x"\nmodel_types = ["x"]\n[experts]\n{SIZES}hub = "per-expert"\nmemory = "per-expert"\n{PER_EXPERT}'


def test_a_family_of_the_shortest_form_loads() -> None:
    family = parse_family(GOOD, "x.toml")
    assert family.layers == "model.layers." and family.experts is not None
    assert [t.holds for t in family.experts.layouts[0].tensors] == [("gate",), ("up",), ("down",)]


@pytest.mark.parametrize(
    "old,new,says",
    [
        ('name = "x"\n', "", "name"),
        ('model_types = ["x"]', "model_types = []", "no model type"),
        ('model_types = ["x"]', 'model_types = "x"', "model_types"),
        ('model_types = ["x"]', 'model_types = ["x"]\nlayer = "a."', "layer"),
        ('model_types = ["x"]', 'model_types = ["x"]\nfp32_pins = ["("]', "regular expression"),
        ('hub = "per-expert"', 'hub = "fused"', "fused"),
        ('holds = ["up"]', 'holds = ["gate"]', "each role once"),
        ('holds = ["up"]', 'holds = ["side"]', "some of"),
        ('holds = ["down"]', 'holds = ["down", "up"]', "different shapes"),
        ('holds = ["up"]', 'holds = ["up"], join = "zip"', "join"),
        ('holds = ["up"]', 'holds = ["up"], experts = "rows"', "rows"),
        ("{e}.up_proj", "{e}.{e}.up_proj", "segment"),
        ("{e}.up_proj.weight", "{e}.gate_proj.weight", "a name twice"),
        ("[experts]", "[[renames]]\nsource = 'a'\nname = 'model.'\nhub = 'b.'\nwhere = 'mid'\n[experts]", "where"),
        ("[experts]", "[[renames]]\nsource = 'a'\nname = 'p'\nhub = 'q'\nwhere = 'prefix'\n[experts]", "dot"),
        (
            "[experts]",
            "renames = [{ source = 'a', name = 'p', hub = 'q' }, { source = 'b', name = 'q', hub = 'r' }]\n[experts]",
            "another row",
        ),
        ("[experts]", "[experts", "TOML"),
    ],
)
def test_a_wrong_table_is_named(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(ReshardError, match=says) as error:
        parse_family(GOOD.replace(old, new, 1), "x.toml")
    assert error.value.where == "x.toml"


def test_shipped_families() -> None:
    assert {family.name for family in all_families()} >= {"llama", "qwen3", "qwen3_moe", "deepseek_v3"}
    for family in all_families():
        for kind in family.model_types:
            assert find_family({"model_type": kind}) is family
            assert find_family({"model_type": "wrapped", "text_config": {"model_type": kind}}) is family
    assert find_family({"model_type": "qwen3_mo"}) is None and find_family(None) is None


def test_renaming_hub_names_changes_nothing(tmp_path: Path) -> None:
    """Every shipped rename is one way: what it gives is no name that any row takes."""
    for family in all_families():
        for row in family.renames:
            tensors = stored({f"model.layers.0.{row.name}": torch.ones(1, 2, 2)}, tmp_path / family.name)
            once = rename_to_hub(tensors, family)
            assert list(once) == [f"model.layers.0.{row.hub}"]
            assert rename_to_hub(once, family) == once


@pytest.mark.parametrize(
    "kind,config,right",
    [
        ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, {1}),
        ("qwen3_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 1, "mlp_only_layers": []}, {0, 1, 2}),
        ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 3}, {3}),
        ("deepseek_v3", {"num_hidden_layers": 4}, None),
        ("llama", {"num_hidden_layers": 4}, None),
    ],
)
def test_sparse_layers_by_the_config(kind: str, config: dict[str, Any], right: set[int] | None) -> None:
    family = find_family({"model_type": kind})
    assert family is not None and sparse_layers(family, config) == right
