"""`python -m hicache_mooncake.cli` is `hicache-mooncake`."""

from hicache_mooncake.cli import main

main()
