"""What a fake engine (`fake_engine`) is told, what it says of itself, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["null", "prefill", "decode"]
FaultKind = Literal["refuse", "hang", "error", "die", "slow"]


@dataclass(frozen=True)
class FakeEngineSettings:
    """A port of 0 is any free one. Times are seconds."""

    host: str = "127.0.0.1"
    port: int = 0
    mode: Mode = "null"
    model: str = "fake"
    model_path: str = "fake/model"
    tokenizer: str = ""
    """A folder with tokenizer.json and a chat template (`fake_tokenizer`); without one, a token is a byte."""
    page_size: int = 64
    cache_pages: int = 16_384
    context_tokens: int = 131_072
    prefill_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_token_s: float = 0.0
    tokens_a_chunk: int = 1
    """Tokens in an event of a stream, SGLang's stream interval."""
    kv_events: bool = False
    cache_report: bool = True
    """Whether the OpenAI forms tell cached tokens."""
    bootstrap_port: int = 0


@dataclass
class Fault:
    """`refuse` hangs up at once, `hang` never answers, `error` answers 500, `die` hangs up after `chunks` events of a stream,
    `slow` takes `seconds` more before the prefill."""

    kind: FaultKind
    times: int = 1
    """Requests that it hits; -1 is all, until it is taken back."""
    seconds: float = 0.0
    chunks: int = 1
    health: bool = False
    """It hits /health, and nothing else."""


@dataclass
class FakeStats:
    """What an engine saw since it was started."""

    requests: int = 0
    """That came to it, whatever became of them; `finished`, `disconnects`, `aborts` and `failures` are disjoint."""
    finished: int = 0
    disconnects: int = 0
    """Clients that hung up before the end."""
    aborts: int = 0
    """Requests ended by /abort_request."""
    failures: int = 0
    """Of its own: faults, bad requests, and other halves that failed."""
    running: int = 0
    max_running: int = 0
    waiting: int = 0
    """For their prefill, those being computed among them."""
    max_waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    busy_s: float = 0.0
    """Time in prefills."""


def server_info(
    settings: FakeEngineSettings, port: int, bootstrap_port: int, event_ports: tuple[int, int] | None
) -> dict[str, Any]:
    """What /server_info has of SGLang's, as far as somebody before engines may ask. `event_ports`: publishing and replay."""
    return {
        "model_path": settings.model_path,
        "tokenizer_path": settings.tokenizer or settings.model_path,
        "served_model_name": settings.model,
        "host": settings.host,
        "port": port,
        "page_size": settings.page_size,
        "context_length": settings.context_tokens,
        "tp_size": 1,
        "dp_size": 1,
        "max_running_requests": None,
        "disaggregation_mode": settings.mode,
        "disaggregation_bootstrap_port": bootstrap_port or 8998,
        "enable_hierarchical_cache": False,
        "enable_cache_report": settings.cache_report,
        "max_total_num_tokens": settings.cache_pages * settings.page_size,
        "kv_events": None if event_ports is None else _describe_events(settings, *event_ports),
        "internal_states": [{}],
        "version": "0.5.23",
        "frontend": "python",
    }


def _describe_events(settings: FakeEngineSettings, port: int, replay_port: int) -> dict[str, Any]:
    return {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": port,
        "topic": "",
        "block_size": settings.page_size,
        "dp_size": 1,
        "replay_endpoint_port_base": replay_port,
    }


def model_info(settings: FakeEngineSettings) -> dict[str, Any]:
    """What /model_info has."""
    return {
        "model_path": settings.model_path,
        "served_model_name": settings.model,
        "tokenizer_path": settings.tokenizer or settings.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "disaggregation_mode": settings.mode,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "fake",
        "architectures": ["FakeForCausalLM"],
    }
