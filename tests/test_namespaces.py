"""Identity: what differs in one thing never shares a page, what differs in nothing always does, in any process."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_mooncake.client.geometry import PoolGeometry
from hicache_mooncake.client.identity import Weights, namespace_of
from hicache_mooncake.config import Settings, load_settings
from hicache_mooncake.keys import Namespace
from hicache_mooncake.protocol import Run
from tests.conftest import ROOT, environment

FIELDS = [field.name for field in dataclasses.fields(Namespace)]

# What an unframed or untyped digest would confuse: nothing and the words for it, numbers and their digits, separators, the tags
# and names that the digest itself uses.
TEXT_TRAPS = ["", "0", "1", "-1", "None", "null", "n", "s", "i0", "t", "()", "a", "ab", "a/b", "a-b", "a_b", "a,b", "a b",
              "A", "a ", "\0", "a\0", "a\0b", "\x01\0\0\0", "kv", "model", "smodel", "tp_rank", "é", "e\u0301",
              "\u0661"]  # fmt: skip
NUMBER_TRAPS = [0, 1, -1, 2, 10, 11, 2**31, 2**32, 2**63, -(2**63)]
TUPLE_TRAPS: list[tuple[int, ...]] = [(), (0,), (1, 2), (12,), (1, 2, 3), (12, 3), (1, 23), (123,), (-1,), (1, -1)]
TEXT_TUPLE_TRAPS: list[tuple[str, ...]] = [
    (),
    ("",),
    ("", ""),
    ("a", "b"),
    ("a,b",),
    ("ab",),
    ("sa", "b"),
    ("1",),
    ("a=b", "c"),
    ("a", "=bc"),
]
TRAPS: dict[str, list[Any]] = {
    "str": TEXT_TRAPS,
    "int": NUMBER_TRAPS,
    "tuple[int, ...]": TUPLE_TRAPS,
    "tuple[str, ...]": TEXT_TUPLE_TRAPS,
}
TEXTS = st.sampled_from(TEXT_TRAPS) | st.text(max_size=8)
NUMBERS = st.sampled_from(NUMBER_TRAPS) | st.integers(-5, 300)
TUPLES = st.sampled_from(TUPLE_TRAPS) | st.lists(NUMBERS, max_size=3).map(tuple)
TEXT_TUPLES = st.sampled_from(TEXT_TUPLE_TRAPS) | st.lists(TEXTS, max_size=3).map(tuple)
STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "str": TEXTS,
    "int": NUMBERS,
    "tuple[int, ...]": TUPLES,
    "tuple[str, ...]": TEXT_TUPLES,
}


def kind_of(field: dataclasses.Field[Any]) -> tuple[str, bool]:
    """(type of a field, whether it may be None)."""
    kinds = [part.strip() for part in str(field.type).split("|")]
    (kind,) = [part for part in kinds if part != "None"]
    return kind, "None" in kinds


def strategy_of(field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    kind, optional = kind_of(field)
    return st.none() | STRATEGIES[kind] if optional else STRATEGIES[kind]


VALUES = {field.name: strategy_of(field) for field in dataclasses.fields(Namespace)}
NAMESPACES = st.builds(Namespace, **VALUES)


@given(NAMESPACES, st.sampled_from(FIELDS), st.data())
@settings(max_examples=500)
def test_a_difference_in_one_field_is_a_difference(one: Namespace, field: str, data: st.DataObject) -> None:
    value = data.draw(VALUES[field].filter(lambda value: value != getattr(one, field)), label=field)
    other = dataclasses.replace(one, **{field: value})
    assert one.digest() != other.digest()
    assert one.differences(other) == [field]


@given(st.sampled_from(FIELDS), st.lists(NAMESPACES, min_size=2, max_size=2), st.data())
def test_every_value_of_a_field_has_a_digest_of_its_own(field: str, bases: list[Namespace], data: st.DataObject) -> None:
    """In this namespace and in that one: what a value does to the digest does not depend on the other fields."""
    values = data.draw(st.lists(VALUES[field], min_size=4, max_size=8, unique_by=repr), label=field)
    for base in bases:
        assert len({dataclasses.replace(base, **{field: value}).digest() for value in values}) == len(values)


@given(NAMESPACES, st.sampled_from(FIELDS), st.sampled_from(FIELDS))
def test_a_value_in_another_field_is_another_value(one: Namespace, a: str, b: str) -> None:
    other = dataclasses.replace(one, **{a: getattr(one, b), b: getattr(one, a)})
    assert (one.digest() == other.digest()) == (one == other)


@given(NAMESPACES, st.text(max_size=6), st.data())
def test_fields_do_not_run_into_each_other(base: Namespace, text: str, data: st.DataObject) -> None:
    """The same characters, cut in other places."""
    fields = [field.name for field in dataclasses.fields(Namespace) if str(field.type) == "str"]
    a, b = data.draw(st.tuples(st.sampled_from(fields), st.sampled_from(fields)).filter(lambda pair: pair[0] != pair[1]))
    digests = {dataclasses.replace(base, **{a: text[:cut], b: text[cut:]}).digest() for cut in range(len(text) + 1)}
    assert len(digests) == len(text) + 1


@given(NAMESPACES, NAMESPACES)
def test_equal_namespaces_and_no_others_have_one_digest(one: Namespace, other: Namespace) -> None:
    assert (one.digest() == other.digest()) == (one == other)
    rebuilt = Namespace(**json.loads(json.dumps(dataclasses.asdict(one)), object_hook=_tuples))
    assert rebuilt == one
    assert rebuilt.digest() == one.digest()
    assert len(one.digest()) == 16


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


ELSEWHERE = """
import json, sys
from hicache_mooncake.keys import Namespace
for line in sys.stdin:
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in reversed(json.loads(line).items())}
    print(Namespace(**fields).digest().hex())
"""


@given(NAMESPACES, NAMESPACES)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_process_makes_the_same_digests(one: Namespace, other: Namespace) -> None:
    """P49: nothing of hash(), of a dict's order, or of this process is in a key."""
    namespaces = [one, other]
    for field in dataclasses.fields(Namespace):
        kind, optional = kind_of(field)
        traps = [*TRAPS[kind], None] if optional else TRAPS[kind]
        namespaces += [dataclasses.replace(one, **{field.name: value}) for value in traps]
    lines = "\n".join(json.dumps(dataclasses.asdict(namespace)) for namespace in namespaces)
    here = [namespace.digest().hex() for namespace in namespaces]
    for seed in ("0", "1", "4242"):
        there = subprocess.run(
            [sys.executable, "-c", ELSEWHERE], input=lines, cwd=ROOT, text=True, check=True, capture_output=True,
            env=environment() | {"PYTHONHASHSEED": seed},
        ).stdout.split()  # fmt: skip
        assert there == here


# --------------------------------------------------------------------------- from SGLang's configuration and pool


RANKS = st.integers(0, 9)
SIZES = st.integers(1, 9)
NAMES = TEXTS.filter(bool)

CONFIG: dict[str, st.SearchStrategy[Any]] = {
    "model_name": NAMES,
    "tp_rank": RANKS,
    "tp_size": SIZES,
    "pp_rank": RANKS,
    "pp_size": SIZES,
    "attn_cp_rank": RANKS,
    "attn_cp_size": SIZES,
    "dcp_rank": RANKS,
    "dcp_size": SIZES,
}
POOL: dict[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from(["torch.bfloat16", "torch.float16", "torch.uint8", "torch.float8_e4m3fn"]),
    "layout": st.sampled_from(["layer_first", "page_first", "page_first_direct", "page_head"]),
    "storage_format_tag": NAMES,
    "layer_num": SIZES,
    "start_layer": RANKS,
    "end_layer": RANKS,
    "target_layer_num": SIZES,
    "head_num": SIZES,
    "head_dim": SIZES,
    "v_head_dim": SIZES,
    "kv_cache_dim": SIZES,
    "class": st.sampled_from(["MHATokenToKVPoolHost", "MambaPoolHost", "PoolOfTomorrow"]),
}
GEOMETRY: dict[str, st.SearchStrategy[Any]] = {
    "pool": st.sampled_from(["kv", "indexer", "swa", "draft", "pool_of_tomorrow"]),
    "page_tokens": SIZES,
    "run_bytes": st.lists(SIZES, min_size=1, max_size=3).map(tuple),
}
OPERATOR: dict[str, st.SearchStrategy[Any]] = {
    "tag": TEXTS,
    "tenant": NAMES,
    "model_id": TEXTS,
    "weight_version": TEXTS,
}
EVERYTHING = CONFIG | POOL | GEOMETRY | OPERATOR
ENGINES = st.fixed_dictionaries(EVERYTHING)
DEFAULTS: Settings = load_settings({}, {}, {"socket": "/tmp/none.sock", "node": "external"})[0]


def namespace(engine: dict[str, Any], **config: Any) -> Namespace:
    """As the backend computes it. `config`: more fields of the storage config; None takes one away."""
    fields = {name: engine[name] for name in CONFIG} | {"is_mla_model": False} | config
    pool = type(engine["class"], (SimpleNamespace,), {})(**{name: engine[name] for name in POOL if name != "class"})
    geometry = PoolGeometry(
        pool=engine["pool"],
        runs=tuple(Run(0, length, length) for length in engine["run_bytes"]),
        page_tokens=engine["page_tokens"],
        page_count=4,
        regions=(),
        fds=(),
        affine=True,
    )
    operator = dataclasses.replace(DEFAULTS, tag=engine["tag"], tenant=engine["tenant"], model_id=engine["model_id"])
    weights = Weights(engine["model_id"], engine["weight_version"])
    given_ = SimpleNamespace(**{name: value for name, value in fields.items() if value is not None})
    return namespace_of(given_, pool, geometry, operator, weights)


@given(ENGINES, st.sampled_from(sorted(EVERYTHING)), st.data())
@settings(max_examples=400)
def test_engines_that_differ_in_one_attribute_differ(engine: dict[str, Any], what: str, data: st.DataObject) -> None:
    value = data.draw(EVERYTHING[what].filter(lambda value: value != engine[what]), label=what)
    assert namespace(engine).digest() != namespace(engine | {what: value}).digest()


@given(ENGINES, st.sampled_from(sorted({*EVERYTHING} - {"tp_rank", "tp_size", "class"})), st.data())
def test_ranks_of_replicated_pools_share_and_nobody_else(engine: dict[str, Any], what: str, data: st.DataObject) -> None:
    """MLA: the tensor-parallel rank and size say nothing about the primary pool's bytes; everything else does."""
    engine = engine | {"pool": "kv", "class": "MLATokenToKVPoolHost"}
    one = namespace(engine, is_mla_model=True)
    other_rank = {"tp_rank": data.draw(RANKS), "tp_size": data.draw(SIZES)}
    assert namespace(engine | other_rank, is_mla_model=True).digest() == one.digest()
    value = data.draw(EVERYTHING[what].filter(lambda value: value != engine[what]), label=what)
    assert namespace(engine | {what: value}, is_mla_model=True).digest() != one.digest()
    assert namespace(engine, is_mla_model=False).digest() != one.digest()


@given(ENGINES)
def test_what_a_release_does_not_tell_is_neutral(engine: dict[str, Any]) -> None:
    """An engine of 0.5.9, whose config has no context parallelism, shares with one of a newer release that does not use it."""
    neutral = {"attn_cp_rank": 0, "attn_cp_size": 1, "dcp_rank": 0, "dcp_size": 1}
    missing = dict.fromkeys(neutral, None)
    assert namespace(engine, **missing).digest() == namespace(engine, **neutral).digest()
    assert namespace(engine, dp_rank=3, a_field_of_tomorrow=1).digest() == namespace(engine).digest()


@given(ENGINES, st.integers(1, 9))
def test_the_logical_page_size_is_the_page_size(engine: dict[str, Any], factor: int) -> None:
    """Under decode context parallelism a page has more tokens than slots here."""
    alone = namespace(engine)
    logical = namespace(engine, logical_page_size=engine["page_tokens"] * factor)
    assert (alone.digest() == logical.digest()) == (factor == 1)


@pytest.mark.parametrize("model_name", [None, ""])
def test_a_page_without_a_models_name_is_nobodys(model_name: str | None) -> None:
    engine = {
        "model_name": "m", "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "dcp_rank": 0, "dcp_size": 1, "dtype": "d", "layout": "l", "storage_format_tag": None, "layer_num": 1,
        "start_layer": 0, "end_layer": 1, "target_layer_num": 1, "head_num": 1, "head_dim": 1, "v_head_dim": 1,
        "kv_cache_dim": None, "class": "P", "pool": "kv", "page_tokens": 1, "run_bytes": (1,), "tag": "", "tenant": "default",
        "model_id": "", "weight_version": "",
    }  # fmt: skip
    assert namespace(engine).digest()
    with pytest.raises(ValueError, match="--served-model-name"):
        namespace(engine | {"model_name": model_name})
