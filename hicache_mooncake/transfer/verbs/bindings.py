"""Which Python package speaks to RDMA devices: the setting `verbs_binding`."""

from __future__ import annotations

from hicache_mooncake.transfer.verbs.api import Binding, BindingUnavailable
from hicache_mooncake.transfer.verbs.ibverbs_binding import IbverbsBinding
from hicache_mooncake.transfer.verbs.pyverbs_binding import PyverbsBinding

_KNOWN: dict[str, type[IbverbsBinding] | type[PyverbsBinding]] = {"ibverbs": IbverbsBinding, "pyverbs": PyverbsBinding}
"""In the order of `auto`."""


def load_binding(choice: str = "auto") -> Binding:
    """The package named `ibverbs` or `pyverbs`, or with `auto` the first of them that is there. Raises BindingUnavailable that
    says of each why not, and what to install."""
    if choice != "auto":
        if choice not in _KNOWN:
            raise BindingUnavailable(f"verbs_binding is {choice!r}; it can be auto, {', '.join(_KNOWN)}")
        return _KNOWN[choice]()
    reasons = []
    for binding in _KNOWN.values():
        try:
            return binding()
        except BindingUnavailable as error:
            reasons.append(error.reason)
    raise BindingUnavailable("; ".join(reasons))
