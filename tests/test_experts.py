"""Routed experts: every layout to every other, against transformers' own saves and torch; gaps are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mini_models
import reshard
from mini_models import QWEN, assert_same, family_of, qwen_layer, stored
from reshard.errors import Damaged, Refused
from reshard.transforms.experts import convert_experts

MOE = ("qwen3_moe", "deepseek_v3")


# Experts against transformers' own saves


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Both ways in which transformers writes a model: the Hub's layout, and what it holds in memory."""
    found = {}
    for kind in MOE:
        root = tmp_path_factory.mktemp(kind)
        model = mini_models.write(kind, root / "hub")
        model.save_pretrained(root / "memory", save_original_format=False)
        found[kind] = (root / "hub", root / "memory")
    return found


@pytest.mark.parametrize("kind", MOE)
def test_hub_and_fused_layouts_are_transformers_own(
    kind: str, saves: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    hub, memory = (load_file(path / "model.safetensors") for path in saves[kind])
    assert sum(".experts." in name for name in memory) < sum(".experts." in name for name in hub)
    config = json.loads((saves[kind][0] / "config.json").read_text())
    ours = [dict(reshard.open(str(path)).tensors) for path in saves[kind]]
    for target, right in (("hub", hub), ("per-expert", hub), ("fused", memory)):
        for source in ours:
            assert_same(convert_experts(source, family_of(kind), config, target)[0], right)


@pytest.mark.parametrize("kind", MOE)
def test_stacks_of_one_projection(kind: str, saves: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """What prime-rl and torchtitan keep: w1 the gates, w3 the ups, w2 the downs, stacked here by torch."""
    hub, memory = (load_file(path / "model.safetensors") for path in saves[kind])
    config = json.loads((saves[kind][0] / "config.json").read_text())
    stacked = {name: tensor for name, tensor in hub.items() if ".mlp.experts." not in name}
    layers = sorted({name.partition("mlp.experts.")[0] for name in hub if ".mlp.experts." in name})
    assert layers
    for layer in layers:
        for ours, theirs in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            parts = [hub[f"{layer}mlp.experts.{e}.{theirs}_proj.weight"] for e in range(4)]
            stacked[f"{layer}mlp.experts.{ours}"] = torch.stack(parts)
    source = stored(stacked, tmp_path)
    assert_same(convert_experts(source, family_of(kind), config, "hub")[0], hub)
    assert_same(convert_experts(source, family_of(kind), config, "fused")[0], memory)
    assert_same(convert_experts(source, family_of(kind), config, "keep")[0], stacked)
    first = dict(reshard.open(str(saves[kind][1])).tensors)
    assert_same(convert_experts(first, family_of(kind), config, "stacked")[0], stacked)


# Numbers of experts


def test_twelve_experts_keep_their_numeric_order(tmp_path: Path) -> None:
    hub = qwen_layer()
    source = stored(dict(sorted(hub.items())), tmp_path / "hub")  # as text, 10 comes before 2
    fused = convert_experts(source, family_of("qwen3_moe"), QWEN, "fused")[0]
    values = fused["model.layers.0.mlp.experts.gate_up_proj"].torch()
    assert values.shape == (12, 4, 3)
    for e in range(12):
        assert (values[e, :2] == e).all() and (values[e, 2:] == 100 + e).all()
        assert (fused["model.layers.0.mlp.experts.down_proj"].torch()[e] == 200 + e).all()
    back = convert_experts(fused, family_of("qwen3_moe"), QWEN, "hub")[0]
    assert_same(back, hub)
    assert_same(
        convert_experts(source, family_of("qwen3_moe"), None, "fused")[0], {n: t.torch() for n, t in fused.items()}
    )


STEM = "model.layers.0.mlp.experts."
FAULTS: dict[str, tuple[Any, str, str]] = {
    # what is done to the tensors: (change, name in the error, words of the error)
    "one expert": (lambda t: [t.pop(n) for n in list(t) if ".experts.7." in n], f"{STEM}7.", "missing"),
    "the last expert": (lambda t: [t.pop(n) for n in list(t) if ".experts.11." in n], f"{STEM}11.", "missing"),
    "one projection of one expert": (lambda t: t.pop(f"{STEM}7.up_proj.weight"), f"{STEM}7.up_proj.weight", "missing"),
    "one projection": (lambda t: [t.pop(n) for n in list(t) if "up_proj" in n], "up_proj", "missing"),
    "one too many": (
        lambda t: t.update({n.replace("11", "12"): v.clone() for n, v in t.items() if ".experts.11." in n}),
        f"{STEM}12.",
        "12 experts",
    ),
    "a wrong shape": (
        lambda t: t.update({f"{STEM}3.up_proj.weight": torch.ones(2, 4)}),
        f"{STEM}3.up_proj.weight",
        "2, 3",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("target", ["hub", "fused"])
def test_incomplete_experts_are_damage_by_name(fault: str, target: str, tmp_path: Path) -> None:
    tensors = qwen_layer()
    change, where, says = FAULTS[fault]
    change(tensors)
    if fault == "a wrong shape" and target == "hub":
        return  # nothing is rearranged
    with pytest.raises(Damaged, match=says) as error:
        convert_experts(stored(tensors, tmp_path), family_of("qwen3_moe"), QWEN, target)
    assert where in error.value.where and error.value.exit_status == 4


@pytest.mark.parametrize("count", [8, 16])
def test_fused_experts_are_counted_against_the_config(count: int, tmp_path: Path) -> None:
    fused = {f"{STEM}gate_up_proj": torch.ones(12, 4, 3), f"{STEM}down_proj": torch.ones(12, 3, 2)}
    for target in ("hub", "fused"):
        with pytest.raises(Damaged, match=rf"12 rows of experts where the config says {count}") as error:
            convert_experts(stored(fused, tmp_path), family_of("qwen3_moe"), {**QWEN, "num_experts": count}, target)
        assert error.value.where in fused


def test_fused_tensors_that_disagree_are_damage(tmp_path: Path) -> None:
    fused = {f"{STEM}gate_up_proj": torch.ones(12, 4, 3), f"{STEM}down_proj": torch.ones(11, 3, 2)}
    config = {key: value for key, value in QWEN.items() if key != "num_experts"}
    with pytest.raises(Damaged, match="experts"):
        convert_experts(stored(fused, tmp_path), family_of("qwen3_moe"), config, "hub")


def test_two_layouts_in_one_layer_are_refused(tmp_path: Path) -> None:
    tensors = {**qwen_layer(), f"{STEM}gate_up_proj": torch.ones(12, 4, 3), f"{STEM}down_proj": torch.ones(12, 3, 2)}
    with pytest.raises(Refused, match="layouts"):
        convert_experts(stored(tensors, tmp_path), family_of("qwen3_moe"), QWEN, "hub")


def test_a_router_without_its_experts_is_damage(tmp_path: Path) -> None:
    tensors = {**qwen_layer(), "model.layers.1.mlp.gate.weight": torch.ones(12, 3)}
    with pytest.raises(Damaged, match=r"layers\.1\.mlp\.gate"):
        convert_experts(stored(tensors, tmp_path), family_of("qwen3_moe"), QWEN, "hub")


@pytest.mark.parametrize("end", ["gate_up_proj_scale_inv", "gate_up_proj_bias", "gate_up_proj.scale"])
def test_companions_are_not_parted_from_their_weights(end: str, tmp_path: Path) -> None:
    tensors = {
        f"{STEM}gate_up_proj": torch.ones(12, 4, 3),
        f"{STEM}down_proj": torch.ones(12, 3, 2),
        STEM + end: torch.ones(12, 4),
    }
    source = stored(tensors, tmp_path)
    with pytest.raises(Refused, match="--experts keep") as error:
        convert_experts(source, family_of("qwen3_moe"), QWEN, "hub")
    assert error.value.where == STEM + end
    assert_same(convert_experts(source, family_of("qwen3_moe"), QWEN, "fused")[0], tensors)


@pytest.mark.parametrize("main_is_fused", [True, False])
@pytest.mark.parametrize("mtp", ["mtp.layers.0.", "model.layers.2."])
def test_extra_layers_stored_otherwise_than_the_rest(main_is_fused: bool, mtp: str, tmp_path: Path) -> None:
    """A multi-token-prediction layer has its own layout; both come out alike."""
    config = QWEN | {"num_hidden_layers": 1}
    hub = qwen_layer() | qwen_layer(layer=mtp)
    family = family_of("qwen3_moe")
    fused = {
        n: t.torch() for n, t in convert_experts(stored(hub, tmp_path / "hub"), family, config, "fused")[0].items()
    }
    assert len(fused) == 4
    first, second = (fused, hub) if main_is_fused else (hub, fused)
    mixed = {n: t for n, t in first.items() if not n.startswith(mtp)} | {
        n: t for n, t in second.items() if n.startswith(mtp)
    }
    source = stored(mixed, tmp_path / "mixed")
    assert_same(convert_experts(source, family, config, "hub")[0], hub)
    assert_same(convert_experts(source, family, config, "fused")[0], fused)


LARGE = """
import time
from reshard.families import find_family
from reshard.tensors.lazy import Stored
from reshard.transforms.experts import convert_experts

config = {"model_type": "deepseek_v3", "n_routed_experts": 256, "moe_intermediate_size": 8, "hidden_size": 16}
tensors = {}
for layer in range(61):
    stem = f"model.layers.{layer}."
    for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_a_proj", "self_attn.o_proj"):
        tensors[f"{stem}{norm}.weight"] = Stored("BF16", (16,), "f", 0)
    for e in range(256):
        for role, shape in (("gate", (8, 16)), ("up", (8, 16)), ("down", (16, 8))):
            tensors[f"{stem}mlp.experts.{e}.{role}_proj.weight"] = Stored("BF16", shape, "f", e)
family = find_family(config)
times = [time.process_time()]
fused = convert_experts(tensors, family, config, "fused")[0]
times.append(time.process_time())
back = convert_experts(fused, family, config, "hub")[0]
times.append(time.process_time())
assert len(fused) == 61 * 6 and set(back) == set(tensors)
# Not ru_maxrss: it counts what the parent held when it started this process.
mark = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))
print(times[1] - times[0], times[2] - times[1], int(mark.split()[1]) >> 10)
"""


def test_forty_six_thousand_experts_in_seconds() -> None:
    """The size of DeepSeek V3: plans alone, no bytes. Seconds of processor time, MiB of the whole process."""
    source = str(Path(reshard.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, env={"PYTHONPATH": source}
    )
    there, back, peak = map(float, done.stdout.split())
    assert there < 3 and back < 3 and peak < 300, done.stdout


# Families that nobody has described


def test_an_unknown_family_passes_as_it_is(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.weird.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(2)}
    source = stored(tensors | qwen_layer(2), tmp_path)
    assert_same(convert_experts(source, None, None, "hub", training=True)[0], tensors | qwen_layer(2))
    for target in ("fused", "per-expert"):
        with pytest.raises(Refused, match="reshard families"):
            convert_experts(source, None, None, target)


@pytest.mark.parametrize("name", ["mlp.experts.gate_up_proj", "mlp.experts.w1", "moe.up_proj.weight"])
def test_fused_experts_of_an_unknown_family_are_not_passed_off_as_the_hub_s(name: str, tmp_path: Path) -> None:
    tensors = {f"model.layers.0.{name}": torch.ones(2, 3, 4)}
    source = stored(tensors, tmp_path)
    for config, remedy in (({"model_type": "nobody_knows"}, "--experts keep"), (None, "--config-from")):
        with pytest.raises(Refused, match=remedy) as error:
            convert_experts(source, None, config, "hub", training=True)
        assert error.value.where == f"model.layers.0.{name}"
    assert_same(convert_experts(source, None, None, "keep", training=True)[0], tensors)
    assert_same(convert_experts(source, None, None, "hub", training=False)[0], tensors)
