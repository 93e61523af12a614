"""KV heads as objects of their own, so that engines of different tensor-parallel sizes and host layouts share pages.

A page of an MHA host pool is cut into groups of KV heads. Each group is one object, in one byte order whatever the layout it
comes from (`BYTE_ORDER`), so a rank of any size reads exactly the heads that it has, and heads that several ranks hold are
stored once. No I/O here: where the bytes of each group lie, and which heads of the model a rank holds.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import sys
from typing import Any

from hicache_mooncake.client import weights
from hicache_mooncake.client.geometry import GeometryError, PoolGeometry
from hicache_mooncake.protocol import Run

log = logging.getLogger(__name__)

BYTE_ORDER = "kv,head,token,layer,dim"
"""Of a head group's body, outermost first. SGLang's page_head pools have it, in each half of a page."""

_AXES = {
    "layer_first": ("layer", "slot", "head", "dim"),
    "page_first": ("slot", "layer", "head", "dim"),
    "page_first_direct": ("page", "layer", "token", "head", "dim"),
    "page_head": ("page", "head", "token", "layer", "dim"),
}
"""Of K and of V, by layout: `init_kv_buffer` in sglang/srt/mem_cache/pool_host/mha.py. The same in every release from 0.5.9."""

_CLASSES = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost")
"""By exact name: a subclass may keep more than these bytes in a page (MXFP8's scales), or number its pages in another way."""


# --------------------------------------------------------------------------- where a head group's bytes lie


def head_runs(pool: Any, geometry: PoolGeometry, heads_per_object: int) -> list[tuple[Run, ...]]:
    """For the rank's own KV heads in order, cut into groups of `heads_per_object`: the runs (K, V) of each group, in
    `BYTE_ORDER`, derived from the shapes and strides of the pool's own tensors. `geometry` is `of_pool`'s.

    Before they are given back, they are held against `get_page_buffer_meta` for up to four pages: together they are exactly the
    page's bytes, and no byte is in two. Raises GeometryError for another pool class or layout, tensors of another shape, heads
    that do not come out even, or bytes that differ. Reads the pool and changes nothing in it.
    """
    where = _where(pool, geometry.pool)
    if type(pool).__name__ not in _CLASSES:
        raise GeometryError(f"{where}: pages of this class are not known to be K and V of whole heads and nothing else")
    axes = _AXES.get(str(getattr(pool, "layout", "")))
    if axes is None:
        raise GeometryError(f"{where}: the order of bytes in this layout is not known")
    if not geometry.affine or geometry.page_tokens != pool.page_size:
        raise GeometryError(f"{where}: its pages are not at fixed places, or shared between ranks")
    halves = [_Half.of(pool, part, axes, geometry, where) for part in ("k_buffer", "v_buffer")]
    heads = halves[0].heads
    if heads_per_object < 1 or heads % heads_per_object:
        raise GeometryError(f"{where}: {heads} KV heads of this rank cannot be cut into objects of {heads_per_object}")
    groups = [tuple(half.run(first, heads_per_object) for half in halves) for first in range(0, heads, heads_per_object)]
    last = geometry.page_count - 1
    for page in sorted({0, min(1, last), last // 2, last}):
        _check_page(pool, geometry, groups, page, where)
    return groups


@dataclasses.dataclass(frozen=True)
class _Half:
    """K or V of all pages. Steps in bytes."""

    address: int
    heads: int
    tokens: int
    layers: int
    row: int
    """Bytes of one head of one token in one layer."""
    page_step: int
    head_step: int
    token_step: int
    layer_step: int

    @classmethod
    def of(cls, pool: Any, name: str, axes: tuple[str, ...], geometry: PoolGeometry, where: str) -> _Half:
        tensor = getattr(pool, name, None)
        if tensor is None or tensor.device.type != "cpu" or tensor.dim() != len(axes):
            raise GeometryError(f"{where}: {name} is no CPU tensor of {len(axes)} dimensions")
        item = tensor.element_size()
        size = dict(zip(axes, tensor.shape, strict=True))
        step = {axis: stride * item for axis, stride in zip(axes, tensor.stride(), strict=True)}
        tokens = geometry.page_tokens
        dim = pool.head_dim if name == "k_buffer" else getattr(pool, "v_head_dim", pool.head_dim)
        due = {"layer": pool.layer_num, "head": pool.head_num, "dim": dim, "slot": pool.size, "token": tokens}
        if any(size[axis] != due.get(axis, geometry.page_count) for axis in axes) or step["dim"] != item:
            raise GeometryError(f"{where}: {name} is {size} with steps {step}, expected {due} in {geometry.page_count} pages")
        return cls(
            address=tensor.data_ptr(),
            heads=size["head"],
            tokens=tokens,
            layers=size["layer"],
            row=dim * item,
            page_step=step["page"] if "page" in axes else step["slot"] * tokens,
            head_step=step["head"],
            token_step=step["token" if "token" in axes else "slot"],
            layer_step=step["layer"],
        )

    def run(self, first_head: int, heads: int) -> Run:
        piece = self.row
        dims: list[tuple[int, int]] = []  # innermost first
        for count, step in ((self.layers, self.layer_step), (self.tokens, self.token_step), (heads, self.head_step)):
            if count == 1:
                continue
            if not dims and step == piece:
                piece *= count
            elif dims and step == dims[-1][0] * dims[-1][1]:
                dims[-1] = (dims[-1][0] * count, dims[-1][1])
            else:
                dims.append((count, step))
        length = heads * self.tokens * self.layers * self.row
        return Run(self.address + first_head * self.head_step, self.page_step, length, dims[::-1])


def _check_page(pool: Any, geometry: PoolGeometry, groups: list[tuple[Run, ...]], page: int, where: str) -> None:
    import torch

    tokens = geometry.page_tokens
    pointers, sizes = pool.get_page_buffer_meta(torch.arange(page * tokens, (page + 1) * tokens, dtype=torch.int64))
    whole = _spans([(int(address), int(size), []) for address, size in zip(pointers, sizes, strict=True)])
    parts = _spans([(run.address + page * run.stride, run.length, run.dims) for runs in groups for run in runs])
    if whole is None or whole != parts:
        raise GeometryError(f"{where}: the heads of page {page} are not the bytes that get_page_buffer_meta gives, once each")


def _spans(runs: list[tuple[int, int, list[tuple[int, int]]]]) -> list[tuple[int, int]] | None:
    """The (start, end) that runs (address, length, dims) cover, joined where they touch; None when two overlap."""
    import numpy

    starts, ends = [], []
    for address, length, dims in runs:
        places: Any = numpy.array([address], numpy.int64)
        for count, step in dims:
            places = numpy.add.outer(places, numpy.arange(count, dtype=numpy.int64) * step).ravel()
        starts.append(places)
        ends.append(places + length // math.prod(count for count, _ in dims))
    start, end = numpy.concatenate(starts), numpy.concatenate(ends)
    order = numpy.argsort(start)
    start, end = start[order], end[order]
    if (end[:-1] > start[1:]).any():
        return None
    first = numpy.concatenate([[True], start[1:] != end[:-1]])
    last = numpy.concatenate([first[1:], [True]])
    return list(zip(start[first].tolist(), end[last].tolist(), strict=True))


def _where(pool: Any, name: str) -> str:
    return f"pool {name} ({type(pool).__name__}, layout {getattr(pool, 'layout', '?')})"


# --------------------------------------------------------------------------- which heads a rank holds


def heads_of_rank(total_heads: int, tp_rank: int, tp_size: int) -> range:
    """Which of the model's KV heads a rank holds, in the order of its pool.

    As SGLang's QKVParallelLinear shards them (sglang/srt/layers/linear.py: `__init__` and `weight_loader`, where the shard is
    `kv_tp_rank // num_kv_head_replicas`): contiguous blocks, and with more ranks than heads each head on `tp_size /
    total_heads` ranks in a row. `tp_rank` and `tp_size` are those of attention, as in `HiCacheStorageConfig`. Raises
    GeometryError where SGLang would refuse, too: sizes of which neither divides the other.
    """
    if total_heads < 1 or not 0 <= tp_rank < tp_size:
        raise GeometryError(f"rank {tp_rank} of {tp_size} and {total_heads} KV heads")
    if total_heads % tp_size == 0:
        each = total_heads // tp_size
        return range(tp_rank * each, (tp_rank + 1) * each)
    if tp_size % total_heads == 0:
        head = tp_rank // (tp_size // total_heads)
        return range(head, head + 1)
    raise GeometryError(f"{total_heads} KV heads cannot be spread evenly over {tp_size} ranks")


def heads_per_object(total_heads: int, tp_lcm_size: int | None = None) -> int:
    """How many KV heads one object holds: the largest group that no rank of any size in use has a part of only.

    `tp_lcm_size` is the least common multiple of the tensor-parallel sizes that share, as SGLang's setting of this name.
    SGLang itself (cache_controller.py, `_generate_storage_config`) uses it for page_head pools alone and cuts a rank's heads
    into `tp_lcm_size / tp_size` objects, which are the same groups. Without it any size may come: an object is one head.
    Raises GeometryError for numbers below 1.
    """
    if total_heads < 1 or (tp_lcm_size is not None and tp_lcm_size < 1):
        raise GeometryError(f"{total_heads} KV heads, tp_lcm_size {tp_lcm_size}")
    return total_heads // math.gcd(total_heads, tp_lcm_size) if tp_lcm_size else 1


_STANDARD = {
    "apertus": ("ApertusForCausalLM",),
    "arcee": ("ArceeForCausalLM",),
    "commandr": ("CohereForCausalLM", "Cohere2ForCausalLM"),
    "exaone": ("ExaoneForCausalLM",),
    "gemma": ("GemmaForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3_causal": ("Gemma3ForCausalLM",),
    "gemma3_mm": ("Gemma3ForConditionalGeneration",),
    "glm4": ("Glm4ForCausalLM",),
    "glm4_moe": ("Glm4MoeForCausalLM",),
    "glm4v": ("Glm4vForConditionalGeneration",),
    "glm4v_moe": ("Glm4vMoeForConditionalGeneration",),
    "gpt_oss": ("GptOssForCausalLM",),
    "granite": ("GraniteForCausalLM",),
    "granitemoe": ("GraniteMoeForCausalLM",),
    "internlm2": ("InternLM2ForCausalLM",),
    "llama": ("LlamaForCausalLM", "Phi3ForCausalLM", "InternLM3ForCausalLM"),
    "minimax_m2": ("MiniMaxM2ForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "mixtral": ("MixtralForCausalLM",),
    "nemotron_h": ("NemotronHForCausalLM",),
    "olmoe": ("OlmoeForCausalLM",),
    "phimoe": ("PhiMoEForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration",),
    "qwen2_moe": ("Qwen2MoeForCausalLM",),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "qwen3_next": ("Qwen3NextForCausalLM",),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration",),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration",),
    "starcoder2": ("Starcoder2ForCausalLM",),
}
"""Modules of sglang.srt.models, and their architectures, whose every attention layer takes its K and V from a
QKVParallelLinear of `config.num_key_value_heads` heads, sharded in the ordinary way. tests/sglang/test_heads.py reads their
sources and says so."""


class _Uncertain(Exception):
    """Why the number of KV heads is not certain."""


def total_kv_heads(pool: Any, tp_size: int) -> int | None:
    """KV heads of the model that this engine process serves, or None when it is not certain that they are spread over the ranks
    as `heads_of_rank` says. A wrong answer would deliver another head's page, so everything that could speak against it is
    asked, and the reason for None is logged. For the primary KV pool of a rank; `tp_size` as in `HiCacheStorageConfig`.

    What must hold:

    * the pool is one of `_CLASSES`, no draft model's, and has no draft layers packed into it (those may have other heads);
    * SGLang's own configuration of the model (`ModelConfig`, from the server's arguments) names one architecture that is in
      `_STANDARD`, and the class that SGLang has loaded for it is SGLang's own and not another package's or implementation's;
    * its `get_total_num_kv_heads` is `num_key_value_heads`, and sliding-window layers have as many;
    * the pool has that many heads over `tp_size`, at least 1, of the configuration's width, and no more layers than the model;
    * attention runs on `tp_size` ranks in this process's own account, with no context parallelism (which repeats heads over
      ranks in another order), and, where a rank has one head, with no data-parallel attention (where a model that shards by the
      whole group would look the same);
    * on a CPU the heads come out even: there SGLang pads them with empty ones where others repeat them;
    * no `quantization_param_path`: its scales may differ by rank, and then so do the bytes of one head.
    """
    try:
        return _certain_total(pool, tp_size)
    except Exception as error:  # of SGLang's, in a release that is not known: not certain, either
        reason = str(error) if isinstance(error, _Uncertain) else repr(error)
        log.info("%s: not shared with other tensor-parallel sizes: %s", _where(pool, "kv"), reason)
        return None


def _certain_total(pool: Any, tp_size: int) -> int:
    def must(holds: bool, reason: str) -> None:
        if not holds:
            raise _Uncertain(reason)

    must(type(pool).__name__ in _CLASSES, "this class of host pool is not known")
    must("draft" not in str(getattr(pool, "pool_label", "")), "the pool is a draft model's")
    must(getattr(pool, "target_layer_num", pool.layer_num) == pool.layer_num, "draft layers are packed into the pool")
    arguments: Any = weights.server_args()
    must(arguments is not None, "there is no SGLang server in this process")
    must(
        getattr(arguments, "quantization_param_path", None) is None, "quantization_param_path may give each rank its own scales"
    )
    config: Any = importlib.import_module("sglang.srt.configs.model_config").ModelConfig.from_server_args(arguments)
    _check_architecture(config, must)
    total = config.get_total_num_kv_heads()
    must(isinstance(total, int) and total > 0, f"the model has {total} KV heads")
    must(getattr(config.hf_text_config, "num_key_value_heads", None) == total, "the configuration counts KV heads in two ways")
    if hasattr(config, "get_swa_num_kv_heads"):
        must(config.get_swa_num_kv_heads(1) == total, "its sliding-window layers have another number of KV heads")
    must(total % tp_size == 0 or tp_size % total == 0, f"{total} KV heads do not go evenly into {tp_size} ranks")
    has = (pool.head_num, pool.head_dim, getattr(pool, "v_head_dim", pool.head_dim))
    due = (max(1, total // tp_size), config.head_dim, getattr(config, "v_head_dim", config.head_dim))
    must(has == due, f"the pool's heads, K and V widths are {has}, the model's {due}")
    must(pool.layer_num <= config.num_hidden_layers, f"the pool has more layers than the model's {config.num_hidden_layers}")
    if getattr(arguments, "device", None) == "cpu":
        even = total % tp_size == 0 and config.num_attention_heads % tp_size == 0
        must(even, f"on a CPU SGLang pads the model's heads for {tp_size} ranks")
    _check_parallel(pool.head_num, tp_size, must)
    return int(total)


def _check_architecture(config: Any, must: Any) -> None:
    architectures = list(getattr(config.hf_config, "architectures", None) or [])
    must(len(architectures) == 1, f"the model's architectures are {architectures}")
    known = next((module for module, names in _STANDARD.items() if architectures[0] in names), None)
    must(known is not None, f"it is not known how {architectures[0]} spreads its KV heads")
    registry = getattr(sys.modules.get("sglang.srt.models.registry"), "ModelRegistry", None)
    must(registry is not None, "no model has been loaded in this process")
    loaded = getattr(registry.models.get(architectures[0]), "__module__", None) if registry is not None else None
    must(loaded == f"sglang.srt.models.{known}", f"{architectures[0]} is served by {loaded}, not by SGLang's own class")
    implementation = getattr(config, "model_impl", "auto")
    implementation = str(getattr(implementation, "value", implementation)).lower()
    must(implementation in ("auto", "sglang"), f"the model is served by the {implementation} implementation")


def _check_parallel(heads: int, tp_size: int, must: Any) -> None:
    try:
        parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
        tp, cp, dp = parallel.attn_tp_size, parallel.attn_cp_size, parallel.attn_dp_size
        dcp = getattr(parallel, "attn_dcp_size", 1)
    except ImportError:  # before 0.5.14
        old = importlib.import_module("sglang.srt.layers.dp_attention")
        tp, cp, dp = old.get_attention_tp_size(), old.get_attention_cp_size(), old.get_attention_dp_size()
        dcp = 1
    must(tp == tp_size, f"attention runs on {tp} ranks, not {tp_size}")
    must(cp == 1 and dcp == 1, "context parallelism repeats heads over ranks")
    must(dp == 1 or tp == 1 or heads > 1, "with data-parallel attention, one head on a rank could be any")
