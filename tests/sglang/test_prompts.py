"""The router's tokens, page hashes and event keys are SGLang's own, computed here by SGLang's own functions.

`python -m tests.sglang.test_prompts` writes them to tests/data/prompts.json, against which other tests compare without SGLang.
"""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hicache_master.router.chains import CacheNamespace, adapter_id, event_keys, event_seed, page_hashes, storage_seed
from hicache_master.router.chat import Chat, takes_parts

from tests import prompt_vectors as vectors


def _node(tokens: list[int], namespace: dict[str, Any], bigrams: bool) -> Any:
    """One node of SGLang's tree, with all of the prompt's whole pages."""
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.mem_cache.radix_cache import RadixKey

    extra_key = namespace.get("extra_key") or None
    if "lora_path" in namespace:
        extra_key = (extra_key or "") + LoRARef.deterministic_id(*vectors.ADAPTER)
    page = vectors.PAGE_SIZE
    units = max(len(tokens) - 1, 0) if bigrams else len(tokens)
    whole = units // page * page
    ids = array("q", tokens[: whole + 1 if bigrams else whole])
    key = RadixKey(ids, extra_key, is_bigram=bigrams, cache_salt=namespace.get("cache_salt") or None)
    root = SimpleNamespace(parent=None, key=RadixKey(array("q"), None), hash_value=[], event_hash_value=None)
    return SimpleNamespace(parent=root, key=key, hash_value=None, event_hash_value=None)


def sglang_hashes(tokens: list[int], namespace: dict[str, Any], bigrams: bool) -> dict[str, Any]:
    from sglang.srt.disaggregation.kv_events import BlockStored
    from sglang.srt.mem_cache.events import KVCacheEventRecorder, KvEventLoraNames
    from sglang.srt.mem_cache.utils import compute_node_hash_values

    node = _node(tokens, namespace, bigrams)
    found: dict[str, Any] = {"hashes": "".join(compute_node_hash_values(node, vectors.PAGE_SIZE)) if len(node.key) else ""}
    for name, dynamo in (("keys", False), ("dynamo", True)):
        names = KvEventLoraNames()
        if "lora_path" in namespace:
            names.register(SimpleNamespace(lora_id="x", extra_key=node.key.extra_key), vectors.ADAPTER[0])
        recorder = KVCacheEventRecorder(enabled=True, page_size=vectors.PAGE_SIZE, dynamo_format=dynamo, lora_names=names)
        if len(node.key):
            recorder.record_store(node)
        found[name] = [block for event in recorder.take() if isinstance(event, BlockStored) for block in event.block_hashes]
    return found


def sglang_chat(template: str, body: dict[str, Any]) -> list[int]:
    """The tokens that SGLang's OpenAI server makes of this request."""
    from sglang.srt.entrypoints.openai import serving_chat
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format

    tokenizer = vectors.make_tokenizer(template)
    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"], model_type="llama"),
        is_multimodal=False,
        get_default_sampling_params=dict,
    )
    manager = mock.MagicMock(
        tokenizer=tokenizer, model_config=config, served_model_name="model", config_value=lambda name: None
    )
    templates = mock.MagicMock(
        chat_template_name=None,
        jinja_template_content_format=detect_jinja_template_content_format(template),
        jinja_template_may_reorder_tool_results=False,
        python_chat_template=None,
        reasoning_config=None,
        force_reasoning=False,
    )
    settings = SimpleNamespace(default_chat_template_kwargs=None, return_input_ids=False)
    with mock.patch.object(serving_chat, "get_serving", return_value=settings):
        serving = serving_chat.OpenAIServingChat(manager, templates)
        request = ChatCompletionRequest(model="model", **json.loads(json.dumps(body)))
        adapted, _ = serving._convert_to_internal_request(request)
    return list(adapted.input_ids)


def all_vectors() -> dict[str, Any]:
    return {
        "hashes": [
            {"tokens": tokens, "namespace": namespace, "bigrams": bigrams, **sglang_hashes(tokens, namespace, bigrams)}
            for tokens in vectors.TOKENS
            for namespace in vectors.NAMESPACES
            for bigrams in (False, True)
        ],
        "chats": {
            template: {name: sglang_chat(source, body) for name, body in vectors.CHATS.items()}
            for template, source in vectors.TEMPLATES.items()
        },
        "texts": {text: vectors.make_tokenizer("")(text)["input_ids"] for text in vectors.TEXTS},
    }


@pytest.mark.parametrize("bigrams", [False, True])
@pytest.mark.parametrize("namespace", vectors.NAMESPACES, ids=str)
def test_pages_have_the_names_that_sglang_gives_them(namespace: dict[str, Any], bigrams: bool) -> None:
    adapter = adapter_id(*vectors.ADAPTER) if "lora_path" in namespace else None
    ours = CacheNamespace(namespace.get("extra_key") or None, namespace.get("cache_salt") or None, adapter)
    for tokens in vectors.TOKENS:
        theirs = sglang_hashes(tokens, namespace, bigrams)
        page = vectors.PAGE_SIZE
        assert page_hashes(tokens, page, seed=storage_seed(ours), bigrams=bigrams).hex() == theirs["hashes"]
        chain = page_hashes(tokens, page, seed=event_seed(ours), bigrams=bigrams)
        assert list(event_keys(chain, ours)) == theirs["keys"]
        assert list(event_keys(chain, ours, dynamo=True)) == theirs["dynamo"]


@pytest.mark.parametrize("name", vectors.CHATS)
@pytest.mark.parametrize("template", vectors.TEMPLATES)
def test_a_chat_has_the_tokens_that_sglangs_server_makes_of_it(template: str, name: str) -> None:
    body = vectors.CHATS[name]
    if "input_ids" not in body:
        source = vectors.TEMPLATES[template]
        assert Chat(vectors.make_tokenizer(source)).tokens(body) == sglang_chat(source, body)


@pytest.mark.parametrize(
    "template",
    [
        *vectors.TEMPLATES.values(),
        "{% for m in messages %}{% for p in m.content[1:] | list %}{{ p.text }}{% endfor %}{% endfor %}",
        "{% for content in message['content'] | selectattr('type') %}{% endfor %}",
        "{% for message in messages %}{% set content = message.content %}{% for p in content %}{% endfor %}{% endfor %}",
        "no loop",
        "{% broken",
    ],
)
def test_templates_that_take_parts_are_told_as_sglang_tells_them(template: str) -> None:
    from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format

    assert takes_parts(template) == (detect_jinja_template_content_format(template) == "openai")


def test_the_stored_vectors_are_what_this_sglang_says() -> None:
    assert vectors.stored() == all_vectors()


if __name__ == "__main__":
    vectors.VECTORS.write_text(json.dumps(all_vectors(), indent=1, ensure_ascii=False) + "\n")
