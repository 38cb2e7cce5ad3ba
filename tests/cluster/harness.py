"""
A real Kubernetes control plane on loopback for tests, with Kueue and test nodes.

    python tests/cluster/harness.py up      start one, leave it running, print its KUBECONFIG
    python tests/cluster/harness.py down    end it

Tests use the fixture ``cluster`` (conftest.py), which is :func:`open_cluster`: a cluster of its own
from built binaries, or the one that ``KUBECONFIG`` names. See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import cluster_kueue
from cluster_certs import Authority
from cluster_kubectl import Kubectl, until
from cluster_process import MARK, Program, answers, end_marked, free_ports, marked
from kubelet_node import NODE_MARK

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
_BINARIES = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "kueue",
)
_BY_HAND = "by hand"
API_SERVER_STARTS = "the API server starts"
"""Verb of the line in the audit log that is not of the API server's own."""


class NotHere(Exception):
    """This machine, or this kind of cluster, cannot do it; the message says what would help."""


def assets_folder() -> Path:
    """Where ``build-assets.sh`` puts the binaries; the script alone knows the pin."""
    script = HERE / "build-assets.sh"
    done = subprocess.run(
        ["bash", str(script), "--dir"], capture_output=True, text=True, timeout=30, check=True
    )
    return Path(done.stdout.strip())


def images() -> dict[str, list[str]]:
    """What the images of the project's own programs run on a test node."""
    return {
        "modelpool.test/member": [sys.executable, "-m", "modelpool_router.testing.member"],
        "modelpool.test/router": [sys.executable, "-m", "modelpool_router"],
        "modelpool.test/operator": [sys.executable, "-m", "modelpool_operator"],
    }


class Cluster:
    """What every cluster can do, ours or one that exists already."""

    def __init__(self, kubectl: Kubectl, folder: Path) -> None:
        self.kubectl = kubectl
        self.folder = folder
        self._namespaces = 0

    @property
    def kubeconfig(self) -> Path:
        """Path of the administrator's kubeconfig."""
        return self.kubectl.kubeconfig

    @property
    def is_ours(self) -> bool:
        """Whether nodes, faults and restarts are ours to make."""
        return False

    def user(self, name: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig that acts as the user *name* in *groups*; it has no rights by itself."""
        raise NotImplementedError

    def service_account(self, namespace: str, name: str) -> Path:
        """A kubeconfig that acts as a service account, which must exist, with a real token."""
        token = self.kubectl("create", "token", name, "-n", namespace, "--duration=24h").strip()
        return self._kubeconfig_with({"token": token}, f"account-{namespace}-{name}", namespace)

    def as_user(self, kubeconfig: Path) -> Kubectl:
        """kubectl with another kubeconfig of this cluster."""
        return Kubectl(self.kubectl.program, kubeconfig, self.folder / "kubectl-cache")

    def new_namespace(self, prefix: str = "test") -> str:
        """Make a namespace whose default service account is there; delete it when done."""
        self._namespaces += 1
        name = f"{prefix}-{os.getpid()}-{self._namespaces}"
        self.kubectl("create", "namespace", name)
        until(
            lambda: self.kubectl.get("serviceaccount", "default", "-n", name),
            f"service account of namespace {name}",
        )
        return name

    def _kubeconfig_with(self, user: dict[str, str], name: str, namespace: str) -> Path:
        content = json.loads(
            self.kubectl("config", "view", "--raw", "--flatten", "--minify", "-o", "json")
        )
        content["users"][0]["user"] = user
        content["contexts"][0]["context"]["namespace"] = namespace
        path = self.folder / "users" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(json.dumps(content), "utf-8")
        return path


class GivenCluster(Cluster):
    """The cluster that KUBECONFIG names. Its nodes run containers; nothing of it can be stopped."""

    def user(self, name: str, groups: Sequence[str] = ()) -> Path:
        """Impersonation stands in for a certificate: the administrator may do that."""
        content = json.loads(
            self.kubectl("config", "view", "--raw", "--flatten", "--minify", "-o", "json")
        )
        content["users"][0]["user"] |= {"as": name, "as-groups": list(groups)}
        path = self.folder / "users" / name.replace("/", "-").replace(":", "-")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(json.dumps(content), "utf-8")
        return path


class TestNode:
    """One Node of ours and the kubelet behind it."""

    __test__ = False

    def __init__(self, name: str, folder: Path, program: Program, kubectl: Kubectl) -> None:
        self.name = name
        self.folder = folder
        self.kubelet = program
        self._kubectl = kubectl

    def wait_ready(self) -> None:
        """Wait until the Node is Ready and may be scheduled on."""
        until(self._is_ready, f"node {self.name} is Ready")

    def lose(self) -> None:
        """Cut the kubelet off: heartbeats and reports end, its containers go on."""
        self.kubelet.signal(signal.SIGSTOP)

    def come_back(self) -> None:
        """Undo :meth:`lose`."""
        self.kubelet.signal(signal.SIGCONT)

    def power_off(self) -> None:
        """The machine is gone at once: kubelet and containers; its objects stay."""
        self.kubelet.kill()
        end_marked(str(self.folder), NODE_MARK)

    def power_on(self) -> None:
        """Start the kubelet again, after :meth:`power_off` or :meth:`stop`."""
        self.kubelet.start()
        self.wait_ready()

    def stop(self) -> None:
        """End the kubelet and its containers; the Node object stays."""
        self.kubelet.stop()

    def remove(self) -> None:
        """End the kubelet, delete its Pods and the Node object."""
        self.power_off()
        # Left to itself, the control plane takes a minute to see that they are orphans.
        chosen = ("-A", f"--field-selector=spec.nodeName={self.name}")
        self._kubectl("delete", "pods", *chosen, "--force", "--grace-period=0")
        self._kubectl("delete", "node", self.name, "--ignore-not-found")

    def container_pids(self) -> list[int]:
        """Process ids of everything that runs in containers of this node."""
        return marked(str(self.folder), NODE_MARK)

    def _is_ready(self) -> bool:
        node = self._kubectl.get("node", self.name)
        conditions = (node.get("status") or {}).get("conditions") or []
        ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        return ready and not (node.get("spec") or {}).get("taints")


class OwnCluster(Cluster):
    """A control plane of ours in *folder*, from the binaries in *assets*."""

    def __init__(self, assets: Path, folder: Path) -> None:
        self.assets = assets
        self.authority = Authority(folder / "pki")
        (folder / "owner").write_text(str(os.getpid()), "utf-8")
        etcd, peer, api, kcm, scheduler, webhook, health = free_ports(7)
        self.server = f"https://127.0.0.1:{api}"
        admin = self.authority.client("admin", ("system:masters",))
        kubeconfig = self.authority.kubeconfig(self.server, admin, folder / "kubeconfig")
        super().__init__(
            Kubectl(assets / "bin" / "kubectl", kubeconfig, folder / "kubectl-cache"), folder
        )
        self._webhook_port = webhook
        self.nodes: dict[str, TestNode] = {}
        self._tls = ssl.create_default_context(cafile=str(self.authority.pair.cert))
        # The scheduler and the controller manager make their own certificates, for health alone.
        self._unverified = ssl.create_default_context()
        self._unverified.check_hostname = False
        self._unverified.verify_mode = ssl.CERT_NONE
        health_url = f"http://127.0.0.1:{health}/readyz"
        self.programs: dict[str, Program] = {
            "etcd": self._program(
                "etcd",
                self._etcd_flags(etcd, peer),
                partial(answers, f"http://127.0.0.1:{etcd}/readyz"),
            ),
            "kube-apiserver": self._program(
                "kube-apiserver",
                self._apiserver_flags(etcd, api),
                partial(answers, f"{self.server}/readyz", self._tls),
            ),
            "kube-controller-manager": self._program(
                "kube-controller-manager",
                self._controller_flags(kcm),
                partial(answers, f"https://127.0.0.1:{kcm}/healthz", self._unverified),
            ),
            "kube-scheduler": self._program(
                "kube-scheduler",
                self._scheduler_flags(scheduler),
                partial(answers, f"https://127.0.0.1:{scheduler}/readyz", self._unverified),
            ),
            "kueue": self._program(
                "kueue",
                (f"--config={folder / 'kueue.json'}", f"--kubeconfig={kubeconfig}"),
                partial(answers, health_url),
            ),
        }
        self._health_port = health

    @property
    def is_ours(self) -> bool:
        return True

    @property
    def audit_log(self) -> Path:
        """Where the API server writes down who asked for what, one JSON object a line."""
        return self.folder / "logs" / "audit.jsonl"

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything and one node ``gpu-0`` with one GPU; says how long it took."""
        begun = time.monotonic()
        self.programs["etcd"].start()
        self.programs["kube-apiserver"].start()
        for name in ("kube-controller-manager", "kube-scheduler"):
            self.programs[name].launch()
        node = self._launch_node("gpu-0", {"nvidia.com/gpu": 1}, {})
        certificates = self.folder / "kueue-certs"
        kueue_authority = Authority(self.folder / "kueue-pki", cluster_kueue.AUTHORITY)
        cluster_kueue.install(
            self.kubectl, self.assets / "kueue", kueue_authority, self._webhook_port
        )
        cluster_kueue.place_certificate(kueue_authority, certificates)
        cluster_kueue.write_config(
            self.folder / "kueue.json",
            certificates,
            webhook=self._webhook_port,
            health=self._health_port,
        )
        for program in self.programs.values():
            program.start()
        node.wait_ready()
        print(f"cluster: up in {time.monotonic() - begun:.1f} s, logs in {self.folder}", flush=True)

    def close(self) -> None:
        """End everything at once; nothing of the cluster survives."""
        for node in self.nodes.values():
            node.kubelet.kill()
        for program in self.programs.values():
            program.kill()
        end_marked(str(self.folder))

    # -- what tests do to it ----------------------------------------------------------------------

    def stop_apiserver(self) -> None:
        """End the API server at once; everything else goes on without it."""
        # Asked politely it would first wait for watches to end, which they do not.
        self.programs["kube-apiserver"].kill()

    def start_apiserver(self) -> None:
        """Start the API server again at the same address, with the same data."""
        self._note_start()
        self.programs["kube-apiserver"].start()

    def _note_start(self) -> None:
        """Write into the audit log that the API server starts: at first it knows of no Role."""
        now = datetime.now(UTC).isoformat()
        event = {"verb": API_SERVER_STARTS, "requestReceivedTimestamp": now}
        with self.audit_log.open("a", encoding="utf-8") as log:
            log.write("\n" + json.dumps(event) + "\n")  # the last line may be half written

    def user(self, name: str, groups: Sequence[str] = ()) -> Path:
        pair = self.authority.client(name, tuple(groups))
        path = self.folder / "users" / name.replace("/", "-").replace(":", "-")
        return self.authority.kubeconfig(self.server, pair, path)

    def node(
        self,
        name: str,
        resources: Mapping[str, int] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> TestNode:
        """The node *name*; started, and waited for, when it is not there yet."""
        if name not in self.nodes:
            wanted = {"nvidia.com/gpu": 1} if resources is None else resources
            self._launch_node(name, wanted, labels or {}).wait_ready()
        return self.nodes[name]

    def remove_node(self, name: str) -> None:
        """End a node and delete its object."""
        self.nodes.pop(name).remove()

    # -- programs ---------------------------------------------------------------------------------

    def _program(self, name: str, flags: Sequence[str], is_ready: partial[bool]) -> Program:
        return Program(
            name,
            [str(self.assets / "bin" / name), *flags],
            log=self.folder / "logs" / f"{name}.log",
            environ=self._environ(),
            is_ready=is_ready,
        )

    def _environ(self) -> dict[str, str]:
        proxies = ("http_proxy", "https_proxy", "all_proxy")
        kept = {key: value for key, value in os.environ.items() if key.lower() not in proxies}
        kept.pop("KUBECONFIG", None)
        # `python` in a Pod's command is this Python, and it finds the packages of this work tree.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        packages = os.pathsep.join((str(ROOT / "router"), str(ROOT / "operator")))
        return {**kept, MARK: str(self.folder), "PATH": path, "PYTHONPATH": packages}

    def _launch_node(
        self, name: str, resources: Mapping[str, int], labels: Mapping[str, str]
    ) -> TestNode:
        folder = self.folder / "nodes" / name
        identity = self.authority.client(f"system:node:{name}", ("system:nodes", "system:masters"))
        kubeconfig = self.authority.kubeconfig(self.server, identity, folder / "kubeconfig")
        server = self.authority.server(f"node-{name}")
        flags = [
            str(HERE / "kubelet.py"),
            f"--kubeconfig={kubeconfig}",
            f"--name={name}",
            f"--folder={folder}",
            f"--certificate={server.cert}",
            f"--key={server.key}",
            f"--client-ca={self.authority.pair.cert}",
            *(f"--resource={key}={count}" for key, count in resources.items()),
            *(f"--label={key}={value}" for key, value in labels.items()),
            *(f"--image={image}={json.dumps(words)}" for image, words in images().items()),
        ]
        program = Program(
            f"kubelet {name}",
            [sys.executable, *flags],
            log=self.folder / "logs" / f"kubelet-{name}.log",
            environ=self._environ(),
            is_ready=lambda: bool(self.kubectl.get("node", name)),
        )
        node = self.nodes[name] = TestNode(name, folder, program, self.kubectl)
        program.launch()
        return node

    def _etcd_flags(self, client: int, peer: int) -> tuple[str, ...]:
        return (
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",  # thrown away with the cluster
            "--log-level=warn",
        )

    def _apiserver_flags(self, etcd: int, port: int) -> tuple[str, ...]:
        server = self.authority.server("kube-apiserver", dns=("kubernetes.default.svc",))
        accounts = self.authority.signing_key("service-accounts")
        kubelet = self.authority.client("kube-apiserver-to-kubelet", ("system:masters",))
        return (
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            # It would publish a loopback address as the endpoint of its Service, which is refused.
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--tls-cert-file={server.cert}",
            f"--tls-private-key-file={server.key}",
            f"--client-ca-file={self.authority.pair.cert}",
            f"--kubelet-client-certificate={kubelet.cert}",
            f"--kubelet-client-key={kubelet.key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={accounts.cert}",
            f"--service-account-signing-key-file={accounts.key}",
            "--authorization-mode=RBAC",
            # Not on by itself, but clusters have it: who names an owner must be allowed to.
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
            f"--audit-policy-file={self._audit_policy()}",
            f"--audit-log-path={self.audit_log}",
            "--audit-log-maxsize=4000",  # one file: what is looked for may be anywhere in it
            "--allow-privileged=true",
            "--profiling=false",
            "--v=1",
        )

    def _audit_policy(self) -> Path:
        """What is written down: who asked for what, but for the control plane's own programs."""
        kinds = {"omitStages": ["RequestReceived"], "level": "Metadata"}
        content = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "rules": [
                {"userGroups": ["system:serviceaccounts"], **kinds},
                {"users": ["admin"], **kinds},
                {"level": "None"},
            ],
        }
        path = self.folder / "audit-policy.json"
        path.write_text(json.dumps(content), "utf-8")
        return path

    def _component_flags(self, port: int, name: str) -> tuple[str, ...]:
        identity = self.authority.client(f"system:{name}", ("system:masters",))
        kubeconfig = self.authority.kubeconfig(self.server, identity, self.folder / name)
        return (
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--leader-elect=false",
            "--kube-api-qps=300",
            "--kube-api-burst=600",
            "--v=1",
        )

    def _controller_flags(self, port: int) -> tuple[str, ...]:
        accounts = self.authority.signing_key("service-accounts")
        return (
            *self._component_flags(port, "kube-controller-manager"),
            f"--service-account-private-key-file={accounts.key}",
            f"--root-ca-file={self.authority.pair.cert}",
            f"--flex-volume-plugin-dir={self.folder / 'no-plugins'}",
            # A real cluster takes 50 s to notice a lost node. Our kubelets renew every 2 s.
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=20s",
        )

    def _scheduler_flags(self, port: int) -> tuple[str, ...]:
        return self._component_flags(port, "kube-scheduler")


@contextmanager
def open_cluster(folder: Path) -> Iterator[Cluster]:
    """
    The cluster that ``KUBECONFIG`` names, or one of our own in *folder* that ends with the context.

    Raises:
        NotHere: Neither is to be had; the message says what to do.
    """
    given = os.environ.get("KUBECONFIG")
    assets = assets_folder()
    if given:
        program = shutil.which("kubectl") or assets / "bin" / "kubectl"
        if not Path(program).exists():
            raise NotHere("KUBECONFIG is set, but there is no kubectl on the PATH")
        yield GivenCluster(Kubectl(Path(program), Path(given), folder / "kubectl-cache"), folder)
        return
    _check_assets(assets)
    end_abandoned()
    own = OwnCluster(assets, folder)
    try:
        own.start()
        yield own
    finally:
        own.close()


def end_abandoned() -> None:
    """End what clusters left behind whose owner was killed before it could."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        for word in words:
            name, _, value = word.decode("utf-8", "replace").partition("=")
            if name == MARK and value and _is_abandoned(Path(value)):
                end_marked(value)


def _is_abandoned(folder: Path) -> bool:
    try:
        owner = (folder / "owner").read_text("utf-8")
    except OSError:
        return True
    return owner != _BY_HAND and not Path("/proc", owner).exists()


def _check_assets(assets: Path) -> None:
    missing = [name for name in _BINARIES if not (assets / "bin" / name).exists()]
    if missing:
        raise NotHere(
            f"no cluster: {missing[0]} is not in {assets}. Build once with "
            "tests/cluster/build-assets.sh (needs Go), or set KUBECONFIG to an existing cluster"
        )


def _state_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "modelpool" / "cluster" / "running"


def up() -> int:
    """Start a cluster that outlives this program; prints how to use and end it."""
    folder = _state_folder()
    kubeconfig = folder / "kubeconfig"
    if not (kubeconfig.exists() and _answers_ready(kubeconfig)):
        down()
        folder.mkdir(mode=0o700, parents=True)
        assets = assets_folder()
        try:
            _check_assets(assets)
        except NotHere as why:
            print(why, file=sys.stderr)
            return 3
        own = OwnCluster(assets, folder)
        (folder / "owner").write_text(_BY_HAND, "utf-8")
        try:
            own.start()
        except BaseException:
            own.close()
            raise
    print(f"export KUBECONFIG={kubeconfig} PATH={assets_folder() / 'bin'}:$PATH")
    print("# end it with: make cluster-down")
    return 0


def down() -> int:
    """End the cluster that :func:`up` started, if there is one."""
    folder = _state_folder()
    end_marked(str(folder))
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _answers_ready(kubeconfig: Path) -> bool:
    config = json.loads(kubeconfig.read_text("utf-8"))
    tls = ssl.create_default_context(cafile=str(kubeconfig.parent / "pki" / "ca.crt"))
    return answers(config["clusters"][0]["cluster"]["server"] + "/readyz", tls)


def main() -> int:
    parser = argparse.ArgumentParser(description="A real Kubernetes control plane for tests.")
    parser.add_argument("verb", choices=("up", "down"))
    return up() if parser.parse_args().verb == "up" else down()


def temporary_folder() -> Path:
    """A new folder for a cluster; short, since some of it ends up in socket paths."""
    return Path(tempfile.mkdtemp(prefix="modelpool-cluster-"))


if __name__ == "__main__":
    sys.exit(main())
