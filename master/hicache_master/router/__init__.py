"""The shell around the conductor: an HTTP router, and what it knows of engines and pool."""
