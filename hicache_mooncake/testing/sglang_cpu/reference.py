"""What a tiny model answers, computed by transformers: neither SGLang nor any cache between two requests has part in it.

As a module: `python -m hicache_mooncake.testing.sglang_cpu.reference MODEL`, a JSON job on stdin. `reference_answers` runs it
as a child process with the environment that transformers needs beside a CPU torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hicache_mooncake.testing.sglang_cpu.servers import ServerError, cpu_environment

TokenIds = tuple[int, ...]
Turn = tuple[TokenIds, TokenIds]
"""A whole prompt, history included, and its answer."""


def reference_answers(
    model: Path, conversations: Sequence[Sequence[TokenIds]], *, max_new_tokens: int = 24, timeout_s: float = 300.0
) -> list[list[Turn]]:
    """Greedy answers in float32, exactly `max_new_tokens` tokens each (end-of-sequence is ignored).

    A conversation is what the user adds in each turn; a turn's prompt is all that was said before, answers included, and this.
    Every prompt is computed from its first token. Raises `ServerError` with the child's output if that fails.
    """
    command = [sys.executable, "-m", "hicache_mooncake.testing.sglang_cpu.reference", str(model)]
    job = json.dumps({"conversations": conversations, "max_new_tokens": max_new_tokens})
    done = subprocess.run(
        command, input=job, env=cpu_environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode != 0:
        raise ServerError(f"transformers did not answer for {model} (exit code {done.returncode}):\n{done.stderr[-2000:]}")
    talks = json.loads(done.stdout)
    return [[(tuple(prompt), tuple(answer)) for prompt, answer in turns] for turns in talks]


def _converse(model: str, conversations: list[list[list[int]]], max_new_tokens: int) -> list[list[tuple[list[int], list[int]]]]:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    talks = []
    for added in conversations:
        turns: list[tuple[list[int], list[int]]] = []
        for text in added:
            prompt = [*turns[-1][0], *turns[-1][1], *text] if turns else text
            answer: list[int] = []
            fed, past = prompt, None
            with torch.inference_mode():
                while len(answer) < max_new_tokens:
                    out = network(input_ids=torch.tensor([fed]), past_key_values=past, use_cache=True)
                    answer.append(int(out.logits[0, -1].argmax()))
                    fed, past = answer[-1:], out.past_key_values
            turns.append((prompt, answer))
        talks.append(turns)
    return talks


if __name__ == "__main__":
    work = json.load(sys.stdin)
    json.dump(_converse(sys.argv[1], work["conversations"], work["max_new_tokens"]), sys.stdout)
