"""Faults that tests outside this folder show: test -> (what is done, what users see)."""

from __future__ import annotations

ELSEWHERE: dict[str, tuple[str, str]] = {}
