"""Benchmarks: each row prints what ran, the ceiling, and the ratio, from interleaved rounds of one run."""
