"""convert as a whole: dtypes, ties, references, places of the output, reports; inputs by torch DCP and safetensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import reshard
from reshard.errors import Damaged, Refused, UsageError
from reshard.verbs.convert import plan_convert

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_dcp(out: Path, state: dict[str, torch.Tensor], **config: Any) -> Path:
    """A DCP directory under the key "model", with a config.json in it."""
    dcp.save({"model": state}, checkpoint_id=out)
    (out / "config.json").write_text(json.dumps({"model_type": "made_up", **config}))
    return out


def load(out: Path | str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(out).glob("*.safetensors")):
        found |= load_file(file)
    return found


def config_of(out: Path | str) -> Any:
    return json.loads((Path(out) / "config.json").read_text())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_cast_leaves_pins_integers_and_shapes_alone(tmp_path: Path) -> None:
    """The router bias that bf16 would flatten to four equal numbers, and tensors that a careless cast breaks."""
    bias = torch.tensor([7.0, 7.01, 7.005, 7.002])
    state = {
        "model.layers.0.mlp.gate.e_score_correction_bias": bias,
        "model.layers.0.mlp.w": torch.randn(2, 3),
        "model.layers.0.pos": torch.arange(4),
        "model.layers.0.flag": torch.tensor([True, False]),
        "model.layers.0.scalar": torch.tensor(3.5),
        "model.layers.0.empty": torch.zeros(0, 4),
    }
    source = save_dcp(tmp_path / "dcp", state, model_type="deepseek_v3", torch_dtype="bfloat16", num_hidden_layers=1)
    report = reshard.convert(str(source), str(tmp_path / "out"))
    found = load(tmp_path / "out")
    assert found.keys() == state.keys()
    assert same(found["model.layers.0.mlp.gate.e_score_correction_bias"], bias)
    assert same(found["model.layers.0.pos"], state["model.layers.0.pos"])
    assert same(found["model.layers.0.flag"], state["model.layers.0.flag"])
    for name in ("mlp.w", "scalar", "empty"):
        assert same(found[f"model.layers.0.{name}"], state[f"model.layers.0.{name}"].bfloat16())
    assert config_of(tmp_path / "out")["torch_dtype"] == "bfloat16"
    assert any("as the model's config declares" in note for note in report["warnings"])


def test_one_rounding_equals_torch_s(tmp_path: Path) -> None:
    state = {f"layers.{i}.w": torch.randn(300, 700) * 10.0 ** (i - 4) for i in range(8)}
    source = save_dcp(tmp_path / "dcp", state)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        reshard.convert(str(source), str(tmp_path / name), dtype=name)
        assert all(same(tensor, state[key].to(dtype)) for key, tensor in load(tmp_path / name).items())


@pytest.mark.parametrize("nested", [False, True])
def test_tied_pair_is_written_once_when_equal_and_twice_when_not(nested: bool, tmp_path: Path) -> None:
    embed = torch.randn(32, 16)
    flag = {"tie_word_embeddings": True}
    config = {**flag, "text_config": dict(flag)} if nested else flag
    equal = {"model.embed_tokens.weight": embed, "lm_head.weight": embed.clone(), "model.norm.weight": torch.ones(16)}
    report = reshard.convert(str(save_dcp(tmp_path / "a", equal, **config)), str(tmp_path / "once"))
    assert sorted(load(tmp_path / "once")) == ["model.embed_tokens.weight", "model.norm.weight"]
    assert [row["name"] for row in report["dropped"]] == ["lm_head.weight"]
    assert config_of(tmp_path / "once")["tie_word_embeddings"] is True
    differing = dict(equal, **{"lm_head.weight": embed.index_fill(0, torch.tensor([31]), 2.0)})
    report = reshard.convert(str(save_dcp(tmp_path / "b", differing, **config)), str(tmp_path / "twice"))
    found = load(tmp_path / "twice")
    assert all(same(found[name], tensor) for name, tensor in differing.items())
    assert len(found) == 3
    written = config_of(tmp_path / "twice")
    assert written["tie_word_embeddings"] is False
    assert not nested or written["text_config"]["tie_word_embeddings"] is False
    assert any("tie_word_embeddings" in note for note in report["warnings"])


def test_equal_values_are_not_a_tie(tmp_path: Path) -> None:
    state = {"model.embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": torch.ones(4, 2)}
    reshard.convert(str(save_dcp(tmp_path / "a", state, tie_word_embeddings=False)), str(tmp_path / "out"))
    assert load(tmp_path / "out").keys() == state.keys()


def test_like_follows_names_dtypes_and_files(tmp_path: Path) -> None:
    state = {f"model.layers.{i}.w": torch.randn(40, 30) for i in range(6)} | {"model.norm.weight": torch.ones(3)}
    (tmp_path / "ref").mkdir()
    reference = {name: tensor.bfloat16() for name, tensor in state.items()} | {"model.norm.weight": torch.ones(3)}
    one = {name: tensor for name, tensor in reference.items() if name[-3] in "024"}
    two = {name: tensor for name, tensor in reference.items() if name not in one}
    save_file(one, tmp_path / "ref" / "model-00001-of-00002.safetensors")
    save_file(two, tmp_path / "ref" / "model-00002-of-00002.safetensors")
    source = save_dcp(tmp_path / "dcp", state)
    reshard.convert(str(source), str(tmp_path / "out"), like=str(tmp_path / "ref"))
    assert load_file(tmp_path / "out" / "model-00001-of-00002.safetensors").keys() == one.keys()
    found = load(tmp_path / "out")
    assert all(same(found[name], tensor) or name.endswith("w") for name, tensor in reference.items())
    assert {str(tensor.dtype) for name, tensor in found.items() if name.endswith("w")} == {"torch.bfloat16"}
    save_file(two | {"extra": torch.ones(1)}, tmp_path / "ref" / "model-00002-of-00002.safetensors")
    with pytest.raises(Refused, match="lacks extra"):
        reshard.convert(str(source), str(tmp_path / "no"), like=str(tmp_path / "ref"))
    assert not (tmp_path / "no").exists()


def test_default_places(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", {"layers.0.w": torch.randn(2, 2)})
    assert reshard.convert(str(source))["output"] == str(source / "weights")
    again = reshard.convert(str(source / "weights"), dtype="bfloat16")
    assert again["output"] == str(source / "weights-bfloat16")
    with pytest.raises(UsageError, match="OUT"):
        plan_convert(str(source / "weights"))
    with pytest.raises(Refused, match="already exists"):
        plan_convert(str(source))


def test_plain_dcp_without_a_config_is_refused(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", {"layers.0.w": torch.randn(2, 2)})
    (source / "config.json").unlink()
    with pytest.raises(Refused, match="--config-from"):
        plan_convert(str(source), str(tmp_path / "out"))


def test_two_candidate_models_are_refused_until_one_is_named(tmp_path: Path) -> None:
    state = {f"layers.{i}.w": torch.full((2, 2), float(i)) for i in range(3)}
    dcp.save({"model": state, "ema": {name: t + 10 for name, t in state.items()}}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp/config.json").write_text('{"model_type": "made_up"}')
    with pytest.raises(Refused, match="--model-key"):
        plan_convert(str(tmp_path / "dcp"), str(tmp_path / "out"))
    reshard.convert(str(tmp_path / "dcp"), str(tmp_path / "out"), model_key="ema")
    assert load(tmp_path / "out")["layers.2.w"].unique().item() == 12


def test_report_and_plan_have_the_promised_fields(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", {"layers.0.w": torch.randn(20, 20), "layers.0.b": torch.randn(20)})
    planned = plan_convert(str(source), str(tmp_path / "out"), drop=("b$",))
    fields = {
        "command", "status", "source", "output", "layout", "family", "tensors", "bytes", "dropped", "kept", "warnings",
        "seconds", "peak_rss_bytes", "error",
    }  # fmt: skip
    before = planned.to_json()
    assert fields <= before.keys() and before["status"] == "planned"
    assert before["plan"]["files"][0]["tensors"][0]["name"] == "layers.0.w"
    assert "layers.0.w" in str(planned) and "--drop b$" in str(planned)
    assert not (tmp_path / "out").exists()
    done = planned.run()
    assert fields <= done.keys() and done["status"] == "done"
    assert done["tensors"] == 1 and done["dropped"] == [{"name": "layers.0.b", "reason": "--drop b$"}]
    assert done["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_copies_need_no_torch(tmp_path: Path) -> None:
    """A same-dtype conversion both ways and an fp32 to bf16 cast in a process where torch cannot be imported."""
    import subprocess

    source = save_dcp(tmp_path / "dcp", {"layers.0.w": torch.randn(20, 20)})
    code = (
        "import sys; sys.modules['torch'] = None; import reshard; a, b, c, d = sys.argv[1:]; reshard.convert(a, b);"
        "reshard.convert(b, c, to='dcp'); reshard.convert(c, d, dtype='bfloat16')"
    )
    places = [str(tmp_path / name) for name in ("one", "two", "three")]
    subprocess.run([sys.executable, "-c", code, str(source), *places], check=True)
    assert load(places[2])["layers.0.w"].dtype == torch.bfloat16


def test_opened_checkpoint_is_a_mapping(tmp_path: Path) -> None:
    values = torch.randn(6, 4)
    source = save_dcp(tmp_path / "dcp", {"layers.0.w": values}, model_type="llama")
    checkpoint = reshard.open(str(source))
    assert list(checkpoint) == ["layers.0.w"] and checkpoint.layout == "dcp" and checkpoint.family == "llama"
    assert checkpoint.config is not None and checkpoint.config["model_type"] == "llama"
    assert torch.equal(checkpoint["layers.0.w"][2:4], values[2:4])
    assert checkpoint["layers.0.w"].shape == (6, 4) and checkpoint["layers.0.w"].dtype == "F32"


def test_refusals_leave_no_staging_behind(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", {"layers.0.w": torch.randn(20, 20)})
    with pytest.raises(UsageError, match="too little"):
        reshard.convert(str(source), str(tmp_path / "out"), max_memory="10MiB")
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_optimizer_state_is_never_a_model(tmp_path: Path) -> None:
    state = {"model": {"layers.0.w": torch.ones(2)}, "optimizers": {"layers.0.w": torch.ones(2)}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(Refused, match="optimizer state, no model"):
        plan_convert(str(tmp_path / "dcp"), str(tmp_path / "out"), model_key="optimizers")


def test_one_file_keeps_the_config_beside_it(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"layers.0.w": torch.randn(4, 4)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "made_up"}')
    reshard.convert(str(tmp_path / "hf" / "model.safetensors"), str(tmp_path / "out"))
    assert config_of(tmp_path / "out")["model_type"] == "made_up"


def test_nothing_left_to_write_and_useless_flags_are_refused(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", {"layers.0.w": torch.randn(4, 4)})
    with pytest.raises(Refused, match="no tensor is left"):
        plan_convert(str(source), str(tmp_path / "out"), drop=(".*",))
    with pytest.raises(UsageError, match="--to dcp"):
        plan_convert(str(source), str(tmp_path / "out"), key_prefix="x.")


def test_absent_layers_are_damage(tmp_path: Path) -> None:
    state = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(2, 2) for i in (0, 2)}
    source = save_dcp(tmp_path / "dcp", state, model_type="llama", num_hidden_layers=3)
    with pytest.raises(Damaged, match="1 are absent"):
        plan_convert(str(source), str(tmp_path / "out"))


def test_config_that_is_a_link_out_of_its_directory(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", {"layers.0.w": torch.randn(4, 4)})
    (source / "config.json").rename(tmp_path / "elsewhere.json")
    (source / "config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(Refused, match="link out"):
        plan_convert(str(source), str(tmp_path / "out"))


def test_side_files_are_hashed_and_verified(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", {"layers.0.w": torch.randn(4, 4)})
    (source / "tokenizer.json").write_text("{}")
    reshard.convert(str(source), str(tmp_path / "out"))
    assert reshard.verify(str(tmp_path / "out"))["status"] == "ok"
    (tmp_path / "out" / "tokenizer.json").write_text("[]")
    found = reshard.verify(str(tmp_path / "out"))
    assert found["status"] == "failed"
    assert "tokenizer.json" in found["problems"][0]["file"]


def test_keys_of_several_models_without_paths(tmp_path: Path) -> None:
    """planner_data says which group a key is of; without it two copies of the same names cannot be told apart."""
    import pickle

    state = {f"layers.{i}.w": torch.full((2, 2), float(i)) for i in range(2)}
    dcp.save({"model": state, "ema": dict(state)}, checkpoint_id=tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp/.metadata").read_bytes())
    metadata.planner_data = None
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "dcp/config.json").write_text('{"model_type": "made_up"}')
    with pytest.raises(Refused, match="--model-key"):
        plan_convert(str(tmp_path / "dcp"), str(tmp_path / "out"))
    reshard.convert(str(tmp_path / "dcp"), str(tmp_path / "out"), model_key="ema")
    assert sorted(load(tmp_path / "out")) == sorted(state)


@pytest.mark.parametrize("declared", ["floatx", "float8_e4m3fn", "int8"])
def test_config_dtype_that_nothing_is_cast_to(declared: str, tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", {"layers.0.w": torch.randn(4, 4)}, dtype=declared)
    with pytest.raises(Refused, match="--dtype bfloat16 or --dtype keep"):
        plan_convert(str(source), str(tmp_path / "out"))
    reshard.convert(str(source), str(tmp_path / "out"), dtype="keep")
