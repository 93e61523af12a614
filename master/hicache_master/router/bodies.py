"""Requests as they come in: what the router must know of them, and what it writes into them. No I/O."""

from __future__ import annotations

import hashlib
import math
import random
import uuid
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import xxhash

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
PATHS = (GENERATE, COMPLETIONS, CHAT)

MAX_BATCH = 1024
MAX_RID_CHARS = 256
_OURS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_PROMPTS = {GENERATE: ("text", "input_ids", "input_embeds"), COMPLETIONS: ("prompt",), CHAT: ()}
_CHARS_A_TOKEN = 4
_ROUGH_TOKENS = 64
"""The least size of a page where prompts are not tokenised: short ones are not worth an entry each."""


class BadRequest(Exception):
    """HTTP 400: what is wrong, for the client."""


@dataclass(slots=True)
class Asked:
    """A request. `raw` is what goes to engines: without what only a router may say. `rid`: "" where it cannot be given one.
    `prompts`: how many in it."""

    path: str
    raw: bytes
    body: dict[str, object]
    stream: bool
    rid: str
    given_rid: bool
    """By the client, so it is no secret and may be anything."""
    prompts: int
    batch: bool
    """It is a list of prompts, of one perhaps."""


def read_asked(path: str, raw: bytes) -> Asked:
    """Raises BadRequest."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if any(key in body for key in _OURS):
        # Whoever chose these could make engines connect to any host.
        body = {key: value for key, value in body.items() if key not in _OURS}
        raw = msgspec.json.encode(body)
    prompts = _prompts(path, body)
    if prompts > MAX_BATCH:
        raise BadRequest(f"{prompts} prompts in one request; the limit is {MAX_BATCH}")
    given = body.get("rid")
    rid, given_rid = "", given is not None
    if isinstance(given, str):
        if len(given) > MAX_RID_CHARS:
            raise BadRequest(f"rid has {len(given)} characters; the limit is {MAX_RID_CHARS}")
        rid = given
    elif given is None and prompts == 1 and _samples(body) == 1:
        rid = uuid.uuid4().hex
        raw = _splice(raw, {"rid": rid}, empty=not body)
    return Asked(path, raw, body, body.get("stream") is True, rid, given_rid, prompts, _is_batch(path, body))


def with_bootstrap(asked: Asked, host: str, port: int | None) -> bytes:
    """For both engines of a pair: where the two halves meet. Lists for a batch, as SGLang wants them."""
    fields: dict[str, object]
    if not asked.batch:
        fields = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": random.getrandbits(63)}
    else:
        count = asked.prompts
        rooms = [random.getrandbits(63) for _ in range(count)]
        fields = {"bootstrap_host": [host] * count, "bootstrap_port": [port] * count, "bootstrap_room": rooms}
    return _splice(asked.raw, fields, empty=asked.raw.strip() == b"{}")


def _splice(raw: bytes, fields: Mapping[str, object], empty: bool) -> bytes:
    """Puts fields at the head of an object: nothing of it is encoded anew, however long it is."""
    start = raw.index(b"{") + 1
    return b"".join((raw[:start], msgspec.json.encode(fields)[1:-1], b"" if empty else b",", raw[start:]))


def _is_batch(path: str, body: Mapping[str, object]) -> bool:
    value = _prompt_value(path, body)
    return isinstance(value, list) and bool(value) and not isinstance(value[0], int)


def _prompts(path: str, body: Mapping[str, object]) -> int:
    value = _prompt_value(path, body)
    return len(value) if isinstance(value, list) and _is_batch(path, body) else 1


def _prompt_value(path: str, body: Mapping[str, object]) -> object:
    return next((body[key] for key in _PROMPTS[path] if body.get(key) is not None), None)


def _samples(body: Mapping[str, object]) -> int:
    params = body.get("sampling_params")
    counts = body.get("n"), params.get("n") if isinstance(params, dict) else 1
    return max(count if isinstance(count, int) else 1 for count in counts)


@dataclass(frozen=True, slots=True)
class Wishes:
    """Of one request: its SLOs, None for the cluster's; priority 0 is the highest."""

    ttft_s: float | None = None
    tbt_s: float | None = None
    priority: int = 0


def read_wishes(headers: Mapping[str, str]) -> Wishes:
    """Raises BadRequest."""
    return Wishes(_ms(headers, "x-slo-ttft-ms"), _ms(headers, "x-slo-tbt-ms"), _priority(headers))


def _ms(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise BadRequest(f"{name} is {text[:40]!r}, not a positive number of milliseconds")
    return value / 1e3


def _priority(headers: Mapping[str, str]) -> int:
    text = headers.get("x-priority", "0")
    if not (text.isascii() and text.isdigit() and len(text) == 1):
        raise BadRequest(f"x-priority is {text[:40]!r}, not 0 (the highest) to 9")
    return int(text)


def tenant(headers: Mapping[str, str]) -> str:
    """Who asks: a hash of the API key, since anything else could be claimed. "" for those without a key."""
    key = headers.get("Authorization") or headers.get("x-api-key") or ""
    return hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=6).hexdigest() if key else ""


@dataclass(frozen=True, slots=True)
class Rough:
    """A prompt that was not tokenised: about how many tokens, and hashes of its pieces, which chain as those of pages do."""

    tokens: int
    keys: tuple[int, ...]


def rough_page_tokens(page_size: int) -> int:
    return max(page_size, _ROUGH_TOKENS)


def rough(asked: Asked, page_tokens: int) -> Rough:
    """Equal beginnings have equal keys; other models, salts and adapters have other ones. Four characters count as a token."""
    data, width = _material(asked.path, asked.body)
    piece = page_tokens * width
    context = [asked.body.get(key) for key in ("model", "cache_salt", "extra_key", "lora_path")]
    seed = xxhash.xxh3_64_intdigest(msgspec.json.encode([asked.path == CHAT, *map(str, context)]))
    keys = []
    for start in range(0, len(data) - piece + 1, piece):
        seed = xxhash.xxh3_64_intdigest(data[start : start + piece], seed)
        keys.append(seed)
    return Rough(max(1, len(data) // width), tuple(keys))


def _material(path: str, body: Mapping[str, object]) -> tuple[bytes, int]:
    """What stands for the prompt, and how many bytes of it for a token. Of a batch the first prompt."""
    if path == CHAT:
        return msgspec.json.encode([body.get("tools"), body.get("messages")]), _CHARS_A_TOKEN
    value = _prompt_value(path, body)
    if isinstance(value, list) and value and _is_batch(path, body):
        value = value[0]
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass"), _CHARS_A_TOKEN
    if isinstance(value, list):
        try:
            return array("q", value).tobytes(), 8
        except (TypeError, OverflowError):  # no tokens: the engine will say so
            pass
    return b"", _CHARS_A_TOKEN
