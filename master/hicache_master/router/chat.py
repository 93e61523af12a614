"""From a chat to the tokens that SGLang's OpenAI server makes of it: the messages as its templates see them, rendered, encoded.

Mirrors sglang/srt/entrypoints/openai/serving_chat.py (0.5.23) for models whose chat template is Jinja's. Where SGLang has an
encoder of its own for a model, `Chat` says so and reads nothing. transformers is imported when a tokenizer is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .segments import Segments

_MEDIA = ("image", "audio", "video", "vision")
_TEXT_PARTS = ("text", "input_text")
_SILENT_PARTS = ("thinking", "reasoning")
"""Parts that SGLang takes and no template sees."""
_MESSAGE_FIELDS = ("role", "content", "tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix")
_OWN_ENCODERS = ("DeepseekV4", "DeepseekV41", "KimiK3", "InklingForConditionalGeneration", "MiniMaxM3")
_FLAGGED_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
"""Their add_bos_token counted before transformers 5, and SGLang sees to it that it still does."""


class ChatError(ValueError):
    """This chat cannot be read here."""


class Tokenizer(Protocol):
    """What is used of a tokenizer of transformers."""

    chat_template: Any
    bos_token_id: int | None

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer that SGLang would serve this model with. Raises ValueError with what to do about it."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            "reading prompts takes the package transformers: install it (pip install 'hicache-mooncake[conductor]'), "
            "or leave the tokenizer out to route by load and by what was routed"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, clean_up_tokenization_spaces=False)
    except Exception as error:
        raise ValueError(
            f"no tokenizer could be loaded from {path}: {error}; give the engines' --tokenizer-path or model"
        ) from error
    _restore(tokenizer, Path(path))
    found: Tokenizer = tokenizer
    return found


def _restore(tokenizer: Any, folder: Path) -> None:
    """What transformers 5 rebuilds in a tokenizer's class, in place of what the files say."""
    backend = getattr(tokenizer, "_tokenizer", None)
    if backend is None or not (folder / "tokenizer.json").is_file():
        return
    from tokenizers import Tokenizer as Raw

    raw = Raw.from_file(str(folder / "tokenizer.json"))
    if raw.pre_tokenizer and backend.pre_tokenizer and type(raw.pre_tokenizer) is not type(backend.pre_tokenizer):
        backend.pre_tokenizer, backend.decoder = raw.pre_tokenizer, raw.decoder
    config = _json(folder / "tokenizer_config.json")
    if str(config.get("tokenizer_class", "")).removesuffix("Fast") not in _FLAGGED_CLASSES:
        return
    bos = config.get("add_bos_token")
    wanted = {"add_bos_token": True if bos is None else bool(bos), "add_eos_token": False}
    if any(getattr(tokenizer, name, None) != value for name, value in wanted.items()):
        for name, value in wanted.items():
            setattr(tokenizer, f"_{name}", value)
        if hasattr(tokenizer, "update_post_processor"):
            tokenizer.update_post_processor()


def own_encoder(path: str) -> str:
    """The model's architecture, if SGLang encodes its chats without a template; else ""."""
    config = _json(Path(path) / "config.json")
    architecture = str((config.get("architectures") or [""])[0])
    return architecture if architecture.startswith(_OWN_ENCODERS) else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Chat:
    """Reads chats with one tokenizer and one template. Thread-safe.

    `template`: Jinja source, in place of the tokenizer's own. `defaults`: SGLang's --default-chat-template-kwargs.
    """

    def __init__(self, tokenizer: Tokenizer, *, template: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        source = template or tokenizer.chat_template
        if isinstance(source, dict):
            source = next(iter(source.values()), None)
        self._template: str = source or ""
        if source:
            tokenizer.chat_template = source
        self._defaults = dict(defaults or {})
        self._parts = takes_parts(self._template)
        self._adds_specials = len(tokenizer.encode("")) > 0
        self._segments = Segments.of(tokenizer)
        self._by_ids = self._loses_by_text()

    def tokens(self, body: Mapping[str, Any]) -> list[int]:
        """Raises ChatError, and whatever the template raises."""
        if not self._template:
            raise ChatError("the model has no chat template: give one, as to SGLang's --chat-template")
        messages = [self._message(message) for message in _list(body, "messages")]
        prefix = ""
        if messages and messages[-1].get("role") == "assistant" and isinstance(messages[-1].get("content"), str):
            last = messages.pop()["content"]
            if body.get("continue_final_message"):
                prefix = last
            else:
                messages.append({"role": "user", "content": last})
        tools = _tools(body)
        options = template_options(body, self._defaults)
        try:
            tokens = self._render(messages, tools, options)
        except Exception:
            if not tools:
                raise
            tokens = self._render(messages, [tool["function"] for tool in tools], options)
        if prefix:
            more = self._tokenizer.encode(prefix)
            tokens += more[1:] if more and more[0] == self._tokenizer.bos_token_id else more
        return tokens

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=self._by_ids, add_generation_prompt=True, tools=tools, return_dict=False, **options
        )
        return list(rendered) if self._by_ids else self._encode(rendered)

    def _encode(self, text: str) -> list[int]:
        if self._segments is not None:
            return self._segments.encode(text)
        return list(self._tokenizer.encode(text, **({"add_special_tokens": False} if self._adds_specials else {})))

    def _loses_by_text(self) -> bool:
        """Has this tokenizer control tokens that are no text?"""
        probe = [{"role": "user", "content": "x"}]
        options = {"add_generation_prompt": True, "return_dict": False}
        try:
            text = self._tokenizer.apply_chat_template(probe, tokenize=False, **options)
            return self._encode(text) != list(self._tokenizer.apply_chat_template(probe, tokenize=True, **options))
        except Exception:
            return False

    def _message(self, given: Any) -> dict[str, Any]:
        """As a template sees it: SGLang's fields in SGLang's order, without those that are not set."""
        if not isinstance(given, dict) or not isinstance(given.get("role"), str):
            raise ChatError("a message is an object with a role")
        role = given["role"] if given["role"] == "user" else given["role"].lower()
        fields = ("role", "content") if role == "user" else _MESSAGE_FIELDS
        message = {name: given[name] for name in fields if given.get(name) is not None}
        message["role"] = role
        message["content"] = self._content(given.get("content"), role)
        if "tool_calls" in message:
            message["tool_calls"] = [_tool_call(call, role) for call in _list(message, "tool_calls")]
        if "tools" in message:
            message["tools"] = [_tool(tool) for tool in _list(message, "tools")]
        return message

    def _content(self, content: Any, role: str) -> Any:
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        texts: list[dict[str, Any]] = []
        others = False
        for part in content if isinstance(content, list) else [content]:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
                texts.append({"type": "text", "text": part["text"]})
            elif kind == "tool_reference":
                others = True
                if self._parts:
                    texts.append({"type": kind, "name": part.get("name")})
            elif kind not in _SILENT_PARTS:
                raise ChatError(f"a part of kind {kind!r} is not text")
        if not self._parts or (role == "tool" and not others):
            return " ".join(part["text"] for part in texts if "text" in part)
        return texts


def takes_parts(template: str) -> bool:
    """Does this template take contents as lists of parts (and not as strings)? As SGLang detects it."""
    if any(word in template for word in _MEDIA):
        return True
    import jinja2

    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        tree = _compile_jinja_template(template).environment.parse(template)
    except Exception:
        return False
    loops = [loop.iter for loop in tree.find_all(jinja2.nodes.For)]
    return any(_is_content(loop, name) for loop in loops for name in ("message", "msg", "m"))


def _is_content(node: Any, name: str) -> bool:
    """Is it `name.content`, `name["content"]`, or that with filters, tests or a slice?"""
    from jinja2 import nodes

    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _is_content(node.node, name)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, name)
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
    elif isinstance(node, nodes.Getattr):
        key = node.attr
    else:
        return False
    return key == "content" and isinstance(node.node, nodes.Name) and node.node.ctx == "load" and node.node.name == name


def template_options(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What the template is given beside messages and tools."""
    given = body.get("chat_template_kwargs")
    options: dict[str, Any] = dict(given) if isinstance(given, dict) else {}
    effort = body.get("reasoning_effort")
    thinking: bool | None = None
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict):
        asked = reasoning.get("effort")
        asked = reasoning.get("reasoning_effort") if asked is None else asked
        effort = effort if asked is None else asked
        enabled = reasoning.get("enabled")
        enabled = reasoning.get("enable") if enabled is None else enabled
        if enabled.strip().lower() in ("1", "true", "yes", "y", "on") if isinstance(enabled, str) else enabled:
            thinking = True
    if effort is not None:
        thinking = effort != "none"
    if thinking is not None:
        options.setdefault("thinking", thinking)
        options.setdefault("enable_thinking", thinking)
    own = options.pop("reasoning_effort", None)
    effort = effort if own is None else own
    for name, value in defaults.items():
        options.setdefault(name, value)
    if effort is None:
        effort = options.get("reasoning_effort")
    return options if effort is None else {"reasoning_effort": effort, **options}


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    given = body.get("tools")
    choice = body.get("tool_choice") or "auto"
    if not given or choice == "none":
        return None
    tools = [_tool(tool) for tool in _list(body, "tools")]
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        tools = [tool for tool in tools if tool["function"]["name"] == name]
    return tools or None


def _tool(given: Any) -> dict[str, Any]:
    """A function keeps the client's order; what the client left out comes behind, except strict and defer_loading."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError("a tool is an object with a function that has a name")
    if function.get("defer_loading") is None and given.get("defer_loading") is not None:
        function = {**function, "defer_loading": given["defer_loading"]}
    fields = ("description", "name", "parameters", "strict", "defer_loading")
    values = {name: function.get(name) for name in fields}
    for name in ("strict", "defer_loading"):
        if values[name] is None:
            del values[name]
    order = [name for name in function if name in values]
    ordered = {name: values[name] for name in order + [name for name in values if name not in order]}
    return {"type": given.get("type", "function"), "function": ordered, "defer_loading": given.get("defer_loading")}


def _tool_call(given: Any, role: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise ChatError("a tool call is an object with a function")
    arguments = function.get("arguments")
    if role == "assistant" and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ChatError("the arguments of a tool call are no JSON") from error
        if not isinstance(arguments, dict):
            raise ChatError("the arguments of a tool call are no JSON object")
    return {
        "id": given.get("id"),
        "index": given.get("index"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _list(body: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = body.get(name)
    if not isinstance(found, list):
        raise ChatError(f"{name} is no list")
    return found
