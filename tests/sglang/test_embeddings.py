"""Multimodal embeddings in the pool: whole, of the right model, dtype and width, however their memory is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from sglang.srt.mem_cache.embedding_store import EmbeddingStoreFactory

from hicache_mooncake import plugin
from hicache_mooncake.config import ConfigError
from hicache_mooncake.embeddings import HiCacheEmbeddings
from tests.conftest import NodeProcess

WIDTH, ROWS = 64, 256
Make = Callable[..., tuple[HiCacheEmbeddings, torch.Tensor]]


@pytest.fixture
def make(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[HiCacheEmbeddings] = []
    monkeypatch.setenv("HICACHE_MOONCAKE_SOCKET", node.socket)

    def build(model_id: str = "vision-1", dtype: torch.dtype = torch.bfloat16, width: int = WIDTH, **env: str):  # type: ignore[no-untyped-def]
        monkeypatch.setenv("HICACHE_MOONCAKE_MODEL_ID", model_id)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        store = HiCacheEmbeddings()
        made.append(store)
        buffer = torch.zeros((ROWS * WIDTH // width, width), dtype=dtype)
        store.register_buffer(buffer)
        return store, buffer

    yield build
    for store in made:
        store.close()


def parts(buffer: torch.Tensor, *rows: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Addresses and bytes of stretches of rows (first, count)."""
    step = buffer.shape[1] * buffer.element_size()
    return [buffer.data_ptr() + first * step for first, _ in rows], [count * step for _, count in rows]


@pytest.mark.parametrize("mode", ["process_vm", "segment"])
def test_an_embedding_comes_back_however_its_memory_is_cut(make: Make, mode: str) -> None:
    writer, source = make(HICACHE_MOONCAKE_COPY_MODE=mode)
    reader, target = make(HICACHE_MOONCAKE_COPY_MODE=mode)
    source[0:30] = torch.randn(30, WIDTH)
    ptrs, sizes = parts(source, (0, 10), (10, 20))
    assert writer.batch_is_exist(["img"]) == [False]
    assert writer.batch_put_from_multi_buffers(["img"], [ptrs], [sizes]) == [True]
    assert reader.batch_is_exist(["other", "img"]) == [False, True]
    ptrs, sizes = parts(target, (100, 25), (40, 5))
    assert reader.batch_get_into_multi_buffers(["img", "other"], [ptrs, ptrs], [sizes, sizes]) == [True, False]
    assert torch.equal(torch.cat([target[100:125], target[40:45]]), source[0:30])
    assert not target[0:40].any()
    ptr, size = parts(target, (60, 30))
    assert reader.batch_get(["img"], ptr, size) == [True]
    assert torch.equal(target[60:90], source[0:30])


def test_another_model_dtype_or_width_never_matches(make: Make) -> None:
    writer, source = make()
    ptr, size = parts(source, (0, 8))
    assert writer.batch_put(["img"], ptr, size) == [True]
    for difference in ({"model_id": "vision-2"}, {"dtype": torch.float16}, {"width": 2 * WIDTH}):
        reader, target = make(**difference)
        assert reader.batch_is_exist(["img"]) == [False]
        assert reader.batch_get(["img"], [target.data_ptr()], size) == [False]


def test_another_length_is_a_miss(make: Make) -> None:
    writer, source = make()
    ptr, size = parts(source, (0, 8))
    writer.batch_put(["img"], ptr, size)
    source.fill_(7)
    assert writer.batch_get(["img"], ptr, [size[0] // 2]) == [False]
    assert writer.batch_get(["img"], ptr, [size[0] * 2]) == [False]
    assert bool((source == 7).all())


def test_bad_arguments_are_false_and_not_raised(make: Make) -> None:
    store, source = make()
    ptr, size = parts(source, (0, 8))
    assert store.batch_put(["a"], [ptr[0] + (1 << 40)], size) == [False], "outside the buffer"
    assert store.batch_put_from_multi_buffers(["a", "b"], [ptr], [size]) == [False, False]
    assert store.batch_put_from_multi_buffers(["a"], [[]], [[]]) == [False]
    assert store.batch_get(["a"], ptr, [0]) == [False]
    assert store.batch_is_exist([]) == []
    store.close()
    assert store.batch_put(["a"], ptr, size) == [False]


def test_embeddings_of_nobody_are_refused(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_MOONCAKE_SOCKET", node.socket)
    monkeypatch.delenv("HICACHE_MOONCAKE_MODEL_ID", raising=False)
    with pytest.raises(ConfigError, match="HICACHE_MOONCAKE_MODEL_ID"):
        HiCacheEmbeddings()


def test_the_plugin_gives_it_the_name_mooncake(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmbeddingStoreFactory, "_registry", {})
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_REUSE_TE", "0")  # which it sets otherwise, for good
    plugin.activate()
    make()
    store = EmbeddingStoreFactory.create_backend("mooncake")
    assert isinstance(store, HiCacheEmbeddings)
    store.close()
