"""Makes a tiny random Llama with a byte-level tokenizer and a chat template: a checkpoint that SGLang serves on one CPU core.

As a module: `python -m hicache_mooncake.testing.sglang_cpu.tiny_model DIRECTORY`. torch and transformers are needed, and with a
CPU torch the folder `shims` on PYTHONPATH (transformers imports torchvision): `make_tiny_model` sees to that by working in a
child process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from hicache_mooncake.testing.sglang_cpu.servers import ServerError, cpu_environment

_CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_CORPUS = "the quick brown fox jumps over the lazy dog. key value cache pages are stored and fetched. "
SEED = 1234


def make_tiny_model(path: Path | str, *, timeout_s: float = 300.0) -> Path:
    """Write the checkpoint into `path` and return it; a complete one that is already there is left alone.

    4 layers, hidden size 256, 2 KV heads of 64, float32, 14 M parameters, 55 MB; the same weights every time. One token has
    4 KiB of KV, a page of 16 tokens 64 KiB. Raises `ServerError` with the child's output if that fails.
    """
    path = Path(path)
    if (path / "config.json").exists():
        return path
    command = [sys.executable, "-m", "hicache_mooncake.testing.sglang_cpu.tiny_model", str(path)]
    done = subprocess.run(command, env=cpu_environment(), capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise ServerError(f"the tiny model could not be made in {path} (exit code {done.returncode}):\n{done.stderr[-2000:]}")
    return path


def write_checkpoint(path: Path) -> None:
    """Make the model in this process. `path` appears whole or not at all."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        tokenizer = Tokenizer(models.BPE(unk_token=None))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
            vocab_size=384,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator([_CORPUS] * 50, trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
        fast.chat_template = _CHAT_TEMPLATE
        fast.save_pretrained(partial)

        torch.manual_seed(SEED)
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            # As in large models, most of the prefill is MLP. SGLang's attention on CPU goes over the whole prompt even where
            # the KV is cached; with a narrow MLP that would be most of the time, and no cache could save it.
            intermediate_size=4096,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            tie_word_embeddings=False,
            initializer_range=0.3,  # logits far apart: greedy decoding does not hang on the last bit of a sum
        )
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(partial, safe_serialization=True)
        try:
            partial.rename(path)
        except OSError:
            if not (path / "config.json").exists():  # unless somebody else made it meanwhile
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m hicache_mooncake.testing.sglang_cpu.tiny_model DIRECTORY")
    write_checkpoint(Path(sys.argv[1]))
