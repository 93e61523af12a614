"""Makes tiny random models with a byte-level tokenizer and a chat template: checkpoints that SGLang serves on one CPU core.

One for each way in which a model keeps its cache: `llama` (MHA with grouped heads), `deepseek` (MLA), `mellum` (sliding-window
beside full attention), `qwen3-next` (recurrent state beside full attention).

As a module: `python -m hicache_mooncake.testing.sglang_cpu.tiny_model DIRECTORY [FAMILY [SEED]]`. torch and transformers are
needed, and with a CPU torch the folder `shims` on PYTHONPATH (transformers imports torchvision): `make_tiny_model` sees to that
by working in a child process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args

from hicache_mooncake.testing.sglang_cpu.servers import ServerError, cpu_environment

_CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_CORPUS = "the quick brown fox jumps over the lazy dog. key value cache pages are stored and fetched. "
SEED = 1234

Family = Literal["llama", "deepseek", "mellum", "qwen3-next"]


def make_tiny_model(path: Path | str, family: Family = "llama", *, seed: int = SEED, timeout_s: float = 300.0) -> Path:
    """Write the checkpoint into `path` and return it; a complete one that is already there is left alone.

    4 layers, hidden size 256, float32, at most 14 M parameters; the same weights for the same seed. `llama` has 2 KV heads of
    64 in every layer: 4 KiB of KV a token, 64 KiB a page of 16. Raises `ServerError` with the child's output if that fails.
    """
    path = Path(path)
    if (path / "config.json").exists():
        return path
    command = [sys.executable, "-m", "hicache_mooncake.testing.sglang_cpu.tiny_model", str(path), family, str(seed)]
    done = subprocess.run(command, env=cpu_environment(), capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise ServerError(f"the tiny model could not be made in {path} (exit code {done.returncode}):\n{done.stderr[-2000:]}")
    return path


def write_checkpoint(path: Path, family: Family = "llama", seed: int = SEED) -> None:
    """Make the model in this process. `path` appears whole or not at all."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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

        torch.manual_seed(seed)
        _model(family).to(torch.float32).save_pretrained(partial, safe_serialization=True)
        try:
            partial.rename(path)
        except OSError:
            if not (path / "config.json").exists():  # unless somebody else made it meanwhile
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # logits far apart: greedy decoding does not hang on the last bit of a sum
}
# As in large models, most of a llama's prefill is MLP. SGLang's attention on CPU goes over the whole prompt even where the KV
# is cached; with a narrow MLP that would be most of the time, and no cache could save it.
_LLAMA: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 4096}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
    # SGLang reads them, transformers has no such fields.
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_parameters": {  # the only kind for MLA on SGLang's CPU engine
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_MELLUM: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
    "mlp_layer_types": ["dense"] * 4,
    "num_experts": 4,
}
_QWEN3_NEXT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,  # the same for SGLang
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}


def _model(family: Family) -> Any:
    import transformers

    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_COMMON, **_LLAMA))
    if family == "deepseek":
        return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**_COMMON, **_DEEPSEEK))
    if family == "mellum":
        return transformers.MellumForCausalLM(transformers.MellumConfig(**_COMMON, **_MELLUM))
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**_COMMON, **_QWEN3_NEXT))


if __name__ == "__main__":
    families = get_args(Family)
    if len(sys.argv) not in (2, 3, 4) or sys.argv[2:3] not in ([], *([family] for family in families)):
        sys.exit(f"usage: python -m hicache_mooncake.testing.sglang_cpu.tiny_model DIRECTORY [{'|'.join(families)} [SEED]]")
    write_checkpoint(Path(sys.argv[1]), *sys.argv[2:3], *map(int, sys.argv[3:]))  # type: ignore[arg-type]
