"""
Who is measured: how to start each one in front of the fake upstream, and its version.

What is not installed is skipped with a line. Peers from PyPI live in virtual environments of
their own below `.venvs/`:

    python benchmarks/contenders.py                     # who is there, who is not and why
    python benchmarks/contenders.py install vllm-router # into .venvs/vllm-router

Same terms for all: one process (or worker), keep-alive to both sides, no TLS, loopback. Logs of
requests are off for the peers and on for modelpool, which also checks a key, counts metrics, looks
up the model and takes a lease of a member that it started itself.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bodies import MODEL
from machine import cores, pinned, version_of
from native import HERE, Natives

VENVS = HERE / ".venvs"
KEY = "sk-bench"
READY_S = 90.0
_ROOT = HERE.parent


class NotInstalled(Exception):
    """This contender cannot run here; says what is missing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known before a contender is started."""

    folder: Path
    """Its own, for configuration, logs, state."""
    port: int
    upstream_port: int
    natives: Natives
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Settings of modelpool for this run alone."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a contender."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    own_members: bool = False
    """It starts the upstream itself, so its children are not part of it."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One entry of `CONTENDERS`."""

    name: str
    launch: Callable[[Plan], Launch]
    version: Callable[[], str]
    requirement: str = ""
    """What `install` gives to pip."""
    python: str = ""
    """Interpreter for its environment; ours when empty."""


class Running:
    """A contender that runs; ``with Running(...) as it``: ready inside, gone outside."""

    def __init__(self, contender: Contender, plan: Plan, *, core: int | None) -> None:
        # a run that is told to end takes down what it started, as after Ctrl-C
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        plan.folder.mkdir(parents=True, exist_ok=True)
        launch = contender.launch(plan)
        self.name = contender.name
        self.port = plan.port
        self._own_members = launch.own_members
        self._log = (plan.folder / "log").open("wb")
        self.started_at = time.monotonic()
        self._process = subprocess.Popen(
            pinned(core, *launch.argv),
            env={**_environment(), **launch.env},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process that was started."""
        return self._process.pid

    def pids(self) -> list[int]:
        """Return every process whose CPU and memory count as the contender's."""
        return [self.pid] if self._own_members else [self.pid, *descendants(self.pid)]

    def cpu_s(self) -> float:
        """Return the CPU time that its processes have used until now, of all their threads."""
        tasks = [task for pid in self.pids() for task in Path(f"/proc/{pid}/task").glob("*")]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self, *, poll_s: float = 0.02) -> None:
        """Return when it has answered a request from the upstream."""
        while not answers(self.port):
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"{self.name} ended with {self._process.returncode}: {self._last_words()}"
                )
            if time.monotonic() - self.started_at > READY_S:
                raise TimeoutError(f"{self.name} is not ready after {READY_S:.0f} s")
            time.sleep(poll_s)

    def _last_words(self) -> str:
        lines = Path(self._log.name).read_text("utf-8", "replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        return said[-1] if said else "it said nothing"

    def wait_listening(self) -> None:
        """Return when it accepts connections, answered or not."""
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._process.poll() is not None or time.monotonic() - self.started_at > READY_S:
                raise RuntimeError(f"{self.name} does not listen")
            time.sleep(0.02)

    def stop(self) -> None:
        """End it and everything it started."""
        end(self._process)
        self._log.close()


def _environment() -> dict[str, str]:
    """Return ours, with Python as it is by default: it keeps what it has compiled."""
    return {name: value for name, value in os.environ.items() if name != _NO_BYTECODE}


_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


def answers(port: int, *, timeout_s: float = 10.0) -> bool:
    """Say whether a small request on *port* is answered with 200."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return int(answer.status) == 200
    except (OSError, urllib.error.HTTPError):
        return False


def descendants(pid: int) -> list[int]:
    """Return all processes below *pid* that run now."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def end(process: subprocess.Popen[bytes], *, patience_s: float = 10.0) -> None:
    """End *process*, if need be the hard way, and everything that it started."""
    below = descendants(process.pid)
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- the contenders -----------------------------------------------------------------------------


def _program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise NotInstalled(f"no `{name}` on this machine")
    return found


def _in_venv(name: str, program: str) -> str:
    path = VENVS / name / "bin" / program
    if not path.exists():
        raise NotInstalled(f"python benchmarks/contenders.py install {name}")
    return str(path)


def _upstream_alone(plan: Plan) -> Launch:
    return Launch([str(plan.natives.upstream), str(plan.port)])


_NGINX = """
daemon off; worker_processes 1; worker_rlimit_nofile 65536; pid {folder}/pid;
error_log {folder}/error.log; {user} {modules}
events {{ worker_connections 20000; }}
http {{
  access_log off; {lua_path}
  client_max_body_size 64m; client_body_buffer_size 8m; client_body_temp_path {folder}/bodies;
  proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000000; keepalive_timeout 75s;
  upstream members {{
    server 127.0.0.1:{upstream_port}; keepalive 1024; keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=8192;
    location / {{
      {choose}
      proxy_pass http://{target}; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""
_LUA = """
      set $member "";
      access_by_lua_block {
        ngx.req.read_body()
        local body = ngx.req.get_body_data()
        local request = body and cjson.decode(body)
        ngx.var.member = request and known[request.model]
        if ngx.var.member == "" then return ngx.exit(404) end
      }
"""


def _nginx(plan: Plan) -> Launch:
    return _nginx_with(plan)


def _nginx_lua(plan: Plan) -> Launch:
    program = _program("nginx")
    folders = ("/usr/lib/nginx/modules", "/usr/share/nginx/modules", "/usr/lib64/nginx/modules")
    for folder in map(Path, folders):
        modules = [folder / "ndk_http_module.so", folder / "ngx_http_lua_module.so"]
        if all(module.exists() for module in modules):
            break
    else:
        raise NotInstalled(f"{program} has no Lua module (libnginx-mod-http-lua, lua-cjson)")
    return _nginx_with(
        plan,
        modules=" ".join(f"load_module {module};" for module in modules),
        lua_path=f'init_by_lua_block {{ cjson = require "cjson"; '
        f'known = {{ {MODEL} = "members" }} }}',
        choose=_LUA,
        target="$member",
    )


def _nginx_with(
    plan: Plan, *, modules: str = "", lua_path: str = "", choose: str = "", target: str = "members"
) -> Launch:
    config = plan.folder / "nginx.conf"
    config.write_text(
        _NGINX.format(
            folder=plan.folder,
            port=plan.port,
            upstream_port=plan.upstream_port,
            user="user root;" if os.geteuid() == 0 else "",
            modules=modules,
            lua_path=lua_path,
            choose=choose,
            target=target,
        )
    )
    return Launch([_program("nginx"), "-c", str(config), "-p", str(plan.folder)])


def _connections() -> int:
    """Return how many connections a proxy may have here, when each takes two files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 20_000 if hard == resource.RLIM_INFINITY else min(20_000, (hard - 100) // 2)


def _haproxy(plan: Plan) -> Launch:
    config = plan.folder / "haproxy.cfg"
    config.write_text(
        f"""
global
  nbthread 1
  maxconn {_connections()}
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  http-reuse always
frontend clients
  bind 127.0.0.1:{plan.port} backlog 8192
  default_backend members
backend members
  server fake 127.0.0.1:{plan.upstream_port}
"""
    )
    return Launch([_program("haproxy"), "-f", str(config)])


def _vllm_router(plan: Plan) -> Launch:
    program = _in_venv("vllm-router", "vllm-router")
    return Launch([program, *_rust_router_flags(plan)])


def _sglang_router(plan: Plan) -> Launch:
    python = _in_venv("sglang-router", "python")
    return Launch([python, "-m", "sglang_router.launch_router", *_rust_router_flags(plan)])


def _rust_router_flags(plan: Plan) -> list[str]:
    flags = ["--host", "127.0.0.1", "--port", str(plan.port), "--policy", "round_robin"]
    flags += ["--worker-urls", f"http://127.0.0.1:{plan.upstream_port}", "--log-level", "error"]
    return [*flags, "--prometheus-port", str(free_port()), "--disable-circuit-breaker"]


def _production_stack_python() -> str:
    # Not on PyPI: whoever has it names the interpreter of its environment.
    python = os.environ.get("BENCH_PRODUCTION_STACK", "")
    if not python:
        raise NotInstalled("BENCH_PRODUCTION_STACK=/path/to/its/python is not set")
    return python


def _production_stack(plan: Plan) -> Launch:
    python = _production_stack_python()
    flags = ["--host", "127.0.0.1", "--port", str(plan.port), "--service-discovery", "static"]
    flags += ["--static-backends", f"http://127.0.0.1:{plan.upstream_port}"]
    flags += ["--static-models", MODEL, "--routing-logic", "roundrobin", "--log-level", "error"]
    return Launch([python, "-m", "vllm_router.app", *flags])


def _litellm(plan: Plan) -> Launch:
    config = plan.folder / "litellm.json"
    upstream = f"http://127.0.0.1:{plan.upstream_port}/v1"
    params = {"model": f"openai/{MODEL}", "api_base": upstream, "api_key": "none"}
    config.write_text(
        json.dumps(
            {
                "model_list": [{"model_name": MODEL, "litellm_params": params}],
                "litellm_settings": {"drop_params": False, "request_timeout": 600},
            }
        )
    )
    program = _in_venv("litellm", "litellm")
    flags = ["--config", str(config), "--host", "127.0.0.1", "--port", str(plan.port)]
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_DOCS": "True"}
    # no key is asked for, like all the peers do
    env["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    return Launch([program, *flags, "--num_workers", "1", "--telemetry", "False"], env)


def ours(plan: Plan) -> Launch:
    """
    Start `modelpool serve` with a pool of one member, the fake upstream, on the tools' core.

    Keys, metrics, request log and all checks are on, as everybody gets them. Only bounds that
    the rows with many connections would hit are raised.
    """
    member = {
        "name": MODEL,
        "profile": "generic",
        "readinessPath": "/health",
        "parallel": 50_000,
        "command": pinned(cores().tools, str(plan.natives.upstream), "{port}"),
    }
    member.update(plan.extra.get("member", {}))
    pool = {"name": "gpu0", "default": MODEL, "members": [member]}
    config = {
        "listen": f"127.0.0.1:{plan.port}",
        "admin": f"127.0.0.1:{free_port()}",
        "stateDir": str(plan.folder / "state"),
        "keys": {"file": str(plan.folder / "keys.txt")},
        "maxConnections": 50_000,
        "maxHeld": 50_000,
        "maxHeldPerKey": 50_000,
        "logFormat": "json",
        "shutdownDelay": "0s",
        "shutdownTimeout": "1s",
        **plan.extra.get("router", {}),
        "pools": [pool],
    }
    (plan.folder / "keys.txt").write_text(f"bench: {KEY}\n")
    path = plan.folder / "modelpool.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return Launch([*ours_command(), "serve", str(path)], own_members=True)


def ours_command() -> list[str]:
    """Return how to call modelpool: from this interpreter, or from the checkout's environment."""
    script = Path(sys.executable).with_name("modelpool")
    if script.exists():
        return [sys.executable, str(script)]
    script = _ROOT / ".venv" / "bin" / "modelpool"
    if not script.exists():
        raise NotInstalled("no modelpool in this environment; `make bench` makes one")
    return [str(script)]


def _nginx_version() -> str:
    return version_of(_program("nginx"), "-v")


def _pip_version(name: str, package: str) -> Callable[[], str]:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return lambda: version_of(_in_venv(name, "python"), "-c", code)


_PRODUCTION_STACK_VERSION = "import importlib.metadata as m; print(m.version('vllm-router'))"

CONTENDERS: dict[str, Contender] = {
    each.name: each
    for each in (
        Contender("upstream alone", _upstream_alone, lambda: ""),
        Contender("nginx", _nginx, _nginx_version),
        Contender("nginx+lua", _nginx_lua, _nginx_version),
        Contender("haproxy", _haproxy, lambda: version_of(_program("haproxy"), "-v")),
        Contender(
            "vllm-router",
            _vllm_router,
            _pip_version("vllm-router", "vllm-router"),
            "vllm-router==0.1.17",
        ),
        Contender(
            "sglang-router",
            _sglang_router,
            _pip_version("sglang-router", "sglang-router"),
            "sglang-router==0.3.2",
        ),
        Contender(
            "litellm",
            _litellm,
            _pip_version("litellm", "litellm"),
            "litellm[proxy]==1.108.7",
        ),
        Contender(
            "production-stack",
            _production_stack,
            lambda: version_of(_production_stack_python(), "-c", _PRODUCTION_STACK_VERSION),
        ),
        Contender("modelpool", ours, lambda: version_of(*ours_command(), "--version")),
    )
}
"""Fixed versions of the peers: two results can be compared only when they measured the same."""


def install(name: str) -> bool:
    """Make the virtual environment of *name*; True when it is there afterwards."""
    contender = CONTENDERS[name]
    if not contender.requirement:
        print(f"{name}: not from PyPI; install it with your system's packages")
        return False
    folder = VENVS / name
    if (folder / ".ready").exists():
        return True
    print(f"{name}: installing {contender.requirement} into its own environment", flush=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
        subprocess.run(
            [str(folder / "bin" / "pip"), "install", "--quiet", contender.requirement],
            check=True,
            timeout=900,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{name}: could not be installed ({type(error).__name__})")
        return False
    (folder / ".ready").touch()
    return True


def main() -> None:
    """List or install contenders."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("verb", nargs="?", choices=["list", "install"], default="list")
    parser.add_argument("names", nargs="*", choices=[[], *CONTENDERS])
    options = parser.parse_args()
    if options.verb == "install":
        done = [install(name) for name in options.names]
        sys.exit(0 if all(done) else 1)
    for name, contender in CONTENDERS.items():
        try:
            print(f"{name:18} {contender.version() or 'is there'}")
        except NotInstalled as error:
            print(f"{name:18} not installed: {error}")


if __name__ == "__main__":
    main()
