"""What moves a request's KV from a prefill engine to a decode engine: layer by layer (`stream`), and the surface of
`mooncake.engine` that SGLang uses."""
