"""Asks a prefill and a decode server together (PD disaggregation): `ask_pair` for tests that choose both, `RouterProcess` else.

A router sends a request to both, with the address of the prefill server's bootstrap and a number for where the two meet; the
decode server answers. That is all, and `ask_pair` does it too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Self

from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess, Progress, free_port
from hicache_mooncake.testing.sglang_cpu.servers import (
    HOST,
    REQUEST_TIMEOUT_S,
    START_TIMEOUT_S,
    Answer,
    ServerError,
    SglangServer,
    cpu_environment,
    post,
    request_body,
    stream,
)

ABORT_S = 0.5


def ask_pair(
    prefill: SglangServer,
    decode: SglangServer,
    prompt: Sequence[int] | str,
    *,
    max_new_tokens: int = 24,
    timeout_s: float = REQUEST_TIMEOUT_S,
    cache_salt: str | None = None,
    on_tokens: Callable[[int], object] | None = None,
) -> Answer:
    """`generate` on a pair of servers. What was cached is what the prefill server had, and `decode` what it had itself.

    Raises `ServerError` when one of them fails.
    """
    body = request_body(prompt, max_new_tokens=max_new_tokens, cache_salt=cache_salt)
    body |= {"rid": uuid.uuid4().hex, "bootstrap_room": random.getrandbits(63)}
    body |= {"bootstrap_host": HOST, "bootstrap_port": prefill.bootstrap_port}
    half = _PrefillHalf(prefill.url, decode.url, body, timeout_s)
    half.start()
    try:
        return stream(decode.url, body, timeout_s, on_tokens)
    except ServerError as error:
        half.join(1.0)
        if half.error is not None:
            raise ServerError(f"{error} ({half.error})") from error
        raise
    finally:
        half.answered.set()


class _PrefillHalf(threading.Thread):
    """The request to the prefill server, whose answer nobody needs. Without it the one to the decode server has no end soon."""

    def __init__(self, url: str, decode_url: str, body: Mapping[str, object], timeout_s: float) -> None:
        super().__init__(daemon=True)
        self.error: ServerError | None = None
        self.answered = threading.Event()
        self._url = url
        self._decode_url = decode_url
        self._body = {**body, "stream": False}
        self._timeout_s = timeout_s

    def run(self) -> None:
        try:
            post(f"{self._url}/generate", self._body, self._timeout_s)
        except ServerError as error:
            self.error = error
            while not self.answered.wait(ABORT_S):  # the other request may not have come yet
                with contextlib.suppress(ServerError):
                    post(f"{self._decode_url}/abort_request", {"rid": self._body["rid"]}, self._timeout_s)


def have_router() -> bool:
    """Whether `sglang-router` is installed."""
    return importlib.util.find_spec("sglang_router") is not None


class RouterProcess(ManagedProcess):
    """SGLang's own router, in front of servers that are up already. About 0.7 GB of memory and 10 to 30 s to start."""

    def __init__(self, name: str, prefills: Sequence[SglangServer], decodes: Sequence[SglangServer], *, log: Path) -> None:
        self.port = free_port()
        self._servers = len(prefills) + len(decodes)
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--disable-health-check"]
        command += ["--host", HOST, "--port", str(self.port), "--prometheus-port", str(free_port())]
        for prefill in prefills:
            command += ["--prefill", prefill.url, str(prefill.bootstrap_port)]
        for decode in decodes:
            command += ["--decode", decode.url]
        super().__init__(name, command, log=log, env=cpu_environment())

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def wait_ready(self, *, timeout_s: float = START_TIMEOUT_S, progress: Progress | None = None) -> float:
        """Wait until it knows every server, which it does some time after it answers, and return the seconds it took.

        Raises `ProcessError` as `wait_until` does.
        """
        return self.wait_until(self._knows_all, timeout_s=timeout_s, progress=progress)

    def _knows_all(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readiness", timeout=5) as response:
                return bool(json.load(response)["healthy_workers"] == self._servers)
        except (OSError, HTTPException):
            return False

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self
