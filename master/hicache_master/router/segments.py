"""Encodes a chat piece by piece, between its special tokens, and remembers the pieces: of a next turn only what is new costs.

A fast tokenizer of Hugging Face first cuts a text at added tokens and treats each piece by itself, so the tokens are those of
the whole. Where that is not certain, for tokenizers of another kind, nothing is cut.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from typing import Any

MAX_CHARS = 16 << 20
"""Of all pieces that are remembered, about 100 MiB with their tokens."""
LEAST_CHARS = 32
"""Shorter ones are encoded sooner than they are found."""
_PIECEWISE = frozenset(
    ("ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts")
)
"""Pre-tokenizers that do not care where in a text a piece was."""
_NEUTRAL = frozenset(("ByteLevel", "BertProcessing", "RobertaProcessing"))
"""Post-processors that leave the tokens alone where no special tokens are to be added."""


class Segments:
    """`encode` is `tokenizer.encode` without added special tokens. Bounded and thread-safe."""

    def __init__(self, backend: Any, pattern: re.Pattern[str], ids: dict[str, int], max_chars: int = MAX_CHARS) -> None:
        self._backend, self._pattern, self._ids = backend, pattern, ids
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._chars = 0
        self.encoded_chars = 0
        """That were not remembered."""

    @classmethod
    def of(cls, tokenizer: Any, max_chars: int = MAX_CHARS) -> Segments | None:
        """None for a tokenizer that is not known to work piece by piece."""
        from transformers import PreTrainedTokenizerBase

        if getattr(type(tokenizer), "encode", None) is not PreTrainedTokenizerBase.encode or not getattr(
            tokenizer, "is_fast", False
        ):
            return None
        backend = tokenizer.backend_tokenizer
        if backend.truncation is not None or backend.padding is not None or getattr(tokenizer, "split_special_tokens", False):
            return None
        parts = json.loads(backend.to_str())
        added = backend.get_added_tokens_decoder()
        if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
            return None
        ids = {token.content: number for number, token in added.items() if token.content and not token.normalized}
        if not ids or not _piecewise(parts.get("pre_tokenizer")) or not _neutral(parts.get("post_processor")):
            return None
        return cls(backend, re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True)))), ids, max_chars)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        start = 0
        for match in self._pattern.finditer(text):
            self._add(tokens, text[start : match.start()])
            tokens.append(self._ids[match.group()])
            start = match.end()
        self._add(tokens, text[start:])
        return tokens

    def _add(self, tokens: list[int], piece: str) -> None:
        if not piece:
            return
        if len(piece) < LEAST_CHARS:
            tokens.extend(self._backend.encode(piece, add_special_tokens=False).ids)
            return
        with self._lock:
            known = self._known.get(piece)
            if known is not None:
                self._known.move_to_end(piece)
        if known is None:
            known = array("I", self._backend.encode(piece, add_special_tokens=False).ids)
            self._keep(piece, known)
        tokens.extend(known)

    def _keep(self, piece: str, tokens: array[int]) -> None:
        with self._lock:
            self.encoded_chars += len(piece)
            if piece in self._known or len(piece) > self._max_chars // 4:
                return
            self._known[piece] = tokens
            self._chars += len(piece)
            while self._chars > self._max_chars:
                self._chars -= len(self._known.popitem(last=False)[0])


def _piecewise(part: Any) -> bool:
    if part is None:
        return True
    if part.get("type") == "Sequence":
        return all(map(_piecewise, part.get("pretokenizers", [])))
    return part.get("type") in _PIECEWISE


def _neutral(part: Any) -> bool:
    if part is None:
        return True
    if part.get("type") == "Sequence":
        return all(map(_neutral, part.get("processors", [])))
    if part.get("type") == "TemplateProcessing":
        return sum("Sequence" in item for item in part.get("single", [])) == 1
    return part.get("type") in _NEUTRAL
