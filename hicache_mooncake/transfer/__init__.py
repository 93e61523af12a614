"""Moving page bytes: shared memory, engine memory, TCP."""
