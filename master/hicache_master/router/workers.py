"""The engines that a router has: what they are, whether they are well, and which of them get nothing new. No I/O."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import urlsplit

Role = Literal["plain", "prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)

_BIGRAMS = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")
"""Speculative algorithms with which SGLang's tree has pairs of tokens."""
MAX_WORKERS = 512
FAILURES = 3
"""In a row, after which a breaker opens."""
OPEN_S = (1.0, 30.0)
"""How long it stays open at first, and at most."""
TRIAL_S = 30.0
"""How long one request may try an engine whose breaker was open, before the next one may."""
MISSED_PROBES = 2
"""In a row, after which an engine is down."""
MAX_RUNNING = 256
"""Requests in an engine at once, where it does not say."""
_NAME_CHARS = 200
_WITH_BOOTSTRAP = re.compile(r"(https?://(?:\[[^]]*\]|[^:/\[\]]+):\d+):(\d+)")


class WorkerError(ValueError):
    """What is wrong with what somebody said about a worker, and what would be right."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What is known of an engine before it answers. `store`: the store node of its host; `ttl_s`: it is gone if it does not
    register again for so long, 0 for never; `fixed`: from the command line, so never forgotten."""

    url: str
    role: Role
    name: str
    bootstrap_port: int | None = None
    store: str = ""
    kv_events: str = ""
    ttl_s: float = 0.0
    fixed: bool = False

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


def parse_spec(text: str, role: Role, fixed: bool = True) -> Spec:
    """`http://host:port[:bootstrap port][,key=value ...]` with the keys name, bootstrap, store and kv_events.

    Raises WorkerError."""
    url, *pairs = text.strip().split(",")
    values: dict[str, object] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or key not in ("name", "bootstrap", "store", "kv_events"):
            raise WorkerError(f"{text!r}: {pair!r} is none of name=, bootstrap=, store= and kv_events=")
        values["bootstrap_port" if key == "bootstrap" else key] = value
    with_bootstrap = _WITH_BOOTSTRAP.fullmatch(url) if role == "prefill" else None
    if with_bootstrap is not None:
        url = with_bootstrap[1]
        values.setdefault("bootstrap_port", with_bootstrap[2])
    return make_spec({"url": url, "role": role, **values}, fixed=fixed)


def make_spec(values: Mapping[str, object], fixed: bool = False) -> Spec:
    """From the fields of a registration. Raises WorkerError."""
    known = {"url", "role", "name", "bootstrap_port", "store", "kv_events", "ttl_s"}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise WorkerError(f"unknown fields {', '.join(unknown)}: a worker has {', '.join(sorted(known))}")
    url = str(values.get("url", "")).rstrip("/")
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise WorkerError(f"url {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path or parts.query or parts.username:
        raise WorkerError(f"url {url!r} is not of the form http://host:port")
    role = values.get("role", "plain")
    if role not in ROLES:
        raise WorkerError(f"role {role!r} is none of {', '.join(ROLES)}")
    name = str(values.get("name") or f"{parts.hostname}:{port or (443 if parts.scheme == 'https' else 80)}")
    if len(name) > _NAME_CHARS or not name.isprintable():
        raise WorkerError(f"the name {name[:40]!r}... has more than {_NAME_CHARS} characters, or some that cannot be printed")
    bootstrap = values.get("bootstrap_port")
    ttl = values.get("ttl_s", 0)
    try:
        bootstrap_port = None if bootstrap is None else int(str(bootstrap))
        ttl_s = float(str(ttl))
    except ValueError:
        raise WorkerError(f"bootstrap_port {bootstrap!r} and ttl_s {ttl!r} must be numbers") from None
    if bootstrap_port is not None and not 0 < bootstrap_port < 65536:
        raise WorkerError(f"bootstrap_port {bootstrap_port} is no port")
    if not 0 <= ttl_s < 1e9:
        raise WorkerError(f"ttl_s {ttl_s} must be a number of seconds, or 0 for no end")
    store, events = str(values.get("store") or ""), str(values.get("kv_events") or "")
    return Spec(url, role, name, bootstrap_port, store, events, ttl_s, fixed)


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine says about itself. `incarnation` is another one after each start; 0 where it does not say."""

    incarnation: str
    role: Role
    model: str
    page_size: int
    tokenizer: str = ""
    bootstrap_port: int | None = None
    max_running: int = 0
    max_tokens: int = 0
    """KV tokens that it has room for."""
    kv_events: Mapping[str, object] | None = None
    """Where it publishes them, in its own words."""
    bigrams: bool = False
    """Its tree hashes pairs of tokens (EAGLE)."""
    dynamo: bool = False
    """Its events are in that format."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    chat_template: str = ""
    template_defaults: Mapping[str, object] = field(default_factory=dict)
    """--default-chat-template-kwargs"""


def read_facts(info: Mapping[str, object]) -> Facts:
    """From `/server_info`. What is missing or odd is left out: releases differ."""
    modes: dict[object, Role] = {"prefill": "prefill", "decode": "decode"}
    role = modes.get(info.get("disaggregation_mode"), "plain")
    events, defaults = info.get("kv_events"), info.get("default_chat_template_kwargs")
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
    ranks = max(1, _whole(info.get("dp_size")) or 1)
    running = _whole(state.get("effective_max_running_requests_per_dp")) or _whole(info.get("max_running_requests"))
    birth = {key: info.get(key) for key in ("startup_time", "random_seed", "weight_version", "start_time", "incarnation")}
    stamp = hashlib.blake2b(json.dumps(birth, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
    return Facts(
        incarnation=stamp,
        role=role,
        model=str(info.get("served_model_name") or info.get("model_path") or ""),
        page_size=max(1, _whole(info.get("page_size")) or 1),
        tokenizer=str(info.get("tokenizer_path") or info.get("model_path") or ""),
        bootstrap_port=_whole(info.get("disaggregation_bootstrap_port")) if role == "prefill" else None,
        max_running=(running or 0) * ranks,
        max_tokens=(_whole(info.get("max_total_num_tokens")) or 0) * ranks,
        kv_events=events if isinstance(events, Mapping) else None,
        bigrams=str(info.get("speculative_algorithm") or "").upper() in _BIGRAMS,
        dynamo='"dynamo"' in str(info.get("kv_events_config") or ""),
        adapters=_adapters(info.get("lora_paths")),
        chat_template=str(info.get("chat_template") or ""),
        template_defaults=defaults if isinstance(defaults, Mapping) else {},
    )


def _adapters(told: object) -> dict[str, str]:
    """Name to path, in the forms that releases have."""
    pairs = told.items() if isinstance(told, Mapping) else ((None, each) for each in told) if isinstance(told, list) else ()
    found: dict[str, str] = {}
    for name, each in pairs:
        if isinstance(each, Mapping):
            name, each = each.get("lora_name", name), each.get("lora_path")
        if isinstance(name, str) and isinstance(each, str):
            found[name] = each
    return found


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


@dataclass(slots=True)
class Breaker:
    """Opens after failures in a row, or one that leaves no doubt; then lets one request try, twice as late after each."""

    _failures: int = 0
    _open_s: float = 0.0
    _until: float = 0.0

    def admits(self, now: float) -> bool:
        return not self._open_s or now >= self._until

    @property
    def open(self) -> bool:
        """Nothing has succeeded since it opened."""
        return self._open_s > 0

    def take(self, now: float) -> None:
        """A request goes there. While nothing is known about it no other does, if the breaker was open."""
        if self._open_s:
            self._until = now + TRIAL_S

    def failed(self, now: float, certain: bool = False) -> None:
        """`certain`: nobody listens there."""
        self._failures += 1
        if certain or self._failures >= FAILURES:
            self._open_s = min(OPEN_S[1], max(OPEN_S[0], 2 * self._open_s))
            self._until = now + self._open_s

    def succeeded(self) -> None:
        self._failures, self._open_s = 0, 0.0


@dataclass(slots=True)
class Worker:
    spec: Spec
    expires: float
    facts: Facts | None = None
    well: bool = False
    """It answered the last probe, or has missed few."""
    missed: int = 0
    problem: str = "it has not answered yet"
    draining: bool = False
    removing: bool = False
    """As soon as nothing runs there."""
    in_flight: int = 0
    down_since: float = 0.0
    breaker: Breaker = field(default_factory=Breaker)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def role(self) -> Role:
        return self.spec.role

    @property
    def bootstrap_port(self) -> int | None:
        """Of a prefill engine: what was said, else what it says itself."""
        if self.spec.bootstrap_port is not None:
            return self.spec.bootstrap_port
        return self.facts.bootstrap_port if self.facts is not None else None

    def usable(self, now: float) -> bool:
        return self.well and self.facts is not None and not self.draining and self.breaker.admits(now)

    @property
    def state(self) -> str:
        if self.draining:
            return "draining"
        if not self.well or self.facts is None:
            return "down"
        return "broken" if self.breaker.open else "up"

    def describe(self) -> dict[str, object]:
        facts = self.facts
        return {
            "name": self.name,
            "url": self.url,
            "role": self.role,
            "state": self.state,
            "problem": self.problem,
            "in_flight": self.in_flight,
            "store": self.spec.store,
            "model": facts.model if facts else "",
            "page_size": facts.page_size if facts else None,
            "incarnation": facts.incarnation if facts else "",
        }


class Workers:
    """All of them. Bounded; time comes in; not thread-safe.

    One model and one page size: the first engine that answers says which, if nobody did before, and engines of another kind
    get nothing, since their pages and their times are none of the others' business."""

    def __init__(self, forget_s: float = 600.0, model: str = "", page_size: int = 0, max_running: int = 0) -> None:
        self.model, self.page_size = model, page_size
        self.max_running = max_running
        """Requests in an engine at once; 0: as many as it says that it runs, or MAX_RUNNING where it does not."""
        self._forget_s = forget_s
        self._workers: dict[str, Worker] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def add(self, spec: Spec, now: float) -> Worker:
        """It registers, anew or again. Raises WorkerError."""
        before = self._workers.get(spec.name)
        if before is None and len(self._workers) >= MAX_WORKERS:
            raise WorkerError(f"there are {MAX_WORKERS} workers already; remove some first")
        expires = now + spec.ttl_s if spec.ttl_s else float("inf")
        if before is not None:
            same = before.spec.url == spec.url and before.spec.role == spec.role
            if not same and before.in_flight:
                raise WorkerError(
                    f"{spec.name} is {before.role} at {before.url} and has requests; drain it, or choose another name"
                )
            if same:
                before.expires = expires
                before.draining = before.removing = False
                if not before.spec.fixed:
                    before.spec = spec
                return before
        clash = next((each for each in self._workers.values() if each.url == spec.url and each.name != spec.name), None)
        if clash is not None:
            raise WorkerError(f"{spec.url} is there already, as {clash.name}")
        worker = self._workers[spec.name] = Worker(spec, expires, down_since=now)
        return worker

    def drain(self, name: str, remove: bool = False) -> Worker | None:
        """It gets nothing new; `remove`: and is gone as soon as nothing runs there."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.draining = True
            worker.removing = worker.removing or remove
        return worker

    def answered(self, name: str, facts: Facts, now: float) -> bool:
        """A probe came back. True: it is a new incarnation, or was down. One that does not fit stays down, with the reason."""
        worker = self._workers.get(name)
        if worker is None:
            return False
        problem = self._misfit(worker, facts)
        if problem:
            self._down(worker, problem, now)
            return False
        self.model, self.page_size = self.model or facts.model, self.page_size or facts.page_size
        anew = not worker.well or worker.facts is None or worker.facts.incarnation != facts.incarnation
        worker.facts, worker.well, worker.missed, worker.problem = facts, True, 0, ""
        if anew:
            worker.breaker.succeeded()
        return anew

    def missed(self, name: str, problem: str, now: float, certain: bool = False) -> bool:
        """A probe did not come back. True: it is down now, and was not before."""
        worker = self._workers.get(name)
        if worker is None:
            return False
        worker.missed += 1
        if not (certain or worker.missed >= MISSED_PROBES):
            return False
        was = worker.well
        self._down(worker, problem, now)
        return was

    def gone(self, now: float) -> list[Worker]:
        """Those that are no longer among them: drained ones, those that did not register again, those down for too long."""
        gone = [each for each in self._workers.values() if self._is_gone(each, now)]
        for worker in gone:
            del self._workers[worker.name]
        return gone

    def avoid(self, now: float) -> set[str]:
        """Names of those that get nothing new. Prefill engines are no use without a decode engine, nor the other way round."""
        avoided = {each.name for each in self._workers.values() if not each.usable(now)}
        halves = {each.role for each in self._workers.values() if each.name not in avoided}
        if not {"prefill", "decode"} <= halves:
            avoided |= {each.name for each in self._workers.values() if each.role != "plain"}
        return avoided

    def capacity(self, now: float) -> int:
        """Requests that may run at once: those of the engines that answer."""
        usable = [each for each in self._workers.values() if each.role != "prefill" and each.usable(now)]
        return sum(self.max_running or (each.facts and each.facts.max_running) or MAX_RUNNING for each in usable)

    def ready(self, now: float) -> bool:
        return len(self.avoid(now)) < len(self._workers)

    def validate(self) -> None:
        """For tests."""
        assert len(self._workers) <= MAX_WORKERS
        assert all(name == each.name and each.in_flight >= 0 for name, each in self._workers.items())
        assert all(each.well <= (each.facts is not None) for each in self._workers.values())

    def _is_gone(self, worker: Worker, now: float) -> bool:
        if worker.in_flight:
            return False
        if worker.removing or worker.expires <= now:
            return True
        return not worker.spec.fixed and not worker.well and worker.down_since + self._forget_s <= now

    def _misfit(self, worker: Worker, facts: Facts) -> str:
        if facts.role != worker.role:
            return f"it runs as {facts.role} and was registered as {worker.role}"
        if self.model and facts.model != self.model:
            return f"it serves {facts.model!r}, this router {self.model!r}: run another router for that model"
        if self.page_size and facts.page_size != self.page_size:
            return f"its page size is {facts.page_size}; that of the others, and what it needs as well, is {self.page_size}"
        if worker.role == "prefill" and worker.spec.bootstrap_port is None and not facts.bootstrap_port:
            return "it does not say its bootstrap port: register it with one"
        return ""

    def _down(self, worker: Worker, problem: str, now: float) -> None:
        if worker.well:
            worker.down_since = now
        worker.well, worker.problem = False, problem
