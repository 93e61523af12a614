"""Identity: two configurations that differ in one field never share a page, two that do not always do."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.keys import Namespace, checksum_seed, checksum_seeds, pack_hashes
from tests.conftest import environment

BASE = Namespace(model="m", family="MHATokenToKVPoolHost", dtype="torch.bfloat16", layout="page_first", page_size=64, layers=32,
                 heads=8, head_dim=128, run_bytes=(4096, 4096), tp_rank=0, tp_size=1)  # fmt: skip


def split_hashes(blob: bytes) -> list[bytes]:
    return [blob[at : at + 32] for at in range(0, len(blob), 32)]


def other_value(value: Any) -> list[Any]:
    if value is None:
        return [0, 1]
    if isinstance(value, int):
        return [value + 1, None]
    if isinstance(value, tuple):
        return [(), (*value, 1), (int("".join(map(str, value))),) if value else (2,)]
    return [value + "x", "0", ""] if value else ["x", "0"]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Namespace)])
def test_every_field_separates(name: str) -> None:
    """P01 P02: weights, dtype, layout, shape, tenant: each alone gives other keys."""
    value = getattr(BASE, name)
    digests = {BASE.digest()}
    others = [v for v in other_value(value) if v != value]
    for other in others:
        changed = dataclasses.replace(BASE, **{name: other})
        digests.add(changed.digest())
        assert changed.differences(BASE) == [name]
    assert len(digests) == 1 + len(others)


@given(st.lists(st.text(max_size=6), min_size=4, max_size=4), st.lists(st.text(max_size=6), min_size=4, max_size=4))
def test_fields_cannot_run_into_each_other(a: list[str], b: list[str]) -> None:
    names = ("model", "model_id", "tag", "tenant")
    first = dataclasses.replace(BASE, **dict(zip(names, a, strict=True)))
    second = dataclasses.replace(BASE, **dict(zip(names, b, strict=True)))
    assert (first.digest() == second.digest()) == (a == b)


def test_every_process_makes_the_same_key() -> None:
    """P49: no process-random hashing anywhere in the key code."""
    program = "from tests.test_keys import BASE; print(BASE.digest().hex())"
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=environment() | {"PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert outputs == {BASE.digest().hex().encode() + b"\n"}


def test_hashes_pack_to_their_bytes() -> None:
    good = ["ab" * 32, "00" * 32]
    blob, bad = pack_hashes(good)
    assert split_hashes(blob) == [bytes.fromhex(key) for key in good]
    assert bad == []
    assert pack_hashes([]) == (b"", [])


@pytest.mark.parametrize(
    "key", ["", "ab", "ab" * 33, "AB" * 32, "zz" * 32, "ab" * 31 + "g1", "__placeholder__", " " * 64, "é" * 64]
)
def test_a_key_that_is_not_a_page_hash_is_named_and_disturbs_nobody(key: str) -> None:
    good = "cd" * 32
    blob, bad = pack_hashes([good, key, good])
    assert bad == [1]
    assert split_hashes(blob) == [bytes.fromhex(good), bytes(32), bytes.fromhex(good)]


def test_two_bad_keys_whose_lengths_add_up_are_both_bad() -> None:
    assert pack_hashes(["ab" * 31, "ab" * 33])[1] == [0, 1]


@given(namespace=st.binary(min_size=16, max_size=16), hashes=st.lists(st.binary(min_size=32, max_size=32), max_size=20))
def test_the_seeds_of_a_blob_are_those_of_its_pages(namespace: bytes, hashes: list[bytes]) -> None:
    assert checksum_seeds(namespace, b"".join(hashes)) == [checksum_seed(namespace, page) for page in hashes]
