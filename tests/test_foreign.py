"""The transports over other projects' engines, run with the real ones where their wheels are installed."""

from __future__ import annotations

import sys

import pytest

from hicache_mooncake.testing import TransportTests
from hicache_mooncake.transfer.transport import TransportError, TransportOptions, open_transport


def need(scheme: str) -> None:
    try:
        open_transport(scheme, TransportOptions()).close()
    except TransportError as error:
        pytest.skip(str(error))


class ForeignTests(TransportTests):
    """As far as an engine that recalls nothing can keep the contract."""

    transfers = 500
    closes_on_stopped_peers = False

    @pytest.fixture(autouse=True)
    def _needed(self) -> None:
        need(self.scheme)


class TestMooncake(ForeignTests):
    scheme = "mooncake"


class TestNixl(ForeignTests):
    scheme = "nixl"

    @pytest.mark.skip(reason="NIXL keeps two descriptors for each agent that it has met")
    def test_links_that_are_closed_leave_nothing_behind(self) -> None: ...


@pytest.mark.parametrize(
    ("scheme", "modules", "package"),
    [
        ("mooncake", ["mooncake", "mooncake.engine"], "mooncake-transfer-engine"),
        ("nixl", ["nixl_cu12", "nixl_cu12._api", "nixl_cu13", "nixl_cu13._api", "nixl", "nixl._api"], "nixl-cu12"),
    ],
    ids=["mooncake", "nixl"],
)
def test_without_the_wheel_it_is_said_which_to_install(
    monkeypatch: pytest.MonkeyPatch, scheme: str, modules: list[str], package: str
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TransportError, match=f"pip install {package}") as caught:
        open_transport(scheme, TransportOptions())
    assert caught.value.reason == "unavailable"
