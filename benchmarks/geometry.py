"""What a page of 64 tokens is, for a rank of some models: how many bytes, in which parts.

    K or V of attention       layers x KV heads of the rank x head dimension x bytes of the dtype, a token
    latent attention (MLA)    layers x (rank of the latent + rotary dimension) x bytes, a token, K and V in one, on every rank
    convolution state         layers x channels of the rank x (kernel - 1) x bytes, once for a prefix
    recurrent state           layers x value heads of the rank x key dimension x value dimension x bytes, once for a prefix

A rank has its share of the KV heads, and at least one. Dimensions are those of the models' published configurations, dtypes the
defaults: bf16, and fp32 for recurrent states. `python -m benchmarks.geometry` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

PAGE_TOKENS = 64
BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Part:
    """One of a rank's pools. `runs`: bytes of what is contiguous in a page in SGLang's page_first layout. `last`: only the last
    so many pages of a prefix are kept; 0 for all."""

    name: str
    runs: tuple[int, ...]
    last: int = 0

    @property
    def size(self) -> int:
        return sum(self.runs)

    def pages(self, prefix: int) -> int:
        """Of a prefix of so many."""
        return min(prefix, self.last or prefix)


@dataclass(frozen=True)
class Geometry:
    title: str
    parts: tuple[Part, ...]

    def size(self, prefix: int) -> int:
        return sum(part.size * part.pages(prefix) for part in self.parts)


def of_rank(heads: int, ranks: int) -> int:
    """KV heads of one of so many ranks; where there are more ranks than heads, several have the same one."""
    if heads % ranks and ranks % heads:
        raise ValueError(f"{heads} heads cannot be cut for {ranks} ranks")
    return max(1, heads // ranks)


def attention(name: str, layers: int, heads: int, dim: int, ranks: int = 1, item: int = BF16, last: int = 0) -> Part:
    half = PAGE_TOKENS * layers * of_rank(heads, ranks) * dim * item
    return Part(name, (half, half), last)


def latent(layers: int, rank: int, rotary: int, item: int = BF16) -> Part:
    return Part("latent", (PAGE_TOKENS * layers * (rank + rotary) * item,))


def gated_delta(layers: int, key_heads: int, value_heads: int, dim: int, kernel: int, ranks: int) -> Part:
    """The state of gated delta rule layers, whose convolution runs over queries, keys and values."""
    channels = (2 * key_heads + value_heads) * dim // ranks
    convolution = layers * channels * (kernel - 1) * BF16
    recurrent = layers * value_heads // ranks * dim * dim * FP32
    return Part("state", (convolution, recurrent), last=1)


PRESETS = {
    "llama-3-70b": Geometry("Llama-3-70B, TP8: 80 layers, 8 KV heads of 128", (attention("kv", 80, 8, 128, ranks=8),)),
    "qwen3-32b": Geometry("Qwen3-32B, TP4: 64 layers, 8 KV heads of 128", (attention("kv", 64, 8, 128, ranks=4),)),
    "deepseek-v3": Geometry("DeepSeek-V3, any TP: 61 layers, latent of 512 + 64", (latent(61, 512, 64),)),
    "gpt-oss-120b": Geometry(
        "GPT-OSS-120b, TP1: 18 full layers and 18 with a window of 128 tokens, 8 KV heads of 64",
        (attention("kv", 18, 8, 64), attention("window", 18, 8, 64, last=128 // PAGE_TOKENS)),
    ),
    "qwen3-next": Geometry(
        "Qwen3-Next-80B-A3B, TP4: 12 full layers, 2 KV heads of 256; 36 gated delta layers, 16 key and 32 value heads of 128",
        (attention("kv", 12, 2, 256, ranks=4), gated_delta(36, 16, 32, 128, kernel=4, ranks=4)),
    ),
}


def main() -> None:
    table = Table(title=f"a page of {PAGE_TOKENS} tokens of one rank")
    for column in ("model", "part", "bytes", "runs", "of a prefix of 128 pages"):
        table.add_column(column, justify="left" if column in ("model", "part") else "right")
    for geometry in PRESETS.values():
        for part in geometry.parts:
            runs = " + ".join(f"{run:,}" for run in part.runs)
            table.add_row(geometry.title, part.name, f"{part.size:,}", runs, f"{part.pages(128)} pages")
    Console(width=max(160, Console().width)).print(table)


if __name__ == "__main__":
    main()
