"""An SGLang plugin that lets MLA and sliding-window models run on SGLang's `torch_native` attention, the only one without AMX.

1. MLA: SGLang computes a prompt without a cached prefix by a path that hands K and V of all heads to the attention backend, not
   through the pool; `torch_native` reads the pool only. So every MLA forward takes the absorbed path, prefix or not.
2. Sliding-window layers have a pool of their own, with slots of its own. SGLang 0.5.23's `torch_native` translates slots where
   it writes but not where it reads, so it would read other tokens' rows.
3. Gated delta rule layers (Qwen3-Next): what SGLang runs as Triton kernels, in torch; the rest is `sgl_kernel.mamba`. SGLang
   keeps states for prefix caching (`extra_buffer`) on accelerators only, though nothing in that needs one.
"""

import torch


class _SlidingWindowSlots:
    """Stands in for `req_to_token_pool` during one layer: `req_to_token` gives slots of the sliding-window pool."""

    def __init__(self, req_to_token, kv_pool):
        self.req_to_token = self
        self._slots = req_to_token
        self._kv_pool = kv_pool

    def __getitem__(self, key):
        return self._kv_pool.translate_loc_from_full_to_swa(self._slots[key]).long()


def _read_translated(forward, self, q, k, v, layer, *args, **kwargs):
    pool = self.token_to_kv_pool
    if not self.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
        return forward(self, q, k, v, layer, *args, **kwargs)
    requests = self.req_to_token_pool
    self.req_to_token_pool = _SlidingWindowSlots(requests.req_to_token, pool)
    try:
        return forward(self, q, k, v, layer, *args, **kwargs)
    finally:
        self.req_to_token_pool = requests


def _always_absorbed(result, *args, **kwargs):
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)


def _norm_gated(self, x, g, residual=None, prenorm=False, residual_in_fp32=False):
    gate = torch.sigmoid(g.float()) if self.activation == "sigmoid" else torch.nn.functional.silu(g.float())
    normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
    return (normal * self.weight.float() * gate).to(x.dtype)


def _gate_sigmoid_mul(hidden_states, gate_weight, shared_output, output, *, do_add):
    gated = (hidden_states @ gate_weight).sigmoid().unsqueeze(-1) * shared_output
    output.copy_(output + gated if do_add else gated)


def _track_states(conv, ssm, slots, mask, destinations, batch_size, layers, conv_strides, *_):
    """Copy the states of the sequences in `mask` to their tracking slots, of one layer or of all."""
    rows = mask[:batch_size].nonzero(as_tuple=True)[0]
    source, destination = slots[rows].long(), destinations[rows].long()
    for states in (conv, ssm):
        if conv_strides[0]:
            states[:, destination] = states[:, source]
        else:
            states[destination] = states[source]


def activate():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return
    torch.Tensor.pin_memory = lambda self, device=None: self
    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}.__init__", _always_absorbed, HookType.AFTER)
    for name in ("forward_extend", "forward_decode"):
        HookRegistry.register(f"{backend}.{name}", _read_translated, HookType.AROUND)
    for target, function in {
        "sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward": _norm_gated,
        "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul": _gate_sigmoid_mul,
        "sglang.kernels.ops.mamba.mamba_state_scatter_triton._launch_track_mamba_states": _track_states,
        "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer": lambda: True,
    }.items():
        HookRegistry.register(target, function, HookType.REPLACE)
