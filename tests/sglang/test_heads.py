"""KV heads as objects: engines of different tensor-parallel sizes and layouts share pages, byte for byte (P143, P145)."""

from __future__ import annotations

import ast
import copy
import ctypes
import functools
import hashlib
import itertools
import json
import os
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
import torch
from sglang.srt import runtime_context
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

from hicache_mooncake import protocol as p
from hicache_mooncake.client import heads
from hicache_mooncake.client.client import Body, PoolClient
from hicache_mooncake.client.geometry import GeometryError, PoolGeometry, of_pool
from hicache_mooncake.client.heads import head_runs, heads_of_rank, heads_per_object, total_kv_heads
from hicache_mooncake.config import Settings
from hicache_mooncake.testing.local import page_hash, pattern
from tests.conftest import NodeProcess
from tests.sglang.pools import PAGE_SIZE, indices, mha_pool, mla_pool

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
LAYERS, HEAD_DIM = 3, 32
ROW = HEAD_DIM * 2
PAGES = 3


def asymmetric_pool(layout: str, *, head_count: int = 2, head_dim: int = 48, v_head_dim: int = 32, pages: int = 8) -> Any:
    slots = PAGE_SIZE * 2
    k = [torch.zeros((slots, head_count, head_dim), dtype=torch.bfloat16) for _ in range(LAYERS)]
    v = [torch.zeros((slots, head_count, v_head_dim), dtype=torch.bfloat16) for _ in range(LAYERS)]
    pointers = [torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64) for tensors in (k, v)]
    info = MHABufferInfo(
        buffers=KVBuffers(k=tuple(k), v=tuple(v), k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD),
        page_size=PAGE_SIZE,
        head_num=head_count,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return AsymmetricMHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE_SIZE,
        layout,
        pin_memory=False,
        allocator_type="shm",
        device_capacity_tokens=slots,
        start_layer=0,
        end_layer=LAYERS,
        host_token_capacity=pages * PAGE_SIZE,
    )


def page_of(pool: Any, page: int) -> list[torch.Tensor]:
    """K and V of a page as views of bytes, (head, token, layer, row): what the layout means, by SGLang's own tensor shapes."""
    parts = []
    for buffer in (pool.k_buffer, pool.v_buffer):
        data = buffer.view(torch.uint8)
        slots = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        parts.append(
            {
                "layer_first": lambda d=data, s=slots: d[:, s].permute(2, 1, 0, 3),
                "page_first": lambda d=data, s=slots: d[s].permute(2, 0, 1, 3),
                "page_first_direct": lambda d=data: d[page].permute(2, 1, 0, 3),
                "page_head": lambda d=data: d[page],
            }[pool.layout]()
        )
    return parts


def canonical(pool: Any, page: int, first: int, count: int) -> bytes:
    """What the object of heads first.. of a page must be: K then V, each (head, token, layer, dim)."""
    return b"".join(half[first : first + count].contiguous().numpy().tobytes() for half in page_of(pool, page))


def gathered(runs: Sequence[p.Run], page: int) -> bytes:
    """The bytes that the runs name, in body order, piece by piece."""
    body = b""
    for run in runs:
        piece = run.length
        for count, _ in run.dims:
            piece //= count
        for where in itertools.product(*(range(0, count * step, step) for count, step in run.dims)):
            body += ctypes.string_at(run.address + page * run.stride + sum(where), piece)
    return body


def randomize(pool: Any) -> None:
    for buffer in (pool.k_buffer, pool.v_buffer):
        data = buffer.view(torch.uint8)
        data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(data.numel())))


# --------------------------------------------------------------------------- where the bytes of a head lie


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("each", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_group_is_the_same_bytes_in_every_layout(layout: str, each: int, dtype: torch.dtype) -> None:
    pool = mha_pool(layout, heads=4, head_dim=HEAD_DIM, layers=LAYERS, pages=5, dtype=dtype)
    randomize(pool)
    groups = head_runs(pool, of_pool(pool, "kv"), each)
    assert len(groups) == 4 // each
    for number, runs in enumerate(groups):
        assert len(runs) == 2
        for page in (0, 1, 4):
            assert gathered(runs, page) == canonical(pool, page, number * each, each)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_k_and_v_of_different_widths(layout: str) -> None:
    pool = asymmetric_pool(layout)
    randomize(pool)
    for number, runs in enumerate(head_runs(pool, of_pool(pool, "kv"), 1)):
        assert [run.length for run in runs] == [PAGE_SIZE * LAYERS * 96, PAGE_SIZE * LAYERS * 64]
        assert gathered(runs, 3) == canonical(pool, 3, number, 1)


@pytest.mark.parametrize("layout", ["page_first", "page_head"])
def test_what_is_contiguous_in_a_layout_is_one_piece(layout: str) -> None:
    """One head on a rank in page_first, or any head in page_head: nothing to gather."""
    count = 1 if layout == "page_first" else 4
    pool = mha_pool(layout, heads=count, head_dim=HEAD_DIM, layers=LAYERS)
    assert all(run.dims == [] for runs in head_runs(pool, of_pool(pool, "kv"), 1) for run in runs)


@pytest.mark.parametrize("split_factor", [1, 2, 4])
def test_page_head_groups_are_where_sglang_splits_heads(split_factor: int) -> None:
    pool = mha_pool("page_head", heads=4, head_dim=HEAD_DIM, layers=LAYERS)
    groups = head_runs(pool, of_pool(pool, "kv"), 4 // split_factor)
    for page in (0, 7):
        pointers, sizes = pool.get_split_heads_page_buffer_meta(indices(page), split_factor)
        mine = [(run.address + page * run.stride, run.length) for runs in groups for run in runs]
        assert mine == list(zip(pointers, sizes, strict=True))
    assert all(run.dims == [] for runs in groups for run in runs)


def _other_class() -> Any:
    class Scaled(MHATokenToKVPoolHost):  # type: ignore[misc]
        pass

    pool = mha_pool()
    pool.__class__ = Scaled
    return pool


def _other_layout() -> Any:
    pool = mha_pool()
    pool.layout = "page_unified"
    return pool


def _claims(**fields: Any) -> Callable[[], Any]:
    def build() -> Any:
        pool = mha_pool("page_first", heads=2)
        for name, value in fields.items():
            setattr(pool, name, value)
        return pool

    return build


def _says(change: Callable[[list[int], list[int]], tuple[list[int], list[int]]]) -> Callable[[], Any]:
    def build() -> Any:
        pool = mha_pool("page_first", heads=2)
        asked = pool.get_page_buffer_meta
        pool.get_page_buffer_meta = lambda slots: change(*asked(slots))
        return pool

    return build


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mla": (lambda: mla_pool(), "class"),
    "a subclass": (_other_class, "class"),
    "layout": (_other_layout, "layout"),
    "no tensor": (_claims(kv_buffer=(None, None)), "no CPU tensor"),
    "heads": (_claims(head_num=4), "expected"),
    "layers": (_claims(layer_num=3), "expected"),
    "width": (_claims(head_dim=32), "expected"),
    "another order": (_claims(layout="layer_first"), "expected"),
    "V elsewhere": (_says(lambda a, n: ([a[0], a[1] + 2], n)), "once each"),
    "less than the page": (_says(lambda a, n: (a, [n[0], n[1] - 64])), "once each"),
    "more than the page": (_says(lambda a, n: ([*a, a[0] - 64], [*n, 64])), "once each"),
    "K twice": (_says(lambda a, n: (a[:1] * 2, n)), "once each"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_pools_that_cannot_be_cut_are_refused(what: str) -> None:
    build, reason = REFUSED[what]
    pool = build()
    geometry = of_pool(mla_pool() if what == "mla" else mha_pool(heads=2), "kv")
    with pytest.raises(GeometryError, match=reason):
        head_runs(pool, geometry, 1)


@pytest.mark.parametrize("each", [0, -1, 3, 8])
def test_heads_that_do_not_come_out_even_are_refused(each: int) -> None:
    pool = mha_pool(heads=4)
    with pytest.raises(GeometryError, match="cannot be cut"):
        head_runs(pool, of_pool(pool, "kv"), each)


# --------------------------------------------------------------------------- which heads a rank holds


@pytest.mark.parametrize(("total", "tp_size"), [(8, 1), (8, 2), (8, 4), (8, 8), (2, 4), (2, 8), (1, 4), (6, 3)])
def test_a_rank_holds_the_heads_that_sglang_loads(total: int, tp_size: int) -> None:
    """The weights of head h are all h: what SGLang's own layer has after loading says which heads it holds."""
    dim = 4
    weights = torch.arange(total).repeat_interleave(dim).float()[:, None].expand(-1, 16).contiguous()
    for rank in range(tp_size):
        with get_parallel().override(tp_size=tp_size, tp_rank=rank):
            layer = QKVParallelLinear(16, dim, 24, total, bias=False, params_dtype=torch.float32)
            load = layer.weight_loader_v2 if hasattr(layer.weight, "load_qkv_weight") else layer.weight_loader
            load(layer.weight, weights, "k")
        rows = layer.weight.data[layer.num_heads * dim :][: layer.num_kv_heads * dim : dim, 0]
        assert list(heads_of_rank(total, rank, tp_size)) == rows.int().tolist()


@pytest.mark.parametrize(("total", "rank", "size"), [(8, 0, 3), (6, 0, 4), (0, 0, 1), (8, 4, 4), (8, -1, 4), (8, 0, 0)])
def test_shapes_that_sglang_would_not_run_are_refused(total: int, rank: int, size: int) -> None:
    with pytest.raises(GeometryError):
        heads_of_rank(total, rank, size)


def test_objects_are_as_large_as_every_size_can_share() -> None:
    assert [heads_per_object(8, lcm) for lcm in (None, 1, 2, 4, 8, 16, 12)] == [1, 8, 4, 2, 1, 1, 2]
    for total, lcm in itertools.product((1, 2, 4, 8, 6), (1, 2, 4, 8, 16, 12)):
        each = heads_per_object(total, lcm)
        for size in (size for size in range(1, lcm + 1) if lcm % size == 0 and (total % size == 0 or size % total == 0)):
            for rank in range(size):
                held = heads_of_rank(total, rank, size)
                assert held.start % each == 0
                assert len(held) % each == 0
    with pytest.raises(GeometryError):
        heads_per_object(8, 0)


# --------------------------------------------------------------------------- how many heads the model has


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}

Serve = Callable[..., None]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """This process as SGLang's scheduler process of a model: `config` of the checkpoint, server arguments by keyword."""
    before, environment = runtime_context.snapshot_context(), dict(os.environ)
    # It keeps the very dictionaries that overrides write to: what a test overrides would be there for all tests after it.
    before["__parallel__"] = {name: copy.copy(value) for name, value in before["__parallel__"].items()}

    def start(config: dict[str, Any] | None = None, *, loaded: str = "sglang.srt.models.llama", **arguments: Any) -> None:
        config = CONFIG | (config or {})
        (tmp_path / "config.json").write_text(json.dumps(config))
        architecture = config["architectures"][0]
        registry = SimpleNamespace(models={architecture: type(architecture, (), {"__module__": loaded})})
        monkeypatch.setitem(sys.modules, "sglang.srt.models.registry", SimpleNamespace(ModelRegistry=registry))
        runtime_context.reset_context()
        runtime_context.publish(ServerArgs(model_path=str(tmp_path), device="cpu", **arguments), role="scheduler")

    yield start
    runtime_context.reset_context()
    runtime_context.restore_context(before)
    os.environ.clear()
    os.environ.update(environment)


def pool_of(head_count: int, **fields: Any) -> Any:
    pool = mha_pool(heads=head_count, head_dim=64, layers=4, pages=4)
    for name, value in fields.items():
        setattr(pool, name, value)
    return pool


@pytest.mark.parametrize(("tp_size", "head_count"), [(1, 4), (2, 2), (4, 1)])
def test_the_total_comes_from_the_model(serve: Serve, tp_size: int, head_count: int) -> None:
    serve(tp_size=tp_size)
    assert total_kv_heads(pool_of(head_count), tp_size) == 4


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments say that this is no CPU engine: there alone heads are repeated over ranks."""
    published = runtime_context.get_server_args()
    fields = {name: getattr(published, name) for name in type(published).__struct_fields__} | {"device": "cuda"}
    monkeypatch.setattr(heads.weights, "server_args", lambda: SimpleNamespace(**fields))
    config = heads.importlib.import_module("sglang.srt.configs.model_config").ModelConfig.from_server_args(published)
    monkeypatch.setattr("sglang.srt.configs.model_config.ModelConfig.from_server_args", staticmethod(lambda _arguments: config))


def test_more_ranks_than_heads(serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a CPU SGLang pads instead of repeating: there the same shape is not certain."""
    caplog.set_level("INFO")
    serve({"num_key_value_heads": 2}, tp_size=4)
    assert total_kv_heads(pool_of(1), 4) is None
    assert "on a CPU SGLang pads" in caplog.text
    on_gpu(monkeypatch)
    assert total_kv_heads(pool_of(1), 4) == 2


UNCERTAIN: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[], Any], str]] = {
    "an architecture nobody has read": ({"architectures": ["XverseForCausalLM"]}, {}, lambda: pool_of(2), "not known how"),
    "two architectures": ({"architectures": ["LlamaForCausalLM", "X"]}, {}, lambda: pool_of(2), "architectures are"),
    "another package's class": ({}, {"loaded": "mine.llama"}, lambda: pool_of(2), "served by mine.llama"),
    "another implementation": ({}, {"model_impl": "transformers"}, lambda: pool_of(2), "transformers implementation"),
    "other sliding-window heads": ({"swa_num_key_value_heads": 8}, {}, lambda: pool_of(2), "sliding-window"),
    "heads under two names": ({"num_kv_heads": 8}, {}, lambda: pool_of(4), "in two ways"),
    "heads that do not fit": ({}, {}, lambda: pool_of(4), "pool's heads"),
    "another width": ({"head_dim": 128}, {}, lambda: pool_of(2), "pool's heads"),
    "uneven heads": ({"num_key_value_heads": 3}, {}, lambda: pool_of(1), "evenly"),
    "more layers": ({"num_hidden_layers": 3}, {}, lambda: pool_of(2), "more layers"),
    "scales by rank": ({}, {"quantization_param_path": "/scales.json"}, lambda: pool_of(2), "scales"),
    "a draft's pool": ({}, {}, lambda: pool_of(2, pool_label="draft"), "draft model's"),
    "packed draft layers": ({}, {}, lambda: pool_of(2, target_layer_num=3), "packed"),
    "another class": ({}, {}, lambda: mla_pool(), "class"),
    "another size": ({}, {"tp_size": 4}, lambda: pool_of(2), "runs on 4 ranks"),
}


@pytest.mark.parametrize("what", UNCERTAIN)
def test_a_total_that_is_not_certain_is_none(serve: Serve, caplog: pytest.LogCaptureFixture, what: str) -> None:
    config, arguments, build, reason = UNCERTAIN[what]
    caplog.set_level("INFO")
    serve(config, **{"tp_size": 2, **arguments})
    assert total_kv_heads(build(), 2) is None
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("parallel", "head_count", "tp_size", "total"),
    [
        ({"tp_size": 8, "moe_tp_size": 8, "attn_tp_size": 4, "attn_dp_size": 2}, 1, 4, None),
        ({"tp_size": 8, "moe_tp_size": 8, "attn_tp_size": 1, "attn_dp_size": 8}, 4, 1, 4),
        ({"tp_size": 4, "moe_tp_size": 4, "attn_tp_size": 2, "attn_dp_size": 2}, 2, 2, 4),
        ({"tp_size": 4, "moe_tp_size": 4, "attn_tp_size": 2, "attn_dp_size": 1, "attn_cp_size": 2}, 2, 2, None),
        ({"attn_dcp_size": 2}, 2, 2, None),
    ],
    ids=["dp with one head", "dp of whole models", "dp with heads", "cp", "dcp"],
)
def test_attention_that_is_spread_in_other_ways(
    serve: Serve, parallel: dict[str, int], head_count: int, tp_size: int, total: int | None
) -> None:
    serve(tp_size=tp_size)
    with get_parallel().override(**parallel):
        assert total_kv_heads(pool_of(head_count), tp_size) == total


def test_outside_an_engine_nothing_is_certain(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime_context.reset_context()
    assert total_kv_heads(pool_of(2), 2) is None
    serve(tp_size=2)
    monkeypatch.delitem(sys.modules, "sglang.srt.models.registry")
    assert total_kv_heads(pool_of(2), 2) is None


# --------------------------------------------------------------------------- models that shard in the ordinary way


@functools.cache
def _source(folder: Path, name: str) -> ast.Module | None:
    path = folder / "srt" / "models" / f"{name}.py"
    return ast.parse(path.read_text(encoding="utf-8-sig")) if path.is_file() else None


def _calls(tree: ast.AST, name: str) -> list[ast.Call]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in found if ast.unparse(call.func).split(".")[-1] == name]


def _argument(call: ast.Call, name: str, position: int = 99) -> str | None:
    named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return named.get(name, ast.unparse(call.args[position]) if len(call.args) > position else None)


def _odd(module: ast.Module) -> list[str]:
    """What is not ordinary in a module's attention layers."""
    odd = []
    for layer in (node for node in module.body if isinstance(node, ast.ClassDef) and _calls(node, "RadixAttention")):
        source = ast.unparse(layer)
        projections = _calls(layer, "QKVParallelLinear")
        totals = re.findall(r"self\.total_num_kv_heads = (.*)", source)
        if [_argument(call, "total_num_kv_heads", 3) for call in projections] != ["self.total_num_kv_heads"]:
            odd.append(f"{layer.name} projects K and V in another way")
        if any(_argument(call, name) for call in projections for name in ("kv_parallel_group", "load_presharded_attn")):
            odd.append(f"{layer.name} shards by another group")
        if {_argument(call, "num_kv_heads", 3) for call in _calls(layer, "RadixAttention")} != {"self.num_kv_heads"}:
            odd.append(f"{layer.name} caches other heads")
        if not re.search(r"self\.num_kv_heads = max\(1, self\.total_num_kv_heads // (self\.)?\w*tp\w*\)", source):
            odd.append(f"{layer.name} has another number of heads on a rank")
        if totals == ["num_kv_heads"]:
            given = {_argument(call, "num_kv_heads") for call in _calls(module, layer.name)}
            if given != {"config.num_key_value_heads"}:
                odd.append(f"{layer.name} is given {given}")
        elif totals != ["config.num_key_value_heads"]:
            odd.append(f"{layer.name} counts {totals}")
    return odd


FOLDERS = [Path(sglang.__file__).parent, *(path / "sglang" for path in sorted(Path(sys.prefix).glob("sglang-*")))]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
@pytest.mark.parametrize("name", heads._STANDARD)
def test_known_models_shard_in_the_ordinary_way(folder: Path, name: str) -> None:
    """Of every SGLang release at hand: the attention of each listed model, its own or that of the model that it wraps."""
    source = _source(folder, name)
    if source is None:
        assert folder != FOLDERS[0]
        return
    entries = [node.value for node in source.body if isinstance(node, ast.Assign) and "EntryClass" in ast.unparse(node)]
    named = {node.id for entry in entries for node in ast.walk(entry) if isinstance(node, ast.Name)}
    assert set(heads._STANDARD[name]) <= named or folder != FOLDERS[0]
    todo, seen = [name], set()
    attention = 0
    while todo:
        module = todo.pop()
        seen.add(module)
        tree = _source(folder, module)
        assert tree is not None
        assert _odd(tree) == []
        attention += len(_calls(tree, "RadixAttention"))
        if not _calls(tree, "RadixAttention"):
            imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            wrapped = [m.rsplit(".", 1)[1] for m in imported if m.startswith("sglang.srt.models.")]
            todo += [m for m in wrapped if m not in seen]
    assert attention


@pytest.mark.parametrize(
    "name", ["qwen3_5", "grok", "step3_vl", "mimo_v2", "gpt_bigcode", "zaya", "jet_nemotron", "transformers"]
)
def test_a_model_that_deviates_is_noticed(name: str) -> None:
    """The check of the sources sees what it must see: each of these spreads its heads in a way of its own."""
    tree = _source(FOLDERS[0], name)
    assert tree is not None
    assert _odd(tree)
    assert name not in heads._STANDARD


# --------------------------------------------------------------------------- through the pool


class Ranks:
    """All ranks of an engine of one size and layout, with one client for all: what differs between ranks is their memory."""

    def __init__(
        self, settings: Settings, layout: str, tp_size: int, total: int, each: int = 1, *, allocator: str = "shm"
    ) -> None:
        self.each = each
        self.held = [heads_of_rank(total, rank, tp_size) for rank in range(tp_size)]
        self.pools = [
            mha_pool(layout, heads=len(held), head_dim=HEAD_DIM, layers=LAYERS, pages=PAGES + 2, allocator=allocator)
            for held in self.held
        ]
        geometries = [of_pool(pool, "kv") for pool in self.pools]
        self.groups = [head_runs(pool, geometry, each) for pool, geometry in zip(self.pools, geometries, strict=True)]
        regions: list[p.Region] = []
        fds: list[int] = []
        for geometry in geometries:
            for region in geometry.regions:
                fd = region.fd + len(fds) if region.fd >= 0 else -1
                regions.append(p.Region(region.address, region.length, fd, region.fd_offset))
            fds += geometry.fds
        self.client = PoolClient(settings, f"{layout}-{tp_size}")
        self.mode = self.client.share(PoolGeometry("kv", (), 1, 1, tuple(regions), tuple(fds), affine=True))

    def fill(self) -> None:
        for pool, held in zip(self.pools, self.held, strict=True):
            for page in range(PAGES):
                for half, view in enumerate(page_of(pool, page)):
                    view.copy_(model_page(page)[half, held.start : held.stop])

    def scramble(self) -> None:
        for pool in self.pools:
            pool.kv_buffer.view(torch.uint8).fill_(0x5A)

    def transfer(self, op: str) -> dict[int, int]:
        """Every object of every rank: pages 0 to 2 are stored, and loaded as 2 to 4. By rank, objects that were there."""
        hashes = b"".join(page_hash(page) for page in range(PAGES))
        places = range(PAGES) if op == "store" else range(2, 2 + PAGES)
        had = {}
        for rank, (held, groups) in enumerate(zip(self.held, self.groups, strict=True)):
            for number, runs in enumerate(groups):
                namespace = hashlib.sha256(b"heads %d of %d" % (held.start + number * self.each, self.each)).digest()[:16]
                assert op == "store" or self.client.exists(namespace, hashes) == PAGES
                outcome = self.client.transfer(op, Body(namespace, runs, b"group of a page."), hashes, array("q", places))
                assert outcome.ok == b"\x01" * PAGES, outcome.reasons
                had[rank] = had.get(rank, 0) + outcome.had
        return had

    def check(self) -> None:
        """The loaded pages have the model's bytes, and the others still have none."""
        for rank, (pool, held) in enumerate(zip(self.pools, self.held, strict=True)):
            for page in range(PAGES):
                for half, view in enumerate(page_of(pool, page + 2)):
                    assert torch.equal(view, model_page(page)[half, held.start : held.stop]), (rank, page, half)
            for page in range(2):
                assert all(bool((view == 0x5A).all()) for view in page_of(pool, page))


@functools.cache
def model_page(page: int) -> torch.Tensor:
    """What the model computed for a page, all 8 heads of it: (K or V, head, token, layer, bytes of a row)."""
    shape = (2, 8, PAGE_SIZE, LAYERS, ROW)
    body = pattern(b"page %d" % page, 2 * 8 * PAGE_SIZE * LAYERS * ROW)
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).reshape(shape)


@pytest.fixture
def ranks(start_node: Callable[..., NodeProcess]) -> Iterator[Callable[..., Ranks]]:
    node = start_node(dram="64MiB")
    made: list[Ranks] = []

    def make(layout: str, tp_size: int, total: int, each: int = 1, *, allocator: str = "shm", **config: object) -> Ranks:
        made.append(Ranks(node.settings(**config), layout, tp_size, total, each, allocator=allocator))
        return made[-1]

    yield make
    for each_ in made:
        each_.client.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_four_ranks_are_read_by_any_number(ranks: Callable[..., Ranks], layout: str) -> None:
    """P143: 8 heads, written by TP=4, read by TP=1, 2, 8 and 4, each in a layout of its own, too."""
    writer = ranks(layout, 4, 8)
    writer.fill()
    assert set(writer.transfer("store").values()) == {0}
    start = LAYOUTS.index(layout)
    for step, tp_size in enumerate((4, 1, 2, 8)):
        for other in {layout, LAYOUTS[(start + step) % 4]}:
            reader = ranks(other, tp_size, 8)
            reader.scramble()
            reader.transfer("load")
            reader.check()
            reader.client.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_that_several_ranks_hold_is_stored_once(ranks: Callable[..., Ranks], layout: str) -> None:
    """P143: 2 heads over TP=4, so each is on two ranks; read by TP=1, 2 and 8."""
    writer = ranks(layout, 4, 2)
    writer.fill()
    assert writer.transfer("store") == {0: 0, 1: PAGES, 2: 0, 3: PAGES}
    report = writer.client.status()
    assert report is not None
    assert report.node["objects"] == 2 * PAGES
    other = LAYOUTS[(LAYOUTS.index(layout) + 1) % 4]
    for tp_size in (1, 2, 8):
        reader = ranks(other, tp_size, 2)
        reader.scramble()
        reader.transfer("load")
        reader.check()
        reader.client.close()


def test_several_heads_make_one_object_where_the_sizes_are_known(ranks: Callable[..., Ranks]) -> None:
    """tp_lcm_size 4: half as many objects of two heads, for sizes 1, 2 and 4."""
    each = heads_per_object(8, 4)
    writer = ranks("page_head", 4, 8, each)
    writer.fill()
    writer.transfer("store")
    report = writer.client.status()
    assert report is not None
    assert report.node["objects"] == 4 * PAGES
    for layout, tp_size in (("page_first", 1), ("layer_first", 2)):
        reader = ranks(layout, tp_size, 8, each)
        reader.scramble()
        reader.transfer("load")
        reader.check()


@pytest.mark.parametrize("mode", ["process_vm", "segment"])
def test_memory_that_is_not_shared_has_heads_too(ranks: Callable[..., Ranks], mode: str) -> None:
    writer = ranks("layer_first", 2, 8, allocator="default", copy_mode=mode)
    assert writer.mode == mode
    writer.fill()
    writer.transfer("store")
    reader = ranks("page_first", 1, 8, allocator="default", copy_mode=mode)
    reader.scramble()
    reader.transfer("load")
    reader.check()
