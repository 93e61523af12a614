"""Prompts whose tokens, page hashes and event keys are stored in tests/data/prompts.json, as SGLang made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parent / "data" / "prompts.json"
PAGE_SIZE = 4
ADAPTER = ("sql", "/adapters/sql")

TEMPLATES = {
    "strings": (
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}"
        "{% if m.reasoning_content is defined %}({{ m.reasoning_content }}){% endif %}"
        "{% for call in m.tool_calls or [] %}[{{ call | tojson }}]{% endfor %}\n{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% if enable_thinking is defined %}thinking={{ enable_thinking }}{% endif %}"
        "{% if reasoning_effort is defined %}effort={{ reasoning_effort }}{% endif %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "parts": (
        "{% for message in messages %}<s>{{ message.role }}: "
        "{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message['content'] %}{{ part.text }}|{% endfor %}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "functions": (  # one that takes tools without OpenAI's wrapper, and fails otherwise
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% for tool in tools or [] %}{% if tool.name is not defined %}{{ raise_exception('wrapped') }}{% endif %}"
        "{{ tool.name }}{% endfor %}assistant:"
    ),
}

_TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}},
    {"type": "function", "function": {"parameters": None, "strict": True, "description": "Moves", "name": "move"}},
]
_CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}]
_HELLO: dict[str, Any] = {"role": "user", "content": "the quick brown fox jumps, ünïcödé 狐"}
_SYSTEM: dict[str, Any] = {"role": "system", "content": "stored pages"}
_PARTS: list[dict[str, Any]] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [_SYSTEM, _HELLO]},
    "the name of a user is nobody's": {"messages": [{**_HELLO, "name": "fox"}]},
    "roles in capitals": {"messages": [{**_SYSTEM, "role": "SYSTEM"}, _HELLO]},
    "parts": {"messages": [{**_SYSTEM, "content": _PARTS}, {"role": "user", "content": _PARTS}]},
    "no content": {"messages": [_HELLO, {"role": "assistant", "content": None, "reasoning_content": "hm"}, _HELLO]},
    "an answer is continued": {"messages": [_HELLO, {"role": "assistant", "content": "It is"}], "continue_final_message": True},
    "an answer is last": {"messages": [_HELLO, {"role": "assistant", "content": "It is"}]},
    "tools": {"messages": [_HELLO], "tools": _TOOLS},
    "tools that are not to be used": {"messages": [_HELLO], "tools": _TOOLS, "tool_choice": "none"},
    "one tool": {"messages": [_HELLO], "tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "move"}}},
    "calls and their results": {
        "messages": [
            _HELLO,
            {"role": "assistant", "tool_calls": _CALLS},
            {"role": "tool", "tool_call_id": "1", "content": _PARTS},
        ],
        "tools": _TOOLS,
    },
    "no thinking": {"messages": [_HELLO], "chat_template_kwargs": {"enable_thinking": False}},
    "effort": {"messages": [_HELLO], "reasoning_effort": "low"},
    "effort of the template": {
        "messages": [_HELLO],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"reasoning_effort": "high"},
    },
    "no effort": {"messages": [_HELLO], "reasoning_effort": "none"},
    "reasoning": {"messages": [_HELLO], "reasoning": {"enabled": " Yes "}},
    "tokens": {"messages": [_HELLO], "input_ids": list(range(3, 12))},
}

TEXTS = ["the quick brown fox jumps over the lazy dog", "<s>key value </s>", "狐 ünïcödé"]
NAMESPACES: list[dict[str, Any]] = [
    {},
    {"cache_salt": "tenant-1"},
    {"extra_key": "a"},
    {"extra_key": "a", "cache_salt": "ünï"},
    {"lora_path": ADAPTER[0]},
    {"lora_path": ADAPTER[0], "extra_key": "a", "cache_salt": "b"},
    {"extra_key": "", "cache_salt": ""},
]
TOKENS: list[list[int]] = [[], [1, 2, 3], [1, 2, 3, 4], list(range(100, 109)), [0, 2**32 - 1, 70_000, 151_643] * 3]


def make_tokenizer(template: str) -> Any:
    """A byte-level tokenizer that puts <s> before a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE(unk_token=None))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(["the quick brown fox jumps over the lazy dog. stored pages are fetched. "] * 20, trainer)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(VECTORS.read_text())
    return found
