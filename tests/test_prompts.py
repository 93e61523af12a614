"""What the router reads of a request: tokens, and the names of its pages, against what SGLang made of the same requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hicache_master.router.chat import Chat, ChatError, own_encoder
from hicache_master.router.prompts import CHAT, COMPLETIONS, GENERATE, INLINE_PAGES, PromptError, Prompts

from tests import prompt_vectors as vectors

STORED = vectors.stored()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("model")
    vectors.make_tokenizer(vectors.TEMPLATES["strings"]).save_pretrained(path)
    return path


@pytest.fixture
def prompts(model: Path) -> Iterator[Prompts]:
    made = Prompts(str(model), vectors.PAGE_SIZE, adapters=dict([vectors.ADAPTER]), served_model_name="s3://the:model")
    yield made
    made.close()


@pytest.mark.parametrize(
    "case", STORED["hashes"], ids=lambda case: f"{len(case['tokens'])}-{case['namespace']}-{case['bigrams']}"
)
def test_pages_are_named_as_sglang_names_them(case: dict[str, Any]) -> None:
    for dynamo in (False, True):
        prompts = Prompts(None, vectors.PAGE_SIZE, bigrams=case["bigrams"], dynamo=dynamo, adapters=dict([vectors.ADAPTER]))
        if not case["tokens"]:
            with pytest.raises(PromptError, match="empty"):
                prompts.read_now(GENERATE, {"input_ids": [], **case["namespace"]})
            continue
        found = prompts.read_now(GENERATE, {"input_ids": case["tokens"], **case["namespace"]})
        assert found.hashes.hex() == case["hashes"]
        assert list(found.keys) == case["dynamo" if dynamo else "keys"]
        assert found.tokens == len(case["tokens"])
        assert found.namespaced == any(case["namespace"].values())


@pytest.mark.parametrize("template", vectors.TEMPLATES)
def test_chats_have_the_tokens_that_sglang_makes_of_them(template: str) -> None:
    pytest.importorskip("transformers")
    chat = Chat(vectors.make_tokenizer(vectors.TEMPLATES[template]))
    for name, body in vectors.CHATS.items():
        if "input_ids" not in body:
            assert chat.tokens(body) == STORED["chats"][template][name], name


def test_texts_have_the_tokens_that_sglang_makes_of_them(prompts: Prompts) -> None:
    for text, tokens in STORED["texts"].items():
        ids = prompts.read_now(GENERATE, {"input_ids": tokens})
        for path, body in ((GENERATE, {"text": text}), (COMPLETIONS, {"prompt": text}), (COMPLETIONS, {"prompt": [text]})):
            assert prompts.read_now(path, body) == ids
    assert prompts.read_now(COMPLETIONS, {"prompt": [5, 6, 7, 8]}) == prompts.read_now(GENERATE, {"input_ids": [[5, 6, 7, 8]]})


def test_the_tokens_of_a_chat_may_be_in_the_request(prompts: Prompts) -> None:
    body = vectors.CHATS["tokens"]
    assert prompts.read_now(CHAT, body) == prompts.read_now(GENERATE, {"input_ids": body["input_ids"]})


def test_an_adapter_in_the_models_name_is_one_by_its_path(prompts: Prompts) -> None:
    name = vectors.ADAPTER[0]
    tokens = {"prompt": list(range(8))}
    plain = prompts.read_now(COMPLETIONS, {**tokens, "model": "s3://the:model"})
    assert not plain.namespaced
    wanted = prompts.read_now(COMPLETIONS, {**tokens, "lora_path": name})
    for model in (f"s3://the:model:{name}", f"other: {name} "):
        assert prompts.read_now(COMPLETIONS, {**tokens, "model": model}) == wanted


def test_pages_of_an_unknown_adapter_are_its_own_and_not_asked_for(prompts: Prompts) -> None:
    tokens = list(range(8))
    found, other, plain = (
        prompts.read_now(GENERATE, {"input_ids": tokens, **more}) for more in ({"lora_path": "one"}, {"lora_path": "two"}, {})
    )
    assert found.hashes == b""
    assert found.namespaced
    assert not {*found.keys} & {*other.keys, *plain.keys}
    assert found == prompts.read_now(GENERATE, {"input_ids": tokens, "lora_path": "one"})


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (GENERATE, {"text": ["a", "b"]}, "several"),
        (GENERATE, {"input_ids": [[1], [2]]}, "several"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "several"),
        (GENERATE, {}, "no prompt"),
        (GENERATE, {"text": 5}, "no prompt"),
        (GENERATE, {"input_ids": [1, "x"]}, "token ids"),
        (GENERATE, {"input_ids": [1, -1]}, "token ids"),
        (GENERATE, {"input_ids": [1, 2**32]}, "token ids"),
        (GENERATE, {"input_ids": [1], "image_data": "x.png"}, "not text alone"),
        (GENERATE, {"input_ids": [1], "session_params": {"id": "s"}}, "not in the request"),
        (GENERATE, {"input_ids": [1], "cache_salt": ["a", "b"]}, "cache_salt"),
        (GENERATE, {"input_ids": [1], "cache_salt": "\ud800"}, "surrogates"),
        (GENERATE, {"text": "x" * 2_000}, "longer than"),
        (CHAT, {"messages": "hello"}, "no messages"),
        (CHAT, {"messages": [5]}, "role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "not text"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {}}]}, "tool"),
        ("/v1/embeddings", {"input": "x"}, "no prompt that is read"),
    ],
)
def test_what_cannot_be_read_says_why(model: Path, path: str, body: dict[str, Any], reason: str) -> None:
    prompts = Prompts(str(model), vectors.PAGE_SIZE, max_chars=1_000)
    with pytest.raises(PromptError, match=reason):
        prompts.read_now(path, body)
    prompts.close()


def test_without_a_tokenizer_token_ids_are_read_and_texts_are_not() -> None:
    prompts = Prompts(None, vectors.PAGE_SIZE)
    assert len(prompts.read_now(GENERATE, {"input_ids": list(range(9))}).keys) == 2
    with pytest.raises(PromptError, match="no tokenizer"):
        prompts.read_now(GENERATE, {"text": "hello"})
    assert prompts.least_tokens(GENERATE, {"text": "hello" * 1000}) == 0
    prompts.close()


def test_a_lower_bound_is_one_and_grows_with_the_prompt(prompts: Prompts) -> None:
    for name, body in vectors.CHATS.items():
        assert 0 < prompts.least_tokens(CHAT, body) <= prompts.read_now(CHAT, body).tokens, name
    for text in vectors.TEXTS:
        assert 0 < prompts.least_tokens(GENERATE, {"text": text}) <= prompts.read_now(GENERATE, {"text": text}).tokens
    assert prompts.least_tokens(GENERATE, {"text": "x" * 1_000_000}) > 10_000
    assert prompts.least_tokens(GENERATE, {"text": ["a", "b"]}) == 0


def test_long_prompts_are_read_in_threads_and_not_too_many_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = Prompts(str(model), vectors.PAGE_SIZE, threads=1, max_waiting=2)
    entered, go_on = threading.Event(), threading.Event()
    read_now = prompts.read_now

    def slow(path: str, body: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert go_on.wait(60)
        return read_now(path, body)

    monkeypatch.setattr(prompts, "read_now", slow)

    async def scenario() -> None:
        waiting = [asyncio.create_task(prompts.read(GENERATE, body)) for body in ({"text": "a"}, {"input_ids": [1] * 20_000})]
        while not entered.is_set():
            await asyncio.sleep(0.01)
        with pytest.raises(PromptError, match="being read already"):
            await prompts.read(GENERATE, {"text": "b"})
        short = INLINE_PAGES * vectors.PAGE_SIZE
        assert (await prompts.read(GENERATE, {"input_ids": [1] * short})).tokens == short, "those go past"
        go_on.set()
        assert [prompt.tokens for prompt in await asyncio.gather(*waiting)] == [2, 20_000]
        assert (await prompts.read(GENERATE, {"text": "b"})).tokens == 2

    asyncio.run(scenario())
    prompts.close()


def test_what_it_cannot_work_with_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--page-size"):
        Prompts(None, 0)
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        Prompts(str(tmp_path / "nowhere"), 16)


def test_a_model_whose_chats_sglang_encodes_itself_is_known(tmp_path: Path, model: Path) -> None:
    assert own_encoder(str(model)) == ""
    (tmp_path / "config.json").write_text('{"architectures": ["DeepseekV41ForCausalLM"]}')
    assert own_encoder(str(tmp_path)) == "DeepseekV41ForCausalLM"


def test_a_chat_without_a_template_is_refused() -> None:
    pytest.importorskip("transformers")
    chat = Chat(vectors.make_tokenizer(""))
    with pytest.raises(ChatError, match="no chat template"):
        chat.tokens(vectors.CHATS["plain"])
