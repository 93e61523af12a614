"""Faults that tests without a marker of their own show: test -> (what is done, what users see, part of the table)."""

from __future__ import annotations

ELSEWHERE: dict[str, tuple[str, str, str]] = {
    # One host.
    "tests/test_pool_local.py::test_a_frozen_mover_is_fenced_and_nothing_lands_after_the_call": (
        "SIGSTOP of a mover in the middle of a copy",
        "misses after one deadline (`fenced`); the mover is killed, and not a byte lands in engine memory afterwards",
        "host",
    ),
    "tests/test_pool_local.py::test_a_frozen_store_leaves_nothing_visible_and_no_memory_behind": (
        "SIGSTOP of a mover in the middle of a store",
        "the pages count as not stored, are never found, and their memory comes back",
        "host",
    ),
    "tests/test_pool_local.py::test_a_frozen_node_costs_one_lookup_its_time_and_the_others_nothing": (
        "SIGSTOP of a host's own node",
        "one lookup costs its deadline, the next ones nothing; it is served again when it goes on",
        "host",
    ),
    "tests/test_pool_local.py::test_a_killed_node_is_misses_and_heals_without_the_engine": (
        "kill -9 of a host's own node",
        "misses (`node_down`); the engine is served again when it is back",
        "host",
    ),
    "tests/test_pool_local.py::test_an_engine_that_dies_in_mid_store_leaves_no_half_page_and_no_memory": (
        "an engine is killed between reserving room and committing",
        "nothing: what it had reserved is free, others are untouched",
        "host",
    ),
    "tests/test_pool_local.py::test_killing_one_of_three_clients_touches_only_its_own": (
        "kill -9 of one of three engines of a host",
        "nothing at the other two",
        "host",
    ),
    "tests/test_pool_local.py::test_damaged_memory_is_a_miss_on_every_read_path": (
        "a bit of the segment flips",
        "a miss (`checksum`) and an error in the node's log that names the host's memory; the page is dropped",
        "host",
    ),
    "tests/test_pool_local.py::test_another_protocol_version_is_refused_where_the_operator_looks": (
        "an engine of another protocol version",
        "misses; client log, node log and a metric say which versions there are",
        "strangers",
    ),
    "tests/test_pool_local.py::test_garbage_on_the_socket_ends_that_connection_only": (
        "garbage on the node's socket",
        "nothing: that connection ends",
        "strangers",
    ),
    "tests/test_pool_local.py::test_a_node_that_gets_no_thread_turns_a_client_away_and_goes_on": (
        "the node's container is at its limit of processes",
        "an engine is turned away, with a line that says what to raise; the others are served",
        "machines",
    ),
    "tests/test_pool_local.py::test_movers_end_with_their_engine": (
        "kill -9 of an engine",
        "its movers end with it, and nothing of it is left",
        "host",
    ),
    "tests/test_embedded.py::test_eight_ranks_starting_at_once_make_one_node_that_outlives_them": (
        "eight ranks of a host start at once, with nothing configured",
        "one node, for all of them",
        "starts",
    ),
    "tests/test_ports.py::test_nodes_that_start_at_once_advertise_what_each_has_bound": (
        "many nodes start at once and let the system choose their ports",
        "nothing: each advertises the port that it has",
        "starts",
    ),
    "tests/faults/test_mapping_limits.py::test_an_engine_whose_movers_cannot_map_its_pool_is_told_why": (
        "the host pool cannot be mapped by the movers: limits of the address space",
        "pages are copied another way; the log names the limit and how to raise it",
        "machines",
    ),
    # Between hosts.
    "tests/faults/test_peers.py::test_whatever_a_first_holder_does_the_second_serves": (
        "one of two holders of a page refuses, is silent, slow, cuts in mid-body, sends damage, or has lost the page",
        "nothing: the other one is asked within the same deadline",
        "network",
    ),
    "tests/faults/test_peers.py::test_a_fault_without_a_second_holder_is_misses_with_reasons_and_then_heals": (
        "the only holder of a page refuses, is silent, slow, cuts in mid-body, or sends damage",
        "misses with their reason, for those pages that had not arrived; whole again by itself",
        "network",
    ),
    "tests/faults/test_peers.py::test_a_silent_rack_costs_one_connect_and_blames_nobody_else": (
        "a whole rack does not answer connects",
        "misses for its pages; local pages and those of healthy nodes arrive",
        "network",
    ),
    "tests/faults/test_peers.py::test_peers_that_drop_connections_in_mid_body_again_and_again": (
        "hundreds of connections between nodes end in mid-body",
        "misses for what had not arrived; no descriptor is left",
        "network",
    ),
    "tests/faults/test_peers.py::test_a_node_whose_connections_die_at_once_is_left_alone_and_the_other_used": (
        "every connection to a node dies within milliseconds",
        "its pages come from the other holder; it is tried ever more seldom",
        "network",
    ),
    "tests/faults/test_peers.py::test_memory_that_the_holder_uses_anew_in_mid_send_is_a_miss": (
        "a holder's memory is used for another page while it is being sent",
        "a miss (`checksum_remote`)",
        "network",
    ),
    "tests/faults/test_peers.py::test_no_deadline_looks_at_the_wall_clock": (
        "wall clocks that are wrong",
        "nothing: no lease, pin or deadline looks at them",
        "machines",
    ),
    "tests/faults/test_readers.py::test_a_reader_killed_in_mid_load_leaves_no_pin_at_either_end": (
        "a reader's mover is killed while another node sends to it",
        "one batch of misses; no pin is left at either end",
        "network",
    ),
    "tests/faults/test_readers.py::test_512_threads_queue_and_none_waits_for_ever": (
        "512 threads of an engine load at once",
        "each gets its verdicts or a reason within its deadline",
        "network",
    ),
    "tests/faults/test_readers.py::test_memory_of_peers_and_of_the_own_node_goes_while_traffic_runs": (
        "the nodes at both ends are killed and come back again and again under load",
        "misses meanwhile; all works afterwards",
        "network",
    ),
    "tests/faults/test_readers.py::test_requests_that_share_pages_that_fail_both_recompute": (
        "pages that two requests wait for are damaged on the way",
        "both compute them anew; nobody finds the damaged ones",
        "network",
    ),
    "tests/faults/test_readers.py::test_a_short_soak_under_changing_faults": (
        "the network does something else every moment",
        "misses meanwhile; all works afterwards, and nothing is left",
        "network",
    ),
    "tests/test_pool_cluster.py::test_a_slow_peer_that_goes_on_sending_is_fenced": (
        "a peer sends on, slowly, after the call's end",
        "the call ends at its deadline, and what comes later lands nowhere",
        "network",
    ),
    "tests/test_pool_cluster.py::test_two_nodes_at_one_address_never_answer_for_each_other": (
        "two nodes advertise one address",
        "pages of the one that is not there are misses, never the other one's bytes",
        "network",
    ),
    "tests/test_pool_cluster.py::test_a_page_evicted_after_the_lookup_is_a_miss": (
        "a page is evicted between lookup and load",
        "a miss for that page",
        "network",
    ),
    "tests/test_pool_cluster.py::test_the_data_port_refuses_another_version_and_survives_garbage": (
        "another version, or garbage, at a node's data port",
        "a refusal that names the versions; everybody else is served",
        "strangers",
    ),
    "tests/test_shared_fetch.py::test_a_rank_that_fetches_and_never_ends_costs_the_others_a_wait": (
        "the rank that fetches pages for all ranks of its host stops",
        "the others wait for half of their time at most, and fetch them themselves",
        "network",
    ),
    # Nodes that are full, and that end.
    "tests/test_spill.py::test_what_one_node_has_no_room_for_another_one_keeps": (
        "one node is full and another one empty",
        "nothing is evicted: the coldest pages are found at the other node",
        "room",
    ),
    "tests/test_replicas.py::test_the_second_fetch_brings_pages_to_stay_and_they_outlive_their_writer": (
        "a page's writer dies after another host has read it twice",
        "nothing: the page is a hit there",
        "room",
    ),
    "tests/test_drain.py::test_a_node_that_ends_under_load_costs_its_readers_nothing": (
        "SIGTERM of a node that is being read from",
        "nothing: no read fails, and what only it had is found at other nodes",
        "room",
    ),
    "tests/test_drain.py::test_an_end_is_bounded_though_nobody_takes_anything": (
        "SIGTERM of a node while the only other one hangs",
        "it ends after `drain_s` and 2 s at most",
        "room",
    ),
    # Masters.
    "tests/test_link_process.py::test_no_lookup_fails_when_one_of_two_masters_dies_or_hangs": (
        "one of two masters dies or hangs, with lookups every moment",
        "nothing: the other one is asked in the same call",
        "masters",
    ),
    "tests/test_link_process.py::test_a_directory_of_two_shards_survives_a_master_of_each": (
        "one master of each of two shards dies",
        "nothing",
        "masters",
    ),
    "tests/test_link_process.py::test_a_killed_master_of_100_000_keys_is_whole_again": (
        "the only master of 100,000 keys is killed and starts empty",
        "all of them are found through it again",
        "masters",
    ),
    "tests/test_link_process.py::test_a_locked_node_with_a_busy_interpreter_stays_a_member": (
        "a node's lock is held for twice the ttl, and its interpreter is busy",
        "nothing at the other hosts: it stays a member",
        "masters",
    ),
    "tests/test_link_process.py::test_masters_are_found_through_etcd_and_kept_while_it_is_away": (
        "etcd is killed",
        "nothing: masters that are known are used on",
        "masters",
    ),
    "tests/test_master_process.py::test_a_clear_while_the_master_is_away_reaches_the_other_nodes_when_it_is_back": (
        "a namespace is cleared while the master is away",
        "other hosts hear of it when the master is back",
        "masters",
    ),
    "tests/test_master_process.py::test_garbage_to_the_port_of_the_master_is_counted_and_hurts_nobody": (
        "garbage at the master's port",
        "nothing; a metric counts it",
        "strangers",
    ),
    # Strangers and versions.
    "tests/test_strangers.py::test_a_stranger_gets_nothing_from_a_master_with_another_key_or_none": (
        "a stranger without the key, or with another, speaks to a master",
        "it gets nothing and changes nothing",
        "strangers",
    ),
    "tests/test_strangers.py::test_a_stranger_on_a_nodes_data_port_is_refused_and_reads_and_leaves_nothing": (
        "a stranger without the key speaks to a node's data port",
        "it is refused, reads nothing and leaves nothing",
        "strangers",
    ),
    "tests/test_strangers.py::test_a_node_with_another_key_joins_nothing_and_serves_its_own_host_all_the_same": (
        "a node is started with another key",
        "its host has a cache of its own; log and health say why no more",
        "strangers",
    ),
    "tests/test_rolling_upgrade.py::test_old_and_new_nodes_find_each_others_pages": (
        "nodes of protocol 1 and 2 in one cluster",
        "nothing: both find each other's pages",
        "strangers",
    ),
    # The cold tier.
    "tests/test_cold_pool.py::test_a_restarted_node_has_its_pages_even_after_a_kill": (
        "kill -9 of a node with a cold tier",
        "misses (`node_down`) while it is away; then all that was on the disk is found",
        "disk",
    ),
    "tests/test_cold_crashes.py::test_a_tier_that_is_killed_has_what_it_had": (
        "kill -9 in the middle of writes to the cold tier, again and again",
        "no wrong byte; all that the index had is there, and nothing that was cleared",
        "disk",
    ),
    "tests/test_cold_pool.py::test_a_cleared_namespace_does_not_come_back_with_a_restart": (
        "a namespace is cleared, then kill -9 of the node",
        "nothing of it is found again",
        "disk",
    ),
    "tests/test_cold_pool.py::test_a_damaged_page_is_a_miss_and_blames_nobody": (
        "bytes of most pages on the disk are damaged",
        "misses (`checksum_cold`, at other hosts `gone_remote` too); these pages are forgotten, and no node is blamed",
        "disk",
    ),
    "tests/test_cold_crashes.py::test_flipped_bits_in_pages_are_misses": (
        "bits of pages on the disk flip",
        "misses for those pages",
        "disk",
    ),
    "tests/test_cold_crashes.py::test_flipped_bits_in_the_index_end_no_node_twice": (
        "bits of the cold tier's index flip",
        "at worst the node ends, once, and the tier begins empty; never a wrong byte",
        "disk",
    ),
    "tests/test_cold_faults.py::test_an_index_that_was_damaged_meanwhile": (
        "the index is garbage, cut or deleted before a start",
        "the tier begins empty; the damaged index is put aside",
        "disk",
    ),
    "tests/test_cold_faults.py::test_an_index_that_says_it_is_damaged_is_put_aside_and_the_tier_begins_empty": (
        "the index turns out to be damaged while the node runs",
        "the tier begins empty, and what DRAM has is written anew",
        "disk",
    ),
    "tests/test_cold_crashes.py::test_one_of_the_files_is_older_than_the_other": (
        "the index is older than the pages' file, or the other way round",
        "what still has its checksum is there; all else is misses",
        "disk",
    ),
    "tests/test_cold_tier.py::test_a_shorter_file_costs_what_was_there_and_no_more": (
        "the pages' file is truncated before a start",
        "misses for what was cut off",
        "disk",
    ),
    "tests/test_cold_pool.py::test_files_that_are_deleted_under_a_live_node_cost_nobody_anything": (
        "the tier's files are deleted under a live node",
        "nothing until it ends; then the tier begins empty",
        "disk",
    ),
    "tests/test_cold_faults.py::test_a_real_disk_that_fills_up_and_is_emptied": (
        "others fill the disk, and make room again",
        "the tier goes round in the room that it has, and takes more when there is some",
        "disk",
    ),
    "tests/test_cold_faults.py::test_writes_that_fail_cost_no_room_and_no_other_page": (
        "writes fail (EIO, ENOSPC, EDQUOT, EROFS)",
        "those pages are evicted unwritten; all that is there can be read; it is tried again after 5 s",
        "disk",
    ),
    "tests/test_cold_faults.py::test_pages_that_cannot_be_read_are_forgotten_and_their_neighbours_are_read": (
        "reads fail (EIO) at one place of the disk",
        "a miss for that page, which is written anew when it comes again; its neighbours are read",
        "disk",
    ),
    "tests/test_cold_parts.py::test_a_disk_that_hangs_altogether_costs_one_deadline_and_then_nothing": (
        "the disk hangs under reads",
        "misses after one deadline, then at once; read again when it answers",
        "disk",
    ),
    "tests/test_data_server.py::test_a_disk_that_hangs_keeps_no_other_host_from_what_is_in_dram": (
        "the disk of a node hangs that other hosts read from",
        "misses for what is only on it, after half a second; pages in DRAM come in the same answer",
        "disk",
    ),
    "tests/test_cold_faults.py::test_an_index_whose_disk_hangs_is_waited_for_by_few": (
        "the index's disk hangs",
        "pages on the disk are misses, after half a second and then at once; pages in DRAM are served",
        "disk",
    ),
    "tests/test_cold_writer.py::test_a_disk_that_hangs_does_not_keep_a_node_from_ending": (
        "SIGTERM of a node whose disk hangs under a write",
        "it ends after 5 s",
        "disk",
    ),
    "tests/test_cold_faults.py::test_a_read_only_file_system_is_refused_with_a_sentence": (
        "the tier's file system is read-only at the start",
        "the node does not start, with one line that says so",
        "disk",
    ),
    "tests/test_cold_pool.py::test_a_node_does_not_start_with_what_another_one_uses": (
        "two nodes are given one directory",
        "the second does not start, with one line that says so",
        "disk",
    ),
    "tests/test_cold_faults.py::test_a_full_index_makes_room_by_forgetting_the_oldest": (
        "the index's map is full",
        "the oldest pages make room, and every store goes on",
        "disk",
    ),
    # Engines.
    "tests/sglang/test_families.py::test_a_node_that_dies_between_lookup_and_load_leaves_misses": (
        "a node dies between SGLang's lookup and its load, for every family of models",
        "misses for every pool of the page, never a part of it",
        "host",
    ),
    "tests/e2e/test_sglang_servers.py::test_a_node_that_is_killed_under_load_costs_no_answer": (
        "kill -9 of a node under the load of real SGLang servers",
        "every answer is the right one",
        "host",
    ),
    "tests/e2e/test_sglang_servers.py::test_an_engine_that_was_killed_finds_its_cache_warm": (
        "kill -9 of an SGLang server",
        "the next one finds the cache warm",
        "host",
    ),
    # More of the disk.
    "tests/test_cold_faults.py::test_a_clear_that_the_disk_refuses_holds_and_is_saved_later": (
        "a namespace is cleared, and the cold tier's disk refuses to note that",
        "nothing: the clear holds at once, and is noted when the disk takes it",
        "disk",
    ),
    "tests/test_cold_faults.py::test_a_full_disk_keeps_what_is_there_and_goes_round_in_it": (
        "the disk has no room for another segment (ENOSPC, EDQUOT)",
        "nothing: the tier goes round in the segments that it has, and takes more when there is room",
        "disk",
    ),
    "tests/test_cold_faults.py::test_a_disk_that_hangs_under_a_write_holds_up_no_reader": (
        "the disk hangs under a write",
        "nothing: lookups and reads of what is there go on",
        "disk",
    ),
    "tests/test_cold_faults.py::test_a_directory_of_somebody_else_is_refused": (
        "the tier's directory is another user's, a link, or may be written by others",
        "the node does not start, with one line that says so",
        "disk",
    ),
    "tests/test_cold_faults.py::test_what_another_version_left_stays": (
        "the directory has a tier of another version",
        "a tier of its own beside it; the log names what may be deleted",
        "disk",
    ),
    "tests/test_cold_faults.py::test_who_looks_and_is_killed_pins_nothing": (
        "a process that reads the tier's index is killed",
        "nothing: what it held of the index is let go, and the index does not grow",
        "disk",
    ),
    # Prefill and decode on servers of their own.
    "tests/e2e/test_pd_faults.py::test_a_node_that_is_killed_between_turns_costs_its_pages_and_no_answer": (
        "kill -9 of a node of the prefill or of the decode server, between two turns",
        "misses for its pages: every answer is the right one; it is used again when it is back",
        "pd",
    ),
    "tests/e2e/test_pd_faults.py::test_a_decode_server_that_is_killed_in_mid_answer_leaves_what_was_written": (
        "kill -9 of a decode server in the middle of an answer",
        "that request ends with an error; the pages that were written are found, and not written again",
        "pd",
    ),
    "tests/e2e/test_pd_faults.py::test_a_restarted_prefill_server_finds_all_that_was_said": (
        "kill -9 and restart of a prefill server, between two turns",
        "nothing: it finds all full pages of prompts and answers",
        "pd",
    ),
    "tests/e2e/test_pd_faults.py::test_a_master_that_restarts_costs_no_answer_and_no_page": (
        "kill -9 and restart of the only master, between turns",
        "misses for pages of other hosts meanwhile: every answer is the right one, and no page is lost",
        "pd",
    ),
    "tests/e2e/test_pd_faults.py::test_while_the_prefill_server_is_gone_requests_end_with_an_error": (
        "kill -9 of the only prefill server",
        "requests end with an error that names it, none hangs; answers again when it is back",
        "pd",
    ),
    "tests/e2e/test_pd_apart.py::test_a_pair_that_can_never_share_is_named_everywhere_and_answers_right": (
        "prefill and decode are given other tags and layouts",
        "every answer is the right one, and no page of the other side is found; logs, `doctor` and a metric name both settings",
        "pd",
    ),
    "tests/sglang/test_pd_trees.py::test_what_decode_has_promised_is_there_when_it_is_loaded_however_full_the_node_gets": (
        "the node is filled four times over between a decode server's promise to prefill and its load",
        "nothing: what was promised is loaded",
        "pd",
    ),
    "tests/sglang/test_pd_trees.py::test_a_promised_page_that_is_gone_fails_the_restore_and_is_counted": (
        "pages that a decode server has promised to prefill are cleared before it loads them",
        "SGLang fails the request; counted by reason, and logged (`broken_promises`)",
        "pd",
    ),
    "tests/sglang/test_pd_trees.py::test_a_prefetch_that_sglang_declines_takes_the_promise_back_before_prefill_is_told": (
        "SGLang declines the prefetch of what a lookup has found",
        "nothing: prefill sends it all, and what the node kept for it is let go by time",
        "pd",
    ),
    "tests/sglang/test_pd_trees.py::test_l2_without_room_after_the_promise_fails_the_request": (
        "the decode server's host pool has no room for what it has promised",
        "SGLang fails the request; no promise of the pool's is broken",
        "pd",
    ),
    "tests/sglang/test_decode_offload.py::test_what_is_being_written_is_what_was_computed_though_its_slots_have_new_owners": (
        "the pool takes nothing until an offloaded answer has ended and its device slots have new owners",
        "nothing: all of it is written, byte for byte",
        "pd",
    ),
    "tests/sglang/test_decode_offload.py::test_requests_of_all_lengths_leave_no_slot_behind_though_l2_was_full": (
        "the pool takes nothing until the decode server's host pool is full",
        "pages that had no room there are not written; no slot is lost on the device or in the host pool",
        "pd",
    ),
    "tests/sglang/test_pp_stages.py::test_stages_agree_on_what_all_have_and_a_promise_lasts_until_the_late_one_asks": (
        "one pipeline stage sees a request seconds after the other, whose node is filled meanwhile",
        "nothing with `promise_s`, misses without; both stages load the same prefix",
        "pd",
    ),
}

if __name__ == "__main__":  # for `make failures`: what to give to pytest to run every test that has a row
    print("tests/faults", *(test for test in ELSEWHERE if not test.startswith("tests/faults/")))
