"""The store node: segment, allocator, index, service."""
