"""RDMA for real, in software: boots a virtual machine once and runs what is in `guest_*.py` there. `make test-rdma`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.rdma import vm

KERNEL = Path(os.environ.get("RDMA_VM") or Path(sys.prefix) / "rdma")


@pytest.mark.slow
@pytest.mark.timeout(vm.LIMIT_S + 60)
def test_the_parts_hold_over_rdma_in_a_virtual_machine() -> None:
    """RDMA_PARTS names the parts, separated by blanks; all without it."""
    if reason := vm.missing(KERNEL):
        pytest.skip(reason)
    parts = tuple(os.environ.get("RDMA_PARTS", "").split()) or vm.PARTS
    status, printed = vm.run(KERNEL, parts)
    assert status == 0, f"pytest in the guest ended with {status}" if status != vm.NO_ANSWER else "the guest gave no answer"
    assert " passed" in printed
