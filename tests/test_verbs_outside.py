"""inspect, verify and diff against outside writers (safetensors, torch DCP) and numbers worked out by hand."""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mini_models
from reshard.errors import Refused, ReshardError, UsageError
from reshard.verbs.convert import convert
from reshard.verbs.diff import diff
from reshard.verbs.inspect import inspect
from reshard.verbs.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable

INDEX = "model.safetensors.index.json"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mini in several files, as transformers writes it."""
    path = tmp_path_factory.mktemp("source") / "qwen3_moe"
    mini_models.write("qwen3_moe", path, shard_size="100KB")
    return path


@pytest.fixture(scope="session")
def output(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as reshard writes it, with hashes."""
    path = tmp_path_factory.mktemp("output") / "out"
    convert(str(source), str(path), dtype="float32", max_shard_size="200KB")
    assert (path / "reshard.json").is_file()
    return path


@pytest.fixture
def copy(output: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(output, tmp_path / "copy"))


def weights(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def state_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in weights(path) for name, tensor in load_file(file).items()}


def save_dcp(state: dict[str, torch.Tensor], out: Path, config: Path) -> Path:
    """torch's own writer, with no process group."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": dict(state)}, checkpoint_id=str(out), no_dist=True)  # type: ignore[attr-defined]
    shutil.copy(config / "config.json", out)
    return out


def one_file(out: Path, **tensors: torch.Tensor) -> str:
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    return str(out)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def tensor_at(file: Path, at: int) -> str | None:
    """The tensor that holds a byte of a file, read here without reshard. None in the header."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for name, row in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__" and row["data_offsets"][0] <= at - 8 - length < row["data_offsets"][1]:
            return str(name)
    return None


def test_an_untouched_output_is_sound(output: Path) -> None:
    found = verify(str(output))
    assert (found["status"], found["problems"]) == ("ok", [])
    assert found["checked_tensors"] == len(state_of(output))
    assert found["checked_bytes"] >= sum(file.stat().st_size for file in weights(output))


def test_one_flipped_byte_anywhere_is_found(copy: Path) -> None:
    """In every tensor's first and last byte's place, and in header, padding and length of every file."""
    chosen: list[tuple[Path, int]] = []
    dice = random.Random(7)
    for file in weights(copy):
        size = file.stat().st_size
        chosen += [(file, at) for at in (0, 8, 40, size - 1)] + [(file, dice.randrange(size)) for _ in range(8)]
    for file, at in chosen:
        name = tensor_at(file, at)
        flip(file, at)
        found = verify(str(copy))
        assert found["status"] == "failed", (file.name, at)
        assert any(file.name in (row["file"] or "") + row["detail"] for row in found["problems"]), (file.name, at)
        if name is not None:
            # The tensor that was hit, and no other.
            assert {row["tensor"] for row in found["problems"]} == {name}, (file.name, at)
        flip(file, at)
    assert verify(str(copy))["status"] == "ok"


def test_a_deleted_shard_is_named(copy: Path) -> None:
    gone = weights(copy)[1]
    gone.unlink()
    found = verify(str(copy))
    assert found["status"] == "failed" and any(gone.name in str(row) for row in found["problems"])
    seen = inspect(str(copy))
    assert seen["complete"] is False and seen["problems"]


def test_an_index_that_misplaces_a_tensor_is_found(copy: Path) -> None:
    body = json.loads((copy / INDEX).read_text())
    files = sorted(set(body["weight_map"].values()))
    name = next(name for name, file in body["weight_map"].items() if file == files[0])
    body["weight_map"][name] = files[1]
    (copy / INDEX).write_text(json.dumps(body))
    found = verify(str(copy))
    assert found["status"] == "failed" and any(name in str(row) for row in found["problems"])


def test_a_wrong_total_size_is_found(copy: Path) -> None:
    body = json.loads((copy / INDEX).read_text())
    right = body["metadata"]["total_size"]
    assert right == sum(tensor.nbytes for tensor in state_of(copy).values())
    body["metadata"]["total_size"] = right - 4
    (copy / INDEX).write_text(json.dumps(body))
    found = verify(str(copy))
    assert found["status"] == "failed" and any(str(right - 4) in row["detail"] for row in found["problems"])


def test_a_stray_weight_file_is_found(copy: Path) -> None:
    save_file({"left.over": torch.ones(3)}, copy / "model-00009-of-00009.safetensors")
    found = verify(str(copy))
    assert found["status"] == "failed" and any("00009-of-00009" in str(row) for row in found["problems"])


def test_a_manifest_entry_without_its_file_is_found(copy: Path) -> None:
    body = json.loads((copy / "reshard.json").read_text())
    body["files"]["extra.safetensors"] = {"bytes": 3, "segments": ["00"]}
    (copy / "reshard.json").write_text(json.dumps(body))
    found = verify(str(copy))
    assert found["status"] == "failed" and any("extra.safetensors" in str(row) for row in found["problems"])


def test_hf_and_dcp_of_the_same_weights_agree(source: Path, tmp_path: Path) -> None:
    other = save_dcp(state_of(source), tmp_path / "dcp", source)
    for a, b in ((source, other), (other, source)):
        found = verify(str(a), against=str(b))
        assert (found["status"], found["problems"]) == ("ok", [])
        assert diff(str(a), str(b))["identical"] is True


def test_one_changed_element_is_named_by_its_index(source: Path, tmp_path: Path) -> None:
    state = state_of(source)
    name = "model.layers.1.self_attn.q_proj.weight"
    state[name] = state[name].clone()
    state[name][37, 11] += 1
    other = save_dcp(state, tmp_path / "dcp", source)
    found = verify(str(source), against=str(other))
    assert found["status"] == "failed" and [row["tensor"] for row in found["problems"]] == [name]
    assert "[37, 11]" in found["problems"][0]["detail"]
    told = diff(str(source), str(other))
    assert [row["name"] for row in told["tensors"]] == [name] and told["tensors"][0]["differing"] == 1


def test_fused_experts_equal_the_same_experts_one_by_one(source: Path, tmp_path: Path) -> None:
    """Fused here by torch: gate above up, stacked over the experts, as transformers holds them."""
    state = state_of(source)
    for layer in range(2):
        block = f"model.layers.{layer}.mlp.experts."
        one = {key: [state.pop(f"{block}{e}.{key}_proj.weight") for e in range(4)] for key in ("gate", "up", "down")}
        pairs = zip(one["gate"], one["up"], strict=True)
        state[f"{block}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        state[f"{block}down_proj"] = torch.stack(one["down"])
    other = save_dcp({f"_orig_mod.{name}": tensor for name, tensor in state.items()}, tmp_path / "dcp", source)
    found = verify(str(source), against=str(other))
    assert (found["status"], found["problems"]) == ("ok", [])
    assert diff(str(source), str(other))["identical"] is True


def test_a_tied_head_counts_only_with_the_embeddings_bytes(tmp_path: Path) -> None:
    mini_models.write("llama_tied", tmp_path / "tied")
    state = state_of(tmp_path / "tied")
    assert "lm_head.weight" not in state
    embedding = state["model.embed_tokens.weight"]
    for what, head in (("same", embedding.clone()), ("other", embedding + 1)):
        other = save_dcp(state | {"lm_head.weight": head}, tmp_path / what, tmp_path / "tied")
        found = verify(str(tmp_path / "tied"), against=str(other))
        assert found["status"] == ("ok" if what == "same" else "failed"), what


def test_load_asks_transformers(source: Path, tmp_path: Path) -> None:
    assert verify(str(source), load=True)["problems"] == []
    assert verify(str(source), target="transformers")["problems"] == []
    state = state_of(source)
    del state[NORM]
    state["model.layers.0.surplus.weight"] = torch.ones(2, dtype=torch.bfloat16)
    state["model.norm.weight"] = torch.ones(63, dtype=torch.bfloat16)
    one_file(tmp_path / "broken", **state)
    shutil.copy(source / "config.json", tmp_path / "broken")
    found = verify(str(tmp_path / "broken"), load=True)
    assert found["status"] == "failed"
    assert {row["tensor"] for row in found["problems"]} == {NORM, "model.layers.0.surplus.weight", "model.norm.weight"}


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_other_loaders_come_later(source: Path, target: str) -> None:
    with pytest.raises(Refused, match="later"):
        verify(str(source), target=target)


def test_the_load_check_fetches_no_kernel(source: Path, tmp_path: Path) -> None:
    """A config may name an attention kernel of the Hub, which is native code: never without leave."""
    copy = Path(shutil.copytree(source, tmp_path / "m"))
    body = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(body | {"attn_implementation": "someone/kernel"}))
    assert verify(str(copy), load=True)["problems"] == []


# Numbers by hand.


def pair(tmp_path: Path, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    same = torch.arange(5)
    return diff(one_file(tmp_path / "a", x=a, same=same), one_file(tmp_path / "b", x=b, same=same.clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_distances_of_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    # Differences 0, 0.5, -2 and 0 against a norm of sqrt(1 + 4 + 9 + 4).
    found = pair(tmp_path, torch.tensor([1.0, 2, 3, -2]).to(dtype), torch.tensor([1, 1.5, 5, -2]).to(dtype))
    (row,) = found["tensors"]
    assert (row["name"], row["elements"], row["differing"], row["max_abs"]) == ("x", 4, 2, 2.0)
    assert row["rel_l2"] == pytest.approx(math.sqrt(4.25 / 18), rel=1e-12)
    assert (found["identical"], found["same"], found["only_a"], found["only_b"]) == (False, 1, [], [])


def test_distances_of_narrow_floats(tmp_path: Path) -> None:
    a, b = torch.tensor([1.0, 2, 4]), torch.tensor([1.0, 2, 3])
    (row,) = pair(tmp_path, a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn))["tensors"]
    assert (row["differing"], row["max_abs"]) == (1, 1.0)
    assert row["rel_l2"] == pytest.approx(1 / math.sqrt(21), rel=1e-12)


def test_distances_of_integers_and_booleans(tmp_path: Path) -> None:
    (tmp_path / "i").mkdir()
    (row,) = pair(tmp_path / "i", torch.tensor([3, 4], dtype=torch.uint8), torch.tensor([3, 9], dtype=torch.uint8))[
        "tensors"
    ]
    assert (row["differing"], row["max_abs"], row["rel_l2"]) == (1, 5.0, 1.0)
    (tmp_path / "b").mkdir()
    (row,) = pair(tmp_path / "b", torch.tensor([True, False, True]), torch.tensor([True, True, False]))["tensors"]
    assert (row["differing"], row["max_abs"]) == (2, 1.0)


def test_nan_equals_the_same_nan_only(tmp_path: Path) -> None:
    nan = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    payload = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    (tmp_path / "same").mkdir()
    assert pair(tmp_path / "same", nan, nan.clone())["identical"] is True
    (tmp_path / "other").mkdir()
    (row,) = pair(tmp_path / "other", nan, payload)["tensors"]
    assert row["differing"] == 1


def test_names_shapes_and_dtypes_that_differ(tmp_path: Path) -> None:
    a = one_file(tmp_path / "a", p=torch.ones(2, 3), q=torch.ones(2), r=torch.ones(4), only_here=torch.ones(1))
    b = one_file(tmp_path / "b", p=torch.ones(3, 2), q=torch.ones(2).half(), r=torch.ones(4), only_there=torch.ones(1))
    found = diff(a, b)
    assert (found["only_a"], found["only_b"]) == (["only_here"], ["only_there"])
    rows = {row["name"]: (row["shape"], row["dtype"]) for row in found["changed"]}
    assert rows == {"p": ([[2, 3], [3, 2]], ["F32", "F32"]), "q": ([[2], [2]], ["F32", "F16"])}
    assert found["identical"] is False


def test_a_tensor_of_many_tiles_agrees_with_numpy(tmp_path: Path) -> None:
    dice = np.random.default_rng(5)
    a = dice.standard_normal((1500, 1501), dtype=np.float32)
    b = a.copy()
    where = dice.choice(a.size, 999, replace=False)
    b.reshape(-1)[where] += dice.uniform(0.5, 2, 999).astype(np.float32)
    (row,) = pair(tmp_path, torch.from_numpy(a), torch.from_numpy(b))["tensors"]
    gap = b.astype(np.float64) - a.astype(np.float64)
    assert (row["differing"], row["elements"]) == (999, a.size)
    assert row["max_abs"] == np.abs(gap).max()
    assert row["rel_l2"] == pytest.approx(np.linalg.norm(gap) / np.linalg.norm(a.astype(np.float64)), rel=1e-9)


# Input that lies.


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD: dict[str, bytes] = {
    "claims a huge header": struct.pack("<Q", 1 << 62) + b"{}",
    "claims more than the file": struct.pack("<Q", 5000) + b"{}",
    "is not JSON": raw(b"{not json"),
    "ends early": raw({"x": entry([4], 0, 16)}, bytes(8)),
    "overlaps": raw({"x": entry([4], 0, 16), "y": entry([4], 8, 24)}, bytes(24)),
    "leaves a hole": raw({"x": entry([4], 0, 16), "y": entry([4], 24, 40)}, bytes(40)),
    "shape and bytes differ": raw({"x": entry([5], 0, 16)}, bytes(16)),
    "wraps around": raw({"x": entry([1 << 33, 1 << 33], 0, 16)}, bytes(16)),
    "has a negative size": raw({"x": entry([-4], 0, 16)}, bytes(16)),
    "goes backwards": raw({"x": entry([4], 16, 0)}, bytes(16)),
    "repeats a name": raw(
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        bytes(8),
    ),
    "has an unknown dtype": raw({"x": entry([4], 0, 16, "Q7")}, bytes(16)),
    "has a tail": raw({"x": entry([4], 0, 16)}, bytes(99)),
    "has a dtype without a name": raw({"x": entry([4], 0, 16, "")}, bytes(16)),
    "is a git-LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
    "is empty": b"",
}


def outcome(call: Callable[[], dict[str, Any]]) -> bool:
    """Whether a verb saw that something is wrong: it raised one of reshard's errors or reports problems."""
    try:
        found = call()
    except ReshardError:
        return True
    return bool(found.get("problems"))


@pytest.mark.parametrize("what", BAD)
def test_a_bad_header_is_seen_by_every_verb(tmp_path: Path, what: str) -> None:
    good = one_file(tmp_path / "good", x=torch.ones(4))
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "model.safetensors").write_bytes(BAD[what])
    assert outcome(lambda: inspect(str(bad)))
    assert outcome(lambda: verify(str(bad)))
    assert outcome(lambda: verify(good, against=str(bad)))
    with pytest.raises(ReshardError):
        diff(good, str(bad))
    with pytest.raises(ReshardError):
        diff(str(bad), good)


def test_scalars_and_empty_tensors_are_sound(tmp_path: Path) -> None:
    a = one_file(tmp_path / "a", s=torch.tensor(3.0), e=torch.ones(0, 4))
    b = one_file(tmp_path / "b", s=torch.tensor(5.0), e=torch.ones(0, 4))
    found = diff(a, b)
    assert [(row["name"], row["max_abs"]) for row in found["tensors"]] == [("s", 2.0)] and found["same"] == 1
    assert diff(a, a)["identical"] is True and inspect(a)["parameters"] == 1


@pytest.mark.parametrize("value", ["../other/model.safetensors", "/etc/passwd", "sub/../../x", "link.safetensors"])
def test_a_weight_map_that_leaves_the_directory_is_seen_by_every_verb(tmp_path: Path, value: str) -> None:
    one_file(tmp_path / "other", x=torch.ones(4))
    good = one_file(tmp_path / "good", x=torch.ones(4))
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "link.safetensors").symlink_to(tmp_path / "other" / "model.safetensors")
    (bad / INDEX).write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": {"x": value}}))
    assert outcome(lambda: inspect(str(bad)))
    assert outcome(lambda: verify(str(bad)))
    with pytest.raises(ReshardError):
        diff(good, str(bad))


@pytest.mark.parametrize("verb", [inspect, verify, lambda path: diff(path, path)])
def test_no_such_path_is_wrong_usage(tmp_path: Path, verb: Callable[[str], Any]) -> None:
    with pytest.raises(UsageError):
        verb(str(tmp_path / "nowhere"))


# What inspect says.


def test_inspect_describes_both_layouts(source: Path, tmp_path: Path) -> None:
    state = state_of(source)
    trained = save_dcp(state, tmp_path / "dcp", source)
    for path, layout, command in ((source, "hf", "verify"), (trained, "dcp", "convert")):
        found = inspect(str(path))
        assert (found["layout"], found["family"], found["model_type"]) == (layout, "qwen3_moe", "qwen3_moe")
        assert found["tensors"] == len(state)
        assert found["parameters"] == sum(tensor.numel() for tensor in state.values())
        assert found["bytes"] == sum(tensor.nbytes for tensor in state.values())
        assert found["dtypes"] == {"BF16": len(state)}
        assert (found["complete"], found["problems"]) == (True, [])
        assert found["next"] == f"reshard {command} {path}"


def test_inspect_imports_neither_torch_nor_numpy(source: Path, tmp_path: Path) -> None:
    trained = save_dcp(state_of(source), tmp_path / "dcp", source)
    code = (
        "import sys; from reshard.verbs.inspect import inspect\n"
        "for path in sys.argv[1:]: inspect(path)\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'rich') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(source), str(trained)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
