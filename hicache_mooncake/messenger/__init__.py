"""What moves a request's KV from a prefill engine to a decode engine: the surface of `mooncake.engine` that SGLang uses."""
