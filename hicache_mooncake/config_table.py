"""Every setting: ours, with its spelling in each layer, and what each of the built-in Mooncake backend's own means here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hicache_mooncake.config_values import (
    COPY_MODES,
    DEFAULT_CLUSTER,
    DEFAULT_MASTER_PORT,
    ENGINES,
    EVICTIONS,
    LOG_LEVELS,
    MAX_COPY_THREADS,
    MAX_LANES,
    NODE_MODES,
    NUMA_MODES,
    VERBS_BINDINGS,
    choice_of,
    parse_advertise,
    parse_bool,
    parse_deadline,
    parse_devices,
    parse_drain,
    parse_fetches,
    parse_file,
    parse_fraction,
    parse_heads,
    parse_host_id,
    parse_listen,
    parse_masters,
    parse_metrics,
    parse_name,
    parse_promise,
    parse_promise_share,
    parse_rate,
    parse_size,
    parse_socket,
    parse_tenant,
    parse_text,
    parse_transfer_timeout,
    parse_transport,
    parse_window,
    whole_number,
)


@dataclass(frozen=True)
class Setting:
    """One row of the configuration: how it is spelled in each layer, how it is read, and what it means."""

    attribute: str
    env: str
    keys: tuple[str, ...]
    """Names in a config file and in extra_config; the first is the preferred one."""
    parse: Callable[[object], object]
    default: str
    meaning: str
    option: str = ""


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "socket",
        "HICACHE_MOONCAKE_SOCKET",
        ("socket",),
        parse_socket,
        "$XDG_RUNTIME_DIR/hicache-mooncake/node.sock, else /tmp/hicache-mooncake-$UID/node.sock",
        "UNIX socket on which the host's node serves its engines. An absolute path of at most 107 bytes. Engines and "
        "node must agree on it; "
        "where they run as different users or in different containers, set it for both.",
        "--socket",
    ),
    Setting(
        "node",
        "HICACHE_MOONCAKE_NODE",
        ("node",),
        choice_of(NODE_MODES),
        "auto",
        "Who runs the node. embedded: the first engine rank on the host starts it. external: it runs already (systemd, a "
        "container); engines only connect. "
        "auto: external if the socket was set, or a Mooncake setting says that a node runs already, else embedded. "
        "off: no pool, every lookup is a miss.",
    ),
    Setting(
        "dram_bytes",
        "HICACHE_MOONCAKE_DRAM",
        ("dram", "dram_bytes"),
        parse_size,
        "4gb, at most a quarter of the available memory",
        "Memory that this host's node gives to the pool. Bytes, or a number with kb, mb, gb, tb; all of them powers of 1024. "
        "It is the host's amount, whatever the number of engines and ranks on it.",
        "--dram",
    ),
    Setting(
        "listen",
        "HICACHE_MOONCAKE_LISTEN",
        ("listen",),
        parse_listen,
        "127.0.0.1:0; 0.0.0.0:0 when a master on another host is set, [::]:0 when all masters are named by IPv6 addresses",
        "host:port on which the node serves pages to other nodes; port 0 lets the system choose, IPv6 goes in brackets. "
        "An address that other hosts reach needs key_file: members prove that they have the key, and nobody else is served. "
        "Page bytes then travel in the clear (docs/security.md).",
        "--listen",
    ),
    Setting(
        "advertise",
        "HICACHE_MOONCAKE_ADVERTISE",
        ("advertise",),
        parse_advertise,
        "derived from listen",
        "host or host:port under which the other nodes reach this one, when that is not what it listens on.",
        "--advertise",
    ),
    Setting(
        "masters",
        "HICACHE_MOONCAKE_MASTER",
        ("master", "masters"),
        parse_masters,
        "none: this host's cache alone",
        f"Metadata masters, host:port separated by commas; port {DEFAULT_MASTER_PORT} if left out. Several are equals: "
        "each holds the whole directory, or the whole of its shard. Or etcd://host:2379,host:2379/CLUSTER: the masters that "
        f"registered there under that name (`{DEFAULT_CLUSTER}` if left out) with `hicache-mooncake master --etcd`.",
        "--master",
    ),
    Setting(
        "name",
        "HICACHE_MOONCAKE_NAME",
        ("name",),
        parse_name,
        "the host's name",
        "Name of the node in the cluster. Must be unique: a node that joins under a name replaces the one that had it.",
        "--name",
    ),
    Setting(
        "host_id",
        "HICACHE_MOONCAKE_HOST_ID",
        ("host_id",),
        parse_host_id,
        "the kernel's boot id, else /etc/machine-id, else the host's name",
        "Which physical host this is. Nodes that say the same are one host: pages are read from a node on the reader's own "
        "host first. The default is alike in all containers of a machine; where it is not (sandboxes with a kernel of their "
        "own), set it to the name of the Kubernetes node.",
        "--host-id",
    ),
    Setting(
        "key_file",
        "HICACHE_MOONCAKE_KEY_FILE",
        ("key_file",),
        parse_file,
        "none",
        "The cluster's key, made once by `hicache-mooncake keygen FILE` and copied to every host: nodes, masters and "
        "`hicache-mooncake status` need it, engines only for disaggregation between hosts (`engine`). "
        "Without it only loopback addresses are served and used.",
        "--key-file",
    ),
    Setting(
        "allow_unauthenticated",
        "HICACHE_MOONCAKE_ALLOW_UNAUTHENTICATED",
        ("allow_unauthenticated",),
        parse_bool,
        "false",
        "Serve and use other hosts without a key: everybody who reaches the ports may then read, add and clear pages.",
        "--allow-unauthenticated",
    ),
    Setting(
        "deadline_s",
        "HICACHE_MOONCAKE_DEADLINE_S",
        ("deadline_s",),
        parse_deadline,
        "2.0",
        "Longest time one storage call may take before what is left of it counts as a miss. Above 0.05 and below 8 "
        "seconds: SGLang gives up on its storage "
        "threads after 10.",
    ),
    Setting(
        "promise_s",
        "HICACHE_MOONCAKE_PROMISE_S",
        ("promise_s",),
        parse_promise,
        "auto: 5 on a decode server with radix cache and HiCache, else 0",
        "How long pages stay that a lookup found, until the engine has loaded them. A decode server tells its prefill server "
        "that it has them, and SGLang fails the request when one then cannot be loaded. At most 60. 0: they may go at any "
        "time. With more than 0 a lookup takes half a second at most, as SGLang's scheduler waits for it.",
    ),
    Setting(
        "promise_share",
        "HICACHE_MOONCAKE_PROMISE_SHARE",
        ("promise_share",),
        parse_promise_share,
        "0.125",
        "Part of the node's memory that pages promised so may take. Beyond it the oldest promises are dropped, and counted "
        "(hicache_node_promises_dropped). At most 0.5.",
        "--promise-share",
    ),
    Setting(
        "copy_mode",
        "HICACHE_MOONCAKE_COPY_MODE",
        ("copy_mode",),
        choice_of(COPY_MODES),
        "auto",
        "How page bytes reach the engine's host memory. memfd: shared memory (SGLang 0.5.18 and newer). process_vm: "
        "process_vm_readv/writev, one system call a "
        "batch. segment: the engine copies through the node's mapped segment. auto: the first of them that works.",
    ),
    Setting(
        "model_id",
        "HICACHE_MOONCAKE_MODEL_ID",
        ("model_id",),
        parse_text,
        "a fingerprint of the checkpoint",
        "Which weights these are. By default a fingerprint of the model's files, the same wherever they lie, so that two "
        "checkpoints under one served name never share. Set it, alike on all engines, where engines must share although their "
        "files differ.",
    ),
    Setting(
        "weight_version",
        "HICACHE_MOONCAKE_WEIGHT_VERSION",
        ("weight_version",),
        parse_text,
        "none",
        "Version of the weights. Change it with every weight update that SGLang is not told of: pages computed with other "
        "weights are then misses. A live update through SGLang names its own (weight_version in the request).",
    ),
    Setting(
        "share_weight_versions",
        "HICACHE_MOONCAKE_SHARE_WEIGHT_VERSIONS",
        ("share_weight_versions",),
        parse_bool,
        "false",
        "Engines whose weights were updated live, not from files, share pages if the updates named one weight_version. Only "
        "for versions that never come again: a trainer that counts 1, 2, 3 in every run needs another `tag` for each. Without "
        "it such pages are the rank's own.",
    ),
    Setting(
        "share_across_tp",
        "HICACHE_MOONCAKE_SHARE_ACROSS_TP",
        ("share_across_tp",),
        parse_bool,
        "false",
        "Store the KV heads of a multi-head model one by one, so that engines of other tensor-parallel sizes and host layouts "
        "read them too. Set it on all of them. MLA models share without it.",
    ),
    Setting(
        "kv_heads",
        "HICACHE_MOONCAKE_KV_HEADS",
        ("kv_heads",),
        parse_heads,
        "read from SGLang's model configuration",
        "KV heads of the model in all, for share_across_tp, where SGLang's own account of them is not certain enough. A wrong "
        "number makes wrong pages: it must be that of every attention layer, spread over the ranks in order.",
    ),
    Setting(
        "tag",
        "HICACHE_MOONCAKE_TAG",
        ("tag",),
        parse_text,
        "none",
        "Free text that separates deployments which share a pool. Engines share pages only if it is equal.",
    ),
    Setting(
        "tenant",
        "HICACHE_MOONCAKE_TENANT",
        ("tenant",),
        parse_tenant,
        "default",
        "Tenant whose pages these are. Tenants never see each other's pages.",
    ),
    Setting(
        "metrics",
        "HICACHE_MOONCAKE_METRICS",
        ("metrics",),
        parse_metrics,
        "off",
        "host:port of the node's /metrics for Prometheus. Off unless set, because a port that nobody chose is a port "
        "that nobody scrapes; "
        "`hicache-mooncake status` shows the main figures without it.",
        "--metrics",
    ),
    Setting(
        "high_watermark",
        "HICACHE_MOONCAKE_HIGH_WATERMARK",
        ("high_watermark",),
        parse_fraction,
        "0.95",
        "Part of the node's memory above which it evicts.",
        "--high-watermark",
    ),
    Setting(
        "low_watermark",
        "HICACHE_MOONCAKE_LOW_WATERMARK",
        ("low_watermark",),
        parse_fraction,
        "0.90",
        "Part of the node's memory down to which it evicts. Below high_watermark.",
        "--low-watermark",
    ),
    Setting(
        "eviction",
        "HICACHE_MOONCAKE_EVICTION",
        ("eviction",),
        choice_of(EVICTIONS),
        "adaptive",
        f"Which pages go first when room is needed: {', '.join(EVICTIONS)}. Under each of them the tail of a chain of pages "
        "goes before its head. docs/eviction.md compares them.",
        "--eviction",
    ),
    Setting(
        "spill",
        "HICACHE_MOONCAKE_SPILL",
        ("spill",),
        parse_bool,
        "true",
        "Give the coldest pages to nodes that have room, instead of dropping them.",
        "--spill",
    ),
    Setting(
        "replicate_after",
        "HICACHE_MOONCAKE_REPLICATE_AFTER",
        ("replicate_after",),
        parse_fetches,
        "2",
        "A page of another node that this host's engines fetched so often within a minute stays here as well. 0: never.",
        "--replicate-after",
    ),
    Setting(
        "drain_s",
        "HICACHE_MOONCAKE_DRAIN_S",
        ("drain_s",),
        parse_drain,
        "10",
        "How long a node that is told to end (SIGTERM) may hand its most used pages to others. 0: it ends at once. Give the "
        "service manager some seconds more before it kills.",
        "--drain-s",
    ),
    Setting(
        "cold",
        "HICACHE_MOONCAKE_COLD",
        ("cold",),
        parse_file,
        "",
        "Directory of the cold tier, on a disk of this host: pages are written there before DRAM loses them, and found again "
        "after a restart. One node, one directory. Empty: there is no cold tier.",
        "--cold",
    ),
    Setting(
        "cold_bytes",
        "HICACHE_MOONCAKE_COLD_BYTES",
        ("cold_bytes",),
        parse_size,
        "8 times dram",
        "Pages on the disk, at most: as dram. The index comes on top, some 150 bytes a page. The node does not start without "
        "room for all of it.",
        "--cold-bytes",
    ),
    Setting(
        "cold_floor",
        "HICACHE_MOONCAKE_COLD_FLOOR",
        ("cold_floor",),
        parse_size,
        "1gb",
        "What the cold tier leaves free on the disk, whatever cold_bytes says.",
        "--cold-floor",
    ),
    Setting(
        "cold_after_loads",
        "HICACHE_MOONCAKE_COLD_AFTER_LOADS",
        ("cold_after_loads",),
        parse_fetches,
        "0",
        "A page that was loaded so often from DRAM within a minute is written to the cold tier as well, long before its "
        "eviction: then a crash does not lose it. 0: never.",
        "--cold-after-loads",
    ),
    Setting(
        "save_on_exit",
        "HICACHE_MOONCAKE_SAVE_ON_EXIT",
        ("save_on_exit",),
        parse_bool,
        "false",
        "On SIGTERM write all of DRAM that is not there yet to the cold tier, the most used pages first. It takes as long as "
        "the disk takes: give the service manager the time, or a second signal ends it.",
        "--save-on-exit",
    ),
    Setting(
        "hugepages",
        "HICACHE_MOONCAKE_HUGEPAGES",
        ("hugepages",),
        parse_bool,
        "false",
        "Back the node's memory with huge pages reserved in vm.nr_hugepages.",
        "--hugepages",
    ),
    Setting(
        "transport",
        "HICACHE_MOONCAKE_TRANSPORT",
        ("transport",),
        parse_transport,
        "auto",
        "How pages travel between nodes. auto: shared memory on one host, RDMA (verbs) where both ends have a device that "
        "works, else tcp. tcp: tcp everywhere. verbs: as auto, and the node says what is missing where it cannot be used. Or "
        "the name of a transport that an installed package brings (mooncake, nixl). docs/transports.md.",
        "--transport",
    ),
    Setting(
        "rdma_devices",
        "HICACHE_MOONCAKE_RDMA_DEVICES",
        ("rdma_devices",),
        parse_devices,
        "all whose port is up",
        "RDMA devices that the node may use, separated by commas: mlx5_0, or mlx5_0:1 with a port. "
        "`hicache-mooncake doctor` lists them.",
        "--rdma-devices",
    ),
    Setting(
        "gid_index",
        "HICACHE_MOONCAKE_GID_INDEX",
        ("gid_index",),
        whole_number("an index in the device's GID table", 0, 65535, -1),
        "auto",
        "Which GID of each RDMA device. auto: RoCE v2 with a routable address, IPv4 first.",
        "--gid-index",
    ),
    Setting(
        "verbs_binding",
        "HICACHE_MOONCAKE_VERBS_BINDING",
        ("verbs_binding",),
        choice_of(VERBS_BINDINGS),
        "auto",
        "Which Python package speaks to RDMA devices: ibverbs (PyPI, `pip install hicache-mooncake[verbs]`) or pyverbs (the "
        "distribution's python3-pyverbs). auto: the first that is there.",
        "--verbs-binding",
    ),
    Setting(
        "interface",
        "HICACHE_MOONCAKE_INTERFACE",
        ("interface",),
        parse_text,
        "none",
        "Network interface whose address the node listens on and advertises for tcp, such as eth1, when `listen` names no "
        "address (is left out, or a wildcard such as 0.0.0.0:7000). Its first IPv4 address, else its first routable IPv6 one.",
        "--interface",
    ),
    Setting(
        "lanes",
        "HICACHE_MOONCAKE_LANES",
        ("lanes",),
        whole_number("tcp connections to one node", 1, MAX_LANES, 0),
        "auto",
        "TCP connections that one load uses to one node. auto: as many as were seen to be faster.",
    ),
    Setting(
        "max_in_flight",
        "HICACHE_MOONCAKE_MAX_IN_FLIGHT",
        ("max_in_flight",),
        parse_window,
        "64mb",
        "Bytes that may be under way from one node to this one over RDMA at a time; what is more waits its turn.",
        "--max-in-flight",
    ),
    Setting(
        "copy_threads",
        "HICACHE_MOONCAKE_COPY_THREADS",
        ("copy_threads",),
        whole_number("threads that copy", 1, MAX_COPY_THREADS, 0),
        "auto",
        "Threads with which a rank's mover copies a batch of large pages. auto: one for every four cores that it may use, at "
        "most four.",
    ),
    Setting(
        "numa",
        "HICACHE_MOONCAKE_NUMA",
        ("numa",),
        choice_of(NUMA_MODES),
        "auto",
        "auto: movers run on the NUMA node that the engine's host memory is on, and the node's memory is spread over all. "
        "off: wherever the system puts them.",
        "--numa",
    ),
    Setting(
        "tls_cert",
        "HICACHE_MOONCAKE_TLS_CERT",
        ("tls_cert",),
        parse_file,
        "none",
        "Certificate (PEM) with which nodes prove themselves to each other; page bytes are then encrypted (TLS 1.3). Needs "
        "tls_key and tls_ca, on every node of the cluster.",
        "--tls-cert",
    ),
    Setting(
        "tls_key",
        "HICACHE_MOONCAKE_TLS_KEY",
        ("tls_key",),
        parse_file,
        "none",
        "Private key (PEM) of tls_cert.",
        "--tls-key",
    ),
    Setting(
        "tls_ca",
        "HICACHE_MOONCAKE_TLS_CA",
        ("tls_ca",),
        parse_file,
        "none",
        "Certificate authority (PEM) that signed the certificates of all nodes of the cluster, and of nobody else.",
        "--tls-ca",
    ),
    Setting(
        "skip_when_slower",
        "HICACHE_MOONCAKE_SKIP_WHEN_SLOWER",
        ("skip_when_slower",),
        parse_rate,
        "0: never",
        "Tokens a second that this engine prefills. Pages that the pool would take longer to load than the engine to compute "
        "are then misses, counted as not_worth_it.",
    ),
    Setting(
        "engine",
        "HICACHE_MOONCAKE_ENGINE",
        ("engine",),
        choice_of(ENGINES),
        "auto",
        "Whose transfer engine SGLang gets as `mooncake.engine` (disaggregation with the transfer backend mooncake). auto: "
        "this package's where Mooncake's is not installed or does not load. on: this package's. off: Mooncake's or none. The "
        "plugin reads it from the environment and the config file.",
    ),
    Setting(
        "transfer_timeout_s",
        "HICACHE_MOONCAKE_TRANSFER_TIMEOUT_S",
        ("transfer_timeout_s",),
        parse_transfer_timeout,
        "30",
        "Longest time one transfer of that engine may take before it counts as failed.",
    ),
    Setting(
        "log_level",
        "HICACHE_MOONCAKE_LOG_LEVEL",
        ("log_level",),
        choice_of(LOG_LEVELS),
        "info",
        "debug, info, warning, error or critical.",
        "--log-level",
    ),
)

BY_ATTRIBUTE = {setting.attribute: setting for setting in SETTINGS}
BY_ENV = {setting.env: setting for setting in SETTINGS}
BY_KEY = {key: setting for setting in SETTINGS for key in setting.keys}

CONFIG_ENV = "HICACHE_MOONCAKE_CONFIG"
MOONCAKE_CONFIG_ENV = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"
PLUGIN_ENV = "HICACHE_MOONCAKE_PLUGIN"
OWN_PREFIX = "HICACHE_MOONCAKE_"

SGLANG_KEYS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "linker",
        "linker_extra_config",
        "linker_module_path",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""extra_config keys that SGLang reads itself."""

KUBERNETES = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""Kubernetes puts HICACHE_MOONCAKE_MASTER_PORT=tcp://... and the like into every pod beside a service of that name."""


# --------------------------------------------------------------------------- Mooncake's own


@dataclass(frozen=True)
class MooncakeSetting:
    """One setting of the built-in backend. `meaning_id` is the attribute of ours that it sets, or names a rule of its own."""

    meaning_id: str
    env: tuple[str, ...]
    keys: tuple[str, ...]
    """In extra_config and in the JSON file of SGLANG_HICACHE_MOONCAKE_CONFIG_PATH."""
    here: str
    """For the documentation; for the log too when nothing of ours is set by it."""
    nothing: tuple[str, ...] = ()
    """Values, in lower case, that ask for what happens anyway: no notice."""


_OFF = ("false", "0", "no", "n", "off")

MOONCAKE_SETTINGS: tuple[MooncakeSetting, ...] = (
    MooncakeSetting(
        "masters",
        ("MOONCAKE_MASTER",),
        ("master_server_address",),
        "sets `masters`. The address is that of `hicache-mooncake master`, not of `mooncake_master`. etcd://host:2379/CLUSTER "
        "works as there; redis:// and the like are refused",
    ),
    MooncakeSetting(
        "dram_bytes",
        ("MOONCAKE_GLOBAL_SEGMENT_SIZE",),
        ("global_segment_size",),
        "sets `dram`, with the same grammar and more. There it is an engine's amount, divided among its tp × pp ranks; "
        "here it is the host's node's, "
        "whatever runs on the host. 0 (contribute nothing) needs a node that runs already: `node=external`",
    ),
    MooncakeSetting(
        "local_hostname",
        ("MOONCAKE_LOCAL_HOSTNAME", "LOCAL_HOSTNAME"),
        ("local_hostname",),
        "sets `name` and the host of `advertise`, unless those are set themselves. The process's environment wins over "
        "extra_config and file, as there. "
        "`localhost` is ignored: two nodes of one name would replace each other",
    ),
    MooncakeSetting(
        "standalone_storage",
        ("MOONCAKE_STANDALONE_STORAGE",),
        ("standalone_storage",),
        "true sets `node=external`, and needs an address: `socket` or client_server_address",
    ),
    MooncakeSetting(
        "client_server_address",
        ("MOONCAKE_CLIENT",),
        ("client_server_address",),
        "sets `node=external`. A path sets `socket`; a host:port cannot (engines and node share memory by a UNIX "
        "socket), so the socket stays at its default",
    ),
    MooncakeSetting(
        "tenant", ("MOONCAKE_TENANT_ID",), ("tenant_id",), "sets `tenant`. Always strict: no switch on the master, no quota"
    ),
    MooncakeSetting(
        "tag",
        (),
        ("extra_backend_tag",),
        "sets `tag`. Not needed to tell layouts, dtypes or parallel shapes apart: keys do that",
    ),
    MooncakeSetting(
        "metadata_server",
        ("MOONCAKE_TE_META_DATA_SERVER",),
        ("metadata_server",),
        "not needed: nodes exchange addresses through the master",
        ("p2phandshake",),
    ),
    MooncakeSetting(
        "protocol",
        ("MOONCAKE_PROTOCOL",),
        ("protocol",),
        "the transport is chosen for each pair of nodes, RDMA where both have a device that works, else tcp, and shared memory "
        "on one host. `transport` says otherwise: tcp for tcp alone, verbs to be told where RDMA cannot be used. The "
        "engine of disaggregation goes by it (docs/transfer-engine.md)",
        ("tcp",),
    ),
    MooncakeSetting(
        "device_name",
        ("MOONCAKE_DEVICE",),
        ("device_name",),
        "sets `rdma_devices`. A JSON table of devices by GPU, or the path of a .json file with one: all devices in it, since "
        "one node serves all GPUs of the host",
    ),
    MooncakeSetting(
        "gid_index",
        ("MC_GID_INDEX",),
        (),
        "sets `gid_index`",
    ),
    MooncakeSetting(
        "force_tcp",
        ("MC_FORCE_TCP",),
        (),
        "sets `transport=tcp`",
        _OFF,
    ),
    MooncakeSetting(
        "transfer_timeout_s",
        ("MC_TRANSFER_TIMEOUT",),
        (),
        "sets `transfer_timeout_s`",
    ),
    MooncakeSetting(
        "ib_port",
        ("MC_IB_PORT",),
        (),
        "not used: every port that is up is; name one in `rdma_devices`, such as mlx5_0:2",
    ),
    MooncakeSetting(
        "tcp_bind_address",
        ("MC_TCP_BIND_ADDRESS",),
        (),
        "not used: set `interface` or `listen` to choose the node's address",
    ),
    MooncakeSetting(
        "master_metrics_port",
        ("MOONCAKE_MASTER_METRICS_PORT",),
        ("master_metrics_port",),
        "not needed: nothing here asks the master over HTTP",
    ),
    MooncakeSetting(
        "check_server",
        ("MOONCAKE_CHECK_SERVER",),
        ("check_server",),
        "not needed: the engine starts without a master and uses it as soon as it answers; `hicache-mooncake doctor` "
        "checks it now",
        _OFF,
    ),
    MooncakeSetting(
        "enable_ssd_offload",
        ("MOONCAKE_ENABLE_SSD_OFFLOAD",),
        ("enable_ssd_offload",),
        "with ssd_offload_path it sets `cold`. Without, set `cold` to a directory: there is no default one",
        _OFF,
    ),
    MooncakeSetting(
        "ssd_offload_path",
        ("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",),
        ("ssd_offload_path",),
        "with enable_ssd_offload it sets `cold`, whose size is `cold_bytes`. There it is an engine's directory, here a host's",
    ),
    MooncakeSetting(
        "enable_group_semantics",
        (),
        ("enable_group_semantics",),
        "not needed: all parts of a page are always found together and evicted together",
        ("true", "1", "yes", "y", "on"),
    ),
    MooncakeSetting(
        "local_buffer_size",
        ("MOONCAKE_LOCAL_BUFFER_SIZE",),
        ("local_buffer_size",),
        "not needed: pages are copied straight between the engine's host memory and the node's",
        ("0",),
    ),
    MooncakeSetting(
        "store_checksum",
        ("MOONCAKE_STORE_CHECKSUM",),
        (),
        "not needed: every page is checksummed, and checked on every load",
        ("true", "1", "yes", "on"),
    ),
)

MOONCAKE_BY_ENV = {name: setting for setting in MOONCAKE_SETTINGS for name in setting.env}
MOONCAKE_BY_KEY = {key: setting for setting in MOONCAKE_SETTINGS for key in setting.keys}
