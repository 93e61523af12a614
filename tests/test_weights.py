"""P01: two checkpoints under one served name are told apart by their files, wherever those lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hicache_mooncake.client.weights import of_folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    for part in (1, 2):
        (folder / f"model-{part}.safetensors").write_bytes(bytes(range(256)) * 400)
    (folder / "README.md").write_text("not part of the weights")
    return folder


def test_a_copy_elsewhere_is_the_same_model(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other" / "place"
    shutil.copytree(checkpoint, copy)
    (copy / "README.md").write_text("edited")
    assert of_folder(copy) == of_folder(checkpoint)


@pytest.mark.parametrize("at", [0, 5000, 50_000, 102_399])
def test_other_weights_of_the_same_size_are_another_model(checkpoint: Path, at: int) -> None:
    """A fine-tune differs nearly everywhere; the samples at both ends and between see it."""
    before = of_folder(checkpoint)
    path = checkpoint / "model-2.safetensors"
    changed = bytearray(path.read_bytes())
    changed[max(0, at - 40_000) : at + 40_000] = b"\xff" * len(changed[max(0, at - 40_000) : at + 40_000])
    path.write_bytes(changed)
    assert of_folder(checkpoint) != before


def test_configuration_names_and_sizes_count(checkpoint: Path) -> None:
    seen = {of_folder(checkpoint)}
    (checkpoint / "config.json").write_text('{"hidden_size": 65}')
    seen.add(of_folder(checkpoint))
    (checkpoint / "model-2.safetensors").rename(checkpoint / "model-3.safetensors")
    seen.add(of_folder(checkpoint))
    with (checkpoint / "model-3.safetensors").open("ab") as file:
        file.write(b"x")
    seen.add(of_folder(checkpoint))
    assert len(seen) == 4


def test_an_empty_weight_file_and_a_small_one_do_no_harm(checkpoint: Path) -> None:
    (checkpoint / "empty.bin").write_bytes(b"")
    (checkpoint / "small.pt").write_bytes(b"abc")
    assert of_folder(checkpoint)
