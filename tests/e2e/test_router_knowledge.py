"""What the router knows of a real SGLang server: the names that it gives to a request's pages are those of the server's KV
events, and those under which the server has stored them in the pool."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hicache_master.conductor.prefixes import DEVICE, DRAM, Prefixes
from hicache_master.router.kv_events import EventSource, KvEvents
from hicache_master.router.pool import PoolView
from hicache_master.router.prompts import CHAT, COMPLETIONS, GENERATE, Prompts

from hicache_mooncake.testing import sglang_cpu
from hicache_mooncake.testing.sglang_cpu.processes import free_port
from hicache_mooncake.testing.sglang_cpu.servers import HOST, PAGE_TOKENS, post
from hicache_mooncake.testing.sglang_cpu.tiny_model import Family
from tests.e2e.support import MARKS, Engine, Host, running_hosts

pytestmark = MARKS

WAIT_S = 60.0
FORMATS = ("default", "dynamo")
TEXT = "the quick brown fox jumps over the lazy dog. "
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}}]
ASSISTANT = {"role": "assistant", "content": "a short answer"}


def requests(form: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Others for each engine: one that finds its pages in the pool does not store them."""

    def user(name: str) -> dict[str, str]:
        return {"role": "user", "content": text(name)}

    def text(name: str) -> str:
        return f"{form} {name} " + TEXT * 5

    return {
        "tokens": (GENERATE, {"input_ids": [3 + len(form), *range(3, 202)]}),
        "text": (GENERATE, {"text": text("one")}),
        "completion": (COMPLETIONS, {"prompt": text("two")}),
        "chat": (CHAT, {"messages": [user("three"), ASSISTANT, user("four")]}),
        "tools": (CHAT, {"messages": [user("five")], "tools": TOOLS}),
        "continued": (CHAT, {"messages": [user("six"), ASSISTANT], "continue_final_message": True}),
        "salted": (GENERATE, {"text": text("seven"), "cache_salt": "tenant"}),
        "extra key": (GENERATE, {"text": text("eight"), "extra_key": "a class of its own"}),
        "both": (GENERATE, {"text": text("nine"), "extra_key": "a", "cache_salt": "b"}),
    }


@pytest.fixture(scope="module", autouse=True)
def torchvision_that_can_be_imported() -> None:
    """transformers does when it loads a model's tokenizer."""
    shims = Path(sglang_cpu.__file__).parent / "shims" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("hicache_shims", shims)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[Family], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def hosts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Host, EventSource]]]:
    """An engine for each format of events."""
    sources = [EventSource(f"tcp://{HOST}:{free_port()}", f"tcp://{HOST}:{free_port()}") for _ in FORMATS]
    engines = []
    for source, form in zip(sources, FORMATS, strict=True):
        at = {"endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint, "bind": True}
        engines.append(Engine(model, args=("--kv-events-config", json.dumps({"publisher": "zmq", "format": form, **at}))))
    with running_hosts(tmp_path_factory.mktemp("knowledge"), *engines) as started:
        yield dict(zip(FORMATS, zip(started, sources, strict=True), strict=True))


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("form", FORMATS)
def test_pages_have_the_names_of_the_servers_events_and_of_the_pool(
    model: Path, hosts: dict[str, tuple[Host, EventSource]], form: str
) -> None:
    host, source = hosts[form]
    prompts = Prompts(str(model), PAGE_TOKENS, dynamo=form == "dynamo")

    async def scenario() -> None:
        prefixes = Prefixes()
        events = KvEvents(prefixes, "engine", "1", source, PAGE_TOKENS)
        pool = PoolView([host.master.address], every_s=0.5)
        events.start()
        await pool.start()
        await until(lambda: events.connected and len(pool.kinds) > 0)
        for name, (path, body) in requests(form).items():
            prompt = await prompts.read(path, body)
            pages = prompt.tokens // PAGE_TOKENS
            assert pages == len(prompt.keys) >= 2, name
            assert prefixes.match(prompt.keys, 0.0).length(DEVICE, "engine") < pages, name
            more: dict[str, Any] = {"sampling_params": {"max_new_tokens": 1}} if path == GENERATE else {"max_tokens": 1}
            answer = json.loads(await asyncio.to_thread(post, host.engine.url + path, {"model": "m", **body, **more}, WAIT_S))
            told = answer["meta_info"] if path == GENERATE else answer["usage"]
            assert told["prompt_tokens"] == prompt.tokens, name
            await until(lambda prompt=prompt, pages=pages: prefixes.match(prompt.keys, 0.0).length(DEVICE, "engine") == pages)
            deadline = time.monotonic() + WAIT_S
            while prefixes.match(prompt.keys, 0.0).length(DRAM, host.node.name) < pages:
                assert time.monotonic() < deadline, name
                await asyncio.sleep(0.05)
                await pool.refresh(prompt, prefixes, 1.0)
        assert (events.problem, pool.problem) == ("", "")
        await events.close()
        await pool.close()

    asyncio.run(scenario())
    prompts.close()
