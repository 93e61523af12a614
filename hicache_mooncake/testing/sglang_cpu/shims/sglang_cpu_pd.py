"""An SGLang plugin that lets prefill and decode be two servers (PD disaggregation) on `--device cpu`, over `mooncake.engine`.

SGLang's sender for it says that it takes page indices in host memory, and prefill then makes them there by pinned memory and a
CUDA event. When it says no, prefill goes the plain way, as with every other sender. The other use of a CUDA event, for pages
that are sent before the prompt is computed, is off by an environment variable: `servers.PD_ENVIRONMENT`.
"""


def activate():
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False
