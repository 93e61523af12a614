"""A chat that is encoded piece by piece has the tokens of the whole, and its next turn costs only what is new."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hicache_master.router.segments import Segments

from tests.prompt_vectors import TEMPLATES, make_tokenizer

pytest.importorskip("transformers")

WORDS = [
    "the",
    " quick",
    "fox",
    "\n",
    "  ",
    "<s>",
    "</s>",
    "<",
    "s>",
    "<pad>",
    "狐",
    "ünï",
    " ",
    "'s",
    "1234",
    "<s",
    "pages.",
    "\t\n",
]


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer(TEMPLATES["strings"])


def plainly(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_the_tokens_are_those_of_the_whole_text(tokenizer: Any) -> None:
    segments, rng = Segments.of(tokenizer), random.Random(1)
    assert segments is not None
    for _ in range(300):
        text = "".join(rng.choices(WORDS, k=rng.randrange(120)))
        for _ in range(2):  # anew, and from memory
            assert segments.encode(text) == plainly(tokenizer, text), text


def test_the_next_turn_encodes_only_what_is_new(tokenizer: Any) -> None:
    segments = Segments.of(tokenizer)
    assert segments is not None
    first = "".join(f"<s>user: message {number} with some more words in it, about a page</s>" for number in range(50))
    segments.encode(first)
    before = segments.encoded_chars
    more = "<s>user: and one more message that nobody has seen before</s>"
    assert segments.encode(first + more) == plainly(tokenizer, first + more)
    assert segments.encoded_chars - before < len(more)


def test_what_is_remembered_is_bounded(tokenizer: Any) -> None:
    segments = Segments.of(tokenizer, max_chars=4_000)
    assert segments is not None
    for number in range(200):
        segments.encode(f"<s>a piece of a text of which there are many, and this is number {number}</s>")
        assert segments._chars == sum(map(len, segments._known)) <= 4_000
    segments.encode("x" * 10_000)
    assert max(map(len, segments._known)) < 1_000, "one long piece does not drive out all others"


def test_a_tokenizer_that_minds_where_a_piece_is_is_left_alone(tokenizer: Any) -> None:
    from tokenizers import AddedToken, pre_tokenizers

    assert Segments.of(object()) is None
    tokenizer.add_tokens([AddedToken("<tool>", lstrip=True)])
    assert Segments.of(tokenizer) is None
    other = make_tokenizer(TEMPLATES["strings"])
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert Segments.of(other) is None
