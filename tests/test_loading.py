"""What transformers says of a checkpoint's names and shapes, with known faults put into real mini models."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mini_models
from reshard.checkpoint import Checkpoint
from reshard.errors import Refused, UsageError
from reshard.opening import open_checkpoint
from reshard.tensors.lazy import Stored
from reshard.verbs.loading import check_load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOE = "model.layers.1.mlp.experts."
State = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def minis(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("minis")

    def get(family: str) -> Path:
        path = root / family
        if not path.exists():
            mini_models.write(family, path)
        return path

    return get


def changed(source: Path, out: Path, change: Callable[[State], Any], **config: Any) -> Path:
    """A copy of a one-file mini with its tensors and config changed."""
    out.mkdir()
    state = load_file(source / "model.safetensors")
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, out / "model.safetensors")
    body = json.loads((source / "config.json").read_text()) | config
    (out / "config.json").write_text(json.dumps(body))
    return out


def found(path: Path) -> set[tuple[str, str | None]]:
    return {(row["kind"], row["tensor"]) for row in check_load(open_checkpoint(str(path)))}


@pytest.mark.parametrize("family", ["qwen3_moe", "llama_tied", "gpt_oss", "deepseek_v3", "qwen3_5_moe", "gemma3"])
def test_sound_models_load(minis: Callable[[str], Path], family: str) -> None:
    assert check_load(open_checkpoint(str(minis(family)))) == []


def test_missing_extra_and_misshaped_are_each_reported(minis: Callable[[str], Path], tmp_path: Path) -> None:
    def damage(state: State) -> None:
        del state["model.layers.0.input_layernorm.weight"]
        state["model.layers.0.surplus.weight"] = torch.ones(2)
        state["model.norm.weight"] = torch.ones(63)

    out = changed(minis("qwen3_moe"), tmp_path / "m", damage)
    rows = {row["kind"]: row for row in check_load(open_checkpoint(str(out)))}
    assert {kind: row["tensor"] for kind, row in rows.items()} == {
        "load-missing": "model.layers.0.input_layernorm.weight",
        "load-unexpected": "model.layers.0.surplus.weight",
        "load-shape": "model.norm.weight",
    }
    assert "[63]" in rows["load-shape"]["detail"] and "[64]" in rows["load-shape"]["detail"]


def test_an_expert_that_is_wholly_absent_is_reported(minis: Callable[[str], Path], tmp_path: Path) -> None:
    def damage(state: State) -> None:
        for name in [name for name in state if name.startswith(f"{MOE}2.")]:
            del state[name]

    out = changed(minis("qwen3_moe"), tmp_path / "m", damage)
    assert found(out) == {("load-shape", f"{MOE}gate_up_proj"), ("load-shape", f"{MOE}down_proj")}


def test_experts_of_unequal_shapes_fail_their_conversion_only(minis: Callable[[str], Path], tmp_path: Path) -> None:
    def damage(state: State) -> None:
        state[f"{MOE}0.down_proj.weight"] = torch.ones(3, 5)

    out = changed(minis("qwen3_moe"), tmp_path / "m", damage)
    assert found(out) == {("load-conversion", f"{MOE}down_proj")}


def test_a_head_may_be_absent_only_where_it_is_tied(minis: Callable[[str], Path], tmp_path: Path) -> None:
    def behead(state: State) -> None:
        state.pop("lm_head.weight", None)

    source = minis("llama")
    assert found(changed(source, tmp_path / "untied", behead)) == {("load-missing", "lm_head.weight")}
    assert found(changed(source, tmp_path / "tied", behead, tie_word_embeddings=True)) == set()


def test_keys_that_the_class_ignores_are_no_problem(minis: Callable[[str], Path], tmp_path: Path) -> None:
    def extend(state: State) -> None:
        state["model.layers.2.mtp_only.weight"] = torch.ones(2)  # the class lets layer 61 go, not layer 2
        state["model.layers.61.eh_proj.weight"] = torch.ones(2)

    out = changed(minis("deepseek_v3"), tmp_path / "m", extend)
    assert found(out) == {("load-unexpected", "model.layers.2.mtp_only.weight")}


def test_without_a_config_it_is_refused() -> None:
    tensors = {"model.embed_tokens.weight": Stored("BF16", (4, 4), "/nonexistent/file", 0)}
    with pytest.raises(Refused, match="no config"):
        check_load(Checkpoint(dict(tensors), "hf", "somewhere"))


def test_a_large_model_is_checked_without_its_weights(minis: Callable[[str], Path], tmp_path: Path) -> None:
    body = json.loads((minis("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(body | {"vocab_size": 1 << 20, "hidden_size": 64 << 10}))
    # 128 GiB each, in a file that does not exist.
    big = Stored("BF16", (1 << 20, 64 << 10), "/nonexistent/file", 0)
    tensors = {"model.embed_tokens.weight": big, "lm_head.weight": big}
    checkpoint = Checkpoint(dict(tensors), "hf", str(tmp_path), config=body, config_dir=str(tmp_path))
    rows = check_load(checkpoint)
    assert {row["kind"] for row in rows} == {"load-missing"}
    assert not {row["tensor"] for row in rows} & set(tensors)


def test_names_with_wrapper_levels_are_read_as_plain(minis: Callable[[str], Path], tmp_path: Path) -> None:
    def wrap(state: State) -> None:
        for name in list(state):
            state[f"_orig_mod.{name}"] = state.pop(name)

    assert found(changed(minis("llama"), tmp_path / "m", wrap)) == set()


def test_code_beside_the_config_runs_only_when_trusted(minis: Callable[[str], Path], tmp_path: Path) -> None:
    out = changed(
        minis("llama"), tmp_path / "m", lambda state: None, model_type="homemade", architectures=["HomeModel"],
        auto_map={"AutoConfig": "home.HomeConfig", "AutoModelForCausalLM": "home.HomeModel"},
    )  # fmt: skip
    marker = tmp_path / "ran"
    (out / "home.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class HomeConfig(LlamaConfig):\n    model_type = 'homemade'\n"
        "class HomeModel(LlamaForCausalLM):\n    config_class = HomeConfig\n"
    )
    checkpoint = open_checkpoint(str(out))
    with pytest.raises(Refused, match="trust-remote-code"):
        check_load(checkpoint)
    assert not marker.exists()
    assert check_load(checkpoint, trust_remote_code=True) == []
    assert marker.exists()


@pytest.mark.parametrize("name", ["NoSuchModel", "AutoConfig", "logging", "__doc__"])
def test_a_class_that_is_no_model_is_refused(minis: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    out = changed(minis("llama"), tmp_path / "m", lambda state: None, architectures=[name])
    with pytest.raises(Refused, match="no model class"):
        check_load(open_checkpoint(str(out)))


def test_without_transformers_the_extra_is_named(minis: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(str(minis("llama")))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError) as caught:
        check_load(checkpoint)
    assert "reshard[hf]" in caught.value.remedy


def test_transformers_own_settings_are_left_as_they_were(minis: Callable[[str], Path]) -> None:
    from transformers.utils import logging as control

    before = control.get_verbosity(), control.is_progress_bar_enabled()
    check_load(open_checkpoint(str(minis("llama"))))
    assert (control.get_verbosity(), control.is_progress_bar_enabled()) == before
