"""RDMA through the package `ibverbs` from PyPI, which needs nothing but libibverbs and its providers. It posts a list of works
in one call, and lets other threads run meanwhile."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hicache_mooncake.transfer.verbs import api
from hicache_mooncake.transfer.verbs.objects import Calls, Limits, Port, Route, VerbsBinding

_MIN_RNR_TIMER = 12


class IbverbsCalls(Calls):
    errors = (OSError, ValueError, OverflowError, RuntimeError)
    """Its own error is an OSError; the others are for handles that are closed and numbers out of range."""

    def __init__(self, package: ModuleType) -> None:
        self._ib = ib = package
        self._access = ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_READ | ib.AccessFlags.REMOTE_WRITE
        # As plain numbers: an operation on an enum costs more than a work request.
        self._opcodes = {"read": int(ib.WROpcode.RDMA_READ), "write": int(ib.WROpcode.RDMA_WRITE)}
        self._signaled = int(ib.SendFlags.SIGNALED)

    def errno(self, error: Exception) -> int:
        return (error.errno or 0) if isinstance(error, OSError) else 0

    def names(self) -> list[str]:
        return [device.name for device in self._ib.get_device_list()]

    def open(self, name: str) -> Any:
        for device in self._ib.get_device_list():
            if device.name == name:
                return device.open()
        raise ValueError(f"{name} is not there any more")

    def limits(self, context: Any) -> Limits:
        a = context.query_device()
        return Limits(
            a.phys_port_cnt, a.max_sge, a.max_mr_size, a.max_mr, a.max_qp_wr, a.max_cqe, a.max_qp_rd_atom
        )  # fmt: skip

    def port(self, context: Any, number: int) -> Port:
        p = context.query_port(number)
        return Port(int(p.state), int(p.link_layer), p.lid, int(p.active_mtu), p.max_msg_sz, p.gid_tbl_len)

    def gid(self, context: Any, port: int, index: int) -> bytes:
        return bytes(context.query_gid(port, index).raw)

    def protection_domain(self, context: Any) -> Any:
        return context.alloc_pd()

    def register(self, domain: Any, address: int, length: int) -> tuple[Any, int, int]:
        mr = domain.reg_mr(address, length, self._access)
        return mr, mr.lkey, mr.rkey

    def channel(self, context: Any) -> tuple[Any, int]:
        channel = context.create_comp_channel()
        return channel, channel.fd

    def completion_queue(self, context: Any, channel: Any, entries: int) -> Any:
        return context.create_cq(entries, channel)

    def poll(self, cq: Any, limit: int) -> list[tuple[int, int]]:
        return [(wc.wr_id, int(wc.status)) for wc in cq.poll(limit)]

    def request_event(self, cq: Any) -> None:
        cq.req_notify()

    def take_event(self, channel: Any, cq: Any) -> None:
        channel.get_cq_event()
        cq.ack_events(1)

    def queue_pair(self, domain: Any, cq: Any, max_wr: int, max_sge: int) -> tuple[Any, int]:
        qp = domain.create_qp(
            self._ib.QPInitAttr(
                send_cq=cq, recv_cq=cq, max_send_wr=max_wr, max_recv_wr=1, max_send_sge=max_sge, max_recv_sge=1
            )
        )  # fmt: skip
        return qp, qp.qp_num

    def to_init(self, qp: Any, port: int) -> None:
        qp.to_init(port, self._access)

    def connect(self, qp: Any, psn: int, route: Route) -> None:
        mask, options = self._ib.QPAttrMask, route.options
        qp.modify(
            mask.STATE | mask.AV | mask.PATH_MTU | mask.DEST_QPN | mask.RQ_PSN | mask.MAX_DEST_RD_ATOMIC | mask.MIN_RNR_TIMER,
            self._ib.AHAttr(
                dgid=route.dgid, sgid_index=route.gid_index, dlid=route.remote.lid, is_global=int(route.is_global),
                port_num=route.port, hop_limit=options.hop_limit, traffic_class=options.traffic_class, sl=options.service_level,
            ),
            qp_state=int(self._ib.QPState.RTR), path_mtu=route.mtu, dest_qp_num=route.remote.number, rq_psn=route.remote.psn,
            max_dest_rd_atomic=route.dest_rd_atomic, min_rnr_timer=_MIN_RNR_TIMER,
        )  # fmt: skip
        qp.to_rts(
            psn,
            timeout=options.ack_timeout,
            retry_cnt=options.retries,
            rnr_retry=options.retries,
            max_rd_atomic=route.rd_atomic,
        )

    def post(self, qp: Any, works: Sequence[api.Work]) -> None:
        send_wr, sge, opcodes, signaled = self._ib.SendWR, self._ib.SGE, self._opcodes, self._signaled
        qp.post_send(
            [
                send_wr(
                    work.wr_id, [sge(*stretch) for stretch in work.sges], opcodes[work.op],
                    signaled if work.signaled else 0, work.remote, work.rkey,
                )
                for work in works
            ]
        )  # fmt: skip


class IbverbsBinding(VerbsBinding):
    """Raises BindingUnavailable where the package or libibverbs is missing."""

    name = "ibverbs"

    def __init__(self) -> None:
        try:
            package = importlib.import_module("ibverbs")
        except ModuleNotFoundError as error:
            raise api.BindingUnavailable(
                "the package ibverbs is not installed: pip install 'hicache-mooncake[verbs]'"
            ) from error
        except ImportError as error:
            raise api.BindingUnavailable(
                f"the package ibverbs cannot be loaded ({error}): install the libraries of rdma-core "
                "(Debian, Ubuntu: libibverbs1 ibverbs-providers; Fedora, RHEL: libibverbs)"
            ) from error
        super().__init__(IbverbsCalls(package))
