"""The conformance suite of transports itself: one that keeps the contract passes it, and one that breaks a rule does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hicache_mooncake.testing import TransportTests
from hicache_mooncake.transfer import tcp_lane
from hicache_mooncake.transfer.transport import Transport, TransportError, TransportOptions
from tests.faulty_transport import Faults, FaultyTransport


class FaultyTests(TransportTests):
    scheme = "tcp"
    faults = Faults()

    def begin(self) -> None:
        super().begin()
        self.made: list[FaultyTransport] = []

    def end(self) -> None:
        for transport in self.made:
            transport.end()
        super().end()

    def make_transport(self, options: TransportOptions) -> Transport:
        self.made.append(FaultyTransport(options, self.faults))
        return self.made[-1]


@pytest.mark.slow
class TestWithoutFaults(FaultyTests):
    """So that what is red below is red for the fault."""

    transfers = 500


BROKEN: list[tuple[str, str, tuple[Any, ...]]] = [
    ("loses_last_byte", "test_pieces_of_any_size_and_alignment", ("read", True)),
    ("loses_last_byte", "test_both_ends_may_begin", ("write",)),
    ("loses_last_byte", "test_a_batch_may_be_larger_than_what_may_be_under_way", ("read",)),
    ("loses_last_byte", "test_random_batches_do_what_copying_would", ()),
    ("loses_last_byte", "test_both_directions_at_once_through_the_smallest_buffers", ()),
    ("loses_last_byte", "test_reads_and_writes_of_several_threads", ()),
    ("loses_last_byte", "test_eight_peers_at_once", ()),
    ("loses_last_byte", "test_batches_that_end_early_leave_the_others_right", ()),
    ("done_too_early", "test_batches_that_end_early_leave_the_others_right", ()),
    ("loses_last_byte", "test_the_same_stretch_may_be_moved_to_several_places", ("write",)),
    ("words_only", "test_pieces_of_any_size_and_alignment", ("write", False)),
    ("first_pieces_only", "test_thousands_of_pieces_in_one_batch", ("read",)),
    ("counts_32_bits", "test_more_than_4_gib_in_one_batch", ("write",)),
    ("empty_hangs", "test_nothing_to_move_is_done", ("read",)),
    ("zero_length_is_checked", "test_nothing_to_move_is_done", ("write",)),
    ("near_may_not_be_asked", "test_both_ends_may_begin", ("read",)),
    ("one_batch_at_a_time", "test_a_small_batch_does_not_wait_for_a_huge_one", ("write",)),
    ("mixes_up_peers", "test_eight_peers_at_once", ()),
    ("done_too_early", "test_pieces_of_any_size_and_alignment", ("read", False)),
    ("done_too_early", "test_a_notice_comes_after_the_batches_that_were_done", ()),
    ("leaks_descriptor", "test_no_descriptor_and_no_thread_is_left_behind_by_transfers", ()),
    ("leaks_thread_per_link", "test_links_that_are_closed_leave_nothing_behind", ()),
    ("dies_of_idleness", "test_a_link_that_nobody_used_for_a_while_works", ()),
    ("notices_reversed", "test_notices_arrive_whole_and_in_order", ()),
    ("notices_cut", "test_notices_arrive_whole_and_in_order", ()),
    ("notices_unbounded", "test_whoever_is_told_too_much_without_looking_loses_the_link", ()),
    ("long_notices", "test_a_notice_that_is_too_long_is_refused", ()),
    ("bounds_unchecked", "test_pieces_outside_of_what_both_ends_know_move_nothing", ("read",)),
    ("bounds_unchecked", "test_memory_that_was_not_registered_is_refused", ("write",)),
    ("any_token", "test_a_wrong_token_reaches_nothing", ("read",)),
    ("any_token", "test_a_wrong_token_reaches_nothing", ("write",)),
    ("unregister_ignored", "test_unregistered_memory_is_out_of_reach", ("read",)),
    ("unregister_ignored", "test_unregistered_memory_is_out_of_reach", ("write",)),
    ("unregister_ignored", "test_nothing_lands_in_memory_that_was_unregistered_under_way", ()),
    ("local_unregister_ignored", "test_what_was_unregistered_here_is_refused_here", ()),
    ("registers_once", "test_memory_may_be_registered_again", ()),
    ("learns_for_good", "test_another_stretch_of_it_may_be_registered_later", (0, 5000)),
    ("registers_overlaps", "test_registrations_that_overlap_are_refused", ()),
    ("ignores_deadline", "test_a_batch_ends_at_its_deadline", ("read",)),
    ("ignores_deadline", "test_a_batch_ends_at_its_deadline", ("write",)),
    ("late_is_tried", "test_a_deadline_that_has_passed_moves_nothing", ("read",)),
    ("ignores_deadline", "test_a_batch_that_is_only_looked_at_ends_at_its_deadline", ()),
    ("byte_after_deadline", "test_a_batch_ends_at_its_deadline", ("read",)),
    ("byte_after_deadline", "test_a_peer_that_stops_costs_no_more_than_the_deadline", ()),
    ("ignores_cancel", "test_a_batch_that_is_cancelled_ends", ("read",)),
    ("ignores_cancel", "test_a_thread_that_waits_learns_of_a_cancel", ()),
    ("byte_after_cancel", "test_a_batch_that_is_cancelled_ends", ("read",)),
    ("cancel_spoils_what_is_done", "test_cancelling_what_is_done_changes_nothing", ()),
    ("byte_after_close", "test_closing_ends_what_is_under_way", ("read",)),
    ("byte_after_peers_end", "test_a_link_ends_with_the_peers_end", ()),
    ("byte_after_peers_end", "test_a_peer_that_dies_in_mid_body", ()),
    ("byte_after_peers_end", "test_a_peer_that_dies_while_it_is_stopped", ()),
    ("loses_last_byte", "test_bytes_of_a_peer_in_another_process", ()),
    ("close_is_no_fence", "test_closing_ends_what_the_peer_is_writing", ()),
    ("close_is_no_fence", "test_closing_while_the_peer_goes_on_writing", ()),
    ("close_is_no_fence", "test_closing_while_the_peer_is_stopped_in_mid_write", ()),
    ("close_forgets_batches", "test_closing_ends_what_is_under_way", ("write",)),
    ("closes_once", "test_a_closed_link_stays_closed", ()),
    ("always_alive", "test_an_idle_link_ends_with_the_peers_end", ()),
    ("always_alive", "test_a_peer_that_dies_while_it_writes", ()),
    ("closes_all", "test_other_links_live_on", ()),
    ("transport_close_ignored", "test_a_transport_that_is_closed_closes_its_links", ()),
    ("wrong_reason", "test_a_closed_link_stays_closed", ()),
    ("wrong_reason", "test_a_link_ends_with_the_peers_end", ()),
    ("keeps_channels", "test_a_handshake_that_fails_closes_its_channels", ("gone", "connect")),
]


def _red(faults: Faults, test: str, arguments: tuple[Any, ...], *, deaf: bool = False) -> None:
    class Broken(FaultyTests):
        transfers = 20
        endless = 60
        patience_s = 20.0

    Broken.faults = faults
    leaks = faults.leaks_descriptor or faults.leaks_thread_per_link
    if faults.always_alive or faults.keeps_channels or faults.one_batch_at_a_time or leaks or deaf:
        Broken.patience_s = 2.0  # which it takes to turn red
    suite = Broken()
    suite.begin()
    try:
        with pytest.raises((AssertionError, TransportError, pytest.fail.Exception)):
            getattr(suite, test)(*arguments)
    finally:
        suite.end()


@pytest.mark.parametrize(("fault", "test", "arguments"), BROKEN, ids=lambda value: str(value)[:60])
def test_a_broken_rule_turns_its_test_red(fault: str, test: str, arguments: tuple[Any, ...]) -> None:
    """A suite that stays green is worse than none. Without the fault the same test is green, see above."""
    _red(Faults(**{fault: True}), test, arguments)


def test_an_end_that_does_not_read_while_it_writes_turns_its_test_red(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = tcp_lane.Lane._receive

    def deaf(lane: tcp_lane.Lane) -> bool:
        over = lane._landing is not None and any(held.ended for held in lane._landing.holds)
        return (over or not lane._out.views) and receive(lane)

    monkeypatch.setattr(tcp_lane.Lane, "_receive", deaf)
    _red(Faults(), "test_both_directions_at_once_through_the_smallest_buffers", (), deaf=True)


def test_every_rule_is_broken_once() -> None:
    """A rule of the faulty transport that no test depends on would be a rule that the suite does not check."""
    assert {fault for fault, _, _ in BROKEN} == {field.name for field in dataclasses.fields(Faults)}


def test_every_test_is_turned_red_once() -> None:
    longer = {  # than one that is turned red, and the same otherwise
        "test_a_link_that_nobody_used_for_a_minute_works",
        "test_nothing_is_left_behind_by_a_hundred_thousand_transfers",
    }
    tests = {name for name in dir(TransportTests) if name.startswith("test_")}
    assert {test for _, test, _ in BROKEN} == tests - longer
