"""`hicache-mooncake conductor`: the router in front of SGLang engines, and `conductor explain`: where a prompt goes and why."""

from __future__ import annotations

import json
import logging
import math
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from hicache_master.router.app import Options

_UNUSABLE = 2
_ASK_S = 30.0
_COLUMNS = 120
"""Of tables that do not go to a terminal."""

conductor_app = typer.Typer(
    invoke_without_command=True,
    help="Run the router: requests go where their first token comes soonest, or are told when to come again.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _fail(problem: str) -> typer.Exit:
    print(f"hicache-mooncake: {problem}", file=sys.stderr)
    return typer.Exit(_UNUSABLE)


def _secret(path: Path | None, what: str) -> str:
    """What is in the file. Raises ValueError."""
    if path is None:
        return ""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{what} {path}: {error}") from None
    if not text or not text.isprintable():
        raise ValueError(f"{what} {path} has no line of printable text")
    return text


@conductor_app.callback()
def conductor_command(
    context: typer.Context,
    listen: Annotated[str, typer.Option(help="host:port for clients.")] = "127.0.0.1:30080",
    worker: Annotated[list[str] | None, typer.Option(help="An engine, http://host:port[,store=NODE]; repeat it.")] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(help="A prefill engine, http://host:port[:bootstrap port][,store=NODE]; repeat it.")
    ] = None,
    decode: Annotated[list[str] | None, typer.Option(help="A decode engine, http://host:port; repeat it.")] = None,
    policy: Annotated[str, typer.Option(help="As of replay.")] = "pool-aware",
    admission: Annotated[str, typer.Option(help="off, baseline, early or predictive.")] = "predictive",
    ttft_slo_ms: Annotated[float, typer.Option(help="Permitted TTFT of requests that do not say; 0: any.", min=0)] = 0.0,
    tbt_slo_ms: Annotated[float, typer.Option(help="Permitted TBT of requests that do not say; 0: any.", min=0)] = 0.0,
    prefill_rate: Annotated[
        float, typer.Option(help="Tokens that an engine prefills in a second, to begin with; it is learned.", min=1)
    ] = 10_000.0,
    token_bytes: Annotated[int, typer.Option(help="KV bytes of a token, all layers.", min=1)] = 160 << 10,
    bandwidth: Annotated[float, typer.Option(help="GB/s out of each store node.", min=0.001)] = 10.0,
    local_bandwidth: Annotated[float, typer.Option(help="GB/s from an engine's own store node.", min=0.001)] = 10.0,
    cold_bandwidth: Annotated[float, typer.Option(help="GB/s of each disk.", min=0.001)] = 2.0,
    threshold: Annotated[float, typer.Option(help="Fetch what makes the prefix longer than this many times.", min=1)] = 1.3,
    max_running: Annotated[int, typer.Option(help="Requests in each engine at once; 0: what it says that it runs.", min=0)] = 0,
    waiting: Annotated[int, typer.Option(help="Requests that may wait for room in the engines.", min=0)] = 1024,
    wait_s: Annotated[float, typer.Option(help="And for how long.", min=0.001)] = 30.0,
    max_body: Annotated[str, typer.Option(help="Largest request, such as 64mb.")] = "64mb",
    max_buffered: Annotated[str, typer.Option(help="All requests in memory, such as 2gb.")] = "2gb",
    retries: Annotated[int, typer.Option(help="Other engines that a request may try.", min=0, max=10)] = 2,
    stall_s: Annotated[float, typer.Option(help="An engine that sends nothing for so long has failed.", min=1)] = 600.0,
    drain_s: Annotated[float, typer.Option(help="What runs has so long when the router is told to end.", min=0)] = 30.0,
    decisions: Annotated[int, typer.Option(help="Keep the reasons of one decision in so many; 0: of none.", min=0)] = 100,
    decisions_file: Annotated[Path | None, typer.Option(help="Write them there as well, a JSON object a line.")] = None,
    admin_token_file: Annotated[Path | None, typer.Option(help="What /workers, /decisions and /explain ask for.")] = None,
    engine_key_file: Annotated[Path | None, typer.Option(help="The engines' API key, for probes and aborts.")] = None,
    model: Annotated[str, typer.Option(help="Served model; the first engine's if not given.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Its folder; auto: the engines', where it is here; or off.")] = "auto",
    master: Annotated[list[str] | None, typer.Option(help="A master of the pool, host:port; repeat it, or by commas.")] = None,
    key_file: Annotated[str, typer.Option(envvar="HICACHE_MOONCAKE_KEY_FILE", help="The pool's key, made by keygen.")] = "",
    log_level: Annotated[str, typer.Option(envvar="HICACHE_MOONCAKE_LOG_LEVEL", help="As for node.")] = "info",
) -> None:
    if context.invoked_subcommand is not None:
        return
    try:
        from hicache_master.conductor.admission import MODES
        from hicache_master.conductor.policies import POLICIES
        from hicache_master.router.app import Options
        from hicache_master.router.serving import Limits
        from hicache_master.router.workers import parse_spec
    except ModuleNotFoundError as error:
        raise _fail(f"the router needs {error.name}: pip install 'hicache-mooncake[conductor]'") from None
    from hicache_mooncake.config import join_address, parse_size, split_address
    from hicache_mooncake.config_table import BY_ATTRIBUTE
    from hicache_mooncake.config_values import parse_masters
    from hicache_mooncake.security import SecurityError, load_key

    try:
        if policy not in POLICIES:
            raise ValueError(f"--policy {policy!r} is none of {', '.join(POLICIES)}")
        if admission not in MODES:
            raise ValueError(f"--admission {admission!r} is none of {', '.join(MODES)}")
        if bool(prefill) != bool(decode):
            raise ValueError("prefill engines are no use without decode engines, nor the other way round: give both")
        specs = [parse_spec(text, "plain") for text in worker or ()]
        specs += [parse_spec(text, "prefill") for text in prefill or ()]
        specs += [parse_spec(text, "decode") for text in decode or ()]
        if len({spec.name for spec in specs}) < len(specs):
            raise ValueError("two engines have the same name or address")
        options = Options(
            listen=_parsed("--listen", listen, lambda text: join_address(*split_address(text))),
            workers=specs,
            policy=policy,
            admission=admission,
            ttft_slo_s=ttft_slo_ms / 1e3 or math.inf,
            tbt_slo_s=tbt_slo_ms / 1e3 or math.inf,
            prefill_tokens_s=prefill_rate,
            token_bytes=token_bytes,
            bandwidth=bandwidth * 1e9,
            local_bandwidth=local_bandwidth * 1e9,
            cold_bandwidth=cold_bandwidth * 1e9,
            threshold=threshold,
            max_running=max_running,
            waiting=waiting,
            limits=Limits(
                _parsed("--max-body", max_body, parse_size),
                _parsed("--max-buffered", max_buffered, parse_size),
                wait_s,
                retries,
            ),
            stall_s=stall_s,
            drain_s=drain_s,
            decisions_every=decisions,
            decisions_file=decisions_file,
            admin_token=_secret(admin_token_file, "--admin-token-file"),
            engine_key=_secret(engine_key_file, "--engine-key-file"),
            model=model,
            tokenizer=tokenizer,
            masters=_parsed("--master", ",".join(master), parse_masters) if master else (),
            master_key=load_key(key_file),
        )
        level = str(BY_ATTRIBUTE["log_level"].parse(log_level))
    except (ValueError, SecurityError) as error:
        raise _fail(str(error)) from None
    _run(options, level)


T = TypeVar("T")


def _parsed(option: str, text: str, parse: Callable[[str], T]) -> T:
    """Raises ValueError that names the option."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option} {text!r}: {error}") from None


def _run(options: Options, level: str) -> None:
    from hicache_master.router.app import Router, run

    from hicache_mooncake.cli import logs

    logs.set_up(level)
    log = logging.getLogger("hicache_master.router")

    def ready(router: Router) -> None:
        log.info("router listens: address=%s engines=%d policy=%s", router.address, len(options.workers), options.policy)
        for notice in router.notices():
            log.info(notice)

    try:
        run(options, ready)
    except OSError as error:
        raise _fail(f"the router cannot start: {error}") from None


@conductor_app.command("explain")
def explain_command(
    prompt: Annotated[str | None, typer.Option(help="A text.")] = None,
    body: Annotated[Path | None, typer.Option(help="A request as a JSON file, - for stdin.")] = None,
    path: Annotated[str, typer.Option(help="/generate, /v1/completions or /v1/chat/completions.")] = "/generate",
    router: Annotated[str, typer.Option(help="The router.")] = "http://127.0.0.1:30080",
    priority: Annotated[int, typer.Option(help="0 is the highest.", min=0, max=9)] = 0,
    admin_token_file: Annotated[Path | None, typer.Option(help="The router's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Show where a running router would send a request, and why. Nothing is sent."""
    try:
        asked = _asked(prompt, body, path)
        token = _secret(admin_token_file, "--admin-token-file")
    except (OSError, ValueError) as error:
        raise _fail(str(error)) from None
    headers = {"Content-Type": "application/json", "x-priority": str(priority)}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"{router.rstrip('/')}/explain", json.dumps(asked).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_ASK_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise _fail(f"{router}: {error.read().decode('utf-8', 'replace')[:500]}") from None
    except (OSError, ValueError) as error:
        raise _fail(f"{router}: {error}") from None
    if as_json:
        print(json.dumps(answer))
    else:
        _show(answer)


def _asked(prompt: str | None, body: Path | None, path: str) -> dict[str, object]:
    if (prompt is None) == (body is None):
        raise ValueError("give either --prompt or --body")
    if prompt is not None:
        forms: dict[str, dict[str, object]] = {
            "/generate": {"text": prompt},
            "/v1/completions": {"prompt": prompt},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": prompt}]},
        }
        return {"path": path, "body": forms.get(path, {})}
    assert body is not None
    text = sys.stdin.read() if str(body) == "-" else body.read_text(encoding="utf-8")
    return {"path": path, "body": json.loads(text)}


def _show(answer: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else _COLUMNS, highlight=False)
    kind = "tokens" if answer["read"] else "tokens, more or less: the prompt could not be read"
    console.print(f"{answer['tokens']:,} {kind}; {answer['pages']:,} pages, {answer.get('known_pages', 0):,} of them known")
    table = Table(box=None, header_style="bold")
    table.add_column("engine", no_wrap=True)
    for heading in ("own", "pages", "queue", "load", "fetch", "prefill", "TTFT (ms)"):
        table.add_column(heading, justify="right")
    for each in answer["candidates"]:
        chosen = each["engine"] == answer.get("chosen")
        times = (f"{each[f'{name}_ms']:,.1f}" for name in ("queue", "load", "transfer", "prefill", "ttft"))
        table.add_row(each["engine"], f"{each['own_pages']:,}", f"{each['pages']:,}", *times, style="bold" if chosen else None)
    console.print(table)
    for name in answer["avoided"]:
        console.print(f"not asked: {name}")
    if "rejected" in answer:
        rejected = answer["rejected"]
        wait = f", again in {rejected['retry_after_s']:.0f} s" if rejected["retry_after_s"] is not None else ""
        load = f", load {rejected['load']:.2f}" if rejected["load"] is not None else ""
        console.print(f"turned away: {rejected['reason']}{load}{wait}")
        return
    for holder, start, end, cold in answer["fetches"]:
        console.print(f"fetches pages {start:,} to {end:,} from {holder}{' (disk)' if cold else ''}")
    decode = answer["decode"]
    where = f", decoded on {decode} at {answer['tbt_ms']:.1f} ms a token" if decode else ""
    console.print(f"goes to {answer['chosen']}{where}")
