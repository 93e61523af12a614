"""From the body of a request to the pages of its prompt, under the names that the engine gives them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from .chains import PLAIN, CacheNamespace, adapter_id, event_keys, event_seed, page_hashes, storage_seed
from .chat import Chat, ChatError, Tokenizer, load_tokenizer, own_encoder

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
THREADS = 2
MAX_WAITING = 64
"""Prompts that are read, or wait for it, at a time."""
MAX_CHARS = 8_000_000
INLINE_TOKENS, INLINE_PAGES = 16_384, 256
"""Prompts of so many token ids are hashed where they are: it takes about as long as to wake a thread."""
_MEDIA = ("image_data", "video_data", "audio_data")
_NFC_FACTOR = 4
"""A normalizer may make one character out of so many."""


class PromptError(ValueError):
    """This prompt cannot be read here; the text says why. The request may be perfectly good."""


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: int
    keys: tuple[int, ...]
    """Whole pages, as KV events name them."""
    hashes: bytes
    """32 bytes a page: the same pages, as the storage names them. Empty where that cannot be known, which is for adapters that
    `Prompts` was not told of: their keys are this process's own then, and match what was routed, but no event."""
    namespaced: bool
    """It has an adapter, an extra key or a salt."""


class Prompts:
    """Reads prompts, in `threads` threads, at most `max_waiting` at a time. Close it. For one event loop.

    `tokenizer_path`: a folder with the tokenizer (the model's will do); None reads token ids alone. `page_size`: the engines'
    --page-size. `bigrams`: they run EAGLE, whose trees hash pairs of tokens. `dynamo`: "format" in --kv-events-config is
    "dynamo". `adapters`: --lora-paths, name to path. `served_model_name`: to tell adapters in "model:adapter".
    `chat_template`: Jinja source; `template_defaults`: --default-chat-template-kwargs. Raises ValueError with what to do.
    """

    def __init__(
        self,
        tokenizer_path: str | None,
        page_size: int,
        *,
        bigrams: bool = False,
        dynamo: bool = False,
        adapters: Mapping[str, str] | None = None,
        served_model_name: str = "",
        chat_template: str = "",
        template_defaults: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        threads: int = THREADS,
        max_waiting: int = MAX_WAITING,
        max_chars: int = MAX_CHARS,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page size {page_size}: give the engines' --page-size")
        self.page_size = page_size
        self._bigrams = bigrams
        self._dynamo = dynamo
        self._adapters = {name: adapter_id(name, path) for name, path in (adapters or {}).items()}
        self._model = served_model_name
        self._max_chars = max_chars
        self._max_waiting = max_waiting
        self._waiting = 0
        self._tokenizer: Tokenizer | None = None
        self._chat: Chat | None = None
        self._no_chat = "no tokenizer was given"
        self._token_chars = math.inf
        if tokenizer_path is not None:
            self._tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=trust_remote_code)
            self._token_chars = most_chars(self._tokenizer)
            if encoder := own_encoder(tokenizer_path):
                self._no_chat = f"chats of {encoder} have no template"
            else:
                self._chat = Chat(self._tokenizer, template=chat_template, defaults=template_defaults)
        self._threads = ThreadPoolExecutor(threads, "prompts")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, path: str, body: Mapping[str, Any]) -> Prompt:
        """Raises PromptError. The body is read, here or in a thread: do not change it meanwhile."""
        tokens = given_tokens(path, body)
        if tokens is not None and len(tokens) <= min(INLINE_TOKENS, INLINE_PAGES * self.page_size):
            return self.read_now(path, body)
        if self._waiting >= self._max_waiting:
            raise PromptError(f"{self._waiting} prompts are being read already")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self.read_now, path, body)
        finally:
            self._waiting -= 1

    def read_now(self, path: str, body: Mapping[str, Any]) -> Prompt:
        """The same, in the calling thread."""
        namespace, known = self._namespace(path, body)
        tokens = given_tokens(path, body)
        if tokens is None:
            tokens = self._tokenize(path, body)
        try:
            chain = page_hashes(tokens, self.page_size, seed=event_seed(namespace), bigrams=self._bigrams)
            keys = event_keys(chain, namespace, dynamo=self._dynamo)
            if not namespace.plain:
                chain = page_hashes(tokens, self.page_size, seed=storage_seed(namespace), bigrams=self._bigrams)
        except (ValueError, UnicodeEncodeError) as error:
            raise PromptError(str(error)) from error
        return Prompt(len(tokens), keys, chain if known else b"", not namespace.plain)

    def least_tokens(self, path: str, body: Mapping[str, Any]) -> int:
        """The prompt has at least so many tokens, at a glance. 0 for one that is not understood."""
        try:
            tokens = given_tokens(path, body)
            if tokens is not None:
                return len(tokens)
            return math.ceil(sum(map(len, _least_texts(path, body))) / self._token_chars)
        except PromptError:
            return 0

    def _tokenize(self, path: str, body: Mapping[str, Any]) -> Sequence[int]:
        if self._tokenizer is None:
            raise PromptError("no tokenizer was given")
        if sum(map(len, _texts(path, body))) > self._max_chars:
            raise PromptError(f"it is longer than {self._max_chars} characters")
        try:
            if path != CHAT:
                return self._tokenizer.encode(_text(path, body))
            if self._chat is None:
                raise PromptError(self._no_chat)
            return self._chat.tokens(body)
        except (PromptError, ChatError) as error:
            raise PromptError(str(error)) from error
        except Exception as error:  # templates and tokenizers raise what they like
            raise PromptError(f"{type(error).__name__}: {error}") from error

    def _namespace(self, path: str, body: Mapping[str, Any]) -> tuple[CacheNamespace, bool]:
        """And whether the engine's names follow from it."""
        extra_key, salt = _one_text(body, "extra_key"), _one_text(body, "cache_salt")
        adapter = _one_text(body, "lora_path")
        model = body.get("model")
        if path != GENERATE and isinstance(model, str) and model != self._model and ":" in model:
            base = f"{self._model}:"
            name = model[len(base) :] if self._model and model.startswith(base) else model.split(":", 1)[1]
            adapter = name.strip() or adapter
        if adapter is None:
            return (CacheNamespace(extra_key, salt) if extra_key or salt else PLAIN), True
        known = self._adapters.get(adapter)
        return CacheNamespace(extra_key, salt, known or f"unknown adapter {adapter}"), known is not None


def most_chars(tokenizer: Any) -> float:
    """No token stands for more characters of a text. inf where that cannot be said."""
    normalizer = getattr(getattr(tokenizer, "_tokenizer", None), "normalizer", None)
    kind = type(normalizer).__name__
    try:
        longest = max(map(len, tokenizer.get_vocab()))
    except (AttributeError, TypeError, ValueError):
        return math.inf
    if normalizer is None:
        return longest
    return longest * _NFC_FACTOR if kind == "NFC" else math.inf


def given_tokens(path: str, body: Mapping[str, Any]) -> Sequence[int] | None:
    """The prompt's tokens, if the body has them. Raises PromptError for what is no single prompt of tokens or text."""
    if path not in (GENERATE, COMPLETIONS, CHAT):
        raise PromptError(f"{path} has no prompt that is read here")
    if body.get("session_params") is not None or body.get("input_embeds") is not None:
        raise PromptError("its tokens are not in the request")
    if any(body.get(name) for name in _MEDIA):
        raise PromptError("it is not text alone")
    found = body.get("prompt") if path == COMPLETIONS else body.get("input_ids")
    if not isinstance(found, list):
        return None
    if len(found) == 1 and isinstance(found[0], list | str):
        found = found[0]
        return found if isinstance(found, list) else None
    if not found or isinstance(found[0], list | str):
        raise PromptError("it is empty" if not found else "it has several prompts")
    return found


def _text(path: str, body: Mapping[str, Any]) -> str:
    found = body.get("prompt" if path == COMPLETIONS else "text")
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, str):
        raise PromptError("it has several prompts" if isinstance(found, list) else "it has no prompt")
    return found


def _texts(path: str, body: Mapping[str, Any]) -> list[str]:
    """All that may have to be tokenized."""
    if path != CHAT:
        return [_text(path, body)]
    return [text for _, texts in _contents(body) for text in texts]


def _least_texts(path: str, body: Mapping[str, Any]) -> list[str]:
    """What is tokenized for certain: templates may leave out what an assistant said, and white space."""
    if path != CHAT:
        return [_text(path, body)]
    return [text.strip() for role, texts in _contents(body) for text in texts if role in ("user", "system")]


def _contents(body: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise PromptError("it has no messages")
    found = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        found.append((str(message.get("role")) if isinstance(message, dict) else "", [t for t in texts if isinstance(t, str)]))
    return found


def _one_text(body: Mapping[str, Any], name: Literal["extra_key", "cache_salt", "lora_path"]) -> str | None:
    found = body.get(name)
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if found is not None and not isinstance(found, str):
        raise PromptError(f"{name} is no text")
    return found or None
