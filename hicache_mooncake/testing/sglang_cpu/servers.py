"""Starts real SGLang servers on CPU cores, asks and administers them: `SglangServer`, `generate`, `chat`, `attach_storage`."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any, Literal, Self

from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess, ProcessError, Progress, free_port, stop_all

SHIMS = Path(__file__).parent / "shims"
SHIM_PLUGINS = "cpu_hicache,cpu_models"
PD_PLUGINS = ("cpu_pd", "hicache_mooncake")
"""What a server of a PD pair needs besides, whatever its storage backend is: ours serves `mooncake.engine`."""
PD_ENVIRONMENT = {
    "HICACHE_MOONCAKE_ENGINE": "on",
    "MOONCAKE_PROTOCOL": "tcp",
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
}
PAGE_TOKENS = 16
MAX_TOTAL_TOKENS = 8192
MODEL_NAME = "tiny"
"""Served model name: part of every page's key, so the servers that share a pool must agree on it."""
START_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 180.0
HICACHE_SIZE_GB = 1
HOST = "127.0.0.1"
_STORAGE = "/hicache/storage-backend"


class ServerError(ProcessError):
    """A server did not start, or answered with an error."""


class Refused(ServerError):
    """A server understood what it was asked and said no; the message has its reason."""


def own_environment() -> dict[str, str]:
    """This process's environment without the settings of a pool or engine that the user may run beside us."""
    foreign = ("HICACHE_MOONCAKE_", "MOONCAKE_", "SGLANG_", "MC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def cpu_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for SGLang without a GPU: ours, the shims on PYTHONPATH, one thread, no downloads, no other plugin."""
    env = own_environment()
    paths = [str(SHIMS), env.get("PYTHONPATH", "")]
    env.update(
        PYTHONPATH=os.pathsep.join(path for path in paths if path),
        SGLANG_USE_CPU_ENGINE="1",
        SGLANG_PLUGINS=SHIM_PLUGINS,
        SGLANG_HOST_IP=HOST,
        SGLANG_MAMBA_CONV_DTYPE="float32",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS="1",
    )
    env.update(extra or {})
    return env


Role = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Caching:
    """What makes one server differ from the next: how it caches, as command line arguments and environment."""

    args: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


NO_CACHE = Caching(("--disable-radix-cache",))
"""Every prompt is computed from its first token: the reference for answers and for cold TTFT."""


Extra = Mapping[str, object]
"""Settings of the pool for one server, besides those that it needs."""


def pool_config(socket: Path, *, dynamic: bool = False, extra: Extra | None = None) -> dict[str, object]:
    """SGLang's extra config for its L3 in the pool, by the store node that listens on this UNIX socket.

    For the name `dynamic` it says where SGLang's own loader finds the backend. One page is enough to ask L3 for.
    """
    config: dict[str, object] = {"socket": str(socket), "prefetch_threshold": PAGE_TOKENS}
    if dynamic:
        config |= {"backend_name": "mooncake", "module_path": "hicache_mooncake.backend", "class_name": "HiCacheMooncake"}
        config |= {"interface_v1": 1, "allocator": "shm"}
    return config | dict(extra or {})


def pool_caching(
    socket: Path | None, *, dynamic: bool = False, ratio: float | None = None, extra: Extra | None = None
) -> Caching:
    """HiCache with its L3 in the pool, or with none until one is attached (`socket` None).

    The backend is named `mooncake`, by our plugin, or with `dynamic` loaded by SGLang's own loader, without the plugin.
    `wait_complete` makes hits reproducible: the request waits for its pages, as long as the backend's own deadline allows.
    `ratio`: tokens in L2 for each one in L1, instead of 1 GB.
    """
    args = ["--enable-hierarchical-cache", *_host_pool(ratio), "--hicache-storage-prefetch-policy", "wait_complete"]
    return Caching((*args, *_storage(socket, dynamic, extra)), _plugins(dynamic))


def offload_caching(socket: Path, *, dynamic: bool = False, ratio: float | None = None, extra: Extra | None = None) -> Caching:
    """For a decode server: nothing is kept on it, what it computes is written to the pool page by page."""
    args = ("--disaggregation-decode-enable-offload-kvcache", *_host_pool(ratio))
    return Caching((*args, *_storage(socket, dynamic, extra)), _plugins(dynamic))


def decode_tree_caching(
    socket: Path, *, dynamic: bool = False, ratio: float | None = None, extra: Extra | None = None
) -> Caching:
    """For a decode server: HiCache of its own, with its L3 in the pool; it is sent only what it does not have."""
    caching = pool_caching(socket, dynamic=dynamic, ratio=ratio, extra=extra)
    return Caching(("--disaggregation-decode-enable-radix-cache", *caching.args), caching.env)


def _host_pool(ratio: float | None) -> tuple[str, str]:
    return ("--hicache-size", str(HICACHE_SIZE_GB)) if ratio is None else ("--hicache-ratio", str(ratio))


def _storage(socket: Path | None, dynamic: bool, extra: Extra | None) -> tuple[str, ...]:
    if socket is None:
        return ()
    config = json.dumps(pool_config(socket, dynamic=dynamic, extra=extra))
    return (
        *("--hicache-storage-backend", "dynamic" if dynamic else "mooncake"),
        *("--hicache-storage-backend-extra-config", config),
    )


def _plugins(dynamic: bool) -> dict[str, str]:
    return {"SGLANG_PLUGINS": SHIM_PLUGINS if dynamic else f"{SHIM_PLUGINS},hicache_mooncake"}


class SglangServer(ManagedProcess):
    """One `sglang.launch_server` on a free port of 127.0.0.1.

    About 2.2 GB of memory, and 30 to 100 s to start on two cores, nearly all of it imports; with HiCache 1 GB, and for every
    further tensor-parallel rank 1.8 GB more. `with SglangServer(...)` starts it and waits until it answers. One with a `role`
    answers only together with one of the other role: see `pd`.
    """

    def __init__(
        self,
        name: str,
        *,
        model: Path,
        caching: Caching,
        log: Path,
        tp: int = 1,
        role: Role | None = None,
        args: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        self.port = port if port is not None else free_port()
        self.bootstrap_port = free_port()
        self.tp = tp
        self.role = role
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", MODEL_NAME),
            *("--device", "cpu", "--dtype", "float32", "--host", HOST, "--port", str(self.port)),
            *("--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(MAX_TOTAL_TOKENS)),
            *("--enable-metrics", "--enable-cache-report", "--sleep-on-idle", *caching.args, *args),
        ]
        env = dict(caching.env)
        if role is not None:
            command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake"]
            plugins = [*env.get("SGLANG_PLUGINS", SHIM_PLUGINS).split(","), *PD_PLUGINS]
            env |= PD_ENVIRONMENT | {"SGLANG_PLUGINS": ",".join(dict.fromkeys(plugins))}
        if role == "prefill":
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        if tp > 1:
            command += ["--tp-size", str(tp)]
            cores = sorted(os.sched_getaffinity(0))  # unless told, SGLang wants a NUMA node for each rank
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
        super().__init__(name, command, log=log, env=cpu_environment(env))

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def wait_healthy(self, *, timeout_s: float = START_TIMEOUT_S, progress: Progress | None = None) -> float:
        """Wait for GET /health and return the seconds it took. Raises `ProcessError` as `wait_until` does."""
        return self.wait_until(lambda: is_healthy(self.url), timeout_s=timeout_s, progress=progress, poll_s=0.5)

    def __enter__(self) -> Self:
        start_servers([self])
        return self


def start_servers(
    servers: Sequence[SglangServer],
    *,
    timeout_s: float = START_TIMEOUT_S,
    progress: Callable[[SglangServer, float, bool], None] | None = None,
) -> None:
    """Start servers at the same time and wait until every one answers GET /health.

    `progress` gets, twice a second, each server, the seconds since its start and whether it is ready. Raises `ProcessError`
    when one ends or the time is over; then none is left running.
    """
    began = time.monotonic()
    waiting = list(servers)
    try:
        for server in servers:
            server.start()
        while waiting:
            for server in list(waiting):
                waited = time.monotonic() - began
                ready = is_healthy(server.url)
                if progress is not None:
                    progress(server, waited, ready)
                if ready:
                    waiting.remove(server)
                else:
                    server.check_running(waited, timeout_s)
            if waiting:
                time.sleep(0.5)
    except BaseException:
        stop_all(servers)
        raise


@dataclass(frozen=True)
class Cached:
    """Prompt tokens that were not computed, by the tier they came from."""

    device: int = 0
    host: int = 0
    storage: int = 0


@dataclass(frozen=True)
class Answer:
    """What /generate returned. `ttft_s` and `total_s`: until the first and the last streamed token, as the client sees it."""

    output_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    cached: Cached
    ttft_s: float
    total_s: float


def generate(
    url: str,
    prompt: Sequence[int] | str,
    *,
    max_new_tokens: int = 24,
    timeout_s: float = REQUEST_TIMEOUT_S,
    cache_salt: str | None = None,
    on_tokens: Callable[[int], object] | None = None,
) -> Answer:
    """Greedy, exactly `max_new_tokens` tokens (end-of-sequence is ignored). Requests share cached pages only if their
    `cache_salt` is equal. `on_tokens` gets, as they come, how many tokens there are; what it raises ends the request, which the
    server takes for a client that hung up. Raises `ServerError`."""
    body = request_body(prompt, max_new_tokens=max_new_tokens, cache_salt=cache_salt)
    return stream(url, body, timeout_s, on_tokens)


def request_body(prompt: Sequence[int] | str, *, max_new_tokens: int, cache_salt: str | None) -> dict[str, object]:
    """Of a streaming POST to /generate."""
    body: dict[str, object] = {
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        "stream": True,
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if isinstance(prompt, str):
        body["text"] = prompt
    else:
        body["input_ids"] = list(prompt)
    return body


def stream(url: str, body: Mapping[str, object], timeout_s: float, on_tokens: Callable[[int], object] | None) -> Answer:
    """Send the request and read its answer to the end. `timeout_s` is for each part of it. Raises `ServerError`."""
    began = time.monotonic()
    first: float | None = None
    last: dict[str, Any] = {}
    try:
        with _post(f"{url}/generate", body, timeout_s) as response:
            for event in _events(response):
                if "error" in event:
                    raise ServerError(f"{url}/generate answered: {event['error']}")
                if first is None and event.get("output_ids"):
                    first = time.monotonic() - began
                last = event
                if on_tokens is not None:
                    on_tokens(len(event.get("output_ids") or ()))
    except (OSError, HTTPException) as error:
        raise ServerError(f"{url}/generate failed after {time.monotonic() - began:.1f} s: {error!r}") from error
    if first is None:
        raise ServerError(f"{url}/generate ended without a token: {last}")
    meta = last["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return Answer(
        output_ids=tuple(last["output_ids"]),
        text=str(last.get("text", "")),
        prompt_tokens=int(meta["prompt_tokens"]),
        cached=Cached(*(int(details.get(tier) or 0) for tier in ("device", "host", "storage"))),
        ttft_s=first,
        total_s=time.monotonic() - began,
    )


@dataclass(frozen=True)
class ChatAnswer:
    text: str
    prompt_tokens: int
    cached_tokens: int


def chat(
    url: str, messages: Sequence[Mapping[str, str]], *, max_tokens: int = 24, timeout_s: float = REQUEST_TIMEOUT_S
) -> ChatAnswer:
    """One greedy OpenAI chat completion. Raises `ServerError`."""
    body = {"model": MODEL_NAME, "messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
    answer = json.loads(post(f"{url}/v1/chat/completions", body, timeout_s))
    usage = answer["usage"]
    return ChatAnswer(
        text=str(answer["choices"][0]["message"]["content"]),
        prompt_tokens=int(usage["prompt_tokens"]),
        cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
    )


def flush_cache(url: str, *, timeout_s: float = 30.0, admin_key: str | None = None) -> None:
    """Drop L1 and L2, never L3. The server refuses while requests run or pages are still written: it is given `timeout_s`."""
    _admin(f"{url}/flush_cache?timeout={timeout_s}", {}, timeout_s + 10, admin_key)


def attach_storage(url: str, backend: str, config: Mapping[str, object], *, admin_key: str, timeout_s: float = 60.0) -> None:
    """Give a running server an L3. Raises `Refused` while it is not idle, or when the backend did not come up."""
    body = {"hicache_storage_backend": backend, "hicache_storage_backend_extra_config_json": json.dumps(config)}
    _admin(f"{url}{_STORAGE}", body, timeout_s, admin_key, method="PUT")


def detach_storage(url: str, *, admin_key: str, timeout_s: float = 60.0) -> None:
    """Take the L3 away. Raises `Refused` while the server is not idle, or when a storage thread did not end within 10 s."""
    _admin(f"{url}{_STORAGE}", None, timeout_s, admin_key, method="DELETE")


def attached_storage(url: str, *, admin_key: str, timeout_s: float = 10.0) -> str | None:
    """Name of the backend that is attached, None without."""
    name = json.loads(_admin(f"{url}{_STORAGE}", None, timeout_s, admin_key, method="GET"))["hicache_storage_backend"]
    return None if name is None else str(name)


def clear_storage(url: str, *, admin_key: str | None = None, timeout_s: float = 60.0) -> None:
    """Have the backend forget this model's pages. SGLang answers with success whatever the backend does."""
    _admin(f"{url}{_STORAGE}/clear", {}, timeout_s, admin_key)


def update_weights(url: str, model: Path, *, admin_key: str | None = None, timeout_s: float = 120.0) -> None:
    """Have a running server load another checkpoint of its architecture, and flush L1 and L2. Raises `Refused`."""
    _admin(f"{url}/update_weights_from_disk", {"model_path": str(model)}, timeout_s, admin_key)


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, HTTPException):
        return False


def metric_sums(url: str, *, timeout_s: float = 10.0) -> dict[str, float]:
    """Every sample of a Prometheus page, summed over its labels, by sample name. Raises `ServerError`."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=timeout_s) as response:
            page = response.read().decode()
    except (OSError, HTTPException) as error:
        raise ServerError(f"{url}/metrics failed: {error!r}") from error
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def tokens_written_to_l3(url: str) -> int:
    """Tokens whose pages this server has written to its storage backend, since its start."""
    return int(metric_sums(url).get("sglang:backuped_tokens_total", 0))


def wait_written_to_l3(url: str, at_least: int, *, timeout_s: float = 30.0) -> int:
    """Wait until `tokens_written_to_l3` reaches `at_least`; write-back runs behind the answers. Raises `ServerError`."""
    deadline = time.monotonic() + timeout_s
    while (written := tokens_written_to_l3(url)) < at_least:
        if time.monotonic() > deadline:
            raise ServerError(f"{url} wrote {written} of {at_least} tokens to the storage backend within {timeout_s:.0f} s")
        time.sleep(0.1)
    return written


def full_pages(tokens: int) -> int:
    """Tokens of the whole pages in a sequence: only those are cached."""
    return tokens // PAGE_TOKENS * PAGE_TOKENS


def post(url: str, body: Mapping[str, object], timeout_s: float) -> bytes:
    """What the server answers in one piece. Raises `ServerError`."""
    try:
        with _post(url, body, timeout_s) as response:
            return response.read()
    except (OSError, HTTPException) as error:
        raise ServerError(f"{url} failed: {error!r}") from error


def _post(url: str, body: Mapping[str, object], timeout_s: float) -> HTTPResponse:
    return _send(urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}), timeout_s)


def _send(request: urllib.request.Request, timeout_s: float) -> HTTPResponse:
    try:
        response = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        text = f"{request.full_url} answered {error.code}: {error.read()[:500].decode(errors='replace')}"
        raise (Refused if error.code == 400 else ServerError)(text) from error
    assert isinstance(response, HTTPResponse)
    return response


def _admin(url: str, body: Mapping[str, object] | None, timeout_s: float, key: str | None, *, method: str = "POST") -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with _send(request, timeout_s) as response:
            return response.read()
    except (OSError, HTTPException) as error:
        raise ServerError(f"{url} failed: {error!r}") from error


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream. Raises `IncompleteRead` when it just ends, as that of a killed server."""
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise IncompleteRead(b"")
