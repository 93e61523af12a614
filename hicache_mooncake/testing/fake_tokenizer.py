"""A tokenizer for fake engines and for what stands before them: made on the spot, or read as transformers saves it.

It needs the `tokenizers` package, and jinja2 for chats, but neither torch nor transformers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
_WORDS = 2000


def words(seed: int, count: int) -> str:
    """Text that only its seed decides, about a token a word."""
    chosen = random.Random(seed)
    return " ".join(chosen.choices(_VOCABULARY, k=count))


def _vocabulary() -> list[str]:
    chosen = random.Random(1)
    syllables = [a + b for a in "bcdfghjklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "or")]
    return sorted({"".join(chosen.choices(syllables, k=chosen.choice((1, 2, 2, 3)))) for _ in range(_WORDS)})


_VOCABULARY = _vocabulary()


def write_tokenizer(folder: Path) -> Path:
    """A BPE of 4,096 tokens with a chat template. One that is there already is left alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if (folder / "tokenizer.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=4096,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([words(seed, 200) for seed in range(50)], trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHAT_TEMPLATE}))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class FolderTokenizer:
    """Tokens of texts and chats, by the files in a folder."""

    def __init__(self, folder: Path) -> None:
        import jinja2
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = folder / "chat_template.jinja"
        if template.exists():
            source = template.read_text()
        else:
            source = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        self._template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)

        self.words = sorted(
            (token, " " + name[1:])
            for name, token in self._tokenizer.get_vocab().items()
            if name[0] == "\u0120" and name[1:].isascii() and name[1:].isalpha()
        )
        """Tokens that are a word with the space before it: in a text of them each is one again."""

    def text(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text = self._template.render(messages=messages, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
