"""verify: every kind of damage is found and named, and a sound checkpoint passes."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save_file

import reshard
from reshard.errors import Damaged, Refused, UsageError
from written import INDEX, LLAMA, flip, flip_in_tensor, header_of, write_hf

SEGMENT = 16 << 20
BLOCK = 64 << 10


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (8, 4),
        "model.layers.0.mlp.up_proj.weight": (6, 4),
        "model.norm.weight": (4,),
        "lm_head.weight": (8, 4),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def kinds(report: dict) -> list[str]:
    assert report["status"] == ("failed" if report["problems"] else "ok")
    assert all(row.keys() == {"kind", "file", "tensor", "detail"} for row in report["problems"])
    json.dumps(report, allow_nan=False)
    return [row["kind"] for row in report["problems"]]


def by_hand(home: Path) -> None:
    """`reshard.json` as its documented format has it, made here with xxhash alone."""
    files, digests = {}, {}
    for path in sorted(home.glob("*.safetensors")):
        data = path.read_bytes()
        parts = [data[at : at + SEGMENT] for at in range(0, len(data), SEGMENT)]
        files[path.name] = {"bytes": len(data), "segments": [xxhash.xxh3_128_hexdigest(part) for part in parts]}
        header, start = header_of(path)
        for name, row in header.items():
            if name != "__metadata__":
                begin, end = row["data_offsets"]
                raw = data[start + begin : start + end]
                blocks = [raw[at : at + BLOCK] for at in range(0, len(raw), BLOCK)]
                total = sum(xxhash.xxh3_128_intdigest(block, seed=i) for i, block in enumerate(blocks))
                digests[name] = f"{total % (1 << 128):032x}"
    body = {"format": 1, "version": "0", "plan": "0" * 32, "segment_bytes": SEGMENT, "files": files}
    (home / "reshard.json").write_text(json.dumps(body | {"tensors": digests, "dropped": [], "kept": []}))


def test_sound_without_a_manifest(tmp_path: Path) -> None:
    report = reshard.verify(str(write_hf(tmp_path / "a", tensors(), config=LLAMA)))
    assert kinds(report) == []
    assert (report["checked_tensors"], report["checked_bytes"]) == (4, 0)
    assert any("reshard.json" in warning for warning in report["warnings"])


def test_hashes_made_by_hand(tmp_path: Path) -> None:
    some = tensors()
    # More than a segment, more than a tile, and a last block that is not full.
    some["model.layers.0.mlp.down_proj.weight"] = np.arange(5_000_003, dtype=np.float32)
    home = write_hf(tmp_path / "a", some, config=LLAMA)
    by_hand(home)
    report = reshard.verify(str(home))
    assert kinds(report) == []
    assert report["checked_bytes"] == (home / "model.safetensors").stat().st_size
    assert "hashes" in report["checks"]


@pytest.mark.parametrize("at", [0, 9_000_000, 17_000_000, 20_000_008])
def test_a_flipped_byte_names_its_tensor(tmp_path: Path, at: int) -> None:
    some = tensors()
    some["model.layers.0.mlp.down_proj.weight"] = np.arange(5_000_003, dtype=np.float32)
    home = write_hf(tmp_path / "a", some, config=LLAMA)
    by_hand(home)
    flip_in_tensor(home / "model.safetensors", "model.layers.0.mlp.down_proj.weight", at)
    report = reshard.verify(str(home))
    assert kinds(report) == ["hash"]
    assert report["problems"][0]["tensor"] == "model.layers.0.mlp.down_proj.weight"
    assert report["problems"][0]["file"].endswith("model.safetensors")


def test_a_flip_outside_all_tensors_names_the_file(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "a", tensors(), config=LLAMA)
    reshard.convert(str(source), str(tmp_path / "out"), dtype="float16")
    out = tmp_path / "out"
    assert kinds(reshard.verify(str(out))) == []
    data = (out / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert data[8 + length - 1 : 8 + length] == b" "  # header padding
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(8 + length - 1)
        file.write(b"\n")
    report = reshard.verify(str(out))
    assert kinds(report) == ["hash"]
    assert report["problems"][0]["tensor"] is None


def test_manifest_faults(tmp_path: Path) -> None:
    home = write_hf(tmp_path / "a", tensors(), config=LLAMA)
    by_hand(home)
    manifest = json.loads((home / "reshard.json").read_text())

    def altered(**change: object) -> list[str]:
        (home / "reshard.json").write_text(json.dumps(manifest | change))
        return kinds(reshard.verify(str(home)))

    rows = manifest["files"]["model.safetensors"]
    assert altered(files={"model.safetensors": rows | {"bytes": rows["bytes"] + 1}}) == ["size"]
    assert altered(files={"model.safetensors": rows | {"segments": []}}) == ["manifest"]
    assert altered(files={"model.safetensors": rows, "gone.safetensors": rows}) == ["manifest"]
    assert altered(files={}) == ["manifest"]
    assert altered(tensors=manifest["tensors"] | {"other": "0" * 32}) == ["manifest"]
    assert altered(files={"../../etc/passwd": rows, "model.safetensors": rows}) == ["manifest"]
    assert altered(format=2) == ["manifest"]
    (home / "reshard.json").write_text("{")
    assert kinds(reshard.verify(str(home))) == ["manifest"]


def test_a_file_taken_over_unhashed_is_checked_by_its_tensors(tmp_path: Path) -> None:
    home = write_hf(tmp_path / "a", tensors(), config=LLAMA)
    by_hand(home)
    manifest = json.loads((home / "reshard.json").read_text())
    manifest["files"]["model.safetensors"]["segments"] = None
    (home / "reshard.json").write_text(json.dumps(manifest))
    report = reshard.verify(str(home))
    assert kinds(report) == [] and report["checked_bytes"] == sum(array.nbytes for array in tensors().values())
    flip_in_tensor(home / "model.safetensors", "model.norm.weight")
    assert [row["tensor"] for row in reshard.verify(str(home))["problems"]] == ["model.norm.weight"]
    manifest["tensors"] = dict.fromkeys(manifest["tensors"])
    (home / "reshard.json").write_text(json.dumps(manifest))
    report = reshard.verify(str(home))
    assert kinds(report) == [] and any("not proven" in warning for warning in report["warnings"])


def two(tmp_path: Path, **options: object) -> Path:
    some = tensors()
    head = {"lm_head.weight": some.pop("lm_head.weight")}
    return write_hf(tmp_path / "two", some, head, config=LLAMA, **options)  # type: ignore[arg-type]


def test_index_faults(tmp_path: Path) -> None:
    home = two(tmp_path)
    assert kinds(reshard.verify(str(home))) == []
    index = json.loads((home / INDEX).read_text())

    def altered(body: dict) -> list[str]:
        (home / INDEX).write_text(json.dumps(body))
        return kinds(reshard.verify(str(home)))

    assert altered(index | {"metadata": {"total_size": 1}}) == ["index"]
    assert altered(index | {"metadata": {}}) == []
    short = {name: file for name, file in index["weight_map"].items() if name != "model.norm.weight"}
    assert altered(index | {"weight_map": short}) == ["index"]
    assert altered(index | {"weight_map": index["weight_map"] | {"ghost": "model-00001-of-00002.safetensors"}}) == [
        "index"
    ]
    swapped = index["weight_map"] | {"lm_head.weight": "model-00001-of-00002.safetensors"}
    assert "index" in altered(index | {"weight_map": swapped}) or "stale" in altered(index | {"weight_map": swapped})
    (home / INDEX).write_text(json.dumps(index))
    save_file({"old": np.zeros(2, np.float32)}, home / "model-00003-of-00003.safetensors")
    assert kinds(reshard.verify(str(home))) == ["stale"]
    (home / "model-00003-of-00003.safetensors").unlink()
    (home / "model-00002-of-00002.safetensors").unlink()
    assert kinds(reshard.verify(str(home))) == ["missing"]


def test_an_index_left_by_an_earlier_save(tmp_path: Path) -> None:
    home = write_hf(tmp_path / "a", tensors(), config=LLAMA)
    (home / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    assert kinds(reshard.verify(str(home))) == ["stale"]


def test_all_damaged_files_are_named(tmp_path: Path) -> None:
    home = two(tmp_path)
    for path in home.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-4])
    report = reshard.verify(str(home))
    assert sorted(Path(row["file"]).name for row in report["problems"]) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_config_faults(tmp_path: Path) -> None:
    assert kinds(reshard.verify(str(write_hf(tmp_path / "a", tensors())))) == ["config"]
    assert kinds(reshard.verify(str(write_hf(tmp_path / "b", tensors(), config={"hidden_size": 4})))) == ["config"]
    home = write_hf(tmp_path / "c", tensors(), config=LLAMA)
    (home / "config.json").write_text("{")
    report = reshard.verify(str(home))
    assert "json" in kinds(report) and report["checked_tensors"] == 4
    good = write_hf(tmp_path / "d", tensors(), config=LLAMA)
    assert kinds(reshard.verify(str(tmp_path / "a"), config_from=str(good))) == []
    assert kinds(reshard.verify(str(tmp_path / "a" / "model.safetensors"))) == []  # one file is no model directory


def test_what_the_family_expects(tmp_path: Path) -> None:
    home = write_hf(tmp_path / "a", tensors(), config=LLAMA | {"num_hidden_layers": 3})
    assert kinds(reshard.verify(str(home))) == ["layers"]
    less = tensors()
    del less["lm_head.weight"]
    assert kinds(reshard.verify(str(write_hf(tmp_path / "b", less, config=LLAMA)))) == ["missing"]
    tied = LLAMA | {"tie_word_embeddings": True}
    assert kinds(reshard.verify(str(write_hf(tmp_path / "c", less, config=tied)))) == []
    both = less | {"lm_head.weight": less["model.embed_tokens.weight"].copy()}
    assert kinds(reshard.verify(str(write_hf(tmp_path / "d", both, config=tied)))) == []
    both["lm_head.weight"][7, 3] += 1
    report = reshard.verify(str(write_hf(tmp_path / "e", both, config=tied)))
    assert kinds(report) == ["tied"] and "[7, 3]" in report["problems"][0]["detail"]


def test_an_expert_that_is_missing(mini_dirs: Path, tmp_path: Path) -> None:
    home = tmp_path / "moe"
    shutil.copytree(mini_dirs / "qwen3_moe", home)
    assert kinds(reshard.verify(str(home))) == []
    some = load_file(home / "model.safetensors")
    del some["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(some, home / "model.safetensors", metadata={"format": "pt"})
    report = reshard.verify(str(home))
    assert kinds(report) == ["experts"]
    assert report["problems"][0]["tensor"] == "model.layers.1.mlp.experts.2.up_proj.weight"


def test_against_another_layout(mini_dirs: Path, tmp_path: Path) -> None:
    source = str(mini_dirs / "qwen3_moe")
    reshard.convert(source, str(tmp_path / "fused"), experts="fused")
    reshard.convert(source, str(tmp_path / "dcp"), to="dcp", key_prefix="app.model.")
    for one, other in ((source, "fused"), (source, "dcp"), ("fused", "dcp"), ("dcp", source)):
        report = reshard.verify(str(tmp_path / one), against=str(tmp_path / other))
        assert kinds(report) == [] and report["checked_bytes"] > 0
    # One element of one expert, changed behind the fused layout.
    file = tmp_path / "fused" / "model.safetensors"
    # [E=4, 2I=96, H=64] bf16: expert 2, row 48 + 5 (up), column 7.
    flip_in_tensor(file, "model.layers.1.mlp.experts.gate_up_proj", ((2 * 96 + 48 + 5) * 64 + 7) * 2)
    report = reshard.verify(str(tmp_path / "fused"), against=source)
    assert sorted(kinds(report)) == ["bytes", "hash"]
    row = next(row for row in report["problems"] if row["kind"] == "bytes")
    assert row["tensor"] == "model.layers.1.mlp.experts.2.up_proj.weight" and "[5, 7]" in row["detail"]


def test_against_names_shapes_dtypes(tmp_path: Path) -> None:
    base = tensors()
    home = str(write_hf(tmp_path / "a", base, config=LLAMA))

    def against(other: dict[str, np.ndarray], **options: object) -> list[tuple[str, str]]:
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        reference = write_hf(tmp_path / "b", other, config=LLAMA)
        report = reshard.verify(home, against=str(reference), **options)  # type: ignore[arg-type]
        kinds(report)
        return [(row["kind"], row["tensor"]) for row in report["problems"]]

    name = "model.norm.weight"
    assert against(base) == []
    assert against({k: v for k, v in base.items() if k != name}) == [("unexpected", name)]
    assert against(base | {"extra": np.zeros(1, np.int64)}) == [("missing", "extra")]
    assert against(base | {name: np.zeros(5, np.float32)}) == [("shape", name)]
    assert against(base | {name: base[name].astype(np.float64)}) == [("dtype", name)]
    assert against(base | {name: base[name].astype(np.float64)}, allow_cast=True) == []
    assert against(base | {name: np.arange(4)}, allow_cast=True) == [("dtype", name)]
    changed = base[name].copy()
    changed[-1] = np.nextafter(changed[-1], np.float32(9))
    assert against(base | {name: changed}) == [("bytes", name)]


def test_allow_cast_is_one_rounding(tmp_path: Path) -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, np.nan, -0.0, 3e38], np.float32)  # two ties, to even
    rounded = np.array([0x3F80, 0x3F80, 0x3F82, 0x7FC0, 0x8000, 0x7F62], np.uint16)
    wide = write_hf(tmp_path / "a", {"w": values}, config=LLAMA | {"model_type": "other"})
    for bits, expected in ((rounded, []), (rounded + np.array([0, 1, 0, 0, 0, 0], np.uint16), ["bytes"])):
        home = write_hf(tmp_path / "b", {"w": bits.view(ml_dtypes.bfloat16)}, config=LLAMA | {"model_type": "other"})
        assert kinds(reshard.verify(str(home), against=str(wide), allow_cast=True)) == expected


def test_a_damaged_reference_is_an_error(tmp_path: Path) -> None:
    home = str(write_hf(tmp_path / "a", tensors(), config=LLAMA))
    other = write_hf(tmp_path / "b", tensors(), config=LLAMA)
    (other / "model.safetensors").write_bytes(b"")
    with pytest.raises(Damaged):
        reshard.verify(home, against=str(other))


def test_dcp_data_that_was_changed(mini_dirs: Path, tmp_path: Path) -> None:
    reshard.convert(str(mini_dirs / "llama"), str(tmp_path / "dcp"), to="dcp")
    assert kinds(reshard.verify(str(tmp_path / "dcp"))) == []
    data = next((tmp_path / "dcp").glob("*.distcp"))
    raw = data.read_bytes()
    embed = load_file(mini_dirs / "llama" / "model.safetensors")["model.embed_tokens.weight"].tobytes()
    flip(data, raw.index(embed) + 100)
    report = reshard.verify(str(tmp_path / "dcp"))
    assert "hash" in kinds(report)
    assert "model.embed_tokens.weight" in {row["tensor"] for row in report["problems"]}
    data.write_bytes(raw[: len(raw) // 2])
    report = reshard.verify(str(tmp_path / "dcp"))
    assert kinds(report) == ["truncated"]


def loaded_by_transformers(home: Path) -> dict[str, set[str]]:
    """What from_pretrained itself says of a directory."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(home)
    kind = getattr(transformers, config.architectures[0])
    _, info = kind.from_pretrained(home, output_loading_info=True, ignore_mismatched_sizes=True)
    return {
        "missing": set(info["missing_keys"]),
        "unexpected": set(info["unexpected_keys"]),
        "shape": {row[0] for row in info["mismatched_keys"]},
    }


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_load_says_what_from_pretrained_says(mini_dirs: Path, tmp_path: Path, family: str) -> None:
    whole = reshard.verify(str(mini_dirs / family), load=True)
    assert kinds(whole) == [], whole["problems"]
    home = tmp_path / "broken"
    shutil.copytree(mini_dirs / family, home)
    some = load_file(home / "model.safetensors")
    del some["model.norm.weight"]
    some["model.layers.9.self_attn.q_proj.weight"] = np.zeros((4, 4), np.float32)
    some["extra.weight"] = np.zeros(3, np.float32)
    some["model.layers.1.self_attn.o_proj.weight"] = np.zeros((3, 5), np.float32)
    if "qwen3_moe" in family:
        for name in [name for name in some if ".experts.3." in name]:
            del some[name]
    save_file(some, home / "model.safetensors", metadata={"format": "pt"})
    report = reshard.verify(str(home), target="transformers")
    expected = loaded_by_transformers(home)
    assert expected["missing"] and expected["unexpected"] and expected["shape"]
    for kind, names in expected.items():
        assert {row["tensor"] for row in report["problems"] if row["kind"] == f"load-{kind}"} == names


def test_load_reports_experts_that_cannot_be_fused(mini_dirs: Path, tmp_path: Path) -> None:
    home = tmp_path / "broken"
    shutil.copytree(mini_dirs / "qwen3_moe", home)
    some = load_file(home / "model.safetensors")
    some["model.layers.0.mlp.experts.1.down_proj.weight"] = np.zeros((2, 2), some["lm_head.weight"].dtype)
    save_file(some, home / "model.safetensors", metadata={"format": "pt"})
    report = reshard.verify(str(home), load=True)
    row = next(row for row in report["problems"] if row["kind"] == "load-conversion")
    assert "model.layers.0.mlp.experts" in row["tensor"] and "\n" not in row["detail"]


def test_load_of_a_training_checkpoint(mini_dirs: Path, tmp_path: Path) -> None:
    reshard.convert(str(mini_dirs / "qwen3_moe"), str(tmp_path / "dcp"), to="dcp", experts="fused")
    assert kinds(reshard.verify(str(tmp_path / "dcp"), load=True)) == []


def test_load_never_holds_the_model(tmp_path: Path) -> None:
    """A model of 12 GB, as a file with a hole where its data would be."""
    pytest.importorskip("transformers")
    home = tmp_path / "large"
    home.mkdir()
    hidden, width, vocab, layers = 4096, 14336, 32000, 28
    config = LLAMA | {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": width, "vocab_size": vocab,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16",
        "max_position_embeddings": 128,
    }  # fmt: skip
    (home / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": [vocab, hidden],
        "lm_head.weight": [vocab, hidden],
        "model.norm.weight": [hidden],
    }
    for layer in range(layers):
        for name, shape in {
            "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
            "self_attn.q_proj": [hidden, hidden], "self_attn.o_proj": [hidden, hidden],
            "self_attn.k_proj": [1024, hidden], "self_attn.v_proj": [1024, hidden],
            "mlp.gate_proj": [width, hidden], "mlp.up_proj": [width, hidden],
            "mlp.down_proj": [hidden, width],
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (home / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    assert at > 12e9
    code = (
        "import reshard, sys; from reshard.engine.memory import peak_rss; "
        "report = reshard.verify(sys.argv[1], load=True); print(report['status'], peak_rss())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(home)], capture_output=True, text=True, check=True)
    status, peak = done.stdout.split()
    print(f"verify --load of {at / 1e9:.1f} GB: peak RSS {int(peak) >> 20} MiB")
    assert status == "ok" and int(peak) < 1 << 30


def test_code_of_the_model_runs_only_when_asked(mini_dirs: Path, tmp_path: Path) -> None:
    home = tmp_path / "custom"
    shutil.copytree(mini_dirs / "llama", home)
    config = json.loads((home / "config.json").read_text())
    config |= {
        "model_type": "custom_llama",
        "architectures": ["CustomLlama"],
        "auto_map": {
            "AutoConfig": "modeling_custom.CustomConfig",
            "AutoModelForCausalLM": "modeling_custom.CustomLlama",
        },
    }
    (home / "config.json").write_text(json.dumps(config))
    (home / "modeling_custom.py").write_text(
        "import os\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "open(os.environ['RESHARD_TEST_MARKER'], 'w').close()\n"
        "class CustomConfig(LlamaConfig):\n    model_type = 'custom_llama'\n"
        "class CustomLlama(LlamaForCausalLM):\n    config_class = CustomConfig\n"
    )
    marker = tmp_path / "marker"
    code = (
        "import reshard, sys\n"
        "print(reshard.verify(sys.argv[1], load=True, trust_remote_code=len(sys.argv) > 2)['status'])"
    )
    environment = os.environ | {"RESHARD_TEST_MARKER": str(marker), "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", code, str(home)]
    refused = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "--trust-remote-code" in refused.stderr and not marker.exists()
    allowed = subprocess.run([*command, "yes"], capture_output=True, text=True, env=environment)
    assert allowed.stdout.split()[-1:] == ["ok"], allowed.stderr[-2000:]
    assert marker.exists()


def test_refusals_of_flags(tmp_path: Path) -> None:
    home = str(write_hf(tmp_path / "a", tensors(), config=LLAMA))
    for target in ("vllm", "sglang"):
        with pytest.raises(Refused, match="comes later"):
            reshard.verify(home, target=target)
    with pytest.raises(UsageError):
        reshard.verify(home, target="gguf")
    with pytest.raises(UsageError):
        reshard.verify(home, against=home, workers=0)
    with pytest.raises(Refused, match=re.escape("--config-from")):
        reshard.verify(str(write_hf(tmp_path / "b", tensors())), load=True)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    home = write_hf(tmp_path / "a", tensors(), config=LLAMA)
    by_hand(home)
    seen: list[tuple[int, int]] = []
    reshard.verify(str(home), against=str(home), progress=lambda done, total: seen.append((done, total)))
    ends = [done for done, total in seen if done == total]
    assert len(ends) == 2  # hashes, then the comparison


def test_payload_checksums_of_dcp(tmp_path: Path) -> None:
    """torch's own readers do not notice a flipped bit of a payload; the checksum that it recorded does."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"layers.0.w": torch.randn(50, 40), "layers.1.w": torch.randn(50, 40), "layers.1.e": torch.zeros(0, 3)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp/config.json").write_text('{"model_type": "made_up"}')
    found = reshard.verify(str(tmp_path / "dcp"))
    assert found["status"] == "ok"
    assert "checksums" in found["checks"]
    file = next((tmp_path / "dcp").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    at = data.index(state["layers.1.w"].numpy().tobytes()[4000:4100])
    data[at + 7] ^= 1
    file.write_bytes(data)
    found = reshard.verify(str(tmp_path / "dcp"))
    assert found["status"] == "failed"
    assert [(row["kind"], row["tensor"]) for row in found["problems"]] == [("checksum", "layers.1.w")]
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"model": state}, checkpoint_id=tmp_path / "off")
    finally:
        torch.serialization.set_crc32_options(True)
    (tmp_path / "off/config.json").write_text('{"model_type": "made_up"}')
    found = reshard.verify(str(tmp_path / "off"))
    assert found["status"] == "ok"
    assert any("without a checksum" in note for note in found["warnings"])
