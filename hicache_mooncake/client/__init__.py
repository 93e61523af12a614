"""What runs in and beside an engine rank: the thin client, its movers, and the embedded node's starter."""
