"""The metadata master: soft-state directory, membership and lookups. Nodes own the data; nothing here is worth saving."""
