"""Side files: what travels with the weights, what does not, and model code that is missing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from reshard.errors import Refused
from reshard.hf.sidefiles import find_side_files, missing_code

if TYPE_CHECKING:
    from pathlib import Path

GO = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
    "modeling_x.py",
    "code/helpers.py",
    "code/deeper/more.py",
    "spiece.model",
    "vocab.txt",
    "merges.txt",
    "README.md",
    "LICENSE",
    "hf_quant_config.json",
    "router_balancing_biases.pt",
    "training_provenance.json",
    "modules.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
)
STAY = (
    "config.json",
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "training_args.bin",
    "trainer_state.json",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state_0.pth",
    "rng_state.pth",
    "optimizer_shard_00000.pt",
    "model.gguf",
    "tf_model.h5",
    "flax_model.msgpack",
    "adapter_config.json",
    "reshard.json",
    ".gitattributes",
    ".git/config",
    ".cache/huggingface/x.json",
    ".tokenizer.json.0123456789abcdef0123456789abcdef.tmp",
    "vocab.json.staged",
    "_incomplete_checkpoints/checkpoint-1/x.json",
    "checkpoint-500/tokenizer.json",
    "global_step_5/x.json",
    "original/params.json",
    "consolidated/x.json",
    "metal/x.json",
    "weights/tokenizer.json",
    "other/model.safetensors",
    "other/config.json",
    "__pycache__/modeling_x.cpython-311.pyc",
    "onnx/model.onnx",
    ".metadata",
    "__0_0.distcp",
)


def write(home: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"content of {name}")


def test_what_travels_and_what_stays(tmp_path: Path) -> None:
    write(tmp_path, GO + STAY)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, 3]))
    found = find_side_files([str(tmp_path)])
    assert set(found) == set(GO)
    assert found == {name: str(tmp_path / name) for name in sorted(GO)}


def test_a_folder_of_weights_travels_only_as_part_of_a_pipeline(tmp_path: Path) -> None:
    write(tmp_path, ("2_Dense/model.safetensors", "2_Dense/config.json", "outside.json"))
    for paths in ([], [{"path": "../2_Dense"}], [{"path": "2_Dense/../.."}], {"path": "2_Dense"}):
        (tmp_path / "modules.json").write_text(json.dumps(paths))
        assert set(find_side_files([str(tmp_path)])) == {"modules.json", "outside.json"}


def test_the_first_directory_that_has_a_name_gives_it_and_only_it_gives_code(tmp_path: Path) -> None:
    write(tmp_path / "a", ("tokenizer.json", "modeling_x.py", "code/x.py"))
    write(tmp_path / "b", ("tokenizer.json", "vocab.txt", "modeling_y.py", "code/y.py"))
    found = find_side_files([str(tmp_path / "a"), str(tmp_path / "b")])
    assert set(found) == {"tokenizer.json", "modeling_x.py", "code/x.py", "vocab.txt"}
    assert found["tokenizer.json"] == str(tmp_path / "a/tokenizer.json")
    assert found["vocab.txt"] == str(tmp_path / "b/vocab.txt")


@pytest.mark.parametrize("name", ["tokenizer.json", "code"])
def test_links_out_of_the_directory_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "outside", ("secret.json",))
    home = tmp_path / "home"
    write(home, ("vocab.txt",))
    target = tmp_path / "outside" if name == "code" else tmp_path / "outside/secret.json"
    (home / name).symlink_to(target)
    with pytest.raises(Refused, match="link out of the directory"):
        find_side_files([str(home)])


def test_links_inside_and_into_the_blobs_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b/snapshots/abc"
    write(tmp_path / "models--a--b", ("blobs/0f", "other/x.json"))
    write(snapshot, ("vocab.txt",))
    (snapshot / "tokenizer.json").symlink_to("../../blobs/0f")
    (snapshot / "merges.txt").symlink_to("vocab.txt")
    assert set(find_side_files([str(snapshot)])) == {"vocab.txt", "tokenizer.json", "merges.txt"}
    (snapshot / "processor_config.json").symlink_to("../../other/x.json")
    with pytest.raises(Refused, match=r"processor_config\.json"):
        find_side_files([str(snapshot)])


def test_a_link_in_a_circle_ends(tmp_path: Path) -> None:
    write(tmp_path, ("code/a.py",))
    (tmp_path / "code/again").symlink_to(tmp_path / "code")
    assert "code/a.py" in find_side_files([str(tmp_path)])


def code(home: Path, files: dict[str, str], **auto_map: object) -> str:
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (home / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    return str(home / "config.json")


def test_code_is_followed_through_relative_imports_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    config = code(
        tmp_path,
        {
            "modeling_x.py": f"open({str(marker)!r}, 'w')\nfrom .layers import A\nfrom . import ops\nimport torch.nn",
            "layers.py": "def f():\n    from .deep.inner import B\n",
            "ops.py": "",
            "deep/inner.py": "from ..back import C\nfrom ...above import D\n",
        },
        AutoModel="modeling_x.X",
        AutoConfig="configuration_x.C",
        AutoTokenizer=["tokenization_x.T", None],
        AutoProcessor="other/repo--processing_y.P",
        AutoOdd=3,
    )
    assert missing_code(config) == ["back.py", "configuration_x.py", "tokenization_x.py"]
    for name in ("back.py", "configuration_x.py", "tokenization_x.py"):
        (tmp_path / name).write_text("")
    assert missing_code(config) == []
    assert not marker.exists()


def test_tokenizers_and_processors_name_code_too(tmp_path: Path) -> None:
    config = code(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tok.T", None]}}))
    (tmp_path / "processor_config.json").write_text(json.dumps({"auto_map": {"AutoProcessor": "proc.P"}}))
    assert missing_code(config) == ["proc.py", "tok.py"]


def test_packages_attributes_and_broken_sources(tmp_path: Path) -> None:
    config = code(
        tmp_path,
        {
            "modeling_x.py": "from .package import thing\nfrom .broken import b\n",
            "package/__init__.py": "from . import module, attribute\nfrom .gone import z\n",
            "package/module.py": "",
            "broken.py": "def (",
        },
        AutoModel="modeling_x.X",
    )
    assert missing_code(config) == ["package/gone.py"]


@pytest.mark.parametrize("text", ["", "[]", '{"auto_map": []}', '{"auto_map": {"A": "../x.Y", "B": "/etc/x.Y"}}', "{"])
def test_odd_configs_need_no_code(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert missing_code(str(tmp_path / "config.json")) == []
