"""Both Python packages for RDMA where there are no devices, or not even the package; and what is common to them, over calls
that fail: order of closing, leaks, GID tables."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_mooncake.transfer.verbs import bindings, ibverbs_binding, pyverbs_binding, sysfs
from hicache_mooncake.transfer.verbs.api import BindingUnavailable, Gid, QpAddress, Sge, VerbsError, Work
from hicache_mooncake.transfer.verbs.objects import Calls, Limits, Port, Route, VerbsBinding
from hicache_mooncake.transfer.verbs.pyverbs_binding import PyverbsBinding
from tests.conftest import environment

# ---------------------------------------------------------------------- which package


def test_a_package_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ibverbs", None)
    with pytest.raises(BindingUnavailable, match=r"pip install 'hicache-mooncake\[verbs\]'"):
        bindings.load_binding("ibverbs")
    monkeypatch.setattr(pyverbs_binding, "_find", lambda places: (_ for _ in ()).throw(BindingUnavailable("no pyverbs")))
    with pytest.raises(BindingUnavailable, match=r"hicache-mooncake\[verbs\].*no pyverbs"):
        bindings.load_binding("auto")
    with pytest.raises(BindingUnavailable, match="auto, ibverbs, pyverbs"):
        bindings.load_binding("libfabric")


def test_a_package_without_libibverbs_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ibverbs.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "ibverbs", raising=False)
    with pytest.raises(BindingUnavailable, match="ibverbs-providers"):
        ibverbs_binding.IbverbsBinding()


def test_pyverbs_is_found_where_distributions_put_it_and_nothing_else_of_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    path = list(sys.path)
    # Built for another Python.
    (tmp_path / "pyverbs").mkdir()
    (tmp_path / "pyverbs/__init__.py").write_text("")
    (tmp_path / "pyverbs/device.cpython-27-x86_64-linux-gnu.so").write_text("")
    with pytest.raises(BindingUnavailable, match="another Python"):
        PyverbsBinding([str(tmp_path)])
    with pytest.raises(BindingUnavailable, match="python3-pyverbs"):
        PyverbsBinding([str(tmp_path / "nowhere")])
    # For this one, as it seems, but broken.
    (tmp_path / "pyverbs/device.abi3.so").write_text("")
    with pytest.raises(BindingUnavailable, match="cannot be loaded"):
        PyverbsBinding([str(tmp_path)])
    assert sys.modules["pyverbs"].__file__ == str(tmp_path / "pyverbs/__init__.py")
    assert sys.path == path


@pytest.mark.parametrize("name", ["ibverbs", "pyverbs"])
def test_without_devices_there_is_an_empty_list_and_a_name_is_refused(name: str) -> None:
    """In a process of its own, as libibverbs looks for devices once."""
    code = (
        "import sys\n"
        "from hicache_mooncake.transfer.verbs.bindings import load_binding\n"
        "from hicache_mooncake.transfer.verbs.api import BindingUnavailable, VerbsError\n"
        "try:\n    binding = load_binding(sys.argv[1])\n"
        "except BindingUnavailable as error:\n    sys.exit(f'skip {error}')\n"
        "print(binding.name, binding.devices())\n"
        "try:\n    binding.open('mlx5_0')\n"
        "except VerbsError as error:\n    print(error)\n"
        "import logging\nprint(logging.getLogger().handlers)\n"
    )
    if Path(sysfs.ROOT).is_dir() and any(Path(sysfs.ROOT).iterdir()):
        pytest.skip("there are RDMA devices here")
    ran = subprocess.run([sys.executable, "-c", code, name], env=environment(), capture_output=True, text=True, check=False)
    if ran.stderr.startswith("skip"):
        pytest.skip(ran.stderr.strip())
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{name} []\nthere is no RDMA device mlx5_0, only: none\n[]\n", "and the log is the program's"


# ---------------------------------------------------------------------- GID tables


def test_the_gid_table_is_read_from_sysfs_without_its_empty_entries(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0/ports/1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    entries = {
        0: ("fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "IB/RoCE v1", "eth0"),
        1: ("fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "RoCE v2", "eth0"),
        2: ("0000:0000:0000:0000:0000:0000:0000:0000", "", ""),
        10: ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "bond0"),
    }
    for index, (gid, kind, netdev) in entries.items():
        (port / "gids" / str(index)).write_text(f"{gid}\n")
        if kind:  # of an empty entry they cannot be read
            (port / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
            (port / "gid_attrs/ndevs" / str(index)).write_text(f"{netdev}\n")
    assert sysfs.gids("mlx5_0", 1, "Ethernet", str(tmp_path)) == (
        Gid(0, entries[0][0], "RoCE v1", "eth0"),
        Gid(1, entries[1][0], "RoCE v2", "eth0"),
        Gid(10, entries[10][0], "RoCE v2", "bond0"),
    )
    assert sysfs.gids("mlx5_0", 1, "InfiniBand", str(tmp_path))[0].type == "IB"
    assert sysfs.gids("mlx5_0", 2, "Ethernet", str(tmp_path)) == ()
    assert sysfs.gids("mlx5_9", 1, "Ethernet", str(tmp_path)) == ()


# ---------------------------------------------------------------------- what both share


class Handle:
    def __init__(self, calls: RecordedCalls, kind: str, parents: Sequence[Handle] = ()) -> None:
        self.calls, self.kind, self.parents, self.children = calls, kind, parents, 0
        for parent in parents:
            parent.children += 1
        calls.open_handles.append(self)


class RecordedCalls(Calls):
    """A library that refuses to close what is still in use, as libibverbs does, and fails where it is told to."""

    errors = (OSError,)

    def __init__(self) -> None:
        self.open_handles: list[Handle] = []
        self.log: list[str] = []
        self.fail = ""
        self.code = errno.EIO
        self.link_layer = 2
        self.route: Route | None = None
        self._keys = itertools.count(1)
        self._pipes: list[int] = []

    def _do(self, what: str) -> None:
        self.log.append(what)
        if what == self.fail:
            raise OSError(self.code, "failed as told")

    def errno(self, error: Exception) -> int:
        return getattr(error, "errno", 0) or 0

    def names(self) -> list[str]:
        self._do("names")
        return ["mlx5_1", "mlx5_0"]

    def open(self, name: str) -> Any:
        self._do("open")
        return Handle(self, "context")

    def limits(self, context: Any) -> Limits:
        self._do("limits")
        return Limits(2, 30, 1 << 40, 1000, 8192, 65536, 16)

    def port(self, context: Any, number: int) -> Port:
        self._do("port")
        return Port(4 if number == 1 else 1, self.link_layer, 7, 5, 1 << 30, 4)

    def gid(self, context: Any, port: int, index: int) -> bytes:
        if index == 2:
            raise OSError(errno.ENODATA, "empty")
        return bytes(16) if index == 3 else bytes.fromhex("fe800000000000000000000000000001")

    def protection_domain(self, context: Any) -> Any:
        self._do("protection domain")
        return Handle(self, "domain", [context])

    def register(self, domain: Any, address: int, length: int) -> tuple[Any, int, int]:
        self._do("register")
        return Handle(self, "mr", [domain]), next(self._keys), next(self._keys)

    def channel(self, context: Any) -> tuple[Any, int]:
        self._do("channel")
        handle = Handle(self, "channel", [context])
        reader, writer = os.pipe()
        self._pipes += [reader, writer]
        return handle, reader

    def completion_queue(self, context: Any, channel: Any, entries: int) -> Any:
        self._do("completion queue")
        return Handle(self, "cq", [context, channel])

    def poll(self, cq: Any, limit: int) -> list[tuple[int, int]]:
        self._do("poll")
        return [(5, 10)]

    def request_event(self, cq: Any) -> None:
        self._do("arm")
        os.write(self._pipes[1], b"xx")  # two events

    def take_event(self, channel: Any, cq: Any) -> None:
        self._do("take")
        os.read(self._pipes[0], 1)

    def queue_pair(self, domain: Any, cq: Any, max_wr: int, max_sge: int) -> tuple[Any, int]:
        self._do("queue pair")
        return Handle(self, "qp", [domain, cq]), 77

    def to_init(self, qp: Any, port: int) -> None:
        self._do("init")

    def connect(self, qp: Any, psn: int, route: Route) -> None:
        self.route = route
        self._do("connect")

    def post(self, qp: Any, works: Sequence[Work]) -> None:
        self._do("post")

    def close(self, handle: Any) -> None:
        self._do(f"close {handle.kind}")
        if handle.children:
            raise OSError(errno.EBUSY, "in use")
        for parent in handle.parents:
            parent.children -= 1
        self.open_handles.remove(handle)

    def clean(self) -> None:
        for fd in self._pipes:
            os.close(fd)


class RecordedBinding(VerbsBinding):
    name = "recorded"


@pytest.fixture
def calls() -> Iterator[RecordedCalls]:
    calls = RecordedCalls()
    yield calls
    calls.clean()


@pytest.fixture
def binding(calls: RecordedCalls, monkeypatch: pytest.MonkeyPatch) -> RecordedBinding:
    monkeypatch.setattr(sysfs, "present", lambda root=sysfs.ROOT: False)
    return RecordedBinding(calls)


def test_everything_is_closed_before_what_it_was_made_of(binding: RecordedBinding, calls: RecordedCalls) -> None:
    device = binding.open("mlx5_0")
    device.register(4096, 4096)
    device.register(8192, 4096).close()
    cq = device.completions(16)
    for _ in range(2):
        device.queue_pair(cq, 1, 16, 4)
    calls.log.clear()
    device.close()
    device.close()
    assert calls.log == [
        "close qp", "close qp", "close cq", "close channel", "close mr", "close domain", "close context",
    ]  # fmt: skip
    assert not calls.open_handles


@pytest.mark.parametrize("step", ["open", "limits", "port", "protection domain", "channel", "completion queue", "queue pair"])
def test_what_fails_leaves_nothing_open_and_says_which_device(
    binding: RecordedBinding, calls: RecordedCalls, step: str
) -> None:
    calls.fail = step
    device = None
    with pytest.raises(VerbsError, match=r"mlx5_0.*Input/output error") as caught:  # noqa: PT012 (whichever step it is)
        device = binding.open("mlx5_0")
        device.queue_pair(device.completions(16), 1, 16, 4)
    assert caught.value.errno == errno.EIO
    if device is not None:
        device.close()
    assert not calls.open_handles


def test_a_queue_pair_that_cannot_be_destroyed_says_so_and_is_tried_again(
    binding: RecordedBinding, calls: RecordedCalls
) -> None:
    device = binding.open("mlx5_0")
    qp = device.queue_pair(device.completions(16), 1, 16, 4)
    calls.fail = "close qp"
    for close in (qp.close, device.close):
        with pytest.raises(VerbsError, match="destroy a queue pair of mlx5_0"):
            close()
    calls.fail = ""
    qp.post([])  # it is still there
    device.close()
    assert not calls.open_handles


def test_devices_that_cannot_be_opened_are_listed_with_the_reason(binding: RecordedBinding, calls: RecordedCalls) -> None:
    calls.fail, calls.code = "open", errno.EACCES
    assert [(info.name, info.problem) for info in binding.devices()] == [
        (name, f"open {name}: Permission denied") for name in ("mlx5_0", "mlx5_1")
    ]
    calls.fail = ""
    first = binding.devices()[0]
    assert [(port.number, port.state, port.lid, port.active_mtu) for port in first.ports] == [
        (1, "ACTIVE", 7, 4096),
        (2, "DOWN", 7, 4096),
    ]
    assert [gid.index for gid in first.ports[0].gids] == [0, 1]  # asked one by one where sysfs is missing
    assert (first.max_sge, first.max_mr, first.max_qp_wr, first.max_rd_atomic) == (30, 1000, 8192, 16)
    assert not calls.open_handles


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOENT, errno.EPERM], ids=["ENOSYS", "ENOENT", "EPERM"])
def test_a_kernel_without_rdma_has_no_devices(binding: RecordedBinding, calls: RecordedCalls, code: int) -> None:
    calls.fail, calls.code = "names", code
    if code == errno.EPERM:
        with pytest.raises(VerbsError, match="Operation not permitted"):
            binding.devices()
    else:
        assert binding.devices() == []
        with pytest.raises(VerbsError, match="only: none"):
            binding.open("mlx5_0")


def test_all_events_that_are_there_are_taken(binding: RecordedBinding, calls: RecordedCalls) -> None:
    cq = binding.open("mlx5_0").completions(16)
    cq.arm()
    cq.ack()
    assert calls.log[-3:] == ["arm", "take", "take"]
    assert cq.poll(8)[0][:2] == (5, 10)
    calls.fail = "poll"
    with pytest.raises(VerbsError, match=r"poll .* mlx5_0: Input/output error"):
        cq.poll(8)


@pytest.mark.parametrize(
    ("link_layer", "lid", "gid", "is_global"),
    [
        (2, 0, "fe80::2", True),
        (1, 9, "fe80::2", False),
        (1, 9, "fec0::2", True),
        (1, 0, "fe80::2", True),
        (1, 9, "", False),
    ],
    ids=["RoCE", "one subnet", "another subnet", "no lid", "no gid"],
)
def test_the_global_header_is_used_where_the_peer_needs_it(
    binding: RecordedBinding, calls: RecordedCalls, link_layer: int, lid: int, gid: str, is_global: bool
) -> None:
    calls.link_layer = link_layer
    device = binding.open("mlx5_0")
    qp = device.queue_pair(device.completions(16), 1, 16, 4)
    qp.init()
    qp.connect(QpAddress(5, 6, gid, lid, rd_atomic=4), 0, 1024)
    assert calls.route is not None
    assert (calls.route.is_global, calls.route.mtu, calls.route.rd_atomic, calls.route.dest_rd_atomic) == (is_global, 3, 4, 16)
    for address, mtu in ((QpAddress(5, 6, "no address", 0), 1024), (QpAddress(5, 6, gid, 0), 9000)):
        with pytest.raises(VerbsError, match="cannot connect"):
            qp.connect(address, 0, mtu)
    with pytest.raises(VerbsError, match="not one of mlx5_0"):
        binding.open("mlx5_0").queue_pair(_closed(device), 1, 1, 1)


@pytest.mark.parametrize("index", [2, 3], ids=["missing", "zero"])
def test_an_infiniband_port_without_a_gid_connects_by_its_lid(
    binding: RecordedBinding, calls: RecordedCalls, index: int
) -> None:
    calls.link_layer = 1
    device = binding.open("mlx5_0")
    qp = device.queue_pair(device.completions(16), 1, 16, 4)
    qp.init()
    assert (qp.address(index).gid, qp.address(index).lid) == ("", 7)
    qp.connect(QpAddress(5, 6, "fe80::2", 9), index, 1024)
    assert calls.route is not None
    assert not calls.route.is_global
    for nowhere in (QpAddress(5, 6, "", 0), QpAddress(5, 6, "no address", 9)):
        with pytest.raises(VerbsError, match="cannot connect"):
            qp.connect(nowhere, index, 1024)


def _closed(device: Any) -> Any:
    cq = device.completions(1)
    cq.close()
    return cq


def test_works_are_handed_over_as_they_are(binding: RecordedBinding, calls: RecordedCalls) -> None:
    device = binding.open("mlx5_0")
    qp = device.queue_pair(device.completions(16), 1, 16, 4)
    assert 0 <= qp.psn < 1 << 24
    assert qp.address(0) == QpAddress(77, qp.psn, "fe80:0000:0000:0000:0000:0000:0000:0001", 7, 16)
    qp.post([Work("read", [Sge(1, 2, 3)], 4, 5, 6)])
    assert calls.log[-1] == "post"
    calls.fail, calls.code = "post", errno.ENOMEM
    with pytest.raises(VerbsError, match=r"post 1 works, mlx5_0: Cannot allocate memory"):
        qp.post([Work("read", [Sge(1, 2, 3)], 4, 5, 6)])
