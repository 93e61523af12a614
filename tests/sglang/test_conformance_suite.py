"""The conformance suite itself: a backend that keeps the contract passes all of it, and one that breaks a rule does not."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import subprocess
import sys
from typing import Any

import pytest

from hicache_mooncake.testing import BackendTests
from tests.conftest import ROOT, environment
from tests.sglang.reference_backend import Faults, ReferenceBackend, Storage


class ReferenceTests(BackendTests):
    faults = Faults()
    storage: Storage

    def begin(self) -> None:
        super().begin()
        self.storage = Storage()

    def make_backend(self, config: Any, pools: dict[str, Any]) -> ReferenceBackend:
        return ReferenceBackend(config, self.storage, self.faults)

    def evict_part(self, backend: ReferenceBackend, pool: str, key: str) -> None:
        del self.storage.objects[backend.object_name(pool, key)]

    def flip_byte(self, backend: ReferenceBackend, pool: str, key: str, position: int) -> None:
        content = bytearray(self.storage.objects[backend.object_name(pool, key)])
        content[position] ^= 1
        self.storage.objects[backend.object_name(pool, key)] = bytes(content)

    def resize_part(self, backend: ReferenceBackend, pool: str, key: str, length: int) -> None:
        name = backend.object_name(pool, key)
        self.storage.objects[name] = self.storage.objects[name][:length].ljust(length, b"\0")

    def stop_storage(self) -> None:
        self.storage.up = False

    def start_storage(self) -> None:
        self.storage.up = True


class TestReference(ReferenceTests):
    pass


BROKEN: list[tuple[dict[str, Any], str, tuple[Any, ...]]] = [
    ({"short_list": True}, "test_the_smallest_batches_and_the_largest", ()),
    ({"counts_all_hits": True}, "test_a_hole_ends_the_prefix", ()),
    ({"no_checksum": True}, "test_a_damaged_page_is_never_delivered", (0,)),
    ({"no_checksum": True}, "test_a_damaged_page_is_never_delivered", (-1,)),
    ({"no_checksum": True}, "test_a_damaged_part_is_never_delivered", ()),
    ({"no_length_check": True}, "test_a_page_of_another_length_is_never_delivered", (0,)),
    ({"no_length_check": True}, "test_a_page_of_another_length_is_never_delivered", (100,)),
    ({"no_length_check": True}, "test_a_page_of_another_length_is_never_delivered", (1000,)),
    ({"any_head": True, "no_length_check": True}, "test_heads_that_are_split_for_another_tp_size_are_the_right_ones", ()),
    ({"first_part_only": True}, "test_mha_pages_come_back_whole_into_other_places", ("page_first",)),
    ({"first_part_only": True}, "test_mla_pages_come_back_whole_into_other_places", ("layer_first",)),
    ({"first_part_only": True}, "test_every_pool_of_a_family_comes_back_whole", ("Mamba",)),
    ({"into_next_page": True}, "test_pages_of_any_size_come_back_whole", (1,)),
    ({"into_next_page": True}, "test_several_pools_in_one_call", ()),
    ({"mla_by_rank": True}, "test_mla_pages_of_one_rank_are_read_by_all", ("page_first",)),
    ({"clear_everything": True}, "test_clear_leaves_other_models_alone", ()),
    ({"clear_everything": True}, "test_clear_forgets_every_pool", ()),
    ({"clears_anchor_only": True}, "test_clear_forgets_every_pool", ()),
    ({"raises": True}, "test_absent_keys_are_plain_misses", ()),
    ({"any_key": True}, "test_a_bad_key_gets_a_verdict_and_its_neighbours_theirs", ()),
    ({"any_indices": True}, "test_indices_that_are_no_whole_pages_move_no_byte", ()),
    ({"any_indices": True}, "test_bad_indices_of_one_pool_leave_the_others_alone", ()),
    ({"side_pools_unchecked": True}, "test_batch_exists_promises_no_more_than_the_side_pools_can_restore", ()),
    ({"contiguous_lengths": True}, "test_exactly_the_restorable_lengths", ()),
    ({"contiguous_lengths": True}, "test_random_holes_and_windows", (2,)),
    ({"window_of_one": True}, "test_exactly_the_restorable_lengths", ()),
    ({"window_of_one": True}, "test_only_the_number_of_a_windows_keys_counts", ()),
    ({"placeholder_keys": True}, "test_a_placeholder_is_no_key", ()),
    ({"unknown_policy_raises": True}, "test_an_unknown_hit_policy_gets_no_verdict", ("block_groups",)),
    ({"accepts_broken_pools": True}, "test_an_anchor_that_cannot_be_stored_turns_the_model_off", ("uneven",)),
    ({"accepts_broken_pools": True}, "test_a_side_pool_that_cannot_be_stored_turns_the_model_off", ("outside",)),
    ({"pools_share_keys": True}, "test_pools_do_not_mix", ()),
    ({"works_after_close": True}, "test_calls_after_close_are_misses", ()),
    ({"keeps_stats": True}, "test_statistics_are_drained_and_of_the_right_class", ()),
    ({"late_pools_ignored": True}, "test_a_pool_that_arrives_late", ()),
    ({"logical_anchor_absent": True}, "test_an_anchor_without_bytes_is_decided_by_its_side_pools", ()),
    ({"resurrects": True}, "test_clear_forgets_every_page", ()),
    ({"writes_the_source": True}, "test_a_set_changes_nothing_in_the_engine", ()),
    ({"late_copy": True}, "test_the_source_is_free_after_the_call", ()),
    *(
        ({"ignores": field}, "test_engines_that_differ_never_share", (difference,))
        for field, difference in [
            ("model_name", "model"), ("model_name", "model, separators"), ("tp_rank", "tp_rank"), ("tp_size", "tp_size"),
            ("pp_rank", "pp_rank"), ("pp_rank", "pp_rank, MLA"), ("pp_size", "pp_size"), ("attn_cp_rank", "attn_cp_rank"),
            ("attn_cp_rank", "attn_cp_rank, MLA"), ("attn_cp_size", "attn_cp_size"), ("dcp_rank", "dcp_rank"),
            ("dcp_size", "dcp_size"), ("dtype", "dtype"), ("dtype", "dtype, MLA"), ("layout", "layout, direct"),
            ("layout", "layout, page_head"), ("layout", "layout, MLA"), ("layer_num,head_num", "layers, equal bytes"),
            ("start_layer", "layer range"), ("head_num,head_dim,v_head_dim", "heads, equal bytes"),
            ("page_size,head_dim,v_head_dim", "page size, equal bytes"), ("runs", "a longer page"),
            ("runs", "a shorter page"),
        ]
    ),
    ({"ignores": "runs,layer_num"}, "test_side_pools_that_differ_are_not_shared", ()),
]  # fmt: skip


@pytest.mark.parametrize(("faults", "test", "arguments"), BROKEN, ids=lambda value: str(value)[:60])
def test_a_broken_rule_turns_its_test_red(
    faults: dict[str, Any], test: str, arguments: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """P28: a suite that stays green on bad reads is worse than none. Without the fault the same test is green, see above."""

    class Broken(ReferenceTests):
        pass

    suite = Broken()
    caplog.set_level(logging.ERROR)
    Broken.faults = Faults(**faults)
    call = getattr(suite, test)
    extra = {"caplog": caplog} if "caplog" in inspect.signature(call).parameters else {}
    suite.begin()
    try:
        with pytest.raises((AssertionError, IndexError, KeyError, ValueError, OSError)):
            call(*arguments, **extra)
    finally:
        suite.end()


def test_every_rule_is_broken_once() -> None:
    """A rule of the reference backend that no test depends on would be a rule that the suite does not check."""
    broken = {name for faults, _, _ in BROKEN for name in faults}
    assert broken == {field.name for field in dataclasses.fields(Faults)}


def test_the_module_is_importable_without_pytest_torch_and_sglang() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['pytest', 'torch', 'sglang'])); "
        "import hicache_mooncake.testing as t; from hicache_mooncake.testing import local; assert 'BackendTests' in t.__all__"
    )
    subprocess.run([sys.executable, "-c", program], env=environment(), cwd=ROOT, check=True)
