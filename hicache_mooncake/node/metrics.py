"""The node's figures for Prometheus, read from its report at scrape time: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Report = Mapping[str, int | float | str | bool]

_GAUGES = {
    "capacity_bytes": "Bytes of the segment.",
    "used_bytes": "Bytes allocated, objects and pages being written.",
    "pinned_bytes": "Bytes that readers hold.",
    "promised": "Pages kept since a decode server was told of them and has not loaded them yet.",
    "promised_bytes": "Bytes of those pages; at most promise_share of the segment.",
    "objects": "Objects held.",
    "guests": "Pages that other nodes gave away to this one.",
    "replicas": "Pages of other nodes that are kept here too.",
    "writing": "Batches that are being written.",
    "namespaces": "Namespaces with at least one object.",
    "connections": "Ranks and movers connected.",
    "engines": "Engines of this host that have said who they are.",
    "unshared_engines": "Engines of this host that should share pages with the other side of a prefill and decode cluster, and "
    "cannot; the log, /health and `hicache-mooncake status` say why.",
    "remote_readers": "Connections of other hosts' movers.",
    "links": "Links to other nodes that stand.",
    "links_making": "Links being made.",
    "landing_bytes": "Bytes of the segment that pages are coming to over links.",
    "cold_pages": "Pages in the cold tier.",
    "cold_used_bytes": "Bytes of the cold tier's file that were written, with what is no longer found there.",
    "cold_capacity_bytes": "Bytes that the cold tier's file may have.",
    "cold_index_bytes": "Bytes of the cold tier's index.",
    "cold_direct": "1 where the cold tier's file is read and written past the page cache.",
    "cold_stuck_reads": "Reads from the cold tier that nobody waits for any more.",
    "cold_write_amplification": "Bytes written to the cold tier for each byte that came to it.",
    "quarantined_bytes": "Bytes not used again before a link has been ended that may write there, or before the next start.",
    "link_ends_hanging": "Links whose end does not return: a driver may hang.",
    "uptime_s": "Seconds since start.",
    "draining": "1 while the node hands its pages over before it ends.",
    "degraded": "1 while /health names problems.",
    "master_refused": "1 while the masters refuse this node; /health says why.",
}
_COUNTERS = {
    "lookup_keys": "Keys asked for by ranks.",
    "hit_keys": "Keys asked for and held here.",
    "loaded": "Objects read, by ranks of this host and by other hosts.",
    "loaded_bytes": "Bytes of the objects read.",
    "stored": "Objects stored.",
    "stored_bytes": "Bytes of the objects stored.",
    "had": "Stores of objects that were here already: nothing copied.",
    "evicted": "Objects evicted.",
    "evicted_bytes": "Bytes evicted.",
    "evicted_unkept": "Objects evicted that were not in the cold tier: the disk was behind, or failed.",
    "refused": "Stores refused for want of room: everything is pinned, or the object is larger than the segment.",
    "discarded": "Objects dropped because their bytes failed the checksum.",
    "abandoned": "Objects whose writer died or gave up before the commit.",
    "expired_pins": "Pins that ended by their expiry and not by their reader.",
    "pin_limit": "Reads turned into misses because too much of the segment was pinned.",
    "wrong_length": "Objects found with another length than asked for: misses.",
    "headless": "Pages found behind the first one missing: they are of no use. Should stay near 0.",
    "spilled": "Pages given to nodes with room, and removed here.",
    "spilled_bytes": "Bytes of the pages given to nodes with room.",
    "spill_duplicates": "Pages removed instead of given away, since other nodes had them.",
    "spill_failures": "Batches that a node could not be given: it did not answer, broke off or was too slow.",
    "handed_over": "Pages handed over to other nodes before the end.",
    "handed_over_bytes": "Bytes of the pages handed over.",
    "taken": "Objects stored that other nodes gave.",
    "taken_bytes": "Bytes of the objects that other nodes gave.",
    "pushes_refused": "Objects that other nodes offered and that were not taken: no room below the low watermark, or draining.",
    "replicated": "Objects of other nodes kept here, since this host's engines fetched them again and again or share them.",
    "lookups_recalled": "Questions of loads that no master was asked, since a lookup had just learned the answer.",
    "replicas_kept": "Replicas that became the node's own pages, since no other node had them any more.",
    "promoted": "Objects brought back into DRAM from the cold tier.",
    "promises": "Pages in DRAM that decode servers were promised.",
    "promises_loaded": "Of those, pages that were then loaded.",
    "promises_expired": "Of those, pages that were not loaded in time, or by an engine that has gone.",
    "promises_dropped": "Of those, pages not kept any longer since more was promised than promise_share.",
    "promises_lost": "Of those, pages that were damaged or cleared.",
    "promises_late": "Pages that decode servers of other nodes were told of, and that had gone when this node heard of that.",
    "cold_promises_broken": "Segments of the cold tier emptied although a decode server had been promised pages in them.",
    "cold_written": "Objects written to the cold tier.",
    "cold_written_bytes": "Bytes of the objects written to the cold tier.",
    "cold_kept": "Objects written once more, since they are asked for again and again and their segment was emptied.",
    "cold_kept_bytes": "Bytes of the objects written once more.",
    "cold_emptied": "Segments of the cold tier emptied to make room.",
    "cold_evicted": "Objects that left the cold tier with their segment.",
    "cold_damaged": "Objects whose bytes in the cold tier failed the checksum.",
    "cold_unreadable": "Objects that could not be read from the cold tier in time, or at all.",
    "cold_not_written": "Objects that the cold tier did not take: its disk failed or is full.",
    "cold_errors": "Calls that failed at the disk or the index of the cold tier.",
    "connections_refused": "Connections refused: protocol version or too many.",
    "remote_sent_pages": "Pages sent to other hosts by tcp.",
    "remote_sent_bytes": "Bytes of pages sent to other hosts by tcp.",
    "remote_failed_readers": "Other hosts' connections that failed.",
    "links_made": "Links made to other nodes.",
    "links_failed": "Links that could not be made.",
    "link_fences": "Links ended.",
    "link_fences_failed": "Links that could not be ended for certain.",
    "link_sent_bytes": "Bytes of pages written to other nodes over links.",
    "link_received_bytes": "Bytes of pages that came over links and were whole.",
    "remote_refused_readers": "Other hosts' connections refused: too many.",
}


class NodeMetrics(Collector):  # type: ignore[misc]
    """`report` gives the figures by the names above, `missed` the misses that the host's ranks reported, by reason, and of
    those the pages that had been promised."""

    def __init__(self, report: Callable[[], Report], missed: Callable[[], tuple[Mapping[str, int], Mapping[str, int]]]) -> None:
        self._report = report
        self._missed = missed

    def collect(self) -> Iterable[Metric]:
        report = self._report()
        for name, text in _GAUGES.items():
            if name in report:  # not of a cold tier that there is not
                yield GaugeMetricFamily(f"hicache_node_{name}", text, value=float(report[name]))
        for name, text in _COUNTERS.items():
            if name in report:
                yield CounterMetricFamily(f"hicache_node_{name}", text, value=float(report[name]))
        missed = CounterMetricFamily(
            "hicache_node_client_misses", "Pages that ranks of this host did not get or store.", labels=["reason"]
        )
        broken = CounterMetricFamily(
            "hicache_node_broken_promises",
            "Pages that a decode server was promised and could not load in that time: SGLang fails such a request.",
            labels=["reason"],
        )
        for metric, counts in zip((missed, broken), self._missed(), strict=True):
            for reason, count in sorted(counts.items()):
                metric.add_metric([reason], float(count))
            yield metric
        info = GaugeMetricFamily("hicache_node_info", "Who this is.", labels=["node", "incarnation", "version", "master"])
        info.add_metric([str(report[name]) for name in ("name", "incarnation", "version", "master")], 1.0)
        yield info
