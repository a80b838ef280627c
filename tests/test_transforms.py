"""Names, drops, adapters, dtypes, ties and references: what each does to tensors, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from mini_models import QWEN, assert_same, family_of, qwen_layer, stored
from reshard.errors import Refused, UsageError
from reshard.families import parse_family
from reshard.transforms.adapters import refuse_lora
from reshard.transforms.drops import drop
from reshard.transforms.dtypes import is_norm, target_dtypes
from reshard.transforms.experts import convert_experts
from reshard.transforms.names import plain_name, rename_to_hub, strip_wrappers

# Names


@pytest.mark.parametrize(
    "name,right",
    [
        ("_orig_mod.model.embed.weight", "model.embed.weight"),
        ("module._orig_mod.model.layers.0.weight", "model.layers.0.weight"),
        (
            "model.layers.0._fsdp_wrapped_module.mlp._checkpoint_wrapped_module.up.weight",
            "model.layers.0.mlp.up.weight",
        ),
        ("model.layers.0._orig_mod._orig_mod.mlp.weight", "model.layers.0.mlp.weight"),
        ("model.my_module.weight", "model.my_module.weight"),
        ("model.module", "model.module"),
        ("model.submodule.module_list.0", "model.submodule.module_list.0"),
    ],
)
def test_wrapper_levels_go_wherever_they_stand(name: str, right: str) -> None:
    assert plain_name(name) == right == plain_name(right)


def test_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    source = stored({"model.a.weight": torch.ones(1), "model._orig_mod.a.weight": torch.zeros(1)}, tmp_path)
    with pytest.raises(Refused, match=r"model\.a\.weight"):
        strip_wrappers(source)


def test_prime_rl_names_become_the_hub_s_once(tmp_path: Path) -> None:
    layer = "model.layers.1.mlp."
    values = {name: torch.rand(shape) for name, shape in (("w1", (2, 3)), ("w2", (3, 2)), ("w3", (2, 3)))}
    trainer = {
        f"{layer}router.gate.weight": torch.rand(4, 3),
        f"{layer}expert_bias": torch.rand(4),
        f"{layer}shared_expert.w1": values["w1"][None],
        f"{layer}shared_expert.w2": values["w2"],
        f"{layer}shared_expert.w3": values["w3"][None],
    }
    right = {
        f"{layer}gate.weight": trainer[f"{layer}router.gate.weight"],
        f"{layer}gate.e_score_correction_bias": trainer[f"{layer}expert_bias"],
        f"{layer}shared_experts.gate_proj.weight": values["w1"],
        f"{layer}shared_experts.down_proj.weight": values["w2"],
        f"{layer}shared_experts.up_proj.weight": values["w3"],
    }
    family = family_of("deepseek_v3")
    once = rename_to_hub(stored(trainer, tmp_path / "a"), family)
    assert_same(once, right)
    assert_same(rename_to_hub(once, family), right)
    both = stored({**trainer, f"{layer}gate.weight": torch.rand(4, 3)}, tmp_path / "b")
    with pytest.raises(Refused, match=r"mlp\.gate\.weight"):
        rename_to_hub(both, family)


def test_an_axis_that_is_not_one_long_stays(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.shared_expert.w1"
    found = rename_to_hub(stored({name: torch.rand(2, 2, 3)}, tmp_path), family_of("deepseek_v3"))
    assert [t.shape for t in found.values()] == [(2, 2, 3)]


def test_what_the_hub_has_no_place_for_is_refused_until_dropped(tmp_path: Path) -> None:
    """A count of the run beside the weights: nothing goes silently."""
    counts = "model.layers.0.mlp.tokens_per_expert"
    source = stored({**qwen_layer(), counts: torch.ones(12, dtype=torch.int64)}, tmp_path)
    with pytest.raises(Refused) as error:
        convert_experts(source, family_of("qwen3_moe"), QWEN, "hub")
    assert error.value.where == counts
    pattern = error.value.remedy.partition("--drop '")[2].partition("'")[0]
    left, gone = drop(source, [pattern])
    assert [row.name for row in gone] == [counts] and pattern in gone[0].reason
    assert_same(convert_experts(left, family_of("qwen3_moe"), QWEN, "hub")[0], qwen_layer())


def test_writers_that_disagree_are_refused(tmp_path: Path) -> None:
    text = """
    name = "x"
    model_types = ["x"]
    renames = [
        { source = "a", name = "w1", hub = "gate.weight" },
        { source = "b", name = "w1", hub = "up.weight" },
    ]
    """
    with pytest.raises(Refused, match="as a writes it"):
        rename_to_hub(stored({"model.layers.0.w1": torch.ones(1)}, tmp_path), parse_family(text, "x.toml"))


# Adapters and drops


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.q_proj.lora_B.default.weight",
        "model.layers.0.q_proj.base_layer.weight",
        "model.embed_tokens.lora_embedding_A",
        "model.layers.0.q_proj.lora_magnitude_vector",
    ],
)
def test_adapters_are_refused_by_name(name: str) -> None:
    with pytest.raises(Refused, match="LoRA") as error:
        refuse_lora(["model.norm.weight", name])
    assert error.value.where == name and error.value.remedy


def test_names_that_only_resemble_adapters_pass() -> None:
    refuse_lora(["model.explora_A.weight", "model.lora_layer.weight", "model.database_layer.weight", "flora.lora_a"])


@pytest.mark.parametrize("pattern,says", [("layers\\.99", "matches no tensor"), ("(", "regular expression")])
def test_drop_must_find_something(pattern: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says) as error:
        drop(stored(qwen_layer(2), tmp_path), [pattern])
    assert error.value.exit_status == 2


# Dtypes


def test_the_dtype_policy_leaves_pins_and_whole_numbers_alone(tmp_path: Path) -> None:
    bias = torch.tensor([7.0, 7.01, 7.005, 7.002])
    tensors = {
        "model.layers.0.mlp.gate.e_score_correction_bias": bias,
        "model.layers.0.mlp.gate.weight": torch.rand(4, 3),
        "model.norm.weight": torch.rand(3),
        "model.half": torch.rand(2).half(),
        "model.scalar": torch.tensor(1.5),
        "model.empty": torch.empty(0, 4),
        "model.position_ids": torch.arange(4),
        "model.flag": torch.tensor([True, False, True]),
        "model.complex": torch.tensor([1 + 2j]),
        "model.eight.weight": torch.rand(2, 2).to(torch.float8_e4m3fn),
        "model.bytes": torch.tensor([3], dtype=torch.uint8),
    }
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "n_routed_experts": 4, "first_k_dense_replace": 1}
    source = tmp_path / "source"
    source.mkdir()
    # The router's layer has no experts here, which --experts keep does not ask about.
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    reshard.convert(str(source), str(tmp_path / "out"), dtype="bfloat16", experts="keep")
    floats = ("model.layers.0.mlp.gate.weight", "model.norm.weight", "model.half", "model.scalar", "model.empty")
    right = {name: t.bfloat16() if name in floats else t for name, t in tensors.items()}
    assert_same(load_file(tmp_path / "out/model.safetensors"), right)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    reshard.convert(str(source), str(tmp_path / "norms"), dtype="bfloat16", norms="float32", experts="keep")
    right["model.norm.weight"] = tensors["model.norm.weight"]
    assert_same(load_file(tmp_path / "norms/model.safetensors"), right)
    reshard.convert(str(source), str(tmp_path / "kept"), dtype="keep", experts="keep")
    assert_same(load_file(tmp_path / "kept/model.safetensors"), tensors)


def test_pins_hold_under_a_trainer_s_name(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.expert_bias"
    source = stored({name: torch.ones(4)}, tmp_path)
    assert target_dtypes(source, "BF16", None, family_of("deepseek_v3")) == {name: "F32"}


def test_norms_are_kept_only_where_they_are_stored_in_fp32(tmp_path: Path) -> None:
    tensors = {
        "model.norm.weight": torch.ones(2, dtype=torch.bfloat16),
        "model.layers.0.input_layernorm.weight": torch.ones(2),
        "model.layers.0.self_attn.q_norm.weight": torch.ones(2),
        "model.layers.0.enorm.weight": torch.ones(2),
        "model.layers.0.mlp.normal.weight": torch.ones(2),
        "model.layers.0.norm_proj.weight": torch.ones(2, 2),
    }
    found = target_dtypes(stored(tensors, tmp_path), "F16", "float32", None)
    assert {name for name, dtype in found.items() if dtype == "F32"} == {
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.enorm.weight",
    }
    assert found["model.norm.weight"] == "F16"


@pytest.mark.parametrize(
    "module,right",
    [
        ("model.norm", True),
        ("transformer.ln_f", True),
        ("h.0.ln_1", True),
        ("encoder.LayerNorm", True),
        ("layers.0.attention_norm", True),
        ("layers.0.post_feedforward_layernorm", True),
        ("layers.0.normalizer", False),
        ("layers.0.abnormal", False),
        ("layers.0.mlp.gate", False),
    ],
)
def test_norms_by_name(module: str, right: bool) -> None:
    assert is_norm(f"{module}.weight", (4,)) is right
    assert not is_norm(f"{module}.weight", (4, 4))


# Ties


def write(home: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
    home.mkdir()
    save_file(tensors, home / "model.safetensors")
    (home / "config.json").write_text(json.dumps(config))
    return str(home)


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = {"model_type": "llama", "tie_word_embeddings": True}


def outcome(source: str, out: Path, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    report = reshard.convert(source, str(out), **options)
    return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text()), report


def test_equal_tied_matrices_are_written_once(tmp_path: Path) -> None:
    embed = torch.rand(8, 4)
    source = write(tmp_path / "in", {EMBED: embed, HEAD: embed.clone()}, TIED)
    tensors, config, report = outcome(source, tmp_path / "out")
    assert_same(tensors, {EMBED: embed})
    assert config["tie_word_embeddings"] is True
    assert [row["name"] for row in report["dropped"]] == [HEAD]


@pytest.mark.parametrize("nested", ["text_config", "llm_config", None])
def test_differing_matrices_are_both_written_and_untied(nested: str | None, tmp_path: Path) -> None:
    embed = torch.rand(8, 4)
    head = embed.clone()
    head[7, 3] += 1
    config = TIED | ({nested: {"tie_word_embeddings": True, "hidden_size": 4}} if nested else {})
    source = write(tmp_path / "in", {EMBED: embed, HEAD: head}, config)
    tensors, found, report = outcome(source, tmp_path / "out")
    assert_same(tensors, {EMBED: embed, HEAD: head})
    assert found["tie_word_embeddings"] is False
    if nested:
        assert found[nested] == {"tie_word_embeddings": False, "hidden_size": 4}
    assert any("tie_word_embeddings" in note for note in report["warnings"])


def test_equal_matrices_of_an_untied_model_are_both_kept(tmp_path: Path) -> None:
    embed = torch.rand(8, 4)
    both = {EMBED: embed, HEAD: embed.clone()}
    tensors, config, _ = outcome(write(tmp_path / "in", both, TIED | {"tie_word_embeddings": False}), tmp_path / "out")
    assert_same(tensors, both)
    assert config["tie_word_embeddings"] is False


def test_the_only_copy_of_a_tied_matrix_is_the_embedding(tmp_path: Path) -> None:
    head = torch.rand(8, 4)
    tensors, config, report = outcome(write(tmp_path / "in", {HEAD: head}, TIED), tmp_path / "out")
    assert_same(tensors, {EMBED: head})
    assert config["tie_word_embeddings"] is True
    assert any(HEAD in note for note in report["warnings"])


# References


@pytest.fixture
def runtime(tmp_path: Path) -> tuple[str, str, dict[str, torch.Tensor]]:
    """A checkpoint under in-memory names, the release that it came from in two odd files, and the release's tensors."""
    hub = qwen_layer() | {"model.norm.weight": torch.ones(3), "model.layers.0.mlp.gate.weight": torch.ones(12, 3)}
    family = family_of("qwen3_moe")
    fused = convert_experts(stored(hub, tmp_path / "all"), family, QWEN, "fused")[0]
    source = write(tmp_path / "runtime", {name: tensor.torch() for name, tensor in fused.items()}, QWEN)
    base = tmp_path / "base"
    base.mkdir()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    halves = [{}, {}]
    for i, (name, tensor) in enumerate(hub.items()):
        halves[i % 2][name] = tensor.bfloat16()
    for name, half in zip(names, halves, strict=True):
        save_file(half, base / name)
    weight_map = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    index = {"metadata": {"total_size": sum(t.nbytes for h in halves for t in h.values())}, "weight_map": weight_map}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    return source, str(base), hub


def test_a_reference_gives_names_dtypes_and_files(
    runtime: tuple[str, str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    source, base, hub = runtime
    reshard.convert(source, str(tmp_path / "out"), like=base)
    for file in Path(base).glob("*.safetensors"):
        right = {name: hub[name].bfloat16() for name in load_file(file)}
        assert_same(load_file(tmp_path / "out" / file.name), right)
    ours, theirs = (
        json.loads((p / "model.safetensors.index.json").read_text()) for p in (tmp_path / "out", Path(base))
    )
    assert ours == theirs


@pytest.mark.parametrize("change", ["shape", "missing", "extra", "dtype"])
def test_a_result_unlike_the_reference_is_refused(
    change: str, runtime: tuple[str, str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    source, _, hub = runtime
    other = dict(hub)
    name = "model.layers.0.mlp.experts.11.up_proj.weight"
    if change == "shape":
        other[name] = torch.ones(3, 2)
    elif change == "missing":
        del other[name]
    elif change == "extra":
        name = "model.layers.9.extra.weight"
        other[name] = torch.ones(2)
    else:
        other[name] = torch.ones(2, 3, dtype=torch.int32)
    base = write(tmp_path / "reference", other, QWEN)
    with pytest.raises(Refused) as error:
        reshard.convert(source, str(tmp_path / "out"), like=base)
    assert name in str(error.value) and not (tmp_path / "out").exists()
