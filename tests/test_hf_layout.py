"""The Hugging Face layout: what is accepted in every form it takes, and what is refused before a byte moves."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard.errors import Damaged, Refused, ReshardError
from reshard.layouts import hf, open_layout
from reshard.layouts.options import OpenOptions
from reshard.tensors.lazy import Stored

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.checkpoint import Checkpoint


def open_hf(*paths: Path) -> Checkpoint:
    return open_layout(list(paths), OpenOptions())


def values(*names: str) -> dict[str, Any]:
    return {name: np.full((2, 3), i, "f4") for i, name in enumerate(names)}


def sharded(home: Path, index: dict[str, Any] | None = None) -> Path:
    """Two shards with names a, b | c and an index (or the weight map given)."""
    home.mkdir(parents=True, exist_ok=True)
    save_file(values("a", "b"), home / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file(values("c"), home / "model-00002-of-00002.safetensors", {"format": "pt"})
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    weight_map = {"a": one, "b": one, "c": two} if index is None else index
    (home / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 72}, "weight_map": weight_map})
    )
    return home


def test_single_sharded_indexless_and_one_file(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    save_file(values("a"), tmp_path / "one" / "model.safetensors")
    assert list(open_hf(tmp_path / "one")) == ["a"]
    assert list(open_hf(tmp_path / "one" / "model.safetensors")) == ["a"]
    home = sharded(tmp_path / "two")
    assert sorted(open_hf(home)) == ["a", "b", "c"]
    (home / "model.safetensors.index.json").unlink()
    found = open_hf(home)
    assert sorted(found) == ["a", "b", "c"]
    assert found["b"].tobytes() == np.full((2, 3), 1, "f4").tobytes()


def test_shards_with_names_of_their_own(tmp_path: Path) -> None:
    save_file(values("a"), tmp_path / "part-a.safetensors")
    save_file(values("b"), tmp_path / "part-b.safetensors")
    assert sorted(open_hf(tmp_path)) == ["a", "b"]


def hub_cache(tmp_path: Path) -> Path:
    """A snapshot as huggingface_hub lays it: links to ../../blobs/<hash>."""
    entry = tmp_path / "models--org--name"
    real = sharded(tmp_path / "real")
    snapshot = entry / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (entry / "blobs").mkdir()
    for number, file in enumerate(sorted(real.iterdir())):
        file.rename(entry / "blobs" / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


def test_hub_cache_snapshot_of_links(tmp_path: Path) -> None:
    assert sorted(open_hf(hub_cache(tmp_path))) == ["a", "b", "c"]


def test_several_directories_hold_one_checkpoint(tmp_path: Path) -> None:
    whole = sharded(tmp_path / "whole")
    for node, file in (("n0", "model-00001-of-00002.safetensors"), ("n1", "model-00002-of-00002.safetensors")):
        (tmp_path / node).mkdir()
        (whole / file).rename(tmp_path / node / file)
    (whole / "model.safetensors.index.json").rename(tmp_path / "n0" / "model.safetensors.index.json")
    assert sorted(open_hf(tmp_path / "n0", tmp_path / "n1")) == ["a", "b", "c"]
    with pytest.raises(Damaged, match="absent files: model-00002"):
        open_hf(tmp_path / "n0")
    with pytest.raises(Refused, match="also lies in"):
        open_hf(tmp_path / "n0", tmp_path / "n0")


def test_stale_index_beside_a_single_file(tmp_path: Path) -> None:
    home = sharded(tmp_path / "x")
    save_file(values("a"), home / "model.safetensors")
    with pytest.raises(Refused, match="holds both"):
        open_hf(home)
    for shard in home.glob("model-*"):
        shard.unlink()
    found = open_hf(home)  # the index names nothing that exists: only one reading is left
    assert list(found) == ["a"]
    assert "ignored" in found.warnings[0]


def test_stray_files_are_reported(tmp_path: Path) -> None:
    home = sharded(tmp_path / "x")
    save_file(values("z"), home / "old.safetensors")
    save_file(values("lora"), home / "adapter_model.safetensors")
    found = open_hf(home)
    assert sorted(found) == ["a", "b", "c"]
    assert "old.safetensors" in found.warnings[0]
    assert "adapter" not in found.warnings[0]


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/passwd", "sub/../../x.safetensors", "", "a\\b", 3]
)
def test_index_that_points_out_of_the_directory(name: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    save_file(values("a"), tmp_path / "other" / "model.safetensors")
    home = sharded(tmp_path / "x", {"a": name})
    with pytest.raises(Refused, match="outside the directory") as caught:
        open_hf(home)
    assert caught.value.exit_status == 3


def test_link_out_of_the_directory(tmp_path: Path) -> None:
    home = sharded(tmp_path / "x")
    outside = tmp_path / "outside.safetensors"
    (home / "model-00002-of-00002.safetensors").rename(outside)
    (home / "model-00002-of-00002.safetensors").symlink_to(outside)
    with pytest.raises(Refused, match="link out of the directory"):
        open_hf(home)


def test_link_from_a_false_snapshot(tmp_path: Path) -> None:
    """Only `snapshots/<commit>` may link to the `blobs` of its own entry."""
    snapshot = hub_cache(tmp_path)
    elsewhere = tmp_path / "models--evil" / "snapshots" / "x"
    elsewhere.mkdir(parents=True)
    (elsewhere / "model.safetensors").symlink_to((snapshot / "model-00002-of-00002.safetensors").resolve())
    with pytest.raises(Refused, match="link out of the directory"):
        open_hf(elsewhere)


@pytest.mark.parametrize(
    ("weight_map", "word"),
    [
        (
            {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
            "does not list|ignored|'c'",
        ),
        (
            {"a": "model-00002-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"},
            "lies in model-00001|holds no",
        ),
        ({"a": "gone.safetensors"}, "absent files"),
        ({}, "no weight_map"),
        ([1], "no weight_map"),
    ],
)
def test_index_that_disagrees_with_the_files(weight_map: Any, word: str, tmp_path: Path) -> None:
    home = sharded(tmp_path / "x", weight_map)
    if word.startswith("does not list"):
        # the second file is not named at all: it is a stray, and reported
        assert "model-00002" in open_hf(home).warnings[0]
        weight_map["c"] = "model-00002-of-00002.safetensors"
        del weight_map["b"]
        sharded(home, weight_map)
        word = "does not list 'b'"
    with pytest.raises(Damaged, match=word) as caught:
        open_hf(home)
    assert caught.value.exit_status == 4


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"weight_map": 1}', '{"weight_map": {"a": "x", "a": "y"}}', "[" * 100_000]
)
def test_index_that_is_no_index(text: str, tmp_path: Path) -> None:
    home = sharded(tmp_path / "x")
    (home / "model.safetensors.index.json").write_text(text)
    with pytest.raises(Damaged, match=r"index\.json"):
        open_hf(home)


def test_missing_shard_without_an_index(tmp_path: Path) -> None:
    home = sharded(tmp_path / "x")
    (home / "model.safetensors.index.json").unlink()
    (home / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(Damaged, match="1 shard files are absent, such as model-00001-of-00002"):
        open_hf(home)


def test_one_name_in_two_files(tmp_path: Path) -> None:
    save_file(values("a"), tmp_path / "p.safetensors")
    save_file(values("a"), tmp_path / "q.safetensors")
    with pytest.raises(Damaged, match="'a' also lies in p"):
        open_hf(tmp_path)


def test_layouts_of_others_are_named(tmp_path: Path) -> None:
    (tmp_path / "ep").mkdir()
    save_file(values("model.layers.0.mlp.gate_up_proj.shard_0"), tmp_path / "ep" / "model-00000-of-00001.safetensors")
    with pytest.raises(Refused, match="expert rank shards"):
        open_hf(tmp_path / "ep")
    (tmp_path / "dcp").mkdir()
    save_file(
        values("a"), tmp_path / "dcp" / "shard-00001-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": "{}"}
    )
    with pytest.raises(Refused, match="DCP save as safetensors"):
        open_hf(tmp_path / "dcp")
    for marker, word in (
        ("adapter_config.json", "PEFT"),
        ("zero_to_fp32.py", "DeepSpeed"),
        ("pytorch_model.bin", "pickled"),
    ):
        (tmp_path / marker).mkdir()
        (tmp_path / marker / marker).write_text("")
        with pytest.raises(Refused, match=word):
            open_hf(tmp_path / marker)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(Refused, match="no checkpoint that reshard knows"):
        open_hf(tmp_path / "nothing")


def test_byte_flips_of_an_index_never_escape(tmp_path: Path) -> None:
    import random

    home = sharded(tmp_path / "x")
    path = home / "model.safetensors.index.json"
    whole = path.read_bytes()
    pick = random.Random(0)
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[pick.randrange(len(whole))] ^= 1 << pick.randrange(8)
        path.write_bytes(damaged)
        try:
            assert set(open_hf(home)) <= {"a", "b", "c"}
        except ReshardError as error:
            assert error.exit_status in (3, 4)


def test_planned_files_fill_in_natural_order() -> None:
    tensors = {f"model.layers.{i}.w": Stored("F32", (100,), "x", 0) for i in range(12)}
    planned = hf.plan_files(tensors, dict.fromkeys(tensors, "F32"), 1200)
    assert [[p.tensor for p in f.parts if p.tensor] for f in planned.files] == [
        [f"model.layers.{i}.w" for i in trio] for trio in ((0, 1, 2), (3, 4, 5), (6, 7, 8), (10, 11, 9))
    ]
    assert planned.index is not None
    index = json.loads(planned.index)
    assert index["metadata"]["total_size"] == 4800
    assert index["weight_map"]["model.layers.10.w"] == "model-00004-of-00004.safetensors"
    assert hf.plan_files(tensors, dict.fromkeys(tensors, "F32"), 10_000).index is None


def test_total_size_counts_tensor_bytes() -> None:
    tensors = {
        "a": Stored("F32", (2, 3), "x", 0), "b": Stored("I64", (4,), "x", 0), "c": Stored("BOOL", (2,), "x", 0),
        "d": Stored("F32", (), "x", 0),
    }  # fmt: skip
    planned = hf.plan_files(tensors, {n: t.dtype for n, t in tensors.items()}, 30)
    assert planned.index is not None
    assert json.loads(planned.index)["metadata"]["total_size"] == 62


def test_unreadable_file_is_one_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ReshardError, match=r"model\.safetensors"):
        open_hf(tmp_path)
