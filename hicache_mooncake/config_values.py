"""How the values of settings are written and read, and the defaults that depend on the host. No setting is known here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

SUN_PATH_BYTES = 107
"""Longest UNIX socket path: sun_path has 108 bytes with its closing NUL."""
DEFAULT_DRAM_BYTES = 4 << 30
MIN_DRAM_BYTES = 1 << 20
DEFAULT_MASTER_PORT = 50051
DEFAULT_ETCD_PORT = 2379
DEFAULT_CLUSTER = "default"
MAX_DRAIN_S = 3600.0
MAX_PROMISE_S = 60.0
MAX_TEXT = 512
MAX_FILE_BYTES = 1 << 20

NODE_MODES = ("auto", "embedded", "external", "off")
COPY_MODES = ("auto", "memfd", "process_vm", "segment")
EVICTIONS = ("adaptive", "lru", "cost")
VERBS_BINDINGS = ("auto", "ibverbs", "pyverbs")
NUMA_MODES = ("auto", "off")
ENGINES = ("auto", "on", "off")
MAX_TRANSFER_TIMEOUT_S = 3600.0
MAX_LANES = 16
MAX_COPY_THREADS = 64
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


class ConfigError(ValueError):
    """A setting that cannot be used. Says which one, where it came from, its value, and what to do."""

    def __init__(self, setting: str, origin: str, value: object, problem: str) -> None:
        super().__init__(f"{setting} = {value!r} (from {origin}): {problem}")
        self.setting = setting
        self.origin = origin
        self.value = value
        self.problem = problem


# --------------------------------------------------------------------------- grammar of values

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?")
_SHIFT = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parse_size(value: object) -> int:
    """Bytes of "4gb", "512MB", "1GiB" or 4294967296. Units are powers of 1024, as Mooncake reads them. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError('a size is a number of bytes or a text such as "4gb"')
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip().lower())
        if match is None or (match[3] == "ib" and not match[2]):
            raise ValueError(
                'a size is a number of bytes or a number with kb, mb, gb or tb (powers of 1024), such as "4gb" or "512MB"'
            )
        number, unit = match[1], match[2]
        size = int(number) << _SHIFT[unit] if number.isdigit() else float(number) * (1 << _SHIFT[unit])
    else:
        size = value
    if size != int(size) or not 0 <= size < 1 << 62:
        raise ValueError("a size is a whole number of bytes, not negative and below 4 EiB")
    return int(size)


def split_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as (host, port), the host without brackets. Raises ValueError with what is wrong."""
    if "://" in text:
        raise ValueError("a host:port is needed here, without a scheme")
    host, colon, port_text = text.strip().rpartition(":")
    if text.strip().endswith("]") or not colon:
        host, port_text = text.strip(), ""
    if not port_text and (default_port is None or (colon == ":" and not host.endswith("]"))):
        raise ValueError("the port is missing: write host:port")
    if not port_text.isdecimal() and port_text:
        raise ValueError(f"{port_text!r} is not a port number: write host:port")
    port = int(port_text) if port_text else default_port
    assert port is not None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address goes in brackets: [::1]:50051")
    if not host or re.search(r"[\s/\[\],;]", host):
        raise ValueError("the host is missing or has characters that no host has: write host:port")
    if port > 65535:
        raise ValueError("a port is at most 65535")
    return host, port


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_LOOPBACK = re.compile(r"localhost(\.localdomain)?|::1|127(\.\d{1,3}){3}")


def is_loopback(host: str) -> bool:
    return _LOOPBACK.fullmatch(host) is not None


def is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::")


_CLUSTER = re.compile(r"[A-Za-z0-9._-]{1,64}")


def parse_cluster(value: object) -> str:
    """Name of a cluster in etcd. Raises ValueError."""
    text = parse_text(value) or DEFAULT_CLUSTER
    if _CLUSTER.fullmatch(text) is None:
        raise ValueError("a cluster's name has 1 to 64 letters, digits, dots, dashes or underscores")
    return text


def split_etcd(text: str) -> tuple[list[tuple[str, int]], str]:
    """`etcd://host:2379,host2:2379/CLUSTER` as (addresses, cluster). Port and cluster may be left out. Raises ValueError."""
    scheme, _, rest = text.strip().partition("://")
    if scheme != "etcd":
        raise ValueError("etcd is written etcd://host:2379,host2:2379/CLUSTER")
    hosts, _, cluster = rest.partition("/")
    addresses = [split_address(host, DEFAULT_ETCD_PORT) for host in hosts.split(",") if host.strip()]
    if not addresses or not all(port for _, port in addresses):
        raise ValueError("etcd needs the address of at least one of its servers: etcd://host:2379/CLUSTER")
    return list(dict.fromkeys(addresses)), parse_cluster(cluster.strip("/"))


def parse_shard(value: object) -> tuple[int, int]:
    """`2/4` as (2, 4): the third of four. Raises ValueError."""
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", parse_text(value))
    if found is None or not int(found[1]) < int(found[2]):
        raise ValueError("a shard is written NUMBER/SHARDS, counted from 0: 0/4 to 3/4 are the shards of four")
    return int(found[1]), int(found[2])


def is_etcd(master: str) -> bool:
    """Is this value of `masters` a place where to look for masters, and not the address of one?"""
    return master.startswith("etcd://")


def master_addresses(master: str) -> list[tuple[str, int]]:
    """(host, port) of a master, or of the etcd servers that know the masters. Raises ValueError."""
    return split_etcd(master)[0] if is_etcd(master) else [split_address(master, DEFAULT_MASTER_PORT)]


def is_remote_master(master: str) -> bool:
    """Does reaching it take the connection off this host?"""
    return any(not is_loopback(host) for host, _ in master_addresses(master))


def parse_address(value: object) -> str:
    return join_address(*split_address(parse_text(value)))


_LINK_LOCAL = re.compile(r"fe[89ab][0-9a-f]:.*", re.IGNORECASE)


def _refuse_link_local(host: str) -> None:
    """An IPv6 address that is nothing without the name of an interface, or that has one."""
    if _LINK_LOCAL.fullmatch(host) or "%" in host:
        raise ValueError(
            f"{host} is an address of one network segment: it needs the name of an interface, which is another one on every "
            "host. Give a routable address, IPv4 or IPv6"
        )


def parse_listen(value: object) -> str:
    host, port = split_address(parse_text(value))
    _refuse_link_local(host)
    return join_address(host, port)


def parse_advertise(value: object) -> str:
    text = parse_text(value)
    if not text:
        return ""
    host, port = split_address(text, default_port=0)
    if is_wildcard(host):
        raise ValueError("other nodes cannot connect to a wildcard: give this host's own name or address")
    _refuse_link_local(host)
    return join_address(host, port)


def parse_metrics(value: object) -> str:
    text = parse_text(value)
    return "" if text.lower() in ("", "off", "none", "false", "0") else parse_address(text)


def parse_kv_events(value: object) -> str:
    """tcp://host:port, as host:port; empty where there is none."""
    text = parse_text(value)
    if not text:
        return ""
    scheme, mark, address = text.partition("://")
    if not mark or scheme != "tcp":
        raise ValueError("KV events are published at tcp://host:port")
    return join_address(*split_address(address))


def parse_masters(value: object) -> tuple[str, ...]:
    given = [parse_text(item) for item in (value if isinstance(value, list | tuple) else [value])]
    if any(is_etcd(text) for text in given):
        if len(given) > 1:
            raise ValueError("the masters are either found through one etcd://host:2379/CLUSTER or given as a list, not both")
        addresses, cluster = split_etcd(given[0])
        return (f"etcd://{','.join(join_address(host, port) for host, port in addresses)}/{cluster}",)
    masters: list[str] = []
    for text in (part.strip() for item in given for part in item.split(",")):
        if "://" in text:
            raise ValueError(
                "masters are found through etcd (etcd://host:2379/CLUSTER) or given as a static list, "
                '"host1:50051,host2:50051"; redis and Kubernetes are not there'
            )
        if text:
            host, port = split_address(text, DEFAULT_MASTER_PORT)
            if not port:
                raise ValueError("a master's port cannot be 0")
            masters.append(join_address(host, port))
    return tuple(dict.fromkeys(masters))


def parse_socket(value: object) -> str:
    path = parse_text(value).removeprefix("unix://")
    if not path.startswith("/"):
        raise ValueError("the socket is an absolute path, such as /run/hicache-mooncake/node.sock")
    length = len(os.fsencode(path))
    if length > SUN_PATH_BYTES:
        raise ValueError(f"the path has {length} bytes and a UNIX socket's path at most {SUN_PATH_BYTES}: choose a shorter one")
    return path


def parse_text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("a text is needed here")
    text = str(value).strip()
    if len(text) > MAX_TEXT or not (text.isprintable()):
        raise ValueError(f"a text here has at most {MAX_TEXT} characters, all of them printable")
    return text


def parse_name(value: object) -> str:
    text = parse_text(value)
    if not text or len(text) > 128:
        raise ValueError("a node's name has 1 to 128 characters, and no two nodes share one")
    return text


def parse_tenant(value: object) -> str:
    return parse_text(value) or "default"


def parse_bool(value: object) -> bool:
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "y", "on"):
        return True
    if text in ("0", "false", "no", "n", "off", ""):
        return False
    raise ValueError("a switch is true or false")


def parse_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("a number is needed here")
    try:
        return float(value)
    except ValueError:
        raise ValueError("a number is needed here") from None


def parse_deadline(value: object) -> float:
    seconds = parse_number(value)
    if not 0.05 < seconds < 8:
        raise ValueError("the deadline lies above 0.05 s and below 8 s: SGLang gives up on its storage threads after 10 s")
    return seconds


def parse_transfer_timeout(value: object) -> float:
    seconds = parse_number(value)
    if not 0.1 <= seconds <= MAX_TRANSFER_TIMEOUT_S:
        raise ValueError(f"a transfer may take from 0.1 to {MAX_TRANSFER_TIMEOUT_S:g} seconds")
    return seconds


def parse_heads(value: object) -> int:
    number = parse_number(value)
    if number != int(number) or not 1 <= number <= 4096:
        raise ValueError("a model has 1 to 4096 KV heads")
    return int(number)


def parse_drain(value: object) -> float:
    seconds = parse_number(value)
    if not 0 <= seconds <= MAX_DRAIN_S:
        raise ValueError(f"a node drains for 0 (not at all) to {MAX_DRAIN_S:g} s")
    return seconds


def parse_promise(value: object) -> float:
    if str(value).strip().lower() in ("auto", "-1", "-1.0"):
        return -1.0
    seconds = parse_number(value)
    if not 0 <= seconds <= MAX_PROMISE_S:
        raise ValueError(f"a promise lasts 0 (nothing is promised) to {MAX_PROMISE_S:g} s, or auto")
    return seconds


def parse_promise_share(value: object) -> float:
    share = parse_number(value)
    if not 0 <= share <= 0.5:
        raise ValueError("promised pages take 0 to 0.5 of the memory: more, with what is being read, leaves stores no room")
    return share


def parse_fetches(value: object) -> int:
    number = parse_number(value)
    if not (0 <= number <= 1_000_000 and number == int(number)):
        raise ValueError("a number of fetches is a whole number, and 0 means never")
    return int(number)


def parse_file(value: object) -> str:
    """Absolute path of a file, or "". A node that an engine starts has another working directory."""
    text = parse_text(value)
    return os.path.abspath(os.path.expanduser(text)) if text else ""


def parse_host_id(value: object) -> str:
    text = parse_text(value)
    if len(text) > 128:
        raise ValueError("a host's identity has at most 128 characters")
    return text or default_host_id()


_TRANSPORT = re.compile(r"[a-z][a-z0-9_-]{0,31}")


def parse_transport(value: object) -> str:
    text = parse_text(value).lower()
    if _TRANSPORT.fullmatch(text) is None:
        raise ValueError("choose auto, tcp, verbs, or the name of a transport that an installed package brings")
    if text == "shm":
        raise ValueError("shared memory reaches this host only, where it is used anyway: choose auto, tcp or verbs")
    return text


_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,63}(:[1-9][0-9]{0,2})?")


def parse_devices(value: object) -> tuple[str, ...]:
    given = [parse_text(item) for item in (value if isinstance(value, list | tuple) else [value])]
    devices = [part.strip() for text in given for part in text.split(",") if part.strip()]
    for device in devices:
        if _DEVICE.fullmatch(device) is None:
            raise ValueError(f"{device!r} is not an RDMA device: write mlx5_0, or mlx5_0:1 with its port")
    return tuple(dict.fromkeys(devices))


def parse_mooncake_devices(text: str) -> tuple[str, ...]:
    """Devices as the built-in backend takes them: by commas, as a JSON table by GPU, or as the path of a file with one. Raises
    ValueError."""
    if text.endswith(".json"):
        try:
            with open(text, "rb") as file:
                text = file.read(MAX_FILE_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the file cannot be read ({error}): give the devices themselves, such as mlx5_0,mlx5_1") from None
    if not text.lstrip().startswith("{"):
        return parse_devices(text)
    import json

    try:
        table = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the table of devices cannot be parsed ({error}): give the devices themselves") from None
    return parse_devices(
        [device for devices in table.values() for device in (devices if isinstance(devices, list) else [devices])]
    )


def whole_number(what: str, least: int, most: int, auto: int | None = None) -> Callable[[object], int]:
    """A parser of whole numbers from `least` to `most`, and of the word auto, where there is a number that means it."""

    def parse(value: object) -> int:
        if auto is not None and str(value).strip().lower() in ("auto", ""):
            return auto
        number = parse_number(value)
        if number != int(number) or not (least <= number <= most or number == auto):
            raise ValueError(f"{what}: a whole number from {least} to {most}" + (" or auto" if auto is not None else ""))
        return int(number)

    return parse


def parse_window(value: object) -> int:
    size = parse_size(value)
    if size < 1 << 20:
        raise ValueError("less than 1 MiB under way at a time leaves a network idle: give at least 1mb")
    return size


def parse_rate(value: object) -> float:
    rate = parse_number(value)
    if not 0 <= rate < 1e9:
        raise ValueError("tokens a second, 0 for never")
    return rate


def parse_fraction(value: object) -> float:
    number = parse_number(value)
    if not 0 < number <= 1:
        raise ValueError("a watermark is a part of the memory: above 0, at most 1")
    return number


def choice_of(choices: tuple[str, ...]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = parse_text(value).lower()
        if text not in choices:
            raise ValueError(f"choose one of {', '.join(choices)}")
        return text

    return parse


def display(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else "none"


# --------------------------------------------------------------------------- defaults


def default_socket(environ: Mapping[str, str]) -> str:
    """Where engines and node of one user meet when nobody says otherwise."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        path = f"{runtime.rstrip('/')}/hicache-mooncake/node.sock"
        if len(os.fsencode(path)) <= SUN_PATH_BYTES:
            return path
    return f"/tmp/hicache-mooncake-{os.getuid()}/node.sock"


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def default_host_id() -> str:
    """What every process on this machine sees alike, in containers too: the kernel's boot id, else the machine id, else the
    host's name. A machine id is no good first choice: images carry one baked in, on every host the same."""
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        text = _read(path).strip()
        if text and len(text) <= 128 and text.isprintable():
            return text
    return os.uname().nodename


def _cgroup_room(directory: str) -> int | None:
    """Bytes that may still be allocated under one cgroup v2 directory; page cache that can be dropped counts as free."""
    limit, used = _read(f"{directory}/memory.max").strip(), _read(f"{directory}/memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None
    stat = re.search(r"^inactive_file (\d+)$", _read(f"{directory}/memory.stat"), re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(stat[1]) if stat else 0))


def available_memory_bytes() -> int | None:
    """What this process may still use: MemAvailable, or less where a cgroup (container, systemd slice) says so.

    None if neither can be read.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    rooms = [int(found[1]) << 10] if found else []
    own = re.search(r"^0::(/.*)$", _read("/proc/self/cgroup"), re.MULTILINE)
    parts = own[1].strip("/").split("/") if own else []
    for depth in range(len(parts) + 1):
        room = _cgroup_room("/".join(["/sys/fs/cgroup", *parts[:depth]]).rstrip("/"))
        if room is not None:
            rooms.append(room)
    v1_limit, v1_used = (_read(f"/sys/fs/cgroup/memory/memory.{name}_in_bytes").strip() for name in ("limit", "usage"))
    if v1_limit.isdecimal() and v1_used.isdecimal():
        rooms.append(max(0, int(v1_limit) - int(v1_used)))
    return min(rooms, default=None)


def default_dram_bytes(available: int | None) -> int:
    """4 GiB, but never more than a quarter of what is available; whole MiB, at least 16."""
    quarter = DEFAULT_DRAM_BYTES if available is None else available // 4
    return max(16 << 20, min(DEFAULT_DRAM_BYTES, quarter) >> 20 << 20)
