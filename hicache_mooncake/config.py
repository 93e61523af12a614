"""One typed configuration: defaults < file < MOONCAKE_* < HICACHE_MOONCAKE_* < extra_config < explicit values.

`load_settings` is the only way in. It merges the layers setting by setting, refuses what contradicts itself, and remembers
where each value came from. The settings themselves, and what the built-in Mooncake backend's own mean here, are in
`hicache_mooncake.config_table`.

`python -m hicache_mooncake.config` prints docs/configuration.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hicache_mooncake.config_table import (
    BY_ATTRIBUTE,
    BY_ENV,
    BY_KEY,
    CONFIG_ENV,
    KUBERNETES,
    MOONCAKE_BY_ENV,
    MOONCAKE_BY_KEY,
    MOONCAKE_CONFIG_ENV,
    OWN_PREFIX,
    PLUGIN_ENV,
    SETTINGS,
    SGLANG_KEYS,
    MooncakeSetting,
    Setting,
)
from hicache_mooncake.config_values import (
    DEFAULT_DRAM_BYTES,
    MAX_FILE_BYTES,
    MIN_DRAM_BYTES,
    ConfigError,
    available_memory_bytes,
    default_dram_bytes,
    default_host_id,
    default_socket,
    display,
    is_loopback,
    is_remote_master,
    is_wildcard,
    join_address,
    master_addresses,
    parse_bool,
    parse_mooncake_devices,
    parse_size,
    parse_text,
    split_address,
)

__all__ = [
    "ConfigError",
    "Settings",
    "available_memory_bytes",
    "is_loopback",
    "join_address",
    "load_settings",
    "parse_size",
    "split_address",
]

# --------------------------------------------------------------------------- the settings


@dataclass(frozen=True)
class Settings:
    """The effective configuration of one process. Made by `load_settings`; immutable, so free to share between threads."""

    socket: str = field(default_factory=lambda: default_socket(os.environ))
    node: str = "embedded"
    """embedded, external or off; `load_settings` never leaves "auto" here."""
    dram_bytes: int = DEFAULT_DRAM_BYTES
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    """host:port under which other nodes reach this one, port 0 for the one it listens on; "" = derived from `listen`."""
    masters: tuple[str, ...] = ()
    name: str = field(default_factory=lambda: os.uname().nodename)
    host_id: str = field(default_factory=default_host_id)
    key_file: str = ""
    allow_unauthenticated: bool = False
    deadline_s: float = 2.0
    promise_s: float = -1.0
    """-1: by what kind of engine it is."""
    promise_share: float = 0.125
    copy_mode: str = "auto"
    model_id: str = ""
    weight_version: str = ""
    share_weight_versions: bool = False
    share_across_tp: bool = False
    kv_heads: int = 0
    """0: read from SGLang's model configuration."""
    tag: str = ""
    tenant: str = "default"
    metrics: str = ""
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    eviction: str = "adaptive"
    spill: bool = True
    replicate_after: int = 2
    """0: never."""
    drain_s: float = 10.0
    """0: not at all."""
    cold: str = ""
    """Empty: no cold tier."""
    cold_bytes: int = 8 * DEFAULT_DRAM_BYTES
    cold_floor: int = 1 << 30
    cold_after_loads: int = 0
    save_on_exit: bool = False
    hugepages: bool = False
    transport: str = "auto"
    """auto, tcp, verbs, or the name of a transport that an installed package brings."""
    rdma_devices: tuple[str, ...] = ()
    """Empty: all whose port is up."""
    gid_index: int = -1
    """-1: chosen by the table."""
    verbs_binding: str = "auto"
    interface: str = ""
    lanes: int = 0
    """0: as many as are faster."""
    max_in_flight: int = 64 << 20
    copy_threads: int = 0
    """0: by the number of cores."""
    numa: str = "auto"
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    skip_when_slower: float = 0.0
    """Tokens a second that the engine prefills; 0: never."""
    engine: str = "auto"
    """auto, on or off."""
    transfer_timeout_s: float = 30.0
    log_level: str = "info"
    sources: dict[str, str] = field(default_factory=dict, compare=False)
    """Attribute -> where its value came from."""

    def node_options(self) -> list[str]:
        """Options of `hicache-mooncake node` that start a node with exactly these settings, whatever its environment says."""
        options: list[str] = []
        for setting in SETTINGS:
            value = getattr(self, setting.attribute)
            if setting.option and isinstance(value, bool):
                options.append(setting.option if value else setting.option.replace("--", "--no-", 1))
            elif setting.option:
                options += [setting.option, ",".join(value) if isinstance(value, tuple) else str(value)]
        return options

    def describe(self) -> str:
        """One line for the log at start-up: every value, and in brackets where it came from unless that is the default."""
        parts = []
        for setting in SETTINGS:
            origin = self.sources.get(setting.attribute, "default")
            note = "" if origin == "default" else f" ({origin})"
            parts.append(f"{setting.attribute}={display(getattr(self, setting.attribute))}{note}")
        return ", ".join(parts)


# --------------------------------------------------------------------------- layers


@dataclass(frozen=True)
class Given:
    """A value for one attribute that somebody wrote somewhere."""

    attribute: str
    name: str
    """As it was spelled there."""
    origin: str
    raw: object
    value: object


class Layer:
    """The values of one source. Two spellings of one setting in the same source must agree."""

    def __init__(self) -> None:
        self.given: dict[str, Given] = {}

    def add(self, setting: Setting, name: str, origin: str, raw: object) -> None:
        try:
            value = setting.parse(raw)
        except ValueError as error:
            raise ConfigError(name, origin, raw, str(error)) from None
        other = self.given.get(setting.attribute)
        if other is not None and other.value != value:
            raise ConfigError(
                name, origin, raw, f"contradicts {other.name} = {other.raw!r} in the same place: remove one of the two"
            )
        self.given.setdefault(setting.attribute, Given(setting.attribute, name, origin, raw, value))


def _closest(word: str, candidates: Iterable[str]) -> str | None:
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, list(candidates), n=1, cutoff=0.75)), None)


def _read_file(path: str, origin: str) -> dict[str, object]:
    problem = "give the path of a JSON or TOML file with the settings at its top level"
    try:
        with open(path, "rb") as file:
            body = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError("config file", origin, path, f"cannot be read ({error.strerror}): {problem}") from None
    if len(body) > MAX_FILE_BYTES:
        raise ConfigError("config file", origin, path, f"is larger than {MAX_FILE_BYTES} bytes: {problem}")
    try:
        if path.endswith(".toml"):
            import tomllib

            content: object = tomllib.loads(body.decode())
        else:
            import json

            content = json.loads(body)
    except ValueError as error:
        raise ConfigError("config file", origin, path, f"cannot be parsed ({error}): {problem}") from None
    if not isinstance(content, dict):
        raise ConfigError("config file", origin, path, f"holds no table of settings: {problem}")
    return content


class _Loader:
    """Collects the layers; `finish` resolves what depends on more than one setting."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.notices: list[str] = []
        self.implied = Layer()
        """From local_hostname, which says two things at once and neither of them in our words: any direct setting wins."""
        self.layers: list[Layer] = []
        self.standalone: tuple[str, str, object] | None = None
        self.has_client_address = False
        self.ssd_enabled: tuple[str, object, str] | None = None
        self.ssd_path: tuple[Layer, str, str, object, str] | None = None

    # ---- one method per source

    def add_mapping(self, values: Mapping[str, object], place: str, may_hold_sglang_keys: bool) -> None:
        layer = Layer()
        self.layers.append(layer)
        for key, raw in values.items():
            if raw is None or (may_hold_sglang_keys and key in SGLANG_KEYS):
                continue
            origin = f"{place} {key}"
            if key in BY_KEY:
                layer.add(BY_KEY[key], key, origin, raw)
            elif key in MOONCAKE_BY_KEY:
                self.add_mooncake(layer, MOONCAKE_BY_KEY[key], key, origin, raw)
            else:
                guess = _closest(key, [*BY_KEY, *MOONCAKE_BY_KEY])
                if guess is not None:
                    raise ConfigError(key, place, raw, f"there is no such setting; did you mean {guess!r}?")
                guess = _closest(key, SGLANG_KEYS) if may_hold_sglang_keys else None
                self.notices.append(
                    f"{place}: {key!r} is not a setting of this backend, ignored"
                    + (f"; did you mean {guess!r}?" if guess else "")
                )

    def add_mooncake_environment(self) -> None:
        layer = Layer()
        self.layers.append(layer)
        for name, raw in sorted(self.environ.items()):
            if not raw.strip():
                continue
            if name in MOONCAKE_BY_ENV:
                self.add_mooncake(layer, MOONCAKE_BY_ENV[name], name, name, raw)
            elif name.startswith("MOONCAKE_") and not KUBERNETES.fullmatch(name):
                known = [env.removeprefix("MOONCAKE_") for env in MOONCAKE_BY_ENV if env.startswith("MOONCAKE_")]
                guess = _closest(name.removeprefix("MOONCAKE_"), known)
                self.notices.append(
                    f"{name} has no meaning here, ignored" + (f"; did you mean MOONCAKE_{guess}?" if guess else "")
                )

    def add_own_environment(self) -> None:
        layer = Layer()
        self.layers.append(layer)
        for name, raw in sorted(self.environ.items()):
            if not name.startswith(OWN_PREFIX) or not raw.strip() or name in (CONFIG_ENV, PLUGIN_ENV):
                continue
            if name in BY_ENV:
                layer.add(BY_ENV[name], name, name, raw)
            elif not KUBERNETES.fullmatch(name):
                guess = _closest(
                    name.removeprefix(OWN_PREFIX), [env.removeprefix(OWN_PREFIX) for env in [*BY_ENV, CONFIG_ENV, PLUGIN_ENV]]
                )
                if guess is not None:
                    raise ConfigError(
                        name, "the environment", raw, f"there is no such setting; did you mean {OWN_PREFIX}{guess}?"
                    )
                self.notices.append(f"{name} is not a setting of this backend, ignored")

    def add_explicit(self, values: Mapping[str, object]) -> None:
        layer = Layer()
        self.layers.append(layer)
        for key, raw in values.items():
            if raw is None or key == "config":
                continue
            if key not in BY_KEY:
                raise ConfigError(key, "explicit values", raw, f"there is no such setting; there are {', '.join(BY_KEY)}")
            layer.add(BY_KEY[key], key, BY_KEY[key].option or "explicit value", raw)

    # ---- Mooncake's own settings

    def add_mooncake(self, layer: Layer, setting: MooncakeSetting, name: str, origin: str, raw: object) -> None:
        """A setting of the built-in backend: value for one of ours, notice, or nothing if it asks for what happens anyway."""
        text = str(raw).strip()
        if not text:
            return
        if setting.meaning_id in BY_ATTRIBUTE:
            layer.add(BY_ATTRIBUTE[setting.meaning_id], name, origin, raw)
        elif setting.meaning_id == "device_name":
            self.add_devices(layer, name, origin, text)
        elif setting.meaning_id == "force_tcp" and text.lower() not in setting.nothing:
            layer.add(BY_ATTRIBUTE["transport"], name, origin, "tcp")
        elif setting.meaning_id == "local_hostname":
            self.add_local_hostname(name, origin, raw)
        elif setting.meaning_id == "standalone_storage":
            self.add_standalone(layer, name, origin, raw)
        elif setting.meaning_id == "enable_ssd_offload" and text.lower() not in setting.nothing:
            self.ssd_enabled = (origin, raw, setting.here)
        elif setting.meaning_id == "ssd_offload_path":
            self.ssd_path = (layer, name, origin, raw, setting.here)
        elif setting.meaning_id == "client_server_address":
            self.add_client_address(layer, name, origin, raw)
        elif text.lower() not in setting.nothing:
            self.notices.append(f"{origin} = {raw!r}: {setting.here}")

    def add_devices(self, layer: Layer, name: str, origin: str, text: str) -> None:
        try:
            devices = parse_mooncake_devices(text)
        except ValueError as error:
            raise ConfigError(name, origin, text, str(error)) from None
        layer.add(BY_ATTRIBUTE["rdma_devices"], name, origin, devices)

    def add_standalone(self, layer: Layer, name: str, origin: str, raw: object) -> None:
        try:
            wanted = parse_bool(raw)
        except ValueError as error:
            raise ConfigError(name, origin, raw, str(error)) from None
        if wanted:
            self.standalone = (name, origin, raw)
            layer.add(BY_ATTRIBUTE["node"], name, origin, "external")

    def add_local_hostname(self, name: str, origin: str, raw: object) -> None:
        try:
            host, _ = split_address(parse_text(raw), default_port=0)
        except ValueError as error:
            raise ConfigError(name, origin, raw, str(error)) from None
        if is_loopback(host) or host in ("0.0.0.0", "::"):
            self.notices.append(
                f"{origin} = {raw!r}: names no host in a cluster, ignored; the node is called after the host, set name "
                "and advertise to change that"
            )
            return
        # The environment, added last, wins over a file and over an extra_config that goes to every host alike, as in SGLang.
        for attribute, value in (("name", host), ("advertise", join_address(host, 0))):
            self.implied.given.pop(attribute, None)
            self.implied.add(BY_ATTRIBUTE[attribute], name, origin, value)

    def add_client_address(self, layer: Layer, name: str, origin: str, raw: object) -> None:
        text = str(raw).strip()
        if text.startswith(("/", "unix://")):
            layer.add(BY_ATTRIBUTE["socket"], name, origin, text)
            layer.add(BY_ATTRIBUTE["node"], name, origin, "external")
            return
        try:
            host, port = split_address(text, default_port=50052)
        except ValueError as error:
            raise ConfigError(name, origin, raw, f"{error}, or give the node's UNIX socket as /path") from None
        self.has_client_address = True
        layer.add(BY_ATTRIBUTE["node"], name, origin, "external")
        where = "" if is_loopback(host) else f"; the node must run on this host, {host} is not contacted"
        self.notices.append(
            f"{origin} = {raw!r}: engines reach their node by a UNIX socket, not by TCP port {port}: taken as 'a node "
            f"runs on this host already'{where}; "
            "set socket (HICACHE_MOONCAKE_SOCKET) if it is not at its default path"
        )

    # ---- the result

    def add_ssd(self) -> None:
        """Both of the built-in backend's settings together ask for a cold tier; one of them does not."""
        if self.ssd_path is not None and self.ssd_enabled is not None:
            layer, name, origin, raw, _ = self.ssd_path
            layer.add(BY_ATTRIBUTE["cold"], name, origin, raw)
            return
        alone = self.ssd_enabled or (self.ssd_path and self.ssd_path[2:])
        if alone is not None:
            origin, raw, meaning = alone
            self.notices.append(f"{origin} = {raw!r}: {meaning}")

    def finish(self) -> tuple[Settings, list[str]]:
        self.add_ssd()
        given: dict[str, Given] = {}
        for layer in [self.implied, *self.layers]:
            given.update(layer.given)
        values: dict[str, object] = {attribute: item.value for attribute, item in given.items()}
        sources = {setting.attribute: "default" for setting in SETTINGS} | {
            attribute: item.origin for attribute, item in given.items()
        }

        if self.standalone is not None and "socket" not in given and not self.has_client_address:
            raise ConfigError(
                *self.standalone,
                "needs the node's address as well: set socket (HICACHE_MOONCAKE_SOCKET) to the node's UNIX socket",
            )
        self._resolve_socket(values, sources)
        self._resolve_node(values, sources)
        if "dram_bytes" not in values:
            values["dram_bytes"] = default_dram_bytes(available_memory_bytes())
        elif values["node"] == "embedded":
            self._check_dram(given["dram_bytes"])
        if "cold_bytes" not in values:
            values["cold_bytes"] = 8 * int(str(values["dram_bytes"]))
        self._check_tls(given, values)
        if values["node"] == "embedded":
            self._resolve_interface(given, values, sources)
            self._resolve_listen(given, values, sources)
            self._check_key(given, values, sources)
        settings = Settings(sources=sources, **values)  # type: ignore[arg-type]
        if not settings.low_watermark < settings.high_watermark:
            low, high = given.get("low_watermark"), given.get("high_watermark")
            culprit = low or high
            assert culprit is not None
            raise ConfigError(
                culprit.name,
                culprit.origin,
                culprit.raw,
                f"the low watermark ({settings.low_watermark}) must lie below the high one ({settings.high_watermark}): "
                "set both",
            )
        return settings, self.notices

    def _resolve_socket(self, values: dict[str, object], sources: dict[str, str]) -> None:
        if "socket" in values:
            return
        values["socket"] = default_socket(self.environ)
        runtime = self.environ.get("XDG_RUNTIME_DIR", "")
        if runtime and not str(values["socket"]).startswith(runtime):
            self.notices.append(
                f"XDG_RUNTIME_DIR = {runtime!r}: unusable for a UNIX socket (not absolute, or too long), "
                f"{values['socket']} is used instead"
            )

    def _resolve_node(self, values: dict[str, object], sources: dict[str, str]) -> None:
        if values.get("node", "auto") != "auto":
            return
        if sources["socket"] != "default":
            values["node"], sources["node"] = "external", f"auto: the socket is set by {sources['socket']}"
        else:
            values["node"], sources["node"] = "embedded", "default"

    def _check_dram(self, given: Given) -> None:
        size = given.value
        assert isinstance(size, int)
        if size == 0:
            raise ConfigError(
                given.name,
                given.origin,
                given.raw,
                "the node that this engine starts would hold nothing: give it memory, or run `hicache-mooncake node` on "
                "this host and set "
                "node=external (HICACHE_MOONCAKE_NODE=external)",
            )
        if size < MIN_DRAM_BYTES:
            raise ConfigError(given.name, given.origin, given.raw, f"is {size} bytes, less than 1 MiB: add a unit, such as 4gb")

    def _check_tls(self, given: Mapping[str, Given], values: Mapping[str, object]) -> None:
        """All three or none of them; and no way around it for a node of ours."""
        files = [given[name] for name in ("tls_cert", "tls_key", "tls_ca") if name in given and given[name].value]
        if not files:
            return
        missing = [name for name in ("tls_cert", "tls_key", "tls_ca") if name not in given or not given[name].value]
        if missing:
            item = files[0]
            raise ConfigError(
                item.name,
                item.origin,
                item.raw,
                f"TLS needs {' and '.join(missing)} as well: a certificate, its key, and the authority that signed those of "
                "all nodes",
            )
        transport = given.get("transport")
        if values["node"] == "embedded" and transport is not None and transport.value not in ("auto", "tcp"):
            raise ConfigError(
                transport.name,
                transport.origin,
                transport.raw,
                f"bytes over this transport are not encrypted, and TLS is asked for ({files[0].name}): leave transport out, "
                "which means tcp then, or leave out TLS",
            )

    def _resolve_interface(self, given: dict[str, Given], values: dict[str, object], sources: dict[str, str]) -> None:
        """Where to listen, from the interface. What it says of the address to advertise counts more than the host's name."""
        item = given.get("interface")
        if item is None or not item.value:
            return
        from hicache_mooncake.transfer import addresses

        try:
            table = addresses.table()
            address = addresses.of_interface(str(item.value), table)
        except ValueError as error:
            raise ConfigError(item.name, item.origin, item.raw, str(error)) from None
        port = 0
        listen = given.get("listen")
        if listen is not None:
            host, port = split_address(str(listen.value))
            if not is_wildcard(host):
                if addresses.owner(host, table) != item.value:
                    self.notices.append(
                        f"{item.origin} = {item.raw!r}: not used, since listen = {listen.raw!r} (from {listen.origin}) names "
                        "an address"
                    )
                return
        origin = f"{item.origin} = {item.raw}"
        values["listen"], sources["listen"] = join_address(address, port), origin
        given["listen"] = Given("listen", item.name, item.origin, item.raw, values["listen"])
        advertise = given.get("advertise")
        if advertise is not None and advertise is self.implied.given.get("advertise"):
            del given["advertise"]
            values["advertise"], sources["advertise"] = "", origin

    def _resolve_listen(self, given: Mapping[str, Given], values: dict[str, object], sources: dict[str, str]) -> None:
        masters = values.get("masters", ())
        assert isinstance(masters, tuple)
        remote = [master for master in masters if is_remote_master(master)]
        advertise = given.get("advertise")
        outward = bool(advertise and advertise.value and not is_loopback(split_address(str(advertise.value))[0]))
        if "listen" not in values:
            if remote or (masters and outward):
                hosts = [host for master in remote for host, _ in master_addresses(master)]
                every = "[::]:0" if hosts and all(":" in host for host in hosts) else "0.0.0.0:0"
                values["listen"], sources["listen"] = every, "default with a cluster"
        elif is_loopback(split_address(str(values["listen"]))[0]):
            forwarded = outward and advertise is not None and split_address(str(advertise.value))[1] != 0
            if remote and not forwarded:
                item = given["listen"]
                raise ConfigError(
                    item.name,
                    item.origin,
                    item.raw,
                    f"other hosts cannot reach a loopback address, and the master {remote[0]} is on one: listen on this "
                    "host's own address, or "
                    "set advertise to the host:port that is forwarded here",
                )
            if outward and not forwarded and advertise is not None and advertise is self.implied.given.get("advertise"):
                values["advertise"], sources["advertise"] = "", "default"
                self.notices.append(
                    f"{advertise.origin} = {advertise.raw!r}: not advertised, since the node listens on loopback only"
                )
        if remote and advertise is not None and advertise.value and not outward:
            raise ConfigError(
                advertise.name,
                advertise.origin,
                advertise.raw,
                f"other hosts cannot reach a loopback address, and the master {remote[0]} is on one: advertise this "
                "host's own address",
            )

    def _check_key(self, given: Mapping[str, Given], values: dict[str, object], sources: dict[str, str]) -> None:
        """Without a key this host's own processes are the only ones that are served, unless the operator says otherwise."""
        if values.get("key_file"):
            if values.get("allow_unauthenticated"):
                self.notices.append(
                    f"allow_unauthenticated (from {sources['allow_unauthenticated']}) changes nothing: there is a key, "
                    f"{values['key_file']}, and only who has it is served"
                )
            return
        if values.get("allow_unauthenticated"):
            return
        masters = values.get("masters", ())
        assert isinstance(masters, tuple)
        remote = next((master for master in masters if is_remote_master(master)), "")
        listen = str(values.get("listen", Settings.listen))
        if remote:
            item = given["masters"]
            name, origin, raw, what = item.name, item.origin, item.raw, f"{remote} is on another host"
        elif not is_loopback(split_address(listen)[0]):
            name, origin, raw, what = "listen", sources["listen"], listen, "other hosts reach this address"
        else:
            return
        raise ConfigError(name, origin, raw, f"{what}, and this cluster has no key. {TWO_WAYS_OUT}")


TWO_WAYS_OUT = (
    "Make a key once with `hicache-mooncake keygen FILE`, copy it to every host and set key_file "
    "(HICACHE_MOONCAKE_KEY_FILE, --key-file) for all nodes and masters; or, where everybody who reaches these ports may read, "
    "add and clear pages, set allow_unauthenticated (HICACHE_MOONCAKE_ALLOW_UNAUTHENTICATED=true, --allow-unauthenticated)"
)
"""For the error of whoever may not be reached, or reach out, without a key."""


def load_settings(
    extra_config: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    explicit: Mapping[str, object] | None = None,
) -> tuple[Settings, list[str]]:
    """The effective configuration, and notices for the log about what was given but means nothing here.

    `extra_config` is SGLang's --hicache-storage-backend-extra-config; `environ` defaults to os.environ; `explicit` are values
    from a command line by setting name (`dram`, `socket`, ...; None is "not given"; `config` is the path of a config file). The
    file is `config`, else HICACHE_MOONCAKE_CONFIG, else SGLANG_HICACHE_MOONCAKE_CONFIG_PATH. Layers are merged setting by
    setting. Reads the file, /proc and /sys/fs/cgroup; connects to nothing. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    loader = _Loader(environ)
    explicit = explicit or {}
    for origin, path in (
        ("--config", str(explicit.get("config") or "")),
        (CONFIG_ENV, environ.get(CONFIG_ENV, "")),
        (MOONCAKE_CONFIG_ENV, environ.get(MOONCAKE_CONFIG_ENV, "")),
    ):
        if path:
            loader.add_mapping(_read_file(path, origin), f"file {path}", may_hold_sglang_keys=False)
            break
    # Layers rank by their order in the list. extra_config is read before the environment, whose local_hostname has the last
    # word.
    loader.add_mapping(extra_config or {}, "extra_config", may_hold_sglang_keys=True)
    extra = loader.layers.pop()
    loader.add_mooncake_environment()
    loader.add_own_environment()
    loader.layers.append(extra)
    loader.add_explicit(explicit)
    return loader.finish()


if __name__ == "__main__":
    from hicache_mooncake.config_docs import markdown

    print(markdown(), end="")
