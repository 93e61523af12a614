"""A shared KV-cache pool for SGLang HiCache. See docs/concepts.md for the parts and why they are cut this way."""

__version__ = "0.1.0"
