"""P01: two checkpoints under one served name are told apart by their tensors, wherever and in whatever files those lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hicache_mooncake.client.weights import _canonical_json, of_files

NAMES = [f"layers.{layer}.{part}" for layer in range(4) for part in ("q_proj", "v_proj", "down_proj")]


def write_safetensors(path: Path, names: list[str], seed: int = 0, size: int = 40_000) -> None:
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name in names:
        data = bytes((hash_of(name) + seed + i) % 251 for i in range(97)) * (size // 97)
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [len(body), len(body) + len(data)]}  # type: ignore[dict-item]
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def hash_of(name: str) -> int:
    return sum(name.encode())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    write_safetensors(folder / "model-1.safetensors", NAMES[:6])
    write_safetensors(folder / "model-2.safetensors", NAMES[6:])
    (folder / "README.md").write_text("not part of the weights")
    return folder


def test_a_copy_elsewhere_is_the_same_model(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other" / "place"
    shutil.copytree(checkpoint, copy)
    (copy / "README.md").write_text("edited")
    assert of_files(copy) == of_files(checkpoint)


def test_the_same_tensors_in_other_files_are_the_same_model(checkpoint: Path) -> None:
    before = of_files(checkpoint)
    (checkpoint / "model-2.safetensors").unlink()
    write_safetensors(checkpoint / "model-1.safetensors", NAMES)
    assert of_files(checkpoint) == before


def test_a_second_form_of_the_weights_beside_them_makes_no_difference(checkpoint: Path) -> None:
    """One host downloaded everything, another only the .safetensors."""
    before = of_files(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(b"the same weights, pickled")
    (checkpoint / "consolidated.pth").write_bytes(b"and once more")
    assert of_files(checkpoint) == before
    index = {"weight_map": dict.fromkeys(NAMES[:6], "model-1.safetensors") | dict.fromkeys(NAMES[6:], "model-2.safetensors")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors(checkpoint / "consolidated.safetensors", NAMES, seed=5)
    assert of_files(checkpoint) == before


@pytest.mark.parametrize("changed", NAMES)
def test_one_changed_tensor_is_another_model(checkpoint: Path, changed: str) -> None:
    """A merged adapter changes some projections and nothing else."""
    before = of_files(checkpoint)
    part = 1 if changed in NAMES[:6] else 2
    path = checkpoint / f"model-{part}.safetensors"
    data = bytearray(path.read_bytes())
    header_bytes = int.from_bytes(data[:8], "little")
    first, end = json.loads(data[8 : 8 + header_bytes])[changed]["data_offsets"]
    for at in range(8 + header_bytes + first, 8 + header_bytes + end):
        data[at] ^= 1
    path.write_bytes(data)
    assert of_files(checkpoint) != before


def test_two_files_in_one_folder_are_two_models(tmp_path: Path) -> None:
    (tmp_path / "m-Q4.gguf").write_bytes(b"4" * 100_000)
    (tmp_path / "m-Q8.gguf").write_bytes(b"8" * 100_000)
    assert of_files(tmp_path / "m-Q4.gguf") != of_files(tmp_path / "m-Q8.gguf")


def test_other_forms_are_sampled_all_over(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(bytes(2 << 20))
    before = of_files(tmp_path)
    for at in (0, 1 << 20, (2 << 20) - 1):
        data = bytearray(2 << 20)
        data[max(0, at - 50_000) : at + 50_000] = b"x" * len(data[max(0, at - 50_000) : at + 50_000])
        path.write_bytes(data)
        assert of_files(tmp_path) != before


def test_configuration_counts(checkpoint: Path) -> None:
    before = of_files(checkpoint)
    (checkpoint / "config.json").write_text('{"hidden_size": 65}')
    assert of_files(checkpoint) != before


def test_a_damaged_file_is_an_error_and_not_a_fingerprint(checkpoint: Path) -> None:
    (checkpoint / "model-1.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="model-1"):
        of_files(checkpoint)


def test_override_arguments_are_compared_by_meaning() -> None:
    assert _canonical_json('{"a": 1,"b":2}') == _canonical_json('{ "b": 2, "a": 1 }')
    assert _canonical_json(None) == _canonical_json("{}")
