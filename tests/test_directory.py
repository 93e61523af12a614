"""The directory keeps both directions in step, answers only who may be answered, and drops in bounded steps."""

from __future__ import annotations

import hashlib
import random

import pytest
from hicache_master.directory import MAX_PEERS_PER_REPLY, Directory
from hypothesis import given
from hypothesis import strategies as st

NS, OTHER = b"n" * 16, b"o" * 16
EVERYBODY = -1


def hashes(*numbers: int) -> bytes:
    return b"".join(hashlib.sha256(number.to_bytes(8, "little")).digest() for number in numbers)


@pytest.fixture
def directory() -> Directory:
    return Directory(max_keys=10_000, rng=random.Random(1))


def holders(directory: Directory, *numbers: int, namespace: bytes = NS, exclude: int | None = None) -> list[int | None]:
    column, slots = directory.lookup(namespace, hashes(*numbers), exclude, False, EVERYBODY)
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
    assert directory.lookup(NS, hashes(1, 2, 3, 4), None, True, EVERYBODY) == (b"\1\1", [slot])
    assert directory.lookup(NS, hashes(1, 2, 3, 4), None, False, EVERYBODY) == (b"\1\1\0\1", [slot])
    assert directory.lookup(OTHER, hashes(1), None, True, EVERYBODY) == (b"", [])
    assert directory.lookup(OTHER, hashes(1), None, False, EVERYBODY) == (b"\0", [])


def test_the_asker_and_slots_that_are_not_allowed_are_never_an_answer(directory: Directory) -> None:
    a, b = directory.allocate(), directory.allocate()
    directory.add(a, NS, hashes(1))
    directory.add(b, NS, hashes(1, 2))
    assert holders(directory, 1, 2, exclude=b) == [a, None]
    assert directory.lookup(NS, hashes(1, 2), None, False, 1 << a) == (b"\1\0", [a])
    assert directory.lookup(NS, hashes(1), a, True, 1 << a) == (b"", [])


def test_one_answer_names_few_nodes_and_many_answers_name_all(directory: Directory) -> None:
    slots = [directory.allocate() for _ in range(4)]
    for slot in slots:
        directory.add(slot, NS, hashes(*range(50)))
    seen = set()
    for _ in range(100):
        _, named = directory.lookup(NS, hashes(*range(50)), None, True, EVERYBODY)
        assert len(named) == 1
        seen.update(named)
    assert seen == set(slots)


def test_no_answer_names_more_nodes_than_a_column_of_bytes_can(directory: Directory) -> None:
    count = MAX_PEERS_PER_REPLY + 45
    for number in range(count):
        directory.add(directory.allocate(), NS, hashes(number))
    directory.validate()
    column, slots = directory.lookup(NS, hashes(*range(count)), None, True, EVERYBODY)
    assert len(column) == len(slots) == MAX_PEERS_PER_REPLY
    column, slots = directory.lookup(NS, hashes(*range(count), 0), None, False, EVERYBODY)
    assert len(slots) == MAX_PEERS_PER_REPLY
    assert column.count(0) == 45
    assert column[-1] == 1


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
    max_size=40,
)


@given(events)
def test_any_sequence_of_events_leaves_what_a_plain_model_has(sequence: list[tuple[str, int, bytes, list[int]]]) -> None:
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
            assert directory.lookup(namespace, hashes(number), None, True, 1 << slots[node]) == (b"\1", [slots[node]])
