"""Logging of our processes: one line per event, to stderr."""

from __future__ import annotations

import logging
import sys


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")


def set_up(level: str) -> None:
    """Send the process's log to stderr from `level` (debug, info, warning, error, critical) up. Call once, from a command.

    Never called inside an engine: there the log is SGLang's.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
