"""RDMA through pyverbs, rdma-core's own Python package, as distributions bring it (Debian, Ubuntu: python3-pyverbs).

It lies with the distribution's Python packages, where an interpreter of a virtual environment does not look. It is loaded from
there by its path, so that nothing else is found there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hicache_mooncake.transfer.verbs import api
from hicache_mooncake.transfer.verbs.objects import Calls, Limits, Port, Route, VerbsBinding

_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
PLACES = (
    "/usr/lib/python3/dist-packages",
    f"/usr/lib64/{_VERSION}/site-packages",
    f"/usr/lib/{_VERSION}/site-packages",
    f"/usr/local/lib/{_VERSION}/dist-packages",
)
_MODULES = ("enums", "device", "pd", "mr", "cq", "qp", "addr", "wr", "pyverbs_error")
_MIN_RNR_TIMER = 12
_DEVICES = "/sys/class/infiniband_verbs"
_EVENT_FILE = "anon_inode:[infinibandevent]"
_loading = threading.Lock()
_making_channel = threading.Lock()
"""Also around what else makes descriptors of that kind."""


class PyverbsCalls(Calls):
    def __init__(self, package: SimpleNamespace) -> None:
        self._pv, e = package, package.enums
        self.errors = (package.pyverbs_error.PyverbsError, OSError, ValueError, OverflowError)
        self._access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE
        self._opcodes = {"read": int(e.IBV_WR_RDMA_READ), "write": int(e.IBV_WR_RDMA_WRITE)}
        self._signaled = int(e.IBV_SEND_SIGNALED)

    def errno(self, error: Exception) -> int:
        code = getattr(error, "error_code", None) or getattr(error, "errno", None) or 0
        return max(int(code), 0)

    def names(self) -> list[str]:
        try:
            return [device.name.decode() for device in self._pv.device.get_device_list()]
        except self._pv.pyverbs_error.PyverbsError:
            # It does not tell the errno, which is ENOSYS on a kernel without RDMA.
            if Path(_DEVICES).is_dir():
                raise
            return []

    def open(self, name: str) -> Any:
        with _making_channel:
            return self._pv.device.Context(name=name)

    def limits(self, context: Any) -> Limits:
        a = context.query_device()
        return Limits(a.phys_port_cnt, a.max_sge, a.max_mr_size, a.max_mr, a.max_qp_wr, a.max_cqe, a.max_qp_rd_atom)

    def port(self, context: Any, number: int) -> Port:
        p = context.query_port(number)
        return Port(p.state, p.link_layer, p.lid, p.active_mtu, p.max_msg_sz, p.gid_tbl_len)

    def gid(self, context: Any, port: int, index: int) -> bytes:
        return bytes.fromhex(context.query_gid(port, index).gid.replace(":", ""))

    def protection_domain(self, context: Any) -> Any:
        return self._pv.pd.PD(context)

    def register(self, domain: Any, address: int, length: int) -> tuple[Any, int, int]:
        mr = self._pv.mr.MR(domain, length, self._access, address=address)
        return mr, mr.lkey, mr.rkey

    def channel(self, context: Any) -> tuple[Any, int]:
        # Its channels do not tell their descriptor: it is the one that was not there before.
        with _making_channel:
            before = _event_files()
            channel = self._pv.cq.CompChannel(context)
            made = _event_files() - before
        if len(made) != 1:
            channel.close()
            raise ValueError(f"the completion channel is one of the descriptors {sorted(made)}, and which is not known")
        return channel, made.pop()

    def completion_queue(self, context: Any, channel: Any, entries: int) -> Any:
        return self._pv.cq.CQ(context, entries, None, channel)

    def poll(self, cq: Any, limit: int) -> list[tuple[int, int]]:
        return [(wc.wr_id, int(wc.status)) for wc in cq.poll(limit)[1]]

    def request_event(self, cq: Any) -> None:
        cq.req_notify()

    def take_event(self, channel: Any, cq: Any) -> None:
        channel.get_cq_event(cq)
        cq.ack_events(1)

    def queue_pair(self, domain: Any, cq: Any, max_wr: int, max_sge: int) -> tuple[Any, int]:
        m, e = self._pv.qp, self._pv.enums
        capacity = m.QPCap(max_send_wr=max_wr, max_recv_wr=1, max_send_sge=max_sge, max_recv_sge=1)
        qp = m.QP(domain, m.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, sq_sig_all=0, cap=capacity))
        return qp, qp.qp_num

    def to_init(self, qp: Any, port: int) -> None:
        attributes = self._pv.qp.QPAttr(port_num=port)
        attributes.qp_access_flags = self._access
        qp.to_init(attributes)

    def connect(self, qp: Any, psn: int, route: Route) -> None:
        addr, options = self._pv.addr, route.options
        a = self._pv.qp.QPAttr(port_num=route.port)
        a.qp_access_flags = self._access
        a.dest_qp_num, a.path_mtu = route.remote.number, route.mtu
        a.sq_psn, a.rq_psn = psn, route.remote.psn
        a.max_rd_atomic, a.max_dest_rd_atomic, a.min_rnr_timer = route.rd_atomic, route.dest_rd_atomic, _MIN_RNR_TIMER
        a.timeout, a.retry_cnt, a.rnr_retry = options.ack_timeout, options.retries, options.retries
        header = addr.GlobalRoute(
            dgid=addr.GID(api.gid_text(route.dgid)), sgid_index=route.gid_index,
            hop_limit=options.hop_limit, traffic_class=options.traffic_class,
        )  # fmt: skip
        a.ah_attr = addr.AHAttr(
            gr=header, is_global=int(route.is_global), port_num=route.port, dlid=route.remote.lid, sl=options.service_level
        )
        qp.to_rts(a)  # from INIT, by way of RTR

    def post(self, qp: Any, works: Sequence[api.Work]) -> None:
        m = self._pv.wr
        requests: list[Any] = []
        for work in works:
            stretches = [m.SGE(*stretch) for stretch in work.sges]
            request = m.SendWR(
                wr_id=work.wr_id, opcode=self._opcodes[work.op], num_sge=len(stretches), sg=stretches,
                send_flags=self._signaled if work.signaled else 0,
            )  # fmt: skip
            request.set_wr_rdma(work.rkey, work.remote)
            if requests:
                requests[-1].next_wr = request
            requests.append(request)
        if requests:
            qp.post_send(requests[0])


class PyverbsBinding(VerbsBinding):
    """Raises BindingUnavailable where the package is missing or was built for another Python."""

    name = "pyverbs"

    def __init__(self, places: Sequence[str] = PLACES) -> None:
        with _loading:
            _find(places)
            try:
                with _logging_left_alone():
                    modules = {name: importlib.import_module(f"pyverbs.{name}") for name in _MODULES}
            except ImportError as error:
                raise api.BindingUnavailable(f"pyverbs cannot be loaded: {error}") from error
        super().__init__(PyverbsCalls(SimpleNamespace(**modules)))


@contextlib.contextmanager
def _logging_left_alone() -> Iterator[None]:
    """pyverbs calls `logging.basicConfig` when it is imported: where a program has not set up its log, its lines would go to
    stderr from then on. That call does nothing while the root logger has a handler."""
    root, guard = logging.getLogger(), logging.NullHandler()
    root.addHandler(guard)
    try:
        yield
    finally:
        root.removeHandler(guard)


def _find(places: Sequence[str]) -> None:
    """Make `import pyverbs` find it."""
    if "pyverbs" in sys.modules or importlib.util.find_spec("pyverbs") is not None:
        return
    there = [folder for place in places if (folder := Path(place) / "pyverbs").is_dir()]
    fitting = [
        folder for folder in there if any((folder / f"device{end}").exists() for end in importlib.machinery.EXTENSION_SUFFIXES)
    ]
    if not fitting:
        raise api.BindingUnavailable(
            f"pyverbs in {there[0]} is for another Python than this {_VERSION}: pip install 'hicache-mooncake[verbs]' instead"
            if there
            else "pyverbs is not installed: apt install python3-pyverbs (Fedora, RHEL: python3-pyverbs), "
            "or pip install 'hicache-mooncake[verbs]' for the other binding"
        )
    folder = fitting[0]
    spec = importlib.util.spec_from_file_location(
        "pyverbs", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )  # fmt: skip
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = package
    spec.loader.exec_module(package)


def _event_files() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _EVENT_FILE:
                found.add(int(name))
        except OSError:
            continue  # another thread closed it
    return found
