"""diff: distances worked out by hand, and what counts as equal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import reshard
from reshard.verbs.diff import describe_diff
from written import LLAMA, raw_file, write_hf

if TYPE_CHECKING:
    from pathlib import Path


def diff(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], **config: Any) -> dict[str, Any]:
    home_a, home_b = (
        write_hf(tmp_path / "a", a, config=LLAMA | config),
        write_hf(tmp_path / "b", b, config=LLAMA | config),
    )
    found = reshard.diff(str(home_a), str(home_b))
    json.dumps(found, allow_nan=False)
    assert all(line.isprintable() for line in describe_diff(found))
    return found


def row(tmp_path: Path, a: Any, b: Any) -> dict[str, Any]:
    (found,) = diff(tmp_path, {"w": a}, {"w": b})["tensors"]
    return found


def test_identical(tmp_path: Path) -> None:
    some = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "n": np.float32(np.nan).reshape(1),
        "e": np.zeros((0, 4)),
    }
    found = diff(tmp_path, some, some)
    assert found["identical"] and (found["compared"], found["same"], found["tensors"]) == (3, 3, [])


def test_a_distance_by_hand(tmp_path: Path) -> None:
    found = row(tmp_path, np.array([1, 2, 3, 4], np.float32), np.array([1, 2, 3, 6], np.float32))
    assert (found["elements"], found["differing"], found["max_abs"], found["nonfinite"]) == (4, 1, 2.0, 0)
    assert found["rel_l2"] == pytest.approx(2 / 30**0.5)


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.int64]
)
def test_dtypes(tmp_path: Path, dtype: Any) -> None:
    found = row(tmp_path, np.array([[1, 2], [3, 4]], dtype), np.array([[1, 2], [0, 4]], dtype))
    assert (found["differing"], found["max_abs"]) == (1, 3.0)
    assert found["rel_l2"] == pytest.approx(3 / 30**0.5)


def test_booleans_unsigned_and_complex(tmp_path: Path) -> None:
    found = row(tmp_path, np.array([True, False]), np.array([True, True]))
    assert (found["differing"], found["max_abs"]) == (1, 1.0)
    found = row(tmp_path, np.array([0, 255], np.uint8), np.array([255, 255], np.uint8))
    assert (found["differing"], found["max_abs"]) == (1, 255.0)


def test_complex(tmp_path: Path) -> None:
    for name, value in (("a", 3 + 4j), ("b", 0j)):
        home = write_hf(tmp_path / name, {"v": np.zeros(1)}, config=LLAMA)
        raw_file(
            home / "model.safetensors",
            {"w": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}},
            np.array([value], np.complex64).tobytes(),
        )
    (found,) = reshard.diff(str(tmp_path / "a"), str(tmp_path / "b"))["tensors"]
    assert (found["differing"], found["max_abs"], found["rel_l2"]) == (1, 5.0, 1.0)


def test_packed_dtypes_are_compared_as_bytes(tmp_path: Path) -> None:
    for name, data in (("a", b"\x12\x34"), ("b", b"\x12\x35")):
        home = write_hf(tmp_path / name, {"v": np.zeros(1)}, config=LLAMA)
        raw_file(home / "model.safetensors", {"w": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}, data)
    (found,) = reshard.diff(str(tmp_path / "a"), str(tmp_path / "b"))["tensors"]
    assert (found["differing"], found["max_abs"], found["rel_l2"]) == (1, None, None)


def test_zeros_infinities_and_what_is_no_number(tmp_path: Path) -> None:
    zero = np.zeros(2, np.float32)
    found = row(tmp_path, zero, np.array([-0.0, 0.0], np.float32))
    assert (found["differing"], found["max_abs"], found["rel_l2"]) == (1, 0.0, None)
    found = row(tmp_path, np.array([1, np.nan, np.inf, 2], np.float32), np.array([1, 7, np.inf, 4], np.float32))
    assert (found["differing"], found["nonfinite"], found["max_abs"]) == (2, 1, 2.0)
    assert found["rel_l2"] == pytest.approx(2 / 5**0.5)


def test_names_shapes_dtypes(tmp_path: Path) -> None:
    a = {"same": np.ones(2, np.float32), "wide": np.ones(2, np.float32), "cut": np.ones((2, 3)), "gone": np.ones(1)}
    b = {
        "same": np.ones(2, np.float32),
        "wide": np.ones(2, ml_dtypes.bfloat16),
        "cut": np.ones((3, 2)),
        "new": np.ones(1),
    }
    found = diff(tmp_path, a, b)
    assert not found["identical"] and found["tensors"] == []
    assert (found["only_a"], found["only_b"]) == (["gone"], ["new"])
    assert sorted(found["changed"], key=lambda change: change["name"]) == [
        {"name": "cut", "dtype": ["F64", "F64"], "shape": [[2, 3], [3, 2]]},
        {"name": "wide", "dtype": ["F32", "BF16"], "shape": [[2], [2]]},
    ]


def test_a_rounded_copy_is_as_far_as_rounding_is(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((33, 1000)).astype(np.float32)
    rounded = values.astype(ml_dtypes.bfloat16)
    found = diff(tmp_path, {"w": values}, {"w": rounded})
    gap = np.abs(values.astype(np.float64) - rounded.astype(np.float64))
    (row,) = found["tensors"]
    assert row["differing"] == int((gap != 0).sum()) and row["max_abs"] == gap.max()
    assert row["rel_l2"] == pytest.approx(np.linalg.norm(gap) / np.linalg.norm(values.astype(np.float64)))
    assert 0 < row["rel_l2"] < 2**-8


def test_tensors_longer_than_a_tile(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    a = rng.standard_normal(5_000_011).astype(np.float32)
    b = a.copy()
    places = [2_097_151, 2_097_152, 4_999_999, 5_000_010]  # both sides of an 8 MiB tile's edge, and the last
    b[places] += 1
    found = row(tmp_path, a, b)
    assert found["differing"] == len(places)
    assert found["rel_l2"] == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a.astype(np.float64)), rel=1e-6)


def test_across_layouts(mini_dirs: Path, tmp_path: Path) -> None:
    source = str(mini_dirs / "qwen3_moe")
    reshard.convert(source, str(tmp_path / "fused"), experts="fused")
    reshard.convert(source, str(tmp_path / "dcp"), to="dcp", experts="fused")
    for a, b in ((source, "fused"), ("fused", source), ("dcp", source), ("dcp", "fused")):
        assert reshard.diff(str(tmp_path / a), str(tmp_path / b))["identical"]


def test_a_tied_head_on_one_side(tmp_path: Path) -> None:
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    one, both = {embed: values}, {embed: values, head: values.copy()}
    assert diff(tmp_path, one, both, tie_word_embeddings=True)["identical"]
    assert diff(tmp_path, both, one, tie_word_embeddings=True)["identical"]
    assert diff(tmp_path, one, both)["only_b"] == [head]
    both[head][0, 0] = 9
    found = diff(tmp_path, one, both, tie_word_embeddings=True)
    assert [entry["name"] for entry in found["tensors"]] == [head]


def test_the_largest_distances_are_shown_first(tmp_path: Path) -> None:
    a = {f"w{i:02d}": np.ones(4, np.float32) for i in range(30)}
    b = {name: array * (1 + i / 10) for i, (name, array) in enumerate(sorted(a.items()))}
    shown = [line.split()[0] for line in describe_diff(diff(tmp_path, a, b)) if line.startswith("w")]
    assert shown == [f"w{i:02d}" for i in range(29, 9, -1)]


def test_any_number_of_workers(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    a = {f"w{i}": rng.standard_normal((50, 7)).astype(np.float32) for i in range(20)}
    b = {name: array + (0.5 if name.endswith("3") else 0) for name, array in a.items()}
    homes = [str(write_hf(tmp_path / name, some, config=LLAMA)) for name, some in (("a", a), ("b", b))]
    one, four = (reshard.diff(*homes, workers=count) for count in (1, 4))
    assert one["tensors"] == four["tensors"] and len(one["tensors"]) == 2
