"""What tests and demos of this package, and of code built on it, share: real SGLang on CPUs, patterns, fixtures."""
