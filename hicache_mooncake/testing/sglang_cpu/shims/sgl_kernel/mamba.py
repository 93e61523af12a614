"""Gated delta rule and its short convolution in plain torch, for hybrid models on a CPU without AMX.

The same functions, arguments and in-place updates of state as the kernels that SGLang calls by these names. One token after the
other: a few hundred tokens a second, enough for a tiny model.
"""

from itertools import pairwise

import torch
from torch.nn.functional import conv1d, sigmoid, silu, softplus

CHUNK_TOKENS = 64
_library = torch.library.Library("sgl_kernel", "FRAGMENT")  # the operators live as long as this object


def causal_conv1d_fn_cpu(x, weight, bias, activation, conv_states, has_initial_state, cache_indices, query_start_loc, **_):
    """`x`: (channels, tokens of all sequences). The last width - 1 inputs of each sequence become its state."""
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    for i, (begin, end) in enumerate(pairwise(starts)):
        slot = int(cache_indices[i])
        before = conv_states[slot] if bool(has_initial_state[i]) else torch.zeros_like(conv_states[slot])
        inputs = torch.cat((before, x[:, begin:end]), dim=1)
        out[:, begin:end] = _convolve(inputs, weight, bias, activation)
        conv_states[slot] = inputs[:, -conv_states.shape[-1] :]
    return out


def causal_conv1d_update_cpu(x, conv_states, weight, bias, activation, conv_state_indices, **_):
    """`x`: (sequences, channels), one token each."""
    slots = conv_state_indices.long()
    inputs = torch.cat((conv_states[slots], x.unsqueeze(-1)), dim=-1)
    conv_states[slots] = inputs[..., 1:]
    return _convolve(inputs, weight, bias, activation).squeeze(-1)


def _convolve(inputs, weight, bias, activation):
    out = conv1d(inputs, weight.unsqueeze(1), bias, groups=weight.shape[0])
    return silu(out) if activation in ("silu", "swish") else out


def chunk_gated_delta_rule_cpu(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, **_):
    """Returns the outputs, None, and the states at the begin of every 64 tokens of every sequence. (1, tokens, heads, ...)."""
    q, k = _normalized(q, v), _normalized(k, v)
    out, chunks = torch.empty_like(v), []
    starts = cu_seqlens.tolist()
    for i, (begin, end) in enumerate(pairwise(starts)):
        slot = int(initial_state_indices[i])
        state = initial_state[slot].float()
        for t in range(begin, end):
            if (t - begin) % CHUNK_TOKENS == 0:
                chunks.append(state)
            state, out[0, t] = _step(state, q[0, t], k[0, t], v[0, t], g[0, t], beta[0, t])
        initial_state[slot] = state
    return out, None, torch.stack(chunks).unsqueeze(0) if chunks else None


def _normalized(x, v):
    """Unit length, and one head for each of `v`."""
    x = x.float()
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x.repeat_interleave(v.shape[2] // x.shape[2], dim=2)


def _step(state, q, k, v, g, beta):
    """One token; `state`: (heads, V, K)."""
    state = state * g.exp()[:, None, None]
    delta = (v - torch.einsum("hvk,hk->hv", state, k)) * beta[:, None]
    state = state + delta[:, :, None] * k[:, None, :]
    return state, torch.einsum("hvk,hk->hv", state, q) * q.shape[-1] ** -0.5


def _gating(A_log, a, b, dt_bias):
    g = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return g.unsqueeze(0), sigmoid(b.float()).unsqueeze(0)


def _decode(A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices):
    """(1, sequences, heads, ...): one token each."""
    q, k = _normalized(q, v), _normalized(k, v)
    g, beta = _gating(A_log, a, b, dt_bias)
    out = torch.empty_like(v)
    for i, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state_source[slot].float()
        initial_state_source[slot], out[0, i] = _step(state, q[0, i], k[0, i], v[0, i], g[0, i], beta[0, i])
    return out


_library.define("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)")
_library.impl("fused_gdn_gating_cpu", _gating, "CPU")
_library.define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
    "Tensor b, Tensor(x!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, bool use_qk_l2norm_in_kernel, "
    "float softplus_beta, float softplus_threshold) -> Tensor"
)
_library.impl("fused_sigmoid_gating_delta_rule_update_cpu", lambda *args: _decode(*args[:9]), "CPU")
