"""The command `hicache-mooncake`. Commands import what they need when they run: --help must not wait for sockets or LMDB."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hicache_mooncake import __version__
from hicache_mooncake.cli.conductor import conductor_app

if TYPE_CHECKING:
    from hicache_mooncake.config import Settings
    from hicache_mooncake.security import ClusterKey

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A shared KV-cache pool for SGLang HiCache.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Socket = Annotated[str | None, typer.Option(help="UNIX socket of this host's node.")]
Config = Annotated[Path | None, typer.Option(help="Config file, JSON or TOML.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
KeyFile = Annotated[str | None, typer.Option(help="The cluster's key, made by keygen.")]
AllowUnauthenticated = Annotated[bool | None, typer.Option(help="Serve and use other hosts without a key.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning, error or critical.")]

CONFIG_EXIT = 2
"""Exit status for a configuration that cannot be used, as for a wrong option."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hicache-mooncake {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


def _settings(explicit: dict[str, object]) -> tuple[Settings, list[str]]:
    """The effective configuration; a wrong one ends the process with its message."""
    from hicache_mooncake.config import ConfigError, load_settings

    try:
        return load_settings(explicit=explicit)
    except ConfigError as error:
        print(f"hicache-mooncake: {error}", file=sys.stderr)
        raise typer.Exit(CONFIG_EXIT) from None


def _key(path: str) -> ClusterKey | None:
    """The key in this file, None for "". One that cannot be used ends the process with its message."""
    from hicache_mooncake.security import SecurityError, load_key

    try:
        return load_key(path)
    except SecurityError as error:
        print(f"hicache-mooncake: {error}", file=sys.stderr)
        raise typer.Exit(CONFIG_EXIT) from None


@app.command("demo")
def demo_command(
    keep: Annotated[bool, typer.Option(help="Leave everything running at the end.")] = False,
    pd: Annotated[bool, typer.Option("--pd", help="Prefill and decode on servers of their own, and several chats.")] = False,
    workdir: Annotated[Path, typer.Option(help="Where logs, sockets and the demo's model go.")] = Path(".demo"),
    model: Annotated[Path | None, typer.Option(help="Serve this model instead of the tiny one that comes along.")] = None,
) -> None:
    """Show the pool at work on this machine, from nothing."""
    from hicache_mooncake.cli.demo import run_demo
    from hicache_mooncake.cli.demo_pd import run_pd_demo

    raise typer.Exit((run_pd_demo if pd else run_demo)(keep=keep, workdir=workdir, model=model))


@app.command("node")
def node_command(
    dram: Annotated[str | None, typer.Option(help="Memory for the pool, such as 64gb.")] = None,
    socket: Socket = None,
    listen: Annotated[str | None, typer.Option(help="host:port for other nodes; port 0 lets the system choose.")] = None,
    advertise: Annotated[str | None, typer.Option(help="host or host:port under which other nodes reach this one.")] = None,
    master: Annotated[list[str] | None, typer.Option(help="A master, host:port; repeat it, or separate by commas.")] = None,
    name: Annotated[str | None, typer.Option(help="Name in the cluster.")] = None,
    host_id: Annotated[str | None, typer.Option(help="Which physical host this is.")] = None,
    key_file: KeyFile = None,
    allow_unauthenticated: AllowUnauthenticated = None,
    metrics: Annotated[str | None, typer.Option(help="host:port of /metrics, or off.")] = None,
    promise_share: Annotated[float | None, typer.Option(help="Part of the memory for promised pages, 0 to 0.5.")] = None,
    high_watermark: Annotated[float | None, typer.Option(help="Part of the memory above which to evict.")] = None,
    low_watermark: Annotated[float | None, typer.Option(help="Part of the memory down to which to evict.")] = None,
    eviction: Annotated[str | None, typer.Option(help="Which pages go first: adaptive, lru or cost.")] = None,
    spill: Annotated[bool | None, typer.Option(help="Give cold pages to nodes with room.")] = None,
    replicate_after: Annotated[int | None, typer.Option(help="Keep a copy after so many fetches; 0: never.")] = None,
    drain_s: Annotated[float | None, typer.Option(help="How long to hand pages over at the end; 0: not at all.")] = None,
    cold: Annotated[str | None, typer.Option(help="Directory of the cold tier.")] = None,
    cold_bytes: Annotated[str | None, typer.Option(help="Pages on the disk, such as 500gb.")] = None,
    cold_floor: Annotated[str | None, typer.Option(help="What stays free on the disk.")] = None,
    cold_after_loads: Annotated[int | None, typer.Option(help="Write pages loaded so often too; 0: never.")] = None,
    save_on_exit: Annotated[bool | None, typer.Option(help="On SIGTERM write all of DRAM to the cold tier.")] = None,
    hugepages: Annotated[bool | None, typer.Option(help="Back the memory with reserved huge pages.")] = None,
    transport: Annotated[str | None, typer.Option(help="auto, tcp, verbs, or an installed transport's name.")] = None,
    rdma_devices: Annotated[str | None, typer.Option(help="RDMA devices to use, separated by commas.")] = None,
    gid_index: Annotated[str | None, typer.Option(help="GID of each RDMA device, or auto.")] = None,
    verbs_binding: Annotated[str | None, typer.Option(help="auto, ibverbs or pyverbs.")] = None,
    interface: Annotated[str | None, typer.Option(help="Network interface for tcp.")] = None,
    max_in_flight: Annotated[str | None, typer.Option(help="Bytes under way from one node over RDMA, such as 64mb.")] = None,
    numa: Annotated[str | None, typer.Option(help="auto or off.")] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate for TLS between nodes.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its private key.")] = None,
    tls_ca: Annotated[str | None, typer.Option(help="The authority that signed all nodes' certificates.")] = None,
    log_level: LogLevel = None,
    config: Config = None,
    embedded: Annotated[bool, typer.Option("--embedded", hidden=True, help="Started by an engine.")] = False,
    idle_exit_s: Annotated[float | None, typer.Option(hidden=True, help="End after so long without an engine.")] = None,
) -> None:
    """Run this host's store node."""
    import logging

    from hicache_mooncake.cli import logs

    settings, notices = _settings(
        {
            "node": "embedded",  # This process is the node: what says that another one runs elsewhere is meant for engines.
            "dram": dram,
            "socket": socket,
            "listen": listen,
            "advertise": advertise,
            "master": master or None,
            "name": name,
            "host_id": host_id,
            "key_file": key_file,
            "allow_unauthenticated": allow_unauthenticated,
            "metrics": metrics,
            "promise_share": promise_share,
            "high_watermark": high_watermark,
            "low_watermark": low_watermark,
            "eviction": eviction,
            "spill": spill,
            "replicate_after": replicate_after,
            "drain_s": drain_s,
            "cold": cold,
            "cold_bytes": cold_bytes,
            "cold_floor": cold_floor,
            "cold_after_loads": cold_after_loads,
            "save_on_exit": save_on_exit,
            "hugepages": hugepages,
            "transport": transport,
            "rdma_devices": rdma_devices,
            "gid_index": gid_index,
            "verbs_binding": verbs_binding,
            "interface": interface,
            "max_in_flight": max_in_flight,
            "numa": numa,
            "tls_cert": tls_cert,
            "tls_key": tls_key,
            "tls_ca": tls_ca,
            "log_level": log_level,
            "config": config,
        }
    )
    logs.set_up(settings.log_level)
    log = logging.getLogger("hicache_mooncake")
    for notice in notices:
        log.info(notice)
    log.info("node %s: %s", __version__, settings.describe())
    _key(settings.key_file)  # the message of a key that cannot be used, before anything is started

    from hicache_mooncake.node.service import NodeError, run_node

    try:
        raise typer.Exit(run_node(settings, embedded=embedded, idle_exit_s=idle_exit_s))
    except NodeError as error:
        log.error("the node cannot start: %s", error)
        raise typer.Exit(1) from None


@app.command("keygen")
def keygen_command(file: Annotated[Path, typer.Argument(help="Where to write the key; must not exist yet.")]) -> None:
    """Make the key of a cluster. Nodes and masters that have it serve each other and nobody else."""
    from hicache_mooncake.security import ClusterKey

    key = ClusterKey.generate()
    path = file.absolute()
    try:
        key.save(str(path))
    except FileExistsError:
        advice = "a cluster that uses it would be cut off from what joins later. Remove it first if that is what you want"
        print(f"hicache-mooncake: {path} exists and is left as it is: {advice}", file=sys.stderr)
        raise typer.Exit(1) from None
    except OSError as error:
        print(f"hicache-mooncake: {path}: {error.strerror}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(
        f"{path} holds a new cluster key, fingerprint {key.fingerprint}.\n"
        "Copy it to every host over a channel that you trust, mode 0600 and owned by the user of the node or master, then\n"
        f"  hicache-mooncake master --key-file {path} ...\n"
        f"  hicache-mooncake node --key-file {path} ...       or HICACHE_MOONCAKE_KEY_FILE={path}\n"
        "Engines whose node runs as a service need nothing. To change the key, replace the file everywhere and restart\n"
        "all masters and nodes: those with the old key and those with the new one do not see each other."
    )


@app.command("master")
def master_command(
    listen: Annotated[str, typer.Option(help="host:port for the nodes.")] = "0.0.0.0:50051",
    advertise: Annotated[str, typer.Option(help="host:port for etcd, when that is not what it listens on.")] = "",
    shard: Annotated[str, typer.Option(help="Which part of the keys: 0/4 to 3/4 are the masters of four.")] = "0/1",
    key_file: Annotated[str, typer.Option(envvar="HICACHE_MOONCAKE_KEY_FILE", help="The cluster's key, made by keygen.")] = "",
    allow_unauthenticated: Annotated[
        bool, typer.Option(envvar="HICACHE_MOONCAKE_ALLOW_UNAUTHENTICATED", help="Serve other hosts without a key.")
    ] = False,
    etcd: Annotated[str, typer.Option(help="Register at this etcd, http://host:2379; several by commas.")] = "",
    cluster: Annotated[str, typer.Option(help="Name of the cluster in etcd.")] = "",
    metrics: Annotated[str, typer.Option(help="host:port of /metrics, or off.")] = "off",
    heartbeat_s: Annotated[float, typer.Option(help="How often nodes report.", min=0.05, max=60)] = 1.0,
    ttl_s: Annotated[float, typer.Option(help="Pages of a node silent for so long are not offered.", min=0.1, max=600)] = 5.0,
    max_keys: Annotated[int, typer.Option(help="Most keys in the directory, 70 to 140 bytes each.", min=1)] = 50_000_000,
    max_bytes: Annotated[str, typer.Option(help="Most memory of the directory, such as 16gb; 0: what max-keys needs.")] = "0",
    kv_events: Annotated[str, typer.Option(help="Publish KV events of the pool at tcp://host:port, in the clear.")] = "",
    kv_events_replay: Annotated[str, typer.Option(help="tcp://host:port where subscribers get events they missed.")] = "",
    log_level: Annotated[str, typer.Option(envvar="HICACHE_MOONCAKE_LOG_LEVEL", help="As for node.")] = "info",
) -> None:
    """Run a metadata master. Several are equals: give nodes all of their addresses."""
    import logging

    from hicache_mooncake.cli import logs
    from hicache_mooncake.config import join_address, parse_size, split_address
    from hicache_mooncake.config_table import BY_ATTRIBUTE
    from hicache_mooncake.config_values import parse_advertise, parse_cluster, parse_kv_events, parse_shard

    problem = ""
    try:
        address = join_address(*split_address(listen))
        parse_advertise(advertise)
        parse_cluster(cluster)
        part = parse_shard(shard)
        most_bytes = parse_size(max_bytes) or None
        if cluster and not etcd:
            problem = f"--cluster {cluster} names a cluster in etcd: give --etcd as well"
        metrics_address = str(BY_ATTRIBUTE["metrics"].parse(metrics))
        level = str(BY_ATTRIBUTE["log_level"].parse(log_level))
        published, repeated = parse_kv_events(kv_events), parse_kv_events(kv_events_replay)
        if repeated and not published:
            problem = "--kv-events-replay repeats what was published: give --kv-events as well"
        if ttl_s < 2 * heartbeat_s:
            problem = f"--ttl-s {ttl_s:g} must be at least twice --heartbeat-s {heartbeat_s:g}: a late report is no dead node"
    except ValueError as error:
        given = {"listen": listen, "metrics": metrics, "log level": log_level, "shard": shard, "max bytes": max_bytes}
        more = {"advertise": advertise, "etcd": etcd, "cluster": cluster, "kv events": kv_events, "replay": kv_events_replay}
        given |= {name: value for name, value in more.items() if value}
        problem = f"{error} ({', '.join(f'{name} {value!r}' for name, value in given.items())})"
    if problem:
        print(f"hicache-mooncake: {problem}", file=sys.stderr)
        raise typer.Exit(CONFIG_EXIT)
    key = _key(key_file)
    logs.set_up(level)

    from hicache_master.server import MasterError, run_master

    try:
        run_master(
            address,
            metrics_address or None,
            heartbeat_s=heartbeat_s,
            ttl_s=ttl_s,
            max_keys=max_keys,
            max_bytes=most_bytes,
            shard=part,
            key=key,
            allow_unauthenticated=allow_unauthenticated,
            etcd=etcd or None,
            cluster=cluster,
            advertise=advertise,
            kv_events=published,
            kv_events_replay=repeated,
        )
    except MasterError as error:
        logging.getLogger("hicache_master").error("the master cannot start: %s", error)
        raise typer.Exit(1) from None


@app.command("replay")
def replay_command(
    trace: Annotated[
        Path, typer.Option(help="Requests: timestamp, input_length, output_length, hash_ids; a JSON object a line.")
    ],
    policy: Annotated[list[str] | None, typer.Option(help="How to route; repeat it to compare.")] = None,
    admission: Annotated[
        list[str] | None, typer.Option(help="off, baseline, early or predictive; repeat it to compare.")
    ] = None,
    prefill: Annotated[int, typer.Option(help="Prefill engines.", min=1, max=512)] = 8,
    decode: Annotated[int, typer.Option(help="Decode engines; 0: look at prefill only.", min=0, max=512)] = 8,
    mfu: Annotated[float, typer.Option(help="Part of the peak FLOP/s that a prefill reaches.", min=0.01, max=1)] = 0.5,
    speed: Annotated[float, typer.Option(help="How many times as fast as they came requests arrive.", min=0.001)] = 1.0,
    requests: Annotated[int | None, typer.Option(help="Only so many, the first ones.", min=1)] = None,
    ttft_slo: Annotated[float, typer.Option(help="Permitted TTFT, in s.", min=0.001)] = 30.0,
    tbt_slo: Annotated[float, typer.Option(help="Permitted TBT, in s.", min=0.001)] = 0.1,
    dram_tokens: Annotated[
        int, typer.Option(help="Tokens that the DRAM of each store node has room for.", min=512)
    ] = 3_000_000,
    cold_tokens: Annotated[int, typer.Option(help="Tokens that its disk has room for.", min=0)] = 0,
    bandwidth: Annotated[float, typer.Option(help="GB/s out of each store node.", min=0.001)] = 87.0,
    cold_bandwidth: Annotated[float, typer.Option(help="GB/s of each disk.", min=0.001)] = 6.0,
    threshold: Annotated[float, typer.Option(help="Fetch what makes the prefix longer than this many times.", min=1)] = 1.3,
    prefetch: Annotated[bool, typer.Option("--prefetch", help="Pages travel while a request waits, as in SGLang.")] = False,
    noise: Annotated[float, typer.Option(help="How far prefill times are off the model's, 0.2 for about 20 %.", min=0)] = 0.0,
    through_pool: Annotated[
        bool,
        typer.Option("--through-pool", help="Through real store nodes, a small page for each of the trace."),
    ] = False,
    nodes: Annotated[list[int] | None, typer.Option(help="Store nodes of --through-pool; repeat it.", min=1, max=64)] = None,
    capacity: Annotated[
        list[float] | None, typer.Option(help="Millions of tokens that each of them has room for; repeat it.", min=0.001)
    ] = None,
    eviction: Annotated[list[str] | None, typer.Option(help="Their eviction; repeat it to compare.")] = None,
    watermarks: Annotated[bool, typer.Option("--watermarks", help="They evict ahead of need, as nodes do by default.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Charts go there: FILE.png, or .svg where matplotlib is missing.")] = None,
    json: Json = False,
) -> None:
    """Replay a trace of requests through the conductor's decisions, in simulated time, or through a real pool."""
    if through_pool:
        from hicache_mooncake.cli.replay_pool import run_pool_replay

        raise typer.Exit(
            run_pool_replay(
                trace,
                nodes or [1],
                capacity or [3.0, 20.0, 50.0],
                eviction or ["lru"],
                requests,
                plot,
                watermarks=watermarks,
                as_json=json,
            )
        )
    from hicache_master.conductor.replay import Setup

    from hicache_mooncake.cli.replay import run_replay

    modes = admission or ["off"]
    setups = []
    try:
        for route in policy or ["least-queue", "local-aware", "pool-aware"]:
            for mode in modes:
                setup = Setup(
                    policy=route,
                    admission=mode,  # type: ignore[arg-type]
                    prefills=prefill,
                    decodes=decode,
                    mfu=mfu,
                    speed=speed,
                    ttft_slo_s=ttft_slo,
                    tbt_slo_s=tbt_slo,
                    cache_tokens=dram_tokens,
                    cold_tokens=cold_tokens,
                    bandwidth=bandwidth * 1e9,
                    cold_bandwidth=cold_bandwidth * 1e9,
                    threshold=threshold,
                    fetch_while_queued=prefetch,
                    noise=noise,
                )
                setups.append((route if modes == ["off"] else f"{route}, {mode}", setup))
    except ValueError as error:
        print(f"hicache-mooncake: {error}", file=sys.stderr)
        raise typer.Exit(CONFIG_EXIT) from None
    raise typer.Exit(run_replay(trace, setups, requests, plot, as_json=json))


cold_app = typer.Typer(no_args_is_help=True, help="Look at a cold tier, verify it, tidy it up or empty it.")
app.add_typer(cold_app, name="cold")

ColdDirectory = Annotated[Path, typer.Argument(help="The directory that the node is given as --cold.")]


@cold_app.command("stat")
def cold_stat_command(directory: ColdDirectory, json: Json = False) -> None:
    """Show what is in it. The node may run."""
    from hicache_mooncake.cli import cold

    raise typer.Exit(cold.run(lambda: cold.stat(directory, as_json=json)))


@cold_app.command("verify")
def cold_verify_command(directory: ColdDirectory, json: Json = False) -> None:
    """Read every page and check it. The node may run. Exit status 1: something is damaged."""
    from hicache_mooncake.cli import cold

    raise typer.Exit(cold.run(lambda: cold.verify(directory, as_json=json)))


@cold_app.command("gc")
def cold_gc_command(
    directory: ColdDirectory,
    other_versions: Annotated[
        bool, typer.Option("--other-versions", help="Delete what other versions have left, too.")
    ] = False,
) -> None:
    """Give back what nobody can find any more. The node must be stopped."""
    from hicache_mooncake.cli import cold

    raise typer.Exit(cold.run(lambda: cold.gc(directory, other_versions=other_versions)))


@cold_app.command("clear")
def cold_clear_command(
    directory: ColdDirectory,
    namespace: Annotated[str | None, typer.Option(help="Of this namespace, as stat shows it.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Of all of them.")] = False,
) -> None:
    """Forget pages. The node must be stopped."""
    from hicache_mooncake.cli import cold

    raise typer.Exit(cold.run(lambda: cold.clear(directory, namespace=namespace, everything=everything)))


@app.command("status")
def status_command(
    socket: Socket = None,
    master: Annotated[str | None, typer.Option(help="Ask these masters, host:port,host:port, for the cluster.")] = None,
    key_file: KeyFile = None,
    json: Json = False,
    config: Config = None,
) -> None:
    """Show what the node on this host, or masters, know: nodes, bytes, objects, hit rates."""
    from hicache_mooncake.cli.status import run_status

    # This process starts no node.
    settings, _ = _settings({"node": "external", "socket": socket, "master": master, "key_file": key_file, "config": config})
    key = _key(settings.key_file) if master else None
    ask_node = socket is not None or master is None
    masters = settings.masters if master else ()
    raise typer.Exit(run_status(settings.socket if ask_node else None, masters, key=key, as_json=json))


@app.command("doctor")
def doctor_command(socket: Socket = None, json: Json = False, config: Config = None) -> None:
    """Check this host: what would be used, why, and what to do about the rest."""
    from hicache_mooncake.cli.doctor import run_doctor

    raise typer.Exit(run_doctor({"socket": socket, "config": config}, as_json=json))


app.add_typer(conductor_app, name="conductor")


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="hicache-mooncake")
