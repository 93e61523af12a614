"""Memory registered on RDMA devices: parts, what peers are told, and what an operator reads when it cannot be."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hicache_mooncake.testing.fake_verbs import CardLimits, FakeFabric, FakeHost
from hicache_mooncake.transfer.transport import TransportError
from hicache_mooncake.transfer.verbs.api import DeviceInfo, VerbsError
from hicache_mooncake.transfer.verbs.registration import MAX_PARTS, explain, parse_token, part_length, register

MIB = 1 << 20
UNLIMITED = -1


@pytest.fixture
def host() -> Iterator[FakeHost]:
    with FakeFabric() as fabric:
        yield fabric.host("a", ())


@pytest.fixture
def memory() -> Iterator[tuple[int, int]]:
    """Address and length of memory that is really there."""
    mapped = mmap.mmap(-1, 16 * MIB)
    view = ctypes.c_char.from_buffer(mapped)
    yield ctypes.addressof(view), len(mapped)
    del view
    mapped.close()


def test_a_memory_is_cut_into_parts_that_each_device_takes(host: FakeHost, memory: tuple[int, int]) -> None:
    address, length = memory
    host.add_card("small", limits=CardLimits(max_mr_size=5 * MIB))
    host.add_card("large")
    devices = {name: host.binding().open(name) for name in ("small", "large")}
    registration = register(devices, address, length)
    small, large = registration.tables["small"], registration.tables["large"]
    assert [(part.start - address, part.length) for part in small.parts] == [
        (0, 4 * MIB), (4 * MIB, 4 * MIB), (8 * MIB, 4 * MIB), (12 * MIB, 4 * MIB),
    ]  # fmt: skip
    assert [part.length for part in large.parts] == [length]
    assert len({part.key for part in (*small.parts, *large.parts)}) == 5
    assert not registration.problems

    told = parse_token(registration.token, address, length)
    assert set(told) == {"small", "large"}
    for name, table in told.items():
        mine = registration.tables[name].parts
        assert [part[:2] for part in table.parts] == [part[:2] for part in mine]
        # What peers are told are rkeys, and what is kept are lkeys.
        assert {part.key for part in table.parts}.isdisjoint(part.key for part in mine)

    assert host.pinned == 2 * length
    registration.close()
    registration.close()
    assert host.pinned == 0


def test_an_address_lies_in_one_part_up_to_its_border(host: FakeHost, memory: tuple[int, int]) -> None:
    address, length = memory
    host.add_card("mlx5_0", limits=CardLimits(max_mr_size=4 * MIB))
    table = register({"mlx5_0": host.binding().open("mlx5_0")}, address, length).tables["mlx5_0"]
    assert len({part.key for part in table.parts}) == len(table.parts) == length // (4 * MIB)
    for offset, number in ((0, 0), (4 * MIB - 1, 0), (4 * MIB, 1), (5 * MIB, 1), (length - 1, 3)):
        assert table.part(address + offset) == table.parts[number]
        assert table.parts[number][:2] == (address + number * 4 * MIB, 4 * MIB)
    for offset in (-1, length, length + MIB):
        with pytest.raises(TransportError) as caught:
            table.part(address + offset)
        assert caught.value.reason == "bounds"


def test_parts_end_where_huge_pages_do() -> None:
    assert part_length(1 << 40, 7 * MIB) == 7 * MIB
    assert part_length(0, 7 * MIB) == 7 * MIB  # the device does not say
    assert part_length((64 << 30) - 1, 100 << 30) == (64 << 30) - 2 * MIB
    assert part_length(3 * MIB, 7 * MIB) == 2 * MIB
    assert part_length(10_000, 7 * MIB) == 8192


def test_a_device_that_does_not_take_it_is_left_out_and_leaves_nothing(host: FakeHost, memory: tuple[int, int]) -> None:
    address, length = memory
    for name in ("mlx5_0", "mlx5_1"):
        host.add_card(name, limits=CardLimits(max_mr_size=4 * MIB))
    devices = {name: host.binding().open(name) for name in ("mlx5_0", "mlx5_1")}
    host.memlock = length + 5 * MIB  # enough for one, and for one part on the other
    registration = register(devices, address, length)
    assert set(registration.tables) == set(parse_token(registration.token, address, length)) == {"mlx5_0"}
    assert set(registration.problems) == {"mlx5_1"}
    assert host.pinned == length
    registration.close()

    host.memlock = length - 1
    with pytest.raises(TransportError, match=r"mlx5_0.*mlx5_1") as caught:
        register(devices, address, length)
    assert caught.value.reason == "memory"
    assert host.pinned == 0
    with pytest.raises(TransportError, match="no RDMA device"):
        register({}, address, length)
    with pytest.raises(TransportError):
        register(devices, address, 0)


@pytest.mark.parametrize(
    "token",
    [
        b"", b"\xc1", b"\x93\x00", msgspec.msgpack.encode([4096, 8192, {"a": [8192, [1]]}]),
        msgspec.msgpack.encode([4096, 4096, {"a": [0, [1]]}]), msgspec.msgpack.encode([4096, 4096, {"a": [4096, []]}]),
        msgspec.msgpack.encode([4096, 4096, {"a": [4096, [1, 2]]}]),
        msgspec.msgpack.encode([4096, 4096, {"a": [4096, [1 << 32]]}]),
        msgspec.msgpack.encode([4096, 4096, {"a": [4096, [-1]]}]),
        msgspec.msgpack.encode([4096, 4096, {str(n): [4096, [1]] for n in range(65)}]),
    ],
    ids=range(10),
)  # fmt: skip
def test_a_token_that_is_none_is_refused(token: bytes) -> None:
    with pytest.raises(TransportError) as caught:
        parse_token(token, 4096, 4096)
    assert caught.value.reason == "peer"


def test_a_token_of_too_many_parts_is_refused() -> None:
    length = (MAX_PARTS + 1) * 4096
    token = msgspec.msgpack.encode([0, length, {"a": [4096, [1] * (MAX_PARTS + 1)]}])
    with pytest.raises(TransportError, match="parts"):
        parse_token(token, 0, length)


def test_closing_goes_on_after_a_device_that_refuses(host: FakeHost, memory: tuple[int, int]) -> None:
    devices = {}
    for name in ("mlx5_0", "mlx5_1"):
        host.add_card(name)
        devices[name] = host.binding().open(name)
    registration = register(devices, *memory)
    (stubborn,) = devices["mlx5_0"].mrs  # type: ignore[attr-defined]
    close, stubborn.close = stubborn.close, lambda: (_ for _ in ()).throw(VerbsError("busy", errno.EBUSY))
    with pytest.raises(VerbsError, match="busy"):
        registration.close()
    assert host.pinned == memory[1]
    stubborn.close = close
    registration.close()
    assert host.pinned == 0


INFO = DeviceInfo("mlx5_0", max_mr_size=64 << 30, max_mr=1000)


@pytest.mark.parametrize(
    ("code", "info", "length", "parts", "memlock", "mapping", "expected"),
    [
        (errno.ENOMEM, INFO, 64 << 20, 0, 8 << 20, ("rw-p", ""), ["is 8192 KiB", "65536 KiB", "ulimit -l unlimited"]),
        (errno.ENOMEM, INFO, 100 << 30, 1000, UNLIMITED, ("rw-p", ""), ["max_mr 1000", "max_mr_size"]),
        (errno.ENOMEM, INFO, 64 << 20, 0, UNLIMITED, ("rw-p", ""), ["hugepages", "rdma_devices"]),
        (errno.EFAULT, INFO, 64 << 20, 0, UNLIMITED, ("rw-s", "/memfd:x (deleted)"), ["expandable_segments"]),
        (errno.EFAULT, INFO, 64 << 20, 0, UNLIMITED, ("rw-s", "/anon_hugepage (deleted)"), ["sysctl vm.nr_hugepages=32"]),
        (errno.EFAULT, INFO, 64 << 20, 0, UNLIMITED, ("rw-s", "/dev/nvidia-uvm"), ["GPU memory", "expandable_segments"]),
        (errno.EFAULT, INFO, 64 << 20, 0, UNLIMITED, ("r--s", "/memfd:x"), ["read-only"]),
        (errno.EFAULT, INFO, 64 << 20, 0, UNLIMITED, ("rw-s", "/var/lib/pool"), ["file /var/lib/pool", "memfd"]),
        (errno.EFAULT, INFO, 64 << 20, 0, UNLIMITED, None, ["nothing is mapped"]),
        (errno.EINVAL, INFO, 100 << 30, 0, UNLIMITED, ("rw-p", ""), ["max_mr_size"]),
        (errno.EINVAL, INFO, 64 << 20, 0, UNLIMITED, ("rw-p", ""), ["cannot pin"]),
        (errno.EIO, INFO, 64 << 20, 0, UNLIMITED, ("rw-p", ""), ["Input/output error"]),
    ],
    ids=[
        "memlock", "max_mr", "no room", "pinned", "huge pages", "gpu", "read-only", "file", "unmapped", "max_mr_size", "einval",
        "eio",
    ],
)  # fmt: skip
def test_an_error_names_the_limit_and_what_raises_it(
    code: int, info: DeviceInfo, length: int, parts: int, memlock: int, mapping: tuple[str, str] | None, expected: list[str]
) -> None:
    error = VerbsError(f"register: {os.strerror(code)}", code)
    text = explain(error, info, 0x7F0000000000, length, 0, parts, lambda: memlock, lambda _: mapping)
    assert text.startswith("mlx5_0 cannot register")
    for words in expected:
        assert words in text


def test_locked_memory_counts_on_every_device() -> None:
    """Four devices need the limit four times, and the first three may well fit."""
    error = VerbsError("no", errno.ENOMEM)
    text = explain(error, INFO, 4096, 64 << 20, 3 * (64 << 20), 0, lambda: 200 << 20, lambda _: ("rw-p", ""))
    assert f"{(256 << 20) >> 10} KiB are needed" in text


def test_the_mapping_of_an_address_is_looked_up(tmp_path: Path) -> None:
    """Of real memory: a file's, which RDMA cannot pin, and an address where nothing is."""
    (tmp_path / "pool").write_bytes(bytes(8192))
    with open(tmp_path / "pool", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 8192)
    view = ctypes.c_char.from_buffer(mapped)
    error = VerbsError("bad address", errno.EFAULT)
    assert str(tmp_path / "pool") in explain(error, INFO, ctypes.addressof(view) + 4096, 4096)
    assert "nothing is mapped" in explain(error, INFO, 4096, 4096)
    del view
    mapped.close()
