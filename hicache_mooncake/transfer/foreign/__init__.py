"""Other projects' transfer engines as transports, for operators who have one that is proven."""
