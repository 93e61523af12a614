"""Configuration: layers, grammar, every setting of the built-in backend, and refusals that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from hicache_mooncake import config_values
from hicache_mooncake.config import ConfigError, Settings, load_settings, parse_size, split_address
from hicache_mooncake.config_docs import markdown
from hicache_mooncake.config_table import BY_ATTRIBUTE, BY_KEY, MOONCAKE_BY_ENV, MOONCAKE_BY_KEY, SETTINGS, SGLANG_KEYS
from hicache_mooncake.config_values import parse_masters
from hicache_mooncake.transfer import addresses
from hicache_mooncake.transfer.addresses import InterfaceAddress

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30


def load(extra: dict[str, object] | None = None, /, explicit: dict[str, object] | None = None, **environ: str) -> Settings:
    return load_settings(extra, environ, explicit)[0]


def notices(extra: dict[str, object] | None = None, /, **environ: str) -> list[str]:
    return load_settings(extra, environ)[1]


# --------------------------------------------------------------------------- layers


def test_with_nothing_set_the_host_gets_an_embedded_node_and_no_master() -> None:
    settings = load()
    assert settings.node == "embedded"
    assert settings.masters == ()
    assert settings.listen == "127.0.0.1:0"
    assert settings.socket == f"/tmp/hicache-mooncake-{os.getuid()}/node.sock"
    assert settings.name == os.uname().nodename
    assert set(settings.sources.values()) == {"default"}
    assert notices() == []


def test_each_layer_overrides_the_one_below_and_tells_so(tmp_path: Path) -> None:
    file = tmp_path / "pool.json"
    file.write_text(json.dumps({"dram": "1gb"}))
    environ = {"HICACHE_MOONCAKE_CONFIG": str(file)}
    steps: list[tuple[int, str]] = []

    def step(extra: dict[str, object] | None = None, explicit: dict[str, object] | None = None) -> None:
        settings = load_settings(extra, environ, explicit)[0]
        steps.append((settings.dram_bytes // GIB, settings.sources["dram_bytes"]))

    step()
    environ["MOONCAKE_GLOBAL_SEGMENT_SIZE"] = "2gb"
    step()
    environ["HICACHE_MOONCAKE_DRAM"] = "3gb"
    step()
    step({"global_segment_size": "4gb"})
    step({"global_segment_size": "4gb"}, {"dram": "5gb"})
    assert steps == [
        (1, f"file {file} dram"),
        (2, "MOONCAKE_GLOBAL_SEGMENT_SIZE"),
        (3, "HICACHE_MOONCAKE_DRAM"),
        (4, "extra_config global_segment_size"),
        (5, "--dram"),
    ]


def test_layers_are_merged_setting_by_setting() -> None:
    settings = load({"tag": "blue"}, MOONCAKE_MASTER="127.0.0.1:50051", HICACHE_MOONCAKE_TENANT="a")
    assert (settings.tag, settings.masters, settings.tenant) == ("blue", ("127.0.0.1:50051",), "a")


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load(MOONCAKE_MASTER="", HICACHE_MOONCAKE_DRAM=" ", MOONCAKE_DEVICE="").sources == load().sources
    assert notices(MOONCAKE_DEVICE="", MOONCAKE_TE_META_DATA_SERVER="") == []


def test_an_explicit_none_counts_as_not_given_and_an_empty_list_of_masters_as_none() -> None:
    settings = load(explicit={"dram": None, "master": ""}, MOONCAKE_MASTER="10.0.0.1:1")
    assert settings.masters == ()
    assert settings.sources["masters"] == "--master"
    assert settings.sources["dram_bytes"] == "default"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.json", '{"master_server_address": "127.0.0.1:1,localhost", "tag": "x"}'),
        ("c.toml", 'masters = ["127.0.0.1:1", "localhost"]\ntag = "x"\n'),
    ],
)
def test_the_config_file_is_json_or_toml(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    settings = load(SGLANG_HICACHE_MOONCAKE_CONFIG_PATH=str(tmp_path / name))
    assert settings.masters == ("127.0.0.1:1", "localhost:50051")
    assert settings.tag == "x"


def test_the_config_file_named_last_in_the_order_of_layers_is_read(tmp_path: Path) -> None:
    paths = []
    for tag in ("sglang", "own", "option"):
        paths.append(str(tmp_path / f"{tag}.json"))
        Path(paths[-1]).write_text(json.dumps({"tag": tag}))
    environ = {"SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": paths[0]}
    assert load_settings(None, environ)[0].tag == "sglang"
    environ["HICACHE_MOONCAKE_CONFIG"] = paths[1]
    assert load_settings(None, environ)[0].tag == "own"
    assert load_settings(None, environ, {"config": paths[2]})[0].tag == "option"


@pytest.mark.parametrize("content", [None, "{", "[1]", " " * (1 << 20) + "{}"])
def test_a_config_file_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"config file .*bad\.json.* \(from HICACHE_MOONCAKE_CONFIG\)"):
        load(HICACHE_MOONCAKE_CONFIG=str(path))


def test_every_setting_can_be_given_in_every_layer() -> None:
    samples: dict[str, object] = {
        "socket": "/run/x.sock",
        "node": "external",
        "dram_bytes": "2gb",
        "listen": "0.0.0.0:7000",
        "advertise": "h:7000",
        "masters": "m:1",
        "name": "n7",
        "host_id": "rack-3-host-7",
        "key_file": "/etc/hicache-mooncake/key",
        "allow_unauthenticated": "true",
        "deadline_s": 1.5,
        "copy_mode": "segment",
        "model_id": "org/m@r1",
        "weight_version": "7",
        "share_weight_versions": "true",
        "share_across_tp": "true",
        "kv_heads": "8",
        "tag": "t",
        "tenant": "a",
        "metrics": "127.0.0.1:9404",
        "promise_s": 3,
        "promise_share": 0.25,
        "high_watermark": 0.8,
        "low_watermark": 0.5,
        "eviction": "cost",
        "spill": "false",
        "replicate_after": 0,
        "drain_s": 2.5,
        "cold": "/mnt/nvme/pages",
        "cold_bytes": "1tb",
        "cold_floor": "10gb",
        "cold_after_loads": 3,
        "save_on_exit": "true",
        "hugepages": True,
        "transport": "verbs",
        "rdma_devices": "mlx5_0,mlx5_1:2",
        "gid_index": 3,
        "verbs_binding": "pyverbs",
        "interface": "eth1",
        "lanes": 4,
        "max_in_flight": "8mb",
        "copy_threads": 3,
        "numa": "off",
        "tls_cert": "/etc/hicache-mooncake/node.pem",
        "tls_key": "/etc/hicache-mooncake/node.key",
        "tls_ca": "/etc/hicache-mooncake/ca.pem",
        "skip_when_slower": 8000,
        "engine": "on",
        "transfer_timeout_s": 45,
        "log_level": "debug",
    }
    attributes = {field.name for field in fields(Settings)} - {"sources"}
    assert set(samples) == set(BY_ATTRIBUTE) == attributes
    by_env = load_settings(None, {BY_ATTRIBUTE[name].env: str(value) for name, value in samples.items()})[0]
    by_extra = load_settings({BY_ATTRIBUTE[name].keys[0]: value for name, value in samples.items()}, {})[0]
    by_explicit = load_settings(None, {}, samples)[0]
    assert by_env == by_extra == by_explicit
    assert all(getattr(by_env, name) != getattr(load(), name) for name in samples)


def test_the_options_of_a_node_start_it_with_the_same_settings() -> None:
    settings = load(
        {
            "master": "a:1,b:2",
            "listen": "0.0.0.0:0",
            "hugepages": True,
            "dram": "1gb",
            "metrics": "",
            "key_file": "/etc/pool.key",
            "spill": False,
            "drain_s": 3,
        }
    )
    options = settings.node_options()
    explicit: dict[str, object] = {"node": "embedded"}
    rest = iter(options)
    for option in rest:
        name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
        is_switch = isinstance(getattr(settings, BY_KEY[name].attribute), bool)
        explicit[name] = not option.startswith("--no-") if is_switch else next(rest)
    again = load_settings(None, {"MOONCAKE_MASTER": "other:1"}, explicit)[0]
    assert all(getattr(again, s.attribute) == getattr(settings, s.attribute) for s in SETTINGS if s.option)
    assert "--no-hugepages" in load().node_options()


def test_the_start_up_line_tells_what_was_set_and_where() -> None:
    line = load({"tag": "blue"}, MOONCAKE_MASTER="127.0.0.1").describe()
    assert "tag=blue (extra_config tag)" in line
    assert "masters=127.0.0.1:50051 (MOONCAKE_MASTER)" in line
    assert "deadline_s=2.0," in line
    assert "\n" not in line


# --------------------------------------------------------------------------- grammar


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4gb", 4 * GIB),
        ("4GB", 4 * GIB),
        ("4 GB", 4 * GIB),
        ("4g", 4 * GIB),
        ("1GiB", GIB),
        ("512MB", 512 << 20),
        ("512m", 512 << 20),
        ("1.5gb", 3 * GIB // 2),
        ("2tb", 2 << 40),
        ("64kb", 64 << 10),
        ("4294967296", 4 * GIB),
        ("100b", 100),
        (4294967296, 4 * GIB),
        (4294967296.0, 4 * GIB),
        (0, 0),
    ],
)
def test_sizes_are_read_as_mooncake_reads_them(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "gb", "-1", -1, "4 gigs", "4ib", "4xb", "0.3", 1.5, True, None, [], "1e9", "9" * 30])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="a size is"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [("h:1", ("h", 1)), ("10.0.0.1:0", ("10.0.0.1", 0)), ("[::1]:5", ("::1", 5)), (" h:1 ", ("h", 1))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


def test_a_port_may_be_left_out_where_there_is_a_default() -> None:
    assert split_address("h", 9) == ("h", 9)
    assert split_address("[::1]", 9) == ("::1", 9)


@pytest.mark.parametrize(
    "text", ["", "h", "h:", ":1", "h:x", "h:70000", "::1", "[::1]", "http://h:1", "a b:1", "h:-1", "h/x:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".{20}"):
        split_address(text)


def test_the_default_memory_is_four_gib_but_at_most_a_quarter_of_what_is_available() -> None:
    assert config_values.default_dram_bytes(64 * GIB) == 4 * GIB
    assert config_values.default_dram_bytes(8 * GIB) == 2 * GIB
    assert config_values.default_dram_bytes(None) == 4 * GIB
    assert config_values.default_dram_bytes(0) == 16 << 20


def test_available_memory_is_known_on_this_host() -> None:
    available = config_values.available_memory_bytes()
    assert available is not None
    assert available > 0


# --------------------------------------------------------------------------- socket and node


def test_the_default_socket_is_in_the_runtime_directory_if_there_is_one() -> None:
    assert load(XDG_RUNTIME_DIR="/run/user/7").socket == "/run/user/7/hicache-mooncake/node.sock"


@pytest.mark.parametrize("runtime", ["relative", "/" + "r" * 100])
def test_an_unusable_runtime_directory_is_passed_over_and_said_so(runtime: str) -> None:
    settings, said = load_settings(None, {"XDG_RUNTIME_DIR": runtime})
    assert settings.socket.startswith("/tmp/hicache-mooncake-")
    assert "XDG_RUNTIME_DIR" in said[0]


def test_a_socket_path_longer_than_sun_path_is_refused() -> None:
    assert load(HICACHE_MOONCAKE_SOCKET="/" + "s" * 106).socket == "/" + "s" * 106
    with pytest.raises(ConfigError, match=r"HICACHE_MOONCAKE_SOCKET .* 108 bytes .* at most 107"):
        load(HICACHE_MOONCAKE_SOCKET="/" + "s" * 107)
    with pytest.raises(ConfigError, match="at most 107"):
        load(HICACHE_MOONCAKE_SOCKET="/" + "é" * 60)


def test_a_socket_that_was_set_means_that_a_node_runs_already() -> None:
    settings = load({"socket": "unix:///run/x.sock"})
    assert (settings.node, settings.socket) == ("external", "/run/x.sock")
    assert settings.sources["node"] == "auto: the socket is set by extra_config socket"
    assert load({"socket": "/run/x.sock", "node": "embedded"}).node == "embedded"
    assert load(HICACHE_MOONCAKE_NODE="auto").node == "embedded"
    assert load({"node": "off"}, HICACHE_MOONCAKE_SOCKET="/run/x.sock").node == "off"


# --------------------------------------------------------------------------- what the built-in backend's settings mean

SILENT = {
    "MOONCAKE_MASTER": ("127.0.0.1:50051", "masters", ("127.0.0.1:50051",)),
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": ("2gb", "dram_bytes", 2 * GIB),
    "MOONCAKE_LOCAL_HOSTNAME": ("h7", "name", "h7"),
    "LOCAL_HOSTNAME": ("h7:12345", "advertise", "h7:0"),
    "MOONCAKE_TENANT_ID": ("a", "tenant", "a"),
    "MOONCAKE_DEVICE": ("mlx5_0,mlx5_1:2", "rdma_devices", ("mlx5_0", "mlx5_1:2")),
    "MC_GID_INDEX": ("3", "gid_index", 3),
    "MC_FORCE_TCP": ("1", "transport", "tcp"),
    "MC_TRANSFER_TIMEOUT": ("45", "transfer_timeout_s", 45.0),
}
EXPLAINED = {
    "MOONCAKE_CLIENT": ("127.0.0.1:50052", "UNIX socket"),
    "MOONCAKE_TE_META_DATA_SERVER": ("http://127.0.0.1:8080/metadata", "not needed"),
    "MOONCAKE_PROTOCOL": ("rdma", "RDMA where both have a device that works"),
    "MC_IB_PORT": ("2", "mlx5_0:2"),
    "MC_TCP_BIND_ADDRESS": ("10.0.0.7", "`interface`"),
    "MOONCAKE_MASTER_METRICS_PORT": ("9003", "not needed"),
    "MOONCAKE_CHECK_SERVER": ("1", "hicache-mooncake doctor"),
    "MOONCAKE_ENABLE_SSD_OFFLOAD": ("true", "set `cold` to a directory"),
    "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": ("/mnt/ssd", "with enable_ssd_offload it sets `cold`"),
    "MOONCAKE_LOCAL_BUFFER_SIZE": ("16777216", "not needed"),
    "MOONCAKE_STORE_CHECKSUM": ("0", "every page is checksummed"),
}
ASKS_FOR_WHAT_IS = {
    "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
    "MOONCAKE_PROTOCOL": "tcp",
    "MC_FORCE_TCP": "0",
    "MOONCAKE_CHECK_SERVER": "false",
    "MOONCAKE_ENABLE_SSD_OFFLOAD": "0",
    "MOONCAKE_STANDALONE_STORAGE": "false",
    "MOONCAKE_LOCAL_BUFFER_SIZE": "0",
    "MOONCAKE_STORE_CHECKSUM": "1",
}


def test_the_built_in_backends_offload_sets_the_cold_tier() -> None:
    both = load(MOONCAKE_ENABLE_SSD_OFFLOAD="true", MOONCAKE_OFFLOAD_FILE_STORAGE_PATH="/mnt/ssd")
    assert both.cold == "/mnt/ssd"
    assert both.cold_bytes == 8 * both.dram_bytes
    assert load(MOONCAKE_ENABLE_SSD_OFFLOAD="false", MOONCAKE_OFFLOAD_FILE_STORAGE_PATH="/mnt/ssd").cold == ""
    assert load({"cold": "/a", "cold_bytes": "1tb"}, MOONCAKE_ENABLE_SSD_OFFLOAD="true").cold_bytes == 1 << 40


def test_every_variable_of_the_built_in_backend_is_covered_below() -> None:
    assert set(MOONCAKE_BY_ENV) == set(SILENT) | set(EXPLAINED) | {"MOONCAKE_STANDALONE_STORAGE"}


@pytest.mark.parametrize("name", SILENT)
def test_a_variable_that_sets_one_of_ours(name: str) -> None:
    raw, attribute, value = SILENT[name]
    settings, said = load_settings(None, {name: raw})
    assert getattr(settings, attribute) == value
    assert settings.sources[attribute] == name
    assert said == []


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_variable_that_means_nothing_here_is_explained_once(name: str) -> None:
    raw, words = EXPLAINED[name]
    said = notices(**{name: raw})
    assert len(said) == 1
    assert said[0].startswith(f"{name} = {raw!r}: ")
    assert words in said[0]


@pytest.mark.parametrize("name", ASKS_FOR_WHAT_IS)
def test_a_variable_that_asks_for_what_happens_anyway_is_no_news(name: str) -> None:
    settings, said = load_settings(None, {name: ASKS_FOR_WHAT_IS[name]})
    assert said == []
    assert settings == load()


@pytest.mark.parametrize("key", MOONCAKE_BY_KEY)
def test_every_extra_config_key_of_the_built_in_backend_acts_like_its_variable(key: str) -> None:
    names = MOONCAKE_BY_KEY[key].env
    values = {name: value[0] for name, value in (SILENT | EXPLAINED).items()}
    if key == "standalone_storage":
        assert load({key: True, "socket": "/run/x.sock"}).node == "external"
    elif not names:
        assert key in ("extra_backend_tag", "enable_group_semantics")
    else:
        by_env, env_said = load_settings(None, {names[0]: values[names[0]]})
        by_key, key_said = load_settings({key: values[names[0]]}, {})
        assert by_env == by_key
        assert [text.partition(": ")[2] for text in env_said] == [text.partition(": ")[2] for text in key_said]


def test_the_backend_tag_is_the_tag_and_group_semantics_are_always_on() -> None:
    assert load({"extra_backend_tag": "blue"}).tag == "blue"
    assert notices({"enable_group_semantics": True}) == []
    assert "always found together" in notices({"enable_group_semantics": False})[0]


def test_a_deployment_of_the_built_in_backend_starts_as_it_is_with_a_key_besides() -> None:
    settings, said = load_settings(
        {
            "master_server_address": "10.13.3.232:50051",
            "local_hostname": "localhost",
            "metadata_server": "http://127.0.0.1:8080/metadata",
            "global_segment_size": "4gb",
            "protocol": "rdma",
            "device_name": "",
            "tenant_id": "tenant-a",
            "prefetch_threshold": 256,
        },
        {"MOONCAKE_MASTER_PORT": "tcp://10.0.0.9:50051", "HICACHE_MOONCAKE_KEY_FILE": "/etc/pool.key"},
    )
    assert settings.masters == ("10.13.3.232:50051",)
    assert settings.dram_bytes == 4 * GIB
    assert settings.tenant == "tenant-a"
    assert settings.node == "embedded"
    assert [text.split(" = ")[0] for text in said] == [
        "extra_config local_hostname",
        "extra_config metadata_server",
        "extra_config protocol",
    ]


def test_devices_by_gpu_are_the_devices_of_the_host(tmp_path: Path) -> None:
    by_gpu = '{"0": "mlx5_0,mlx5_1", "1": ["mlx5_2", "mlx5_0"]}'
    assert load({"device_name": by_gpu}).rdma_devices == ("mlx5_0", "mlx5_1", "mlx5_2")
    path = tmp_path / "devices.json"
    path.write_text(by_gpu)
    assert load(MOONCAKE_DEVICE=str(path)).rdma_devices == ("mlx5_0", "mlx5_1", "mlx5_2")
    for wrong in ("{", '{"0": true}', str(tmp_path / "none.json"), "mlx5/0"):
        with pytest.raises(ConfigError, match="device_name"):
            load({"device_name": wrong})
    assert load({"rdma_devices": "mlx5_9"}, MOONCAKE_DEVICE="mlx5_0").rdma_devices == ("mlx5_9",)


def test_nodes_called_localhost_would_replace_each_other_so_the_hosts_name_stays() -> None:
    settings, said = load_settings({"local_hostname": "localhost"}, {})
    assert settings.name == os.uname().nodename
    assert settings.advertise == ""
    assert "names no host in a cluster" in said[0]


def test_a_processes_own_hostname_wins_over_the_one_sent_to_all_hosts_and_a_name_over_both() -> None:
    assert load({"local_hostname": "all"}, MOONCAKE_LOCAL_HOSTNAME="mine").name == "mine"
    assert load({"local_hostname": "all"}, LOCAL_HOSTNAME="other", MOONCAKE_LOCAL_HOSTNAME="mine").name == "mine"
    settings = load({"local_hostname": "all"}, MOONCAKE_LOCAL_HOSTNAME="mine", HICACHE_MOONCAKE_NAME="n7")
    assert (settings.name, settings.advertise) == ("n7", "mine:0")


@pytest.mark.parametrize("address", ["redis://h:6379", "k8s://ns/name", "a:1,etcd://b:2379", "http://h:1"])
def test_discovery_that_is_not_there_is_refused_and_what_is_there_named(address: str) -> None:
    with pytest.raises(ConfigError, match="etcd://host:2379/CLUSTER"):
        load(MOONCAKE_MASTER=address)


@pytest.mark.parametrize(
    ("given", "masters"),
    [
        ("etcd://10.0.0.1:2379/prod", "etcd://10.0.0.1:2379/prod"),
        ("etcd://10.0.0.1", "etcd://10.0.0.1:2379/default"),
        (" etcd://a:1, [::1]:2,a:1/x/ ", "etcd://a:1,[::1]:2/x"),
    ],
)
def test_masters_may_be_found_through_etcd(given: str, masters: str) -> None:
    settings = load(MOONCAKE_MASTER=given, HICACHE_MOONCAKE_KEY_FILE="/k")
    assert settings.masters == (masters,)
    assert parse_masters(",".join(settings.masters)) == (masters,)  # an option of the node that an engine starts


@pytest.mark.parametrize("value", ["etcd://", "etcd:///x", "etcd://h:0", "etcd://h/a/b", "etcd://h:x", ["etcd://h", "b:1"]])
def test_etcd_without_a_server_or_a_cluster_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r".{20}"):
        parse_masters(value)


def test_several_masters() -> None:
    environ = {"HICACHE_MOONCAKE_KEY_FILE": "/k"}
    assert load(MOONCAKE_MASTER="a:1, b ,[::1]:3,a:1", **environ).masters == ("a:1", "b:50051", "[::1]:3")
    assert load({"masters": ["a:1", "b:2,c:3"]}, **environ).masters == ("a:1", "b:2", "c:3")


# --------------------------------------------------------------------------- who is served without a key


@pytest.mark.parametrize(
    ("extra", "origin"),
    [
        ({"master": "10.0.0.1"}, "extra_config master"),
        ({"master": "localhost,10.0.0.1"}, "extra_config master"),
        ({"master": "127.evil.example:50051"}, "extra_config master"),
        ({"master": "etcd://10.0.0.1:2379/prod"}, "extra_config master"),
        ({"master": "etcd://localhost,10.0.0.1/prod"}, "extra_config master"),
        ({"listen": "0.0.0.0:7000"}, "extra_config listen"),
        ({"listen": "10.0.0.1:0"}, "extra_config listen"),
        ({"listen": "[::]:0"}, "extra_config listen"),
        ({"master": "localhost", "advertise": "h7"}, "default with a cluster"),
    ],
)
def test_without_a_key_other_hosts_are_neither_served_nor_used_and_both_ways_out_are_named(
    extra: dict[str, object], origin: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(extra)
    assert caught.value.origin == origin
    for words in ("hicache-mooncake keygen", "key_file", "HICACHE_MOONCAKE_KEY_FILE", "allow_unauthenticated"):
        assert words in caught.value.problem
    assert load(extra | {"key_file": "/k"}).key_file == "/k"
    assert load(extra, HICACHE_MOONCAKE_ALLOW_UNAUTHENTICATED="true").allow_unauthenticated
    # An engine whose node runs elsewhere reaches nobody but that node.
    assert load(extra | {"socket": "/run/x.sock"}).node == "external"


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"master": "localhost:1,127.0.0.1:2,[::1]:3", "listen": "127.0.0.1:0"},
        {"master": "etcd://127.0.0.1:2379/test"},
        {"listen": "[::1]:0"},
    ],
)
def test_this_hosts_own_addresses_need_no_key(extra: dict[str, object]) -> None:
    settings = load(extra)
    assert (settings.key_file, settings.allow_unauthenticated) == ("", False)


def test_a_key_makes_the_permission_to_do_without_one_void_and_that_is_said() -> None:
    settings, said = load_settings({"key_file": "/k", "allow_unauthenticated": True}, {})
    assert settings.key_file == "/k"
    assert "allow_unauthenticated" in said[0]
    assert "changes nothing" in said[0]


def test_the_path_of_a_key_is_absolute_since_a_node_runs_in_another_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert load({"key_file": "pool.key"}).key_file == f"{os.getcwd()}/pool.key"
    assert load({"key_file": "~/pool.key"}).key_file == "/home/u/pool.key"


# --------------------------------------------------------------------------- the host


def test_all_processes_of_a_machine_are_on_one_host_and_it_may_be_named() -> None:
    # P54: pods have names and addresses of their own; what they share is the kernel.
    assert load().host_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert load({"name": "pod-a"}).host_id == load({"name": "pod-b"}).host_id
    assert load(HICACHE_MOONCAKE_HOST_ID="k8s-node-7").host_id == "k8s-node-7"
    assert "--host-id" in load().node_options()


def test_where_there_is_no_boot_id_the_machine_id_counts_and_then_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/etc/machine-id": "0123456789abcdef\n"}
    monkeypatch.setattr(config_values, "_read", lambda path: files.get(path, ""))
    assert config_values.default_host_id() == "0123456789abcdef"
    files["/etc/machine-id"] = "\n"
    assert config_values.default_host_id() == os.uname().nodename


def test_a_client_address_says_that_a_node_runs_and_a_path_says_where() -> None:
    settings, said = load_settings({"standalone_storage": True, "client_server_address": "127.0.0.1:50052"}, {})
    assert settings.node == "external"
    assert "HICACHE_MOONCAKE_SOCKET" in said[0]
    assert "10.0.0.9 is not contacted" in notices(MOONCAKE_CLIENT="10.0.0.9:50052")[0]
    settings, said = load_settings({"client_server_address": "/run/x.sock"}, {})
    assert (settings.node, settings.socket, said) == ("external", "/run/x.sock", [])


# --------------------------------------------------------------------------- what is refused


def test_standalone_storage_without_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MOONCAKE_STANDALONE_STORAGE = '1' .* set socket \(HICACHE_MOONCAKE_SOCKET\)"):
        load(MOONCAKE_STANDALONE_STORAGE="1")
    assert load(MOONCAKE_STANDALONE_STORAGE="1", HICACHE_MOONCAKE_SOCKET="/run/x.sock").node == "external"


def test_standalone_storage_and_an_embedded_node_in_one_place_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="contradicts"):
        load({"node": "embedded", "standalone_storage": True, "socket": "/x"})
    # A later layer may still decide otherwise.
    assert load({"node": "embedded"}, MOONCAKE_STANDALONE_STORAGE="1", MOONCAKE_CLIENT="/x").node == "embedded"


def test_two_spellings_of_one_setting_in_one_place_must_agree() -> None:
    with pytest.raises(ConfigError, match=r"contradicts dram = '4gb' in the same place"):
        load({"dram": "4gb", "global_segment_size": "8gb"})
    assert load({"dram": "4gb", "global_segment_size": 4 * GIB}).dram_bytes == 4 * GIB


def test_a_node_without_memory_is_refused_only_where_it_would_be_started() -> None:
    with pytest.raises(ConfigError, match="node=external"):
        load(MOONCAKE_GLOBAL_SEGMENT_SIZE="0")
    assert load(MOONCAKE_GLOBAL_SEGMENT_SIZE="0", HICACHE_MOONCAKE_SOCKET="/run/x.sock").dram_bytes == 0


def test_a_size_without_its_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 bytes, less than 1 MiB"):
        load({"dram": 4})


@pytest.mark.parametrize("value", [0.05, 8, 10, 0, -1, "soon", "nan", True])
def test_a_deadline_outside_what_sglang_bears_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="extra_config deadline_s"):
        load({"deadline_s": value})


@pytest.mark.parametrize(
    "extra",
    [
        {"high_watermark": 0.5},
        {"low_watermark": 0.99},
        {"high_watermark": 0.9, "low_watermark": 0.9},
        {"high_watermark": 1.1},
        {"low_watermark": 0},
    ],
)
def test_watermarks_out_of_order_are_refused(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="watermark"):
        load(extra)
    assert load({"high_watermark": 1, "low_watermark": 0.5}).high_watermark == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("node", "maybe"),
        ("copy_mode", "rdma"),
        ("log_level", "loud"),
        ("hugepages", "2mb"),
        ("listen", "7000"),
        ("listen", "[fe80::1%eth0]:0"),
        ("listen", "[fe80::1]:7000"),
        ("advertise", "[fe80::1]"),
        ("metrics", "9404"),
        ("advertise", "0.0.0.0"),
        ("socket", "node.sock"),
        ("socket", ""),
        ("name", ""),
        ("name", "n" * 200),
        ("tag", "a\nb"),
        ("tag", "x" * 600),
        ("tag", ["a"]),
        ("master", "m:0"),
        ("host_id", "h" * 200),
        ("eviction", "random"),
        ("spill", "sometimes"),
        ("replicate_after", -1),
        ("replicate_after", 1.5),
        ("replicate_after", "nan"),
        ("drain_s", -1),
        ("drain_s", "inf"),
        ("key_file", "a\nb"),
        ("standalone_storage", "perhaps"),
        ("local_hostname", "a b"),
        ("client_server_address", "nowhere:port"),
    ],
)
def test_a_refusal_names_the_setting_its_source_and_its_value(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load({key: value})
    text = str(caught.value)
    assert text.startswith(f"{key} = {value!r} (from extra_config {key}): ")
    assert len(caught.value.problem) > 10


def test_with_a_master_elsewhere_the_node_must_be_reachable_from_elsewhere() -> None:
    key = {"HICACHE_MOONCAKE_KEY_FILE": "/k"}
    assert load(MOONCAKE_MASTER="10.0.0.1", **key).listen == "0.0.0.0:0"
    assert load(MOONCAKE_MASTER="etcd://10.0.0.1", **key).listen == "0.0.0.0:0"
    assert load(MOONCAKE_MASTER="[2001:db8::1]", **key).listen == "[::]:0"
    assert load(MOONCAKE_MASTER="[2001:db8::1],10.0.0.1", **key).listen == "0.0.0.0:0"
    assert load(MOONCAKE_MASTER="localhost").listen == "127.0.0.1:0"
    assert load(MOONCAKE_MASTER="localhost", MOONCAKE_LOCAL_HOSTNAME="h7", **key).listen == "0.0.0.0:0"
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:7000.*other hosts cannot reach a loopback address"):
        load({"listen": "127.0.0.1:7000"}, MOONCAKE_MASTER="10.0.0.1")
    with pytest.raises(ConfigError, match="advertise this host's own address"):
        load({"listen": "0.0.0.0:7000", "advertise": "localhost:7000"}, MOONCAKE_MASTER="10.0.0.1")
    forwarded = load({"listen": "127.0.0.1:7000", "advertise": "gate:7000"}, MOONCAKE_MASTER="10.0.0.1", **key)
    assert forwarded.advertise == "gate:7000"
    # Where no node is started, its addresses are not this process's business.
    assert load({"listen": "127.0.0.1:7000", "socket": "/x"}, MOONCAKE_MASTER="10.0.0.1").node == "external"


TLS = {"tls_cert": "/c.pem", "tls_key": "/k.pem", "tls_ca": "/a.pem"}


@pytest.mark.parametrize("missing", TLS)
def test_tls_needs_its_three_files(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"TLS needs {missing} as well"):
        load({name: path for name, path in TLS.items() if name != missing})
    with pytest.raises(ConfigError, match=r"TLS needs .* and .* as well"):
        load({missing: "/x"})
    assert load({missing: ""}).tls_cert == ""


def test_tls_and_a_transport_that_does_not_encrypt_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"transport = 'verbs'.*not encrypted"):
        load({**TLS, "transport": "verbs"})
    assert load({**TLS, "transport": "tcp"}).tls_ca == "/a.pem"
    assert load(TLS).transport == "auto"


INTERFACES = [
    InterfaceAddress("lo", "127.0.0.1", True),
    InterfaceAddress("lo", "::1", True),
    InterfaceAddress("eth0", "10.0.0.7", True),
    InterfaceAddress("eth1", "fe80::7", True),
    InterfaceAddress("eth1", "2001:db8::7", True),
]


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "table", lambda: INTERFACES)


@pytest.mark.usefixtures("interfaces")
def test_an_interface_is_the_address_that_is_listened_on() -> None:
    key = {"HICACHE_MOONCAKE_KEY_FILE": "/k"}
    assert load({"interface": "eth0"}, **key).listen == "10.0.0.7:0"
    assert load({"interface": "eth0", "listen": "0.0.0.0:7000"}, **key).listen == "10.0.0.7:7000"
    assert load({"interface": "eth1", "listen": "[::]:7000"}, **key).listen == "[2001:db8::7]:7000"
    assert load({"interface": "lo"}).listen == "127.0.0.1:0"
    assert "interface = eth0" in load({"interface": "eth0"}, **key).sources["listen"]
    named = load({"interface": "eth0"}, MOONCAKE_LOCAL_HOSTNAME="h7", MOONCAKE_MASTER="10.0.0.1", **key)
    assert (named.name, named.advertise) == ("h7", ""), "what was bound is advertised"
    assert load({"interface": "eth0", "advertise": "gate:1"}, **key).advertise == "gate:1"
    # The node that an engine starts is told both, and means the same.
    again, said = load_settings({"interface": "eth0", "listen": "10.0.0.7:0", "key_file": "/k"}, {})
    assert (again.listen, said) == ("10.0.0.7:0", [])


@pytest.mark.usefixtures("interfaces")
def test_an_address_says_more_than_an_interface() -> None:
    settings, said = load_settings({"interface": "eth0", "listen": "127.0.0.1:7000"}, {})
    assert settings.listen == "127.0.0.1:7000"
    assert "not used, since listen" in said[0]


@pytest.mark.usefixtures("interfaces")
def test_an_interface_that_gives_no_address_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"interface = 'eth9'.*only lo \(127\.0\.0\.1, ::1\), eth0 \(10\.0\.0\.7\)"):
        load({"interface": "eth9"})
    with pytest.raises(ConfigError, match="loopback address"):
        load({"interface": "lo"}, MOONCAKE_MASTER="10.0.0.1")
    with pytest.raises(ConfigError, match="no key"):
        load({"interface": "eth0"})
    # An engine whose node runs already has no need of one.
    assert load({"interface": "eth9", "socket": "/x"}).interface == "eth9"


def test_a_hostname_is_not_advertised_by_a_node_that_was_told_to_listen_on_loopback() -> None:
    settings, said = load_settings({"listen": "127.0.0.1:0", "master": "localhost"}, {"MOONCAKE_LOCAL_HOSTNAME": "h7"})
    assert (settings.name, settings.advertise) == ("h7", "")
    assert "not advertised" in said[0]


# --------------------------------------------------------------------------- misspellings


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("scoket", "socket"),
        ("deadline", "deadline_s"),
        ("copymode", "copy_mode"),
        ("global_segment_sze", "global_segment_size"),
    ],
)
def test_a_misspelt_key_is_refused_with_a_suggestion(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        load({key: "1"})


@pytest.mark.parametrize(
    ("name", "meant"), [("HICACHE_MOONCAKE_MASTERS", "MASTER"), ("HICACHE_MOONCAKE_DEADLINE", "DEADLINE_S")]
)
def test_a_misspelt_variable_is_refused_with_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean HICACHE_MOONCAKE_{meant}"):
        load_settings(None, {name: "x"})


def test_a_misspelt_variable_of_the_built_in_backend_is_only_noticed() -> None:
    assert "did you mean MOONCAKE_PROTOCOL" in notices(MOONCAKE_PROTOCL="tcp")[0]


def test_keys_that_sglang_reads_are_passed_over() -> None:
    assert notices(dict.fromkeys(SGLANG_KEYS, 1)) == []


def test_other_keys_are_noticed() -> None:
    assert "'colour' is not a setting" in notices({"colour": "blue"})[0]
    assert "did you mean 'prefetch_threshold'" in notices({"prefetch_treshold": 1})[0]


def test_variables_that_kubernetes_makes_of_service_names_are_passed_over() -> None:
    environ = {
        "HICACHE_MOONCAKE_MASTER_PORT": "tcp://10.0.0.9:50051",
        "HICACHE_MOONCAKE_MASTER_SERVICE_HOST": "10.0.0.9",
        "HICACHE_MOONCAKE_MASTER_SERVICE_PORT": "50051",
        "HICACHE_MOONCAKE_MASTER_SERVICE_PORT_RPC": "50051",
        "HICACHE_MOONCAKE_MASTER_PORT_50051_TCP_ADDR": "10.0.0.9",
        "MOONCAKE_MASTER_PORT_50051_TCP": "tcp://10.0.0.9:50051",
    }
    settings, said = load_settings(None, environ)
    assert settings == load()
    assert said == []


def test_the_plugins_own_variable_is_no_setting() -> None:
    assert notices(HICACHE_MOONCAKE_PLUGIN="off") == []


def test_an_unknown_explicit_value_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ConfigError, match="there is no such setting"):
        load_settings(None, {}, {"protocol": "tcp"})


# --------------------------------------------------------------------------- documentation and cost


def test_the_page_in_docs_is_what_the_code_says() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == markdown(), "run: python -m hicache_mooncake.config > docs/configuration.md"


def test_the_page_names_every_setting() -> None:
    page = markdown()
    for name in [*(s.env for s in SETTINGS), *(s.option for s in SETTINGS if s.option), *MOONCAKE_BY_ENV, *MOONCAKE_BY_KEY]:
        assert f"`{name}`" in page


def test_importing_the_configuration_pulls_in_nothing_heavy() -> None:
    code = "import sys, hicache_mooncake.config; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert not {"torch", "sglang", "zmq", "msgspec", "typer", "rich", "json", "difflib", "socket"} & set(loaded)
