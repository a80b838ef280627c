"""The config that is exported, and the files that travel with the weights."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mini_models
import reshard
from reshard.errors import Refused
from reshard.families import find_family, parse_family
from reshard.hf.config import export_config, has_mtp_tensors
from reshard.hf.sidefiles import find_side_files, missing_code

if TYPE_CHECKING:
    from pathlib import Path


def export(config: dict[str, Any], **options: Any) -> tuple[dict[str, Any], list[str]]:
    """As for a training checkpoint written in bf16, unless options say otherwise; the given config must not change."""
    before = deepcopy(config)
    usual: dict[str, Any] = {"family": None, "dtype_written": "bfloat16", "tied": None, "training": True}
    result = export_config(config, **(usual | options))
    assert config == before
    return result


# What a config says of dtypes, the training run and ties


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_field_that_the_config_has_is_set_at_every_level(key: str) -> None:
    config = {
        key: "float32",
        "text_config": {key: "float32", "rope_parameters": {"type": "default"}},
        "vision_config": {key: "float16", "depth": 2},
        "quantization_config": {key: "float32"},
    }
    found, _ = export(config)
    assert (found[key], found["text_config"][key], found["vision_config"][key]) == ("bfloat16",) * 3
    assert found["quantization_config"] == {key: "float32"}
    assert set(found) == set(config)


def test_a_config_without_a_dtype_gets_one_and_none_leaves_it() -> None:
    assert export({"model_type": "llama"})[0] == {"model_type": "llama", "dtype": "bfloat16"}
    assert export({"model_type": "llama"}, dtype_written=None)[0] == {"model_type": "llama"}


RUN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "_attn_implementation": "flash_attention_2",
    "model_type": "qwen3_moe",
    "use_grouped_mm": True,
    "use_cache": False,
    "hidden_size": 8,
    "output_router_logits": True,
    "fused_moe": True,
    "ep_comm_backend": "deepep",
    "router_aux_loss_coef": 0.001,
    "zz_unheard_of": [1, {"use_cache": False}],
    "dtype": "float32",
}


def test_values_of_the_training_run_are_replaced() -> None:
    found, notes = export(RUN | {"text_config": {"use_cache": False, "attn_implementation": "sdpa"}})
    right = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "use_cache": True,
        "hidden_size": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "zz_unheard_of": [1, {"use_cache": False}],
        "dtype": "bfloat16",
        "text_config": {"use_cache": True},
    }
    assert found == right
    assert list(found) == list(right)  # the order of keys is kept
    for key in ("_attn_implementation", "use_grouped_mm", "use_cache", "output_router_logits", "ep_comm_backend"):
        assert any(key in note for note in notes), key
    assert any("text_config.use_cache" in note for note in notes)


def test_a_release_s_config_keeps_all_that(tmp_path: Path) -> None:
    assert export(RUN, training=False, dtype_written="float32") == (RUN, [])
    source = tmp_path / "in"
    source.mkdir()
    save_file({"model.norm.weight": torch.ones(2)}, source / "model.safetensors")
    text = '{"use_cache" :false,\n  "model_type": "odd", "dtype":"float32" }'
    (source / "config.json").write_text(text)
    reshard.convert(str(source), str(tmp_path / "out"))
    assert (tmp_path / "out/config.json").read_text() == text  # to the byte


def test_untying_reaches_nested_configs() -> None:
    config = {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}, "vision_config": {"depth": 1}}
    found, notes = export(config, tied=False)
    assert found["tie_word_embeddings"] is False and found["text_config"]["tie_word_embeddings"] is False
    assert found["vision_config"] == {"depth": 1}
    deep = {"thinker_config": {"text_config": {"tie_word_embeddings": True}}}
    assert export(deep, tied=False)[0]["thinker_config"]["text_config"]["tie_word_embeddings"] is False
    assert any("tie_word_embeddings" in note for note in notes)
    for tied in (True, None):
        assert export(config, tied=tied)[0]["text_config"]["tie_word_embeddings"] is True


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe", "deepseek_v3"])
def test_transformers_reads_what_is_exported(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = json.loads(mini_models.build_config(kind).to_json_string(use_diff=False)) | {"torch_dtype": "float32"}
    config.pop("dtype", None)
    found, _ = export(config | {"use_cache": False}, family=find_family(config))
    (tmp_path / "config.json").write_text(json.dumps(found))
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16 and loaded.use_cache is True
    assert loaded.hidden_size == 64 and type(loaded).model_type == config["model_type"]


# Layers of multi-token prediction


def test_no_count_of_mtp_layers_dangles() -> None:
    family = find_family({"model_type": "deepseek_v3"})
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    main = ["model.layers.0.a", "model.layers.1.a", "lm_head.weight"]
    assert has_mtp_tensors(main, family, config) is False
    assert has_mtp_tensors([*main, "model.layers.2.eh_proj.weight"], family, config) is True
    found, notes = export(config, family=family, has_mtp=False, training=False)
    assert found["num_nextn_predict_layers"] == 0 and any("num_nextn_predict_layers" in note for note in notes)
    for known in (True, None):
        assert export(config, family=family, has_mtp=known)[0]["num_nextn_predict_layers"] == 1
    nested = {"text_config": {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}}
    assert has_mtp_tensors(main, family, nested) is False
    assert export(nested, family=family, has_mtp=False)[0]["text_config"]["num_nextn_predict_layers"] == 0
    assert has_mtp_tensors(main, find_family({"model_type": "llama"}), config) is None
    assert has_mtp_tensors(main, family, None) is None
    # Without the usual prefix (a base model saved alone), layer 2 cannot be told from what is not there.
    assert has_mtp_tensors(["layers.0.a", "layers.2.eh_proj.weight"], family, config) is None


def test_mtp_modules_under_a_prefix_of_their_own() -> None:
    text = 'name = "x"\nmodel_types = ["x"]\nmtp = { count = "mtp_num_layers", prefix = "mtp." }\n'
    family = parse_family(text, "x.toml")
    assert has_mtp_tensors(["mtp.fc.weight"], family, {}) is True
    assert has_mtp_tensors(["model.layers.99.mtp.weight"], family, {"num_hidden_layers": 2}) is False
    assert export({"mtp_num_layers": 1}, family=family, has_mtp=False)[0]["mtp_num_layers"] == 0


def test_a_checkpoint_that_lost_its_mtp_layer_says_so_and_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tmp_path / "in"
    mini_models.write("deepseek_v3", source, mtp=True)
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    reshard.convert(str(source), str(tmp_path / "whole"))
    assert json.loads((tmp_path / "whole/config.json").read_text())["num_nextn_predict_layers"] == 1
    report = reshard.convert(str(source), str(tmp_path / "out"), drop=[r"^model\.layers\.2\."])
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert found == config | {"num_nextn_predict_layers": 0}
    assert any("num_nextn_predict_layers" in note for note in report["warnings"])
    assert all(row["name"].startswith("model.layers.2.") for row in report["dropped"]) and report["dropped"]
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


# Side files


TRAVEL = (
    "chat_template.jinja", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "tokenizer.json", "tokenizer_config.json", "merges.txt", "modeling_x.py", "LICENSE", "code/helper.py",
    "code/deep/more.py", "templates/chat.jinja",
)  # fmt: skip
STAY = (
    "pytorch_model.bin", "training_args.bin", "trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state_0.pth",
    "model.gguf", "model.onnx", "old.safetensors.index.json", "model.safetensors.tmp", ".git/config", ".gitattributes",
    "_cache/x.json", "__pycache__/modeling_x.cpython-311.pyc", "checkpoint-10/config.json", "original/params.json",
    "wandb/run.json", "logs/out.txt", "adapter_config.json", "reshard.json", "weights/config.json",
)  # fmt: skip


def fill(home: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"content of {name}")


def test_what_travels_and_what_stays(tmp_path: Path) -> None:
    fill(tmp_path, (*TRAVEL, *STAY))
    (tmp_path / "config.json").write_text("{}")
    found = find_side_files([str(tmp_path)])
    assert set(found) == set(TRAVEL)
    assert all(path == str(tmp_path / name) for name, path in found.items())


def test_side_files_arrive_byte_for_byte(tmp_path: Path) -> None:
    source = tmp_path / "in"
    fill(source, (*TRAVEL, *STAY))
    (source / "old.safetensors.index.json").unlink()
    (source / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9}')
    save_file({"model.norm.weight": torch.ones(2)}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "odd", "dtype": "float32"}')
    reshard.convert(str(source), str(tmp_path / "out"))
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {*TRAVEL, "config.json", "model.safetensors", "reshard.json"}
    for name in TRAVEL:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_the_first_directory_gives_a_file_and_code_comes_from_it_alone(tmp_path: Path) -> None:
    fill(tmp_path / "a", ("config.json", "tokenizer.json", "modeling_a.py"))
    fill(tmp_path / "b", ("config.json", "tokenizer.json", "merges.txt", "modeling_b.py", "code/b.py"))
    found = find_side_files([str(tmp_path / "a"), str(tmp_path / "b")])
    assert found == {
        "tokenizer.json": str(tmp_path / "a/tokenizer.json"),
        "modeling_a.py": str(tmp_path / "a/modeling_a.py"),
        "merges.txt": str(tmp_path / "b/merges.txt"),
    }


def test_links_out_of_the_directory_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, ("secret.json", "model/tokenizer.json"))
    (tmp_path / "model/merges.txt").symlink_to(tmp_path / "model/tokenizer.json")
    assert set(find_side_files([str(tmp_path / "model")])) == {"tokenizer.json", "merges.txt"}
    (tmp_path / "model/vocab.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(Refused, match="link"):
        find_side_files([str(tmp_path / "model")])


def test_links_to_the_blobs_of_a_cache_are_followed(tmp_path: Path) -> None:
    fill(tmp_path, ("hub/blobs/abc",))
    snapshot = tmp_path / "hub/snapshots/main"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    assert set(find_side_files([str(snapshot)])) == {"tokenizer.json"}


# Model code of its own


def custom(home: Path) -> Path:
    """Code that leaves a marker wherever it is run; three modules, a package among them."""
    marker = str(home / "marker")
    sources = {
        "modeling_x.py": "from .layers import Layer\nfrom . import tools\nimport torch\nfrom torch import nn\n",
        "configuration_x.py": "",
        "layers.py": "def f():\n    from .kernels.fast import run\n",
        "tools.py": "",
        "kernels/__init__.py": "",
        "kernels/fast.py": "from ..tools import x\nfrom .tuned import y\n",
        "kernels/tuned.py": "",
    }
    for name, text in sources.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"open({marker!r}, 'w').close()\n{text}")
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}
    auto_map["AutoModel"] = "other/repo--modeling_y.Y"
    config = {"model_type": "x", "auto_map": auto_map, "dtype": "float32"}
    (home / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(2)}, home / "model.safetensors")
    return home


def test_custom_code_travels_and_is_never_run(tmp_path: Path) -> None:
    source = custom(tmp_path / "in")
    assert missing_code(str(source / "config.json")) == []
    report = reshard.convert(str(source), str(tmp_path / "out"))
    for name in ("modeling_x.py", "configuration_x.py", "layers.py", "tools.py", "kernels/fast.py", "kernels/tuned.py"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert not any("absent" in note for note in report["warnings"])
    assert not (source / "marker").exists()
    assert load_file(tmp_path / "out/model.safetensors")


@pytest.mark.parametrize("gone", ["modeling_x.py", "layers.py", "kernels/tuned.py", "configuration_x.py", "kernels"])
def test_code_that_is_absent_is_reported(gone: str, tmp_path: Path) -> None:
    source = custom(tmp_path / "in")
    target = source / gone
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    absent = missing_code(str(source / "config.json"))
    right = {"kernels": ["kernels/fast.py"]}.get(gone, [gone])
    assert absent == right
    report = reshard.convert(str(source), str(tmp_path / "out"))
    assert any(right[0] in note for note in report["warnings"])
    assert not (source / "marker").exists()


def test_odd_code_and_maps_break_nothing(tmp_path: Path) -> None:
    source = custom(tmp_path)
    (source / "modeling_x.py").write_text("def broken(:\n")
    (source / "tools.py").write_bytes(b"\xff\xfe\x00")
    assert missing_code(str(source / "config.json")) == []
    for auto_map in ([1], {"a": None, "b": ["../x.Y", None]}, "x", {"a": "../../etc/passwd.X"}):
        (source / "config.json").write_text(json.dumps({"auto_map": auto_map}))
        assert missing_code(str(source / "config.json")) == []
