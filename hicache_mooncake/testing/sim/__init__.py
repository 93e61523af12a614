"""Whole clusters in one process: the real state machines of masters, nodes and links on a virtual clock and a bad network.

    python -m hicache_mooncake.testing.sim --seeds 1:200

A run is a seed: masters, nodes and ranks drawn from it store, look up, load, give up and die, while processes crash, freeze
and come back, and the network delays, loses, slows down and parts. Copies take several steps, and every page that a load
reports is compared with the bytes that its (namespace, hash, generation) must have. `run` raises `Violation` when something
did not hold that always must; the same seed and options give the same trace in every process.
"""

from __future__ import annotations

from .cluster import Cluster, Options, Result, run
from .faults import KINDS, Plan
from .world import Violation

__all__ = ["KINDS", "Cluster", "Options", "Plan", "Result", "Violation", "run"]
