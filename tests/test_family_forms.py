"""The form of family tables holds the awkward families: each written down here, its tensors rearranged by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from mini_models import assert_same, stored
from reshard.errors import Damaged, Refused, ReshardError
from reshard.families import parse_family
from reshard.families.configs import config_int
from reshard.transforms.experts import convert_experts

if TYPE_CHECKING:
    from pathlib import Path

E, H, I = 3, 10, 6  # noqa: E741 - experts, model width, expert width, as everywhere
SIZES = 'count = ["num_experts"]\nintermediate = ["moe_intermediate_size"]\n'
CONFIG = {"num_experts": E, "moe_intermediate_size": I, "hidden_size": H}


def bank(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate and up [E, I, H], down [E, H, I], all values distinct."""
    values = torch.arange(3 * E * H * I, dtype=torch.float32) + 10_000 * seed
    gate, up, down = values.view(3, E, -1)
    return gate.view(E, I, H), up.view(E, I, H), down.view(E, H, I)


def each(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, stem: str) -> dict[str, torch.Tensor]:
    """One tensor a projection and expert, in a Linear's orientation."""
    rows = {"gate": gate, "up": up, "down": down}
    return {f"{stem}{e}.{role}_proj.weight": t[e] for role, t in rows.items() for e in range(E)}


def there_and_back(
    family: Any, config: dict[str, Any], hub: dict[str, torch.Tensor], other: dict[str, torch.Tensor], target: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """`hub` becomes `other` as `target`, `other` becomes `hub`, and what lies right stays."""
    first, second = stored(hub, tmp_path / "hub"), stored(other, tmp_path / "other")
    assert_same(convert_experts(first, family, config, target)[0], other)
    assert_same(convert_experts(second, family, config, "hub")[0], hub)
    assert_same(convert_experts(first, family, config, "hub")[0], hub)
    assert_same(convert_experts(second, family, config, target)[0], other)


# The families that are hardest to write down


GPT_OSS = f"""
name = "gpt_oss"
model_types = ["gpt_oss"]
router = "mlp.router"
[experts]
{SIZES}
hub = "fused"
memory = "fused"
[[experts.layouts]]
name = "fused"
tensors = [
    {{ name = "mlp.experts.gate_up_proj", holds = ["gate", "up"], join = "interleave", orientation = "in-out" }},
    {{ name = "mlp.experts.gate_up_proj_bias", holds = ["gate_bias", "up_bias"], join = "interleave" }},
    {{ name = "mlp.experts.down_proj", holds = ["down"], orientation = "in-out" }},
    {{ name = "mlp.experts.down_proj_bias", holds = ["down_bias"] }},
]
[[experts.layouts]]
name = "per-expert"
tensors = [
    {{ name = "mlp.experts.{{e}}.gate_proj.weight", holds = ["gate"] }},
    {{ name = "mlp.experts.{{e}}.gate_proj.bias", holds = ["gate_bias"] }},
    {{ name = "mlp.experts.{{e}}.up_proj.weight", holds = ["up"] }},
    {{ name = "mlp.experts.{{e}}.up_proj.bias", holds = ["up_bias"] }},
    {{ name = "mlp.experts.{{e}}.down_proj.weight", holds = ["down"] }},
    {{ name = "mlp.experts.{{e}}.down_proj.bias", holds = ["down_bias"] }},
]
"""


def test_gpt_oss_interleaved_and_transposed_with_biases(tmp_path: Path) -> None:
    gate, up, down = bank()
    gate_bias, up_bias, down_bias = (torch.arange(E * n).float().view(E, n) + s for n, s in ((I, 0), (I, 50), (H, 99)))
    fused = torch.empty(E, H, 2 * I)
    fused[..., 0::2], fused[..., 1::2] = gate.mT, up.mT
    biases = torch.empty(E, 2 * I)
    biases[:, 0::2], biases[:, 1::2] = gate_bias, up_bias
    stem = "model.layers.0.mlp.experts."
    router = {"model.layers.0.mlp.router.weight": torch.ones(E, H)}
    hub = {
        f"{stem}gate_up_proj": fused,
        f"{stem}gate_up_proj_bias": biases,
        f"{stem}down_proj": down.mT,
        f"{stem}down_proj_bias": down_bias,
    }
    split = each(gate, up, down, stem)
    for role, bias in (("gate", gate_bias), ("up", up_bias), ("down", down_bias)):
        split |= {f"{stem}{e}.{role}_proj.bias": bias[e] for e in range(E)}
    family = parse_family(GPT_OSS, "gpt_oss.toml")
    there_and_back(family, CONFIG, hub | router, split | router, "per-expert", tmp_path)


def test_gpt_oss_columns_taken_in_turns(tmp_path: Path) -> None:
    """Columns 0.5, 1, 1.5, 2: the gate has 0.5 and 1.5, the up projection 1 and 2; halves would mix them."""
    stem = "model.layers.0.mlp.experts."
    fused = torch.tensor([0.5, 1.0, 1.5, 2.0]).expand(1, 32, 4)
    tensors = {
        f"{stem}gate_up_proj": fused,
        f"{stem}gate_up_proj_bias": fused[:, 0],
        f"{stem}down_proj": torch.zeros(1, 2, 32),
        f"{stem}down_proj_bias": torch.zeros(1, 32),
    }
    config = {"num_experts": 1, "moe_intermediate_size": 2, "hidden_size": 32}
    family = parse_family(GPT_OSS, "gpt_oss.toml")
    found, _ = convert_experts(stored(tensors, tmp_path), family, config, "per-expert")
    for role, right in (("gate", [0.5, 1.5]), ("up", [1.0, 2.0])):
        assert torch.equal(found[f"{stem}0.{role}_proj.weight"].torch(), torch.tensor(right)[:, None].expand(2, 32))
        assert found[f"{stem}0.{role}_proj.bias"].torch().tolist() == right


DBRX = """
name = "dbrx"
model_types = ["dbrx"]
layers = "transformer.blocks."
embedding = "transformer.wte.weight"
router = "ffn.router.layer"
[experts]
count = ["ffn_config.moe_num_experts"]
intermediate = ["ffn_config.ffn_hidden_size"]
hidden = ["d_model"]
hub = "rows"
memory = "rows"
[[experts.layouts]]
name = "rows"
tensors = [
    { name = "ffn.experts.mlp.w1", holds = ["gate"], experts = "rows" },
    { name = "ffn.experts.mlp.v1", holds = ["up"], experts = "rows" },
    { name = "ffn.experts.mlp.w2", holds = ["down"], experts = "rows", orientation = "in-out" },
]
[[experts.layouts]]
name = "per-expert"
tensors = [
    { name = "ffn.experts.{e}.gate_proj.weight", holds = ["gate"] },
    { name = "ffn.experts.{e}.up_proj.weight", holds = ["up"] },
    { name = "ffn.experts.{e}.down_proj.weight", holds = ["down"] },
]
"""


def dbrx() -> tuple[Any, dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    gate, up, down = bank()
    stem = "transformer.blocks.0.ffn.experts."
    hub = {
        f"{stem}mlp.w1": gate.reshape(E * I, H),
        f"{stem}mlp.v1": up.reshape(E * I, H),
        f"{stem}mlp.w2": down.mT.reshape(E * I, H),
    }
    config = {"d_model": H, "ffn_config": {"moe_num_experts": E, "ffn_hidden_size": I}}
    return parse_family(DBRX, "dbrx.toml"), config, hub, each(gate, up, down, stem)


def test_dbrx_experts_below_one_another(tmp_path: Path) -> None:
    family, config, hub, split = dbrx()
    assert config_int(config, family.experts.count) == E
    there_and_back(family, config, hub, split, "per-expert", tmp_path)


def test_rows_need_the_number_of_experts(tmp_path: Path) -> None:
    family, config, hub, _ = dbrx()
    tensors = stored(hub, tmp_path)
    with pytest.raises(Refused, match="--config-from"):
        convert_experts(tensors, family, {"d_model": H}, "per-expert")
    config["ffn_config"]["moe_num_experts"] = 4
    with pytest.raises(Damaged, match=r"18 rows of experts where the config says 4"):
        convert_experts(tensors, family, config, "per-expert")


STEP = f"""
name = "step3p7"
model_types = ["step3p7"]
router = "moe.gate"
correction_bias = "moe.router_bias"
shared_experts = "share_expert"
[experts]
{SIZES}
hub = "banks"
memory = "fused"
[[experts.layouts]]
name = "banks"
tensors = [
    {{ name = "moe.gate_proj.weight", holds = ["gate"] }},
    {{ name = "moe.up_proj.weight", holds = ["up"] }},
    {{ name = "moe.down_proj.weight", holds = ["down"] }},
]
[[experts.layouts]]
name = "fused"
tensors = [
    {{ name = "moe.experts.gate_up_proj", holds = ["gate", "up"] }},
    {{ name = "moe.experts.down_proj", holds = ["down"] }},
]
"""


def test_step3p7_one_tensor_a_projection(tmp_path: Path) -> None:
    gate, up, down = bank()
    stem = "model.layers.4.moe."
    hub = {f"{stem}{role}_proj.weight": t for role, t in (("gate", gate), ("up", up), ("down", down))}
    fused = {f"{stem}experts.gate_up_proj": torch.cat([gate, up], 1), f"{stem}experts.down_proj": down}
    rest = {f"{stem}gate.weight": torch.ones(E, H), f"{stem}router_bias": torch.ones(E)}
    there_and_back(parse_family(STEP, "step.toml"), CONFIG, hub | rest, fused | rest, "fused", tmp_path)


GEMMA = f"""
name = "gemma4"
model_types = ["gemma4"]
layers = "model.language_model.layers."
towers = ["model.vision_tower."]
tied_by_default = true
router = "router.proj"
[experts]
{SIZES}
hub = "fused"
memory = "fused"
[[experts.layouts]]
name = "fused"
tensors = [
    {{ name = "experts.gate_up_proj", holds = ["gate", "up"] }},
    {{ name = "experts.down_proj", holds = ["down"] }},
]
[[experts.layouts]]
name = "per-expert"
tensors = [
    {{ name = "experts.{{e}}.gate_proj.weight", holds = ["gate"] }},
    {{ name = "experts.{{e}}.up_proj.weight", holds = ["up"] }},
    {{ name = "experts.{{e}}.down_proj.weight", holds = ["down"] }},
]
"""


def test_gemma4_experts_beside_a_dense_mlp(tmp_path: Path) -> None:
    gate, up, down = bank()
    layer = "model.language_model.layers.1."
    hub = {f"{layer}experts.gate_up_proj": torch.cat([gate, up], 1), f"{layer}experts.down_proj": down}
    rest = {f"{layer}mlp.{role}_proj.weight": torch.ones(I, H) for role in ("gate", "up", "down")}
    rest |= {f"{layer}router.per_expert_scale": torch.ones(E), f"{layer}router.scale": torch.tensor(2.0)}
    split = each(gate, up, down, f"{layer}experts.")
    config = {"text_config": CONFIG}
    there_and_back(parse_family(GEMMA, "gemma4.toml"), config, hub | rest, split | rest, "per-expert", tmp_path)


NEMOTRON = """
name = "nemotron_h"
model_types = ["nemotron_h"]
layers = "backbone.layers."
embedding = "backbone.embeddings.weight"
router = "mixer.gate"
correction_bias = "mixer.gate.e_score_correction_bias"
fp32_pins = ['\\.e_score_correction_bias$']
[[renames]]
source = "memory"
name = "model."
hub = "backbone."
where = "prefix"
[experts]
count = ["n_routed_experts"]
intermediate = ["moe_intermediate_size"]
hub = "per-expert"
memory = "fused"
[[experts.layouts]]
name = "per-expert"
tensors = [
    { name = "mixer.experts.{e}.up_proj.weight", holds = ["up"] },
    { name = "mixer.experts.{e}.down_proj.weight", holds = ["down"] },
]
[[experts.layouts]]
name = "fused"
tensors = [
    { name = "mixer.experts.up_proj", holds = ["up"] },
    { name = "mixer.experts.down_proj", holds = ["down"] },
]
"""


def test_nemotron_h_without_a_gate_under_another_prefix(tmp_path: Path) -> None:
    _, up, down = bank()
    hub = {f"backbone.layers.3.mixer.experts.{e}.up_proj.weight": up[e] for e in range(E)}
    hub |= {f"backbone.layers.3.mixer.experts.{e}.down_proj.weight": down[e] for e in range(E)}
    fused = {"model.layers.3.mixer.experts.up_proj": up, "model.layers.3.mixer.experts.down_proj": down}
    for found, prefix in ((hub, "backbone."), (fused, "model.")):
        found |= {
            f"{prefix}layers.3.mixer.gate.weight": torch.ones(E, H),
            f"{prefix}embeddings.weight": torch.ones(2, H),
        }
    config = {"n_routed_experts": E, "moe_intermediate_size": I, "hidden_size": H}
    there_and_back(parse_family(NEMOTRON, "nemotron.toml"), config, hub, fused, "fused", tmp_path)


VL = f"""
name = "qwen3_vl_moe"
model_types = ["qwen3_vl_moe"]
layers = "model.language_model.layers."
router = "mlp.gate"
[experts]
{SIZES}
hub = "transposed"
memory = "fused"
[[experts.layouts]]
name = "transposed"
tensors = [
    {{ name = "mlp.experts.gate_up_proj", holds = ["gate", "up"], orientation = "in-out" }},
    {{ name = "mlp.experts.down_proj", holds = ["down"], orientation = "in-out" }},
]
[[experts.layouts]]
name = "fused"
tensors = [
    {{ name = "mlp.experts.gate_up_proj", holds = ["gate", "up"] }},
    {{ name = "mlp.experts.down_proj", holds = ["down"] }},
]
"""


def vl(hidden: int, width: int) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    values = torch.arange(3 * E * hidden * width, dtype=torch.float32)
    gate, up, down = values.view(3, E, width, hidden)
    down = down.reshape(E, hidden, width)
    stem = "model.language_model.layers.0.mlp.experts."
    fused = {f"{stem}gate_up_proj": torch.cat([gate, up], 1), f"{stem}down_proj": down}
    config = {"text_config": {"num_experts": E, "moe_intermediate_size": width, "hidden_size": hidden}}
    return config, {name: t.mT for name, t in fused.items()}, fused


def test_qwen3_vl_moe_equal_names_told_apart_by_dimensions(tmp_path: Path) -> None:
    config, hub, fused = vl(H, I)
    there_and_back(parse_family(VL, "vl.toml"), config, hub, fused, "fused", tmp_path)


@pytest.mark.parametrize("hidden,width", [(12, 6), (6, 6)])
def test_coinciding_dimensions_are_refused_and_a_declaration_decides(hidden: int, width: int, tmp_path: Path) -> None:
    """Where one of the tensors is square, it may lie either way whatever the other one says."""
    config, hub, fused = vl(hidden, width)
    family = parse_family(VL, "vl.toml")
    first = stored(hub, tmp_path / "hub")
    for target in ("hub", "fused"):
        with pytest.raises(Refused, match="--experts keep") as refusal:
            convert_experts(first, family, config, target)
        assert refusal.value.exit_status == 3 and "layers.0." in refusal.value.where
    assert_same(convert_experts(first, family, config, "keep")[0], hub)
    assert_same(convert_experts(first, family, config, "fused", source_hint="transposed")[0], fused)
    assert_same(convert_experts(first, family, config, "hub", source_hint="transposed")[0], hub)
    second = stored(fused, tmp_path / "fused")
    assert_same(convert_experts(second, family, config, "hub", source_hint="fused")[0], hub)


def test_dimensions_that_the_config_lacks_decide_nothing(tmp_path: Path) -> None:
    config, hub, _ = vl(H, I)
    del config["text_config"]["moe_intermediate_size"]
    with pytest.raises(Refused, match="--experts keep"):
        convert_experts(stored(hub, tmp_path), parse_family(VL, "vl.toml"), config, "fused")


def test_one_tensor_turned_and_the_other_not_is_refused(tmp_path: Path) -> None:
    config, hub, fused = vl(H, I)
    mixed = {name: (hub if "gate_up" in name else fused)[name] for name in hub}
    with pytest.raises(Refused):
        convert_experts(stored(mixed, tmp_path), parse_family(VL, "vl.toml"), config, "fused")


def test_a_declaration_that_shapes_contradict_is_refused(tmp_path: Path) -> None:
    config, hub, _ = vl(H, I)
    with pytest.raises(ReshardError):
        convert_experts(stored(hub, tmp_path), parse_family(VL, "vl.toml"), config, "fused", source_hint="fused")
