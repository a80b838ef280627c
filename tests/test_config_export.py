"""The exported config: what a training run leaves in it goes, what was written is said, all else stays."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest

import mini_models
from reshard.families import find_family
from reshard.hf.config import export_config, has_mtp_tensors

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("llama", "llama_tied", "qwen3", "qwen3_moe", "deepseek_v3")


def export(config: dict[str, Any], **flags: Any) -> tuple[dict[str, Any], list[str]]:
    """`export_config` with nothing to do unless said; the given config must come out as it went in."""
    before = deepcopy(config)
    what: dict[str, Any] = {"family": find_family(config), "dtype_written": None, "tied": None, "training": False}
    found = export_config(config, **(what | flags))
    assert config == before
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_of_a_model_loads_back_changed_only_where_said(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    saved = mini_models.build_config(family)
    saved.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    config |= {
        "dtype": "float32",
        "use_cache": False,
        "_attn_implementation": "flash_attention_3",
        "use_grouped_mm": True,
    }
    result, notes = export(config, dtype_written="bfloat16", training=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text(json.dumps(result))
    loaded = AutoConfig.from_pretrained(tmp_path / "out").to_dict()
    expected = AutoConfig.from_pretrained(tmp_path / "saved").to_dict()
    different = {key for key in loaded.keys() | expected.keys() if loaded.get(key) != expected.get(key)}
    assert different <= {"dtype", "_name_or_path"}
    assert str(loaded["dtype"]).removeprefix("torch.") == "bfloat16" and loaded["use_cache"] is True
    assert len(notes) == 3 and not any(key in result for key in ("_attn_implementation", "use_grouped_mm"))


def test_nothing_to_do_changes_nothing_and_keeps_the_order() -> None:
    config = {
        "z": 1,
        "model_type": "x",
        "a": None,
        "use_cache": False,
        "_attn_implementation": "sdpa",
        "dtype": "float32",
    }
    result, notes = export(config)
    assert list(result.items()) == list(config.items()) and notes == []


def test_values_of_the_run_in_nested_configs_and_not_in_others() -> None:
    config = {
        "model_type": "x",
        "use_cache": False,
        "text_config": {"output_router_logits": True, "attn_implementation": "flash_attention_2", "deepep": {"a": 1}},
        "vision_config": {"use_cache": False, "inner_config": {"use_cache": False}},
        "rope_scaling": {"use_cache": False},
        "quantization_config": {"use_cache": False, "dtype": "float8_e4m3fn"},
    }
    result, notes = export(config, training=True, dtype_written="bfloat16")
    assert result == {
        "model_type": "x",
        "use_cache": True,
        "text_config": {"output_router_logits": False},
        "vision_config": {"use_cache": True, "inner_config": {"use_cache": True}},
        "rope_scaling": {"use_cache": False},
        "quantization_config": {"use_cache": False, "dtype": "float8_e4m3fn"},
        "dtype": "bfloat16",
    }
    assert len(notes) == 6 and any("text_config.deepep" in note for note in notes)


def test_portable_values_are_not_touched_nor_mentioned() -> None:
    config = {"use_cache": True, "output_router_logits": False, "ep_size": 1, "router_aux_loss_coef": 0.001}
    assert export(config, training=True) == (config, [])
    assert export({"ep_size": 8}, training=True)[0] == {"ep_size": 1}


@pytest.mark.parametrize(
    "config,right",
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"torch_dtype": "float32", "dtype": "float32"}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}),
        ({}, {"dtype": "bfloat16"}),
        ({"dtype": None}, {"dtype": "bfloat16"}),
        (
            {"text_config": {"dtype": "float32"}, "vision_config": {"torch_dtype": "float16"}, "audio_config": None},
            {
                "text_config": {"dtype": "bfloat16"},
                "vision_config": {"torch_dtype": "bfloat16"},
                "audio_config": None,
                "dtype": "bfloat16",
            },
        ),
    ],
)
def test_the_dtype_field_says_what_was_written(config: dict[str, Any], right: dict[str, Any]) -> None:
    assert export(config, dtype_written="bfloat16") == (right, [])
    assert export(config)[0] == config


@pytest.mark.parametrize(
    "config,right",
    [
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
        (
            {"text_config": {"tie_word_embeddings": True}},
            {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": False},
        ),
        (
            {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}, "vision_config": {"a": 1}},
            {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}, "vision_config": {"a": 1}},
        ),
    ],
)
def test_a_head_that_differs_unties_everywhere(config: dict[str, Any], right: dict[str, Any]) -> None:
    result, notes = export(config, tied=False)
    assert result == right and len(notes) == 1
    assert export(config, tied=True) == (config, [])


def test_prediction_layers_that_are_not_there_are_not_promised() -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    family = find_family(config)
    plain = ["model.layers.0.a", "model.layers.1.a", "model.embed_tokens.weight", "model.layers.x.a"]
    assert has_mtp_tensors(plain, family, config) is False
    assert has_mtp_tensors([*plain, "model.layers.2.a"], family, config) is True
    assert has_mtp_tensors([*plain, "model.layers.10.a"], family, config) is True
    assert has_mtp_tensors(plain, family, {}) is None
    assert has_mtp_tensors(plain, None, config) is None
    assert has_mtp_tensors(plain, find_family({"model_type": "llama"}), config) is None
    result, notes = export(config, has_mtp=False)
    assert result["num_nextn_predict_layers"] == 0 and len(notes) == 1
    assert export(config, has_mtp=True) == (config, [])
