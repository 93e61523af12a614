"""What kind of engine this process belongs to: prefill or decode, who writes, what its page hashes are of, how it is set."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache_mooncake.client import weights
from hicache_mooncake.client.hooks import engine_setting, loaded
from hicache_mooncake.sharing import BIGRAMS, DECODE, OFFLOAD, PLAIN, PREFILL, TREE

_STRIDE_ENV = "SGLANG_HICACHE_DECODE_OFFLOAD_STRIDE"
_EAGLES = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")
"""Where SGLang does not say it itself."""
DEFAULT_THRESHOLD = 256
_UNKNOWN = "?"


@dataclasses.dataclass(frozen=True)
class EngineFacts:
    """`role`: prefill, decode, or "" for both. `offload` and `radix`: how a decode engine was started, both or one or none."""

    id: bytes
    label: str
    role: str = ""
    offload: bool = False
    radix: bool = False
    eagle: bool = False
    threshold: str = str(DEFAULT_THRESHOLD)
    """Tokens: shorter prompts, or what is left of them, are not looked up."""
    prefetch_policy: str = _UNKNOWN
    write_policy: str = _UNKNOWN
    host_memory_mode: str = "cache"
    stride: str = ""
    """Of the decode offload, as given in the environment."""

    @property
    def flags(self) -> dict[str, str]:
        """For whoever explains why L3 is not used."""
        return {
            "prefetch_threshold": self.threshold,
            "prefetch_policy": self.prefetch_policy,
            "write_policy": self.write_policy,
        }

    @property
    def promises(self) -> bool:
        """A decode server with HiCache tells its prefill server what lookups found here."""
        return self.role == DECODE and self.radix

    def writer(self, *, in_a_tree: bool) -> str:
        """Who writes and reads by this backend. `in_a_tree`: its pools were registered as a prefix cache does it; an engine
        with both ways of writing has a backend for each."""
        if self.role != DECODE or not self.offload:
            return TREE
        return TREE if self.radix and in_a_tree else OFFLOAD

    def chain(self, writer: str, *, recurrent: bool) -> str:
        """What page hashes are of. `recurrent`: the tree has recurrent states; SGLang has no pairs of tokens in such a tree."""
        return BIGRAMS if self.eagle and writer == TREE and not recurrent else PLAIN

    def stride_tokens(self, page_tokens: int) -> int:
        """In which steps the decode offload writes."""
        given = int(self.stride) if self.stride.lstrip("-").isdigit() else 0
        return max(page_tokens, given // page_tokens * page_tokens) if given > 0 else page_tokens


def read(config: Any) -> EngineFacts:
    """Of the engine that this process belongs to; `config` is SGLang's `HiCacheStorageConfig`. Never raises: what a release
    does not tell has its neutral value."""
    arguments = weights.server_args()
    mode = engine_setting("disagg", "disaggregation_mode")
    role = mode if mode in (PREFILL, DECODE) else ""
    model = str(getattr(config, "model_name", None) or _UNKNOWN)
    place = f"{socket.gethostname()}:{getattr(arguments, 'port', '') or os.getppid()}"
    nodes, joined_at = getattr(arguments, "nnodes", 1), getattr(arguments, "dist_init_addr", None)
    over_hosts = isinstance(nodes, int) and nodes > 1 and bool(joined_at)
    if over_hosts:
        place = f"{joined_at} ({nodes} hosts)"
    return EngineFacts(
        id=_id("over hosts", role, str(joined_at)) if over_hosts else _id(*_process(), role, place),
        label=f"{role or 'the'} engine of {model} on {place}",
        role=role,
        offload=bool(engine_setting("disagg", "disaggregation_decode_enable_offload_kvcache")),
        radix=bool(engine_setting("disagg", "disaggregation_decode_enable_radix_cache"))
        and bool(engine_setting("memory", "enable_hierarchical_cache")),
        eagle=_is_eagle(engine_setting("spec", "speculative_algorithm")),
        threshold=_threshold(engine_setting("memory", "hicache_storage_backend_extra_config"), config),
        prefetch_policy=str(engine_setting("memory", "hicache_storage_prefetch_policy") or _UNKNOWN),
        write_policy=str(engine_setting("memory", "hicache_write_policy") or _UNKNOWN),
        host_memory_mode=str(engine_setting("memory", "hicache_host_memory_mode") or "cache"),
        stride=os.environ.get(_STRIDE_ENV, "").strip(),
    )


def _id(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode()).digest()[:16]


def _process() -> list[str]:
    """The ranks of an engine on one host are children of one process."""
    parent = os.getppid()
    return [_line("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid"), str(parent), _started(parent)]


def _line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When this process began, in ticks since the boot: another one may get its number."""
    fields = _line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _is_eagle(name: Any) -> bool:
    if not name:
        return False
    algorithm = loaded("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm")
    try:
        return bool(algorithm.from_string(name).is_eagle())
    except Exception:  # a release without it, or a name of somebody's plugin that is not here
        return str(name).upper() in _EAGLES


def _threshold(given: Any, config: Any) -> str:
    """SGLang takes `prefetch_threshold` out of the extra config before a backend sees that; a decode offload does not."""
    extra: Any = getattr(config, "extra_config", None)
    if isinstance(extra, Mapping) and "prefetch_threshold" in extra:
        return str(extra["prefetch_threshold"])
    text = str(given or "").strip()
    try:
        if text.startswith("@"):
            path = Path(text[1:])
            text = path.read_text() if path.suffix == ".json" else ""
            if not text:
                return f"{DEFAULT_THRESHOLD}, or as in {path}"
        found = json.loads(text) if text else {}
        return str(found.get("prefetch_threshold", DEFAULT_THRESHOLD))
    except (OSError, ValueError, AttributeError):
        return _UNKNOWN


# --------------------------------------------------------------------------- what to say at start-up


def summary(facts: EngineFacts, writer: str, chain: str, page_tokens: int, host_tokens: int, device_tokens: int) -> str:
    """How this engine uses the pool, on one line. Sizes in tokens; 0: not known."""
    parts = [f"page_size {page_tokens}", f"page hashes of {'pairs of tokens (EAGLE)' if chain == BIGRAMS else 'tokens'}"]
    if writer == OFFLOAD:
        parts.append("writes what it decodes and reads nothing (decode offload)")
        stride = facts.stride_tokens(page_tokens)
        parts.append(f"in steps of {stride} tokens, so the last {stride - 1} tokens of an answer at most are not written")
    else:
        parts.append(f"write policy {facts.write_policy}, prefetch policy {facts.prefetch_policy}")
        parts.append(f"prompts with less than {facts.threshold} tokens to compute are not looked up (prefetch_threshold)")
    if host_tokens:
        share = f", {host_tokens / device_tokens:.1f} times the device's" if device_tokens else ""
        parts.append(f"host pool of {host_tokens:,} tokens{share}")
    return f"{facts.label}: {'; '.join(parts)}"


def contradictions(
    facts: EngineFacts, writer: str, chain: str, page_tokens: int, host_tokens: int, device_tokens: int
) -> list[str]:
    """Settings of SGLang without effect, or against each other, and what to do: a sentence each."""
    found: list[str] = []
    if facts.role == DECODE and facts.offload and facts.radix:
        found.append(
            "this decode engine has both --disaggregation-decode-enable-offload-kvcache and a radix cache with HiCache: "
            "requests that are offloaded never enter the radix cache. Take one of them"
        )
    if writer == OFFLOAD and facts.eagle:
        found.append(
            "decode offload with EAGLE: it writes under hashes of single tokens, and a prefill engine with EAGLE looks for "
            "those of pairs, so what is written here is never found. Take --disaggregation-decode-enable-radix-cache with "
            "--enable-hierarchical-cache for it, or leave EAGLE out on both sides"
        )
    stride = facts.stride_tokens(page_tokens)
    if writer == OFFLOAD and stride > page_tokens:
        found.append(
            f"{_STRIDE_ENV}={facts.stride}: answers are written in steps of {stride} tokens, so up to {stride - 1} tokens at "
            f"the end of each are not written; without it up to {page_tokens - 1}. Leave it unset"
        )
    elif writer == OFFLOAD and facts.stride and facts.stride != str(stride):
        found.append(f"{_STRIDE_ENV}={facts.stride} has no effect: the step is a whole number of pages, {stride} tokens here")
    if writer == TREE and facts.role == PREFILL and facts.write_policy in ("write_through_selective", "write_back"):
        when = (
            "when it is asked for a second time"
            if facts.write_policy == "write_through_selective"
            else "when the GPU evicts it"
        )
        found.append(
            f"--hicache-write-policy {facts.write_policy}: a page is written only {when}, and what decode writes behind it is "
            "not found before that. Use write_through on prefill engines"
        )
    if writer == TREE and facts.host_memory_mode == "cache" and 0 < host_tokens < device_tokens:
        found.append(
            f"the host pool ({host_tokens:,} tokens) is smaller than the device's ({device_tokens:,}): pages wait for room "
            "there before they are written, and are lost where there is none. Raise --hicache-ratio above 1, or --hicache-size"
        )
    return found


def pool_tokens(pool: Any) -> tuple[int, int]:
    """(host, device) tokens of a host pool; 0 where it does not say."""
    device = getattr(pool, "device_capacity_tokens", None) or getattr(getattr(pool, "device_pool", None), "size", None)
    host = getattr(pool, "logical_size", None) or getattr(pool, "size", None)
    return tuple(value if isinstance(value, int) else 0 for value in (host, device))  # type: ignore[return-value]


def is_first(config: Any) -> bool:
    """Is this the rank that speaks for its engine in the log?"""
    return not any(getattr(config, name, 0) for name in ("tp_rank", "pp_rank", "attn_cp_rank", "dp_rank"))
