"""The three forms in which a fake engine (`fake_engine`) reads requests and answers them, as SGLang has them."""

from __future__ import annotations

import hashlib
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Vocabulary = Sequence[tuple[int, str]]
"""Tokens that answers are made of, each with its text."""
LETTERS: Vocabulary = [(byte, chr(byte)) for byte in b"abcdefghijklmnopqrstuvwxyz"]
"""Of an engine without a tokenizer: their text, tokenized again, is the same tokens."""
Body = Mapping[str, Any]
FinishReason = Literal["length", "abort"]


class BadRequest(Exception):
    """What the engine answers with 400."""


@dataclass(slots=True)
class Job:
    """A request on its way through an engine."""

    rid: str
    model: str
    tokens: Sequence[int]
    wanted: int
    """Tokens that the answer shall have."""
    usage: bool
    """Whether a stream ends with one."""
    cache_report: bool
    answer: Sequence[tuple[int, str]] = ()
    done: int = 0
    cached: int = 0
    finish: FinishReason = "length"
    created: int = field(default_factory=lambda: int(time.time()))

    def text(self, start: int = 0) -> str:
        text = "".join(piece for _, piece in self.answer[start : self.done])
        return text if start else text.lstrip()

    def ids(self) -> list[int]:
        return [token for token, _ in self.answer[: self.done]]


def answer_of(tokens: Sequence[int], count: int, vocabulary: Vocabulary) -> list[tuple[int, str]]:
    """What is answered to a prompt: always the same, and different for different prompts."""
    digest = hashlib.sha256(array("I", tokens).tobytes()).digest()
    chosen = random.Random(digest)
    return chosen.choices(vocabulary, k=count)


def bytes_as_tokens(text: str) -> list[int]:
    """The tokenizer of an engine without one: a token a byte."""
    return list(text.encode())


def chat_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The chat template of an engine without one."""
    return "".join(f"<|{each.get('role')}|>{_content(each.get('content'))}\n" for each in messages) + "<|assistant|>"


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content) if isinstance(content, list) else ""


Tokenize = Callable[[str], Sequence[int]]
ChatTokens = Callable[[Sequence[Mapping[str, Any]]], Sequence[int]]


class Form:
    """One path's way of asking and answering."""

    path: str

    def prompt(self, body: Body, tokenize: Tokenize, chat: ChatTokens) -> Sequence[int]:
        """Its tokens. Raises `BadRequest`."""
        raise NotImplementedError

    def wanted(self, body: Body) -> int:
        return int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)

    def wants_usage(self, body: Body) -> bool:
        return bool((body.get("stream_options") or {}).get("include_usage"))

    def begin(self, job: Job) -> bytes:
        """What a stream begins with, before the first token."""
        return b""

    def piece(self, job: Job, start: int) -> bytes:
        """The tokens from `start` to `job.done`, as the next event of a stream."""
        raise NotImplementedError

    def end(self, job: Job) -> bytes:
        return b"data: [DONE]\n\n"

    def whole(self, job: Job) -> dict[str, Any]:
        raise NotImplementedError

    def error(self, message: str, code: int) -> dict[str, Any]:
        return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": code}


class Generate(Form):
    path = "/generate"

    def prompt(self, body: Body, tokenize: Tokenize, chat: ChatTokens) -> Sequence[int]:
        ids, text = body.get("input_ids"), body.get("text")
        if isinstance(text, str):
            return tokenize(text)
        if isinstance(ids, list) and ids and isinstance(ids[0], int):
            return ids
        raise BadRequest("Either text or input_ids of one prompt should be provided.")

    def wanted(self, body: Body) -> int:
        return int((body.get("sampling_params") or {}).get("max_new_tokens") or 16)

    def piece(self, job: Job, start: int) -> bytes:
        return _event(self.whole(job))

    def whole(self, job: Job) -> dict[str, Any]:
        ended = job.done >= job.wanted or job.finish == "abort"
        return {
            "text": job.text(),
            "output_ids": job.ids(),
            "meta_info": {
                "id": job.rid,
                "finish_reason": _finish(job) if ended else None,
                "prompt_tokens": len(job.tokens),
                "weight_version": "default",
                "total_retractions": 0,
                "reasoning_tokens": 0,
                "completion_tokens": job.done,
                "cached_tokens": job.cached,
                "cached_tokens_details": {"device": job.cached, "host": 0},
                "dp_rank": None,
                "e2e_latency": time.time() - job.created,
            },
        }

    def end(self, job: Job) -> bytes:
        last = _event(self.whole(job)) if job.finish == "abort" else b""
        return last + b"data: [DONE]\n\n"

    def error(self, message: str, code: int) -> dict[str, Any]:
        return {"error": {"message": message}}


class Completions(Form):
    path = "/v1/completions"

    def prompt(self, body: Body, tokenize: Tokenize, chat: ChatTokens) -> Sequence[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return tokenize(prompt)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return prompt
        raise BadRequest("Prompt cannot be empty, and there must be one.")

    def piece(self, job: Job, start: int) -> bytes:
        return _event(self._chunk(job, [{"index": 0, "text": job.text(start), "logprobs": None, "finish_reason": None}]))

    def end(self, job: Job) -> bytes:
        last = {"index": 0, "text": "", "logprobs": None, "finish_reason": job.finish, "matched_stop": None}
        events = _event(self._chunk(job, [last]))
        if job.usage:
            events += _event(self._chunk(job, [], _usage(job)))
        return events + b"data: [DONE]\n\n"

    def whole(self, job: Job) -> dict[str, Any]:
        choice = {"index": 0, "text": job.text(), "logprobs": None, "finish_reason": job.finish, "matched_stop": None}
        return self._chunk(job, [choice], _usage(job)) | {"metadata": {"weight_version": "default"}}

    def _chunk(self, job: Job, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        made = {"id": job.rid, "object": "text_completion", "created": job.created, "model": job.model, "choices": choices}
        return made | {"usage": usage}


class Chat(Form):
    path = "/v1/chat/completions"

    def prompt(self, body: Body, tokenize: Tokenize, chat: ChatTokens) -> Sequence[int]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("Messages cannot be empty.")
        return chat(messages)

    def begin(self, job: Job) -> bytes:
        return self._delta(job, {"role": "assistant", "content": ""}, None)

    def piece(self, job: Job, start: int) -> bytes:
        return self._delta(job, {"role": None, "content": job.text(start)}, None)

    def end(self, job: Job) -> bytes:
        events = self._delta(job, {"role": None, "content": None}, job.finish)
        if job.usage:
            events += _event(self._named(job, "chat.completion.chunk") | {"choices": [], "usage": _usage(job)})
        return events + b"data: [DONE]\n\n"

    def whole(self, job: Job) -> dict[str, Any]:
        message = {"role": "assistant", "content": job.text(), "reasoning_content": None, "tool_calls": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": job.finish, "matched_stop": None}
        return self._named(job, "chat.completion") | {"choices": [choice], "usage": _usage(job), "metadata": {}}

    def _delta(self, job: Job, delta: dict[str, Any], finish: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "matched_stop": None}
        return _event(self._named(job, "chat.completion.chunk") | {"choices": [choice], "usage": None})

    def _named(self, job: Job, kind: str) -> dict[str, Any]:
        return {"id": job.rid, "object": kind, "created": job.created, "model": job.model}


FORMS: tuple[Form, ...] = (Generate(), Completions(), Chat())


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _finish(job: Job) -> dict[str, Any]:
    if job.finish == "abort":
        return {"type": "abort", "message": "Aborted by AbortReq.", "status_code": None, "err_type": None}
    return {"type": "length", "length": job.done}


def _usage(job: Job) -> dict[str, Any]:
    return {
        "prompt_tokens": len(job.tokens),
        "total_tokens": len(job.tokens) + job.done,
        "completion_tokens": job.done,
        "prompt_tokens_details": {"cached_tokens": job.cached} if job.cache_report else None,
        "reasoning_tokens": 0,
    }
