"""What happened since a master started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Counters, which only grow."""

    joins: int = 0
    refused_joins: int = 0
    lookups: int = 0
    lookup_keys: int = 0
    lookup_hits: int = 0
    updates: int = 0
    gaps: int = 0
    snapshots: int = 0
    snapshots_broken: int = 0
    clears: int = 0
    unknown_node: int = 0
    reports: int = 0
    sick: int = 0
    foreign_keys: int = 0
