"""The directory keeps both directions in step, answers only who may be answered, and drops in bounded steps."""

from __future__ import annotations

import hashlib
import random

import pytest
from hicache_master.directory import MAX_PEERS_PER_REPLY, Directory
from hypothesis import given, settings
from hypothesis import strategies as st

NS, OTHER = b"n" * 16, b"o" * 16
EVERYBODY = b"\1" * 1024


def hashes(*numbers: int) -> bytes:
    return b"".join(hashlib.sha256(number.to_bytes(8, "little")).digest() for number in numbers)


@pytest.fixture
def directory() -> Directory:
    return Directory(max_keys=10_000, rng=random.Random(1))


def only(*slots: int) -> bytes:
    """Ranks that allow these slots and no others."""
    return bytes(slot in slots for slot in range(max(slots) + 1))


def holders(directory: Directory, *numbers: int, namespace: bytes = NS, exclude: tuple[int, ...] = ()) -> list[int | None]:
    column, _, slots = directory.find(namespace, hashes(*numbers), prefix=False, ranks=EVERYBODY, exclude=exclude)
    return [slots[holder - 1] if holder else None for holder in column]


def test_what_was_added_is_found_in_its_namespace_only(directory: Directory) -> None:
    slot = directory.allocate()
    directory.add(slot, NS, hashes(1, 2))
    directory.validate()
    assert holders(directory, 1, 2, 3) == [slot, slot, None]
    assert holders(directory, 1, namespace=OTHER) == [None]
    assert len(directory) == directory.keys_of(slot) == 2


def test_adding_twice_and_removing_what_is_not_there_change_nothing(directory: Directory) -> None:
    slot = directory.allocate()
    directory.add(slot, NS, hashes(1, 1))
    directory.add(slot, NS, hashes(1))
    directory.remove(slot, NS, hashes(2, 2))
    directory.remove(slot, OTHER, hashes(1))
    directory.validate()
    assert len(directory) == 1
    directory.remove(slot, NS, hashes(1, 1))
    directory.validate()
    assert len(directory) == 0


def test_a_prefix_lookup_ends_before_the_first_page_that_nobody_holds(directory: Directory) -> None:
    slot = directory.allocate()
    directory.add(slot, NS, hashes(1, 2, 4))
    assert directory.find(NS, hashes(1, 2, 3, 4), prefix=True, ranks=EVERYBODY) == (b"\1\1", b"", [slot])
    assert directory.find(NS, hashes(1, 2, 3, 4), prefix=False, ranks=EVERYBODY) == (b"\1\1\0\1", b"", [slot])
    assert directory.find(OTHER, hashes(1), prefix=True, ranks=EVERYBODY) == (b"", b"", [])
    assert directory.find(OTHER, hashes(1), prefix=False, ranks=EVERYBODY) == (b"\0", b"", [])


def test_two_pages_that_look_alike_share_one_entry_and_a_removal_forgets_both(directory: Directory) -> None:
    one = hashes(1)
    twin = one[:8] + hashes(2)[8:]
    slot = directory.allocate()
    directory.add(slot, NS, one + twin)
    directory.validate()
    assert len(directory) == directory.keys_of(slot) == 1
    assert directory.find(NS, one + twin, prefix=True, ranks=EVERYBODY).column == b"\1\1"
    directory.remove(slot, NS, twin + one)
    directory.validate()
    assert directory.find(NS, one + twin, prefix=False, ranks=EVERYBODY).column == b"\0\0"


def test_a_long_prefix_ends_where_it_ends() -> None:
    directory = Directory(max_keys=10_000)
    slot = directory.allocate()
    directory.add(slot, NS, hashes(*range(1000)))
    for missing in (0, 127, 128, 129, 700):
        directory.remove(slot, NS, hashes(missing))
        found = directory.find(NS, hashes(*range(1000)), prefix=True, ranks=EVERYBODY)
        assert found.column == b"\1" * missing
        assert found.slots == ([slot] if missing else [])
        directory.add(slot, NS, hashes(missing))


def test_the_asker_and_slots_that_are_not_allowed_are_never_an_answer(directory: Directory) -> None:
    a, b = directory.allocate(), directory.allocate()
    directory.add(a, NS, hashes(1))
    directory.add(b, NS, hashes(1, 2))
    assert holders(directory, 1, 2, exclude=(b,)) == [a, None]
    assert directory.find(NS, hashes(1, 2), prefix=False, ranks=only(a)) == (b"\1\0", b"", [a])
    assert directory.find(NS, hashes(1, 2), prefix=False, ranks=b"") == (b"\0\0", b"", [])
    assert directory.find(NS, hashes(1), prefix=True, ranks=only(a), exclude=(a,)) == (b"", b"", [])


def test_a_second_holder_is_named_where_there_is_one(directory: Directory) -> None:
    a, b, c = (directory.allocate() for _ in range(3))
    directory.add(a, NS, hashes(1, 2))
    directory.add(b, NS, hashes(2, 3))
    directory.add(c, OTHER, hashes(9))
    found = directory.find(NS, hashes(1, 2, 3, 4), prefix=False, ranks=EVERYBODY)
    first, second = ([found.slots[at - 1] if at else None for at in column] for column in (found.column, found.others))
    assert first == [a, a, b, None]
    assert second == [None, b, None, None]
    assert directory.find(NS, hashes(1, 3), prefix=False, ranks=EVERYBODY).others == b""
    assert directory.find(NS, hashes(2), prefix=False, ranks=EVERYBODY, exclude=(a,)) == (b"\1", b"", [b])


def test_the_better_rank_comes_first_and_within_a_rank_what_is_near(directory: Directory) -> None:
    dram, near_dram, cold, near_cold, leaving = slots = [directory.allocate() for _ in range(5)]
    for slot in slots:
        directory.add(slot, NS, hashes(1))
    ranks, near, order = bytes([1, 1, 2, 2, 3]), {near_dram, near_cold}, []
    while len(order) < 5:
        found = directory.find(NS, hashes(1), prefix=False, ranks=ranks, near=near, exclude=order)
        order.append(found.slots[0])
        if len(order) < 5:
            assert found.column == b"\1"
            assert found.others == b"\2"
    assert order == [near_dram, dram, near_cold, cold, leaving]


def test_of_two_equals_the_less_loaded_is_first_and_the_other_second(directory: Directory) -> None:
    a, b = directory.allocate(), directory.allocate()
    for slot in (a, b):
        directory.add(slot, NS, hashes(*range(10)))
    for load in ({a: 5.0, b: 1.0}, {a: 1.0, b: 5.0}):
        lighter = min(load, key=load.__getitem__)
        for _ in range(10):
            found = directory.find(NS, hashes(*range(10)), prefix=True, ranks=EVERYBODY, load=load.__getitem__)
            assert (found.column, found.others) == (b"\1" * 10, b"\2" * 10)
            assert found.slots[0] == lighter


def test_two_random_choices_leave_the_most_loaded_of_many_alone(directory: Directory) -> None:
    slots = [directory.allocate() for _ in range(5)]
    for slot in slots:
        directory.add(slot, NS, hashes(1))
    first = [directory.find(NS, hashes(1), prefix=True, ranks=EVERYBODY, load=float).slots[0] for _ in range(200)]
    assert set(first) == set(slots[:-1])


def test_a_page_that_hundreds_hold_is_answered_by_any_of_them_and_forgets_each(directory: Directory) -> None:
    slots = [directory.allocate() for _ in range(400)]
    for slot in slots:
        directory.add(slot, NS, hashes(1))
        directory.add(slot, NS, hashes(1))
    directory.validate()
    named = {directory.find(NS, hashes(1), prefix=True, ranks=EVERYBODY).slots[0] for _ in range(500)}
    assert len(named) > 100
    for slot in slots[::2]:
        directory.remove(slot, NS, hashes(1))
    directory.validate()
    for _ in range(100):
        assert set(directory.find(NS, hashes(1), prefix=True, ranks=EVERYBODY).slots) <= set(slots[1::2])
    assert holders(directory, 1, exclude=tuple(slots[:399])) == [slots[399]]


def test_one_answer_names_few_nodes_and_many_answers_name_all(directory: Directory) -> None:
    slots = [directory.allocate() for _ in range(4)]
    for slot in slots:
        directory.add(slot, NS, hashes(*range(50)))
    seen = set()
    for _ in range(100):
        column, others, named = directory.find(NS, hashes(*range(50)), prefix=True, ranks=EVERYBODY)
        assert (column, others) == (b"\1" * 50, b"\2" * 50)
        assert len(named) == 2
        seen.add(named[0])
    assert seen == set(slots)


def test_no_answer_names_more_nodes_than_a_column_of_bytes_can(directory: Directory) -> None:
    count = MAX_PEERS_PER_REPLY + 45
    for number in range(count):
        directory.add(directory.allocate(), NS, hashes(number))
    directory.validate()
    column, _, slots = directory.find(NS, hashes(*range(count)), prefix=True, ranks=EVERYBODY)
    assert len(column) == len(slots) == MAX_PEERS_PER_REPLY
    column, _, slots = directory.find(NS, hashes(*range(count), 0), prefix=False, ranks=EVERYBODY)
    assert len(slots) == MAX_PEERS_PER_REPLY
    assert column.count(0) == 45
    assert column[-1] == 1


def test_second_holders_never_take_the_place_of_a_first_one(directory: Directory) -> None:
    slots = [directory.allocate() for _ in range(2 * MAX_PEERS_PER_REPLY)]
    for number in range(MAX_PEERS_PER_REPLY):
        directory.add(slots[2 * number], NS, hashes(number))
        directory.add(slots[2 * number + 1], NS, hashes(number))
    column, others, named = directory.find(NS, hashes(*range(MAX_PEERS_PER_REPLY)), prefix=True, ranks=EVERYBODY)
    assert sorted(column) == list(range(1, MAX_PEERS_PER_REPLY + 1))
    assert others == b""
    assert len(named) == MAX_PEERS_PER_REPLY


def test_adds_beyond_the_cap_are_refused_and_counted() -> None:
    directory = Directory(max_keys=3)
    a, b = directory.allocate(), directory.allocate()
    directory.add(a, NS, hashes(1, 2, 3, 4, 5))
    directory.add(b, OTHER, hashes(1))
    directory.add(b, NS, hashes(1))  # a further holder needs no new key
    directory.validate()
    assert len(directory) == 3
    assert directory.refused_adds == 3
    assert directory.keys_of(b) == 1
    directory.remove(a, NS, hashes(2))
    directory.add(b, OTHER, hashes(1))
    directory.validate()
    assert holders(directory, 1, namespace=OTHER) == [b]


def test_adds_beyond_the_cap_on_bytes_are_refused_and_room_comes_back() -> None:
    directory = Directory(max_keys=1_000_000, max_bytes=1_000_000)
    a, b = directory.allocate(), directory.allocate()
    for first in range(0, 20_000, 500):
        directory.add(a, NS, hashes(*range(first, first + 500)))
    assert 4_000 < len(directory) < 15_000
    assert directory.refused_adds == 20_000 - len(directory)
    assert directory.resident_bytes < 1_250_000
    before = directory.refused_adds
    directory.add(b, NS, hashes(1))  # a further holder takes bytes too
    assert directory.refused_adds == before + 1
    directory.validate()
    directory.drop_namespace(NS)
    while directory.sweeping:
        directory.sweep(1000)
    assert directory.resident_bytes < 10_000
    directory.add(b, NS, hashes(1))
    assert holders(directory, 1) == [b]


def test_keys_that_come_and_go_leave_no_memory_behind() -> None:
    directory = Directory(max_keys=1_000_000)
    slot, other = directory.allocate(), directory.allocate()
    directory.add(other, NS, hashes(*range(2_000)))
    for start in range(0, 100_000, 250):
        directory.add(slot, NS, hashes(*range(start, start + 250)))
        directory.remove(slot, NS, hashes(*range(max(0, start - 2_000), max(0, start - 1_750))))
    directory.validate()
    assert directory.keys_of(slot) == 2_000
    assert directory.resident_bytes < 4_000 * 300
    directory.remove(slot, NS, hashes(*range(100_000)))
    directory.remove(other, NS, hashes(*range(100_000)))
    while directory.sweeping:
        directory.sweep(10_000)
    directory.validate()
    assert directory.resident_bytes == 0


def test_a_namespace_that_grows_splits_its_tables_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_master.directory.TABLE_KEYS", 4)  # past 256 tables, and on to more
    directory = Directory(max_keys=10_000)
    a, b = directory.allocate(), directory.allocate()
    for start in range(0, 5_000, 50):
        directory.add(a, NS, hashes(*range(start, start + 50)))
        directory.add(b, NS, hashes(*range(start, start + 50, 5)))
        directory.remove(a, NS, hashes(start))
        if not start % 500:
            directory.validate()
    directory.validate()
    expected = [b if not number % 50 else a for number in range(5_000)]
    found = directory.find(NS, hashes(*range(5_000)), prefix=False, ranks=bytes([1, 2]))
    assert [found.slots[at - 1] for at in found.column] == expected


def test_dropping_a_node_goes_in_bounded_steps_and_leaves_the_others_alone(directory: Directory) -> None:
    a, b = directory.allocate(), directory.allocate()
    directory.add(a, NS, hashes(*range(500)))
    directory.add(a, OTHER, hashes(*range(500)))
    directory.add(b, NS, hashes(*range(250, 750)))
    directory.drop_node(a)
    steps = 0
    while directory.sweeping:
        assert directory.sweep(64) <= 64
        directory.validate()
        steps += 1
    assert steps >= 1000 // 64
    assert holders(directory, 0, 300, 700) == [None, b, b]
    assert len(directory) == 500
    assert directory.allocate() == a


def test_a_slot_that_was_given_back_takes_nothing_and_is_not_reused_before_it_is_empty(directory: Directory) -> None:
    a = directory.allocate()
    with pytest.raises(ValueError, match="in use"):
        directory.drop_some(a, 1)
    directory.add(a, NS, hashes(1, 2))
    directory.drop_node(a)
    with pytest.raises(ValueError, match="given back"):
        directory.add(a, NS, hashes(3))
    assert directory.drop_some(a, 1) == 1
    assert directory.allocate() != a
    directory.validate()


def test_dropping_a_namespace_leaves_the_others_and_can_be_filled_again_at_once(directory: Directory) -> None:
    a, b = directory.allocate(), directory.allocate()
    for slot in (a, b):
        directory.add(slot, NS, hashes(*range(100)))
        directory.add(slot, OTHER, hashes(*range(100)))
    directory.drop_node(b)
    directory.sweep(10)
    directory.drop_namespace(NS)
    directory.validate()
    assert holders(directory, 1) == [None]
    directory.add(a, NS, hashes(1))
    while directory.sweeping:
        directory.sweep(7)
        directory.validate()
    assert holders(directory, 1, 2) == [a, None]
    assert holders(directory, 1, 2, namespace=OTHER) == [a, a]


events = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "drop", "clear", "sweep"]),
        st.integers(0, 3),
        st.sampled_from([NS, OTHER]),
        st.lists(st.integers(0, 12), max_size=6),
    ),
    max_size=60,
)


@given(events)
@settings(max_examples=300)
def test_any_sequence_of_events_leaves_what_a_plain_model_has(sequence: list[tuple[str, int, bytes, list[int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:  # so that few keys make tables split and logs be compacted in steps
        patch.setattr("hicache_master.directory.TABLE_KEYS", 2)
        patch.setattr("hicache_master.directory.COMPACT_LEAST", 1)
        patch.setattr("hicache_master.directory.COMPACT_STEP", 1)
        compare_with_a_model(sequence)


def compare_with_a_model(sequence: list[tuple[str, int, bytes, list[int]]]) -> None:
    directory = Directory(max_keys=10_000)
    slots = [directory.allocate() for _ in range(4)]
    model: dict[int, set[tuple[bytes, int]]] = {node: set() for node in range(4)}
    for event, node, namespace, numbers in sequence:
        if event == "add":
            directory.add(slots[node], namespace, hashes(*numbers))
            model[node] |= {(namespace, number) for number in numbers}
        elif event == "remove":
            directory.remove(slots[node], namespace, hashes(*numbers))
            model[node] -= {(namespace, number) for number in numbers}
        elif event == "drop":
            directory.drop_node(slots[node])
            slots[node] = directory.allocate()
            model[node] = set()
        elif event == "clear":
            directory.drop_namespace(namespace)
            model = {node: {key for key in keys if key[0] != namespace} for node, keys in model.items()}
        else:
            directory.sweep(3)
        directory.validate()
    for node, keys in model.items():
        assert directory.keys_of(slots[node]) == len(keys)
        for namespace, number in keys:
            found = directory.find(namespace, hashes(number), prefix=True, ranks=only(slots[node]))
            assert found == (b"\1", b"", [slots[node]])
