"""
A small kubelet for tests: Pods bound to its node run as local processes.

    python tests/cluster/kubelet.py --kubeconfig FILE --name gpu-0 --folder DIR --resource a/b=1

It is a kubelet in what the API server sees of it: phases, container states, probes, grace, devices,
heartbeats. README.md lists what is simulated and how. SIGSTOP makes the node "lost" with its
containers still running, SIGCONT brings it back, TERM ends the kubelet and its containers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from cluster_process import end_marked
from kubelet_api import Api
from kubelet_logs import LogServer, server_tls
from kubelet_node import NODE_MARK, Node, NodeOptions
from kubelet_pod import PodWorker

Object = dict[str, Any]


class Kubelet:
    """One worker for each Pod UID that is bound to the node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._workers: dict[str, PodWorker] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self.uids: dict[tuple[str, str], str] = {}

    async def run(self) -> None:
        """Follow the node's Pods for ever."""
        await self._node.api.follow(
            "/api/v1/pods",
            {"fieldSelector": f"spec.nodeName={self._node.name}"},
            self._on_list,
            self._on_event,
        )

    async def close(self) -> None:
        """End every container; the Pod objects stay as they are."""
        for worker in self._workers.values():
            worker.shut_down()
        if self._lives:
            await asyncio.wait(list(self._lives.values()))

    def _on_list(self, pods: list[Object]) -> None:
        listed = {pod["metadata"]["uid"] for pod in pods}
        for uid in [uid for uid in self._workers if uid not in listed]:
            self._workers[uid].forget()
        for pod in pods:
            self._on_event("MODIFIED", pod)

    def _on_event(self, kind: str, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        worker = self._workers.get(uid)
        if kind == "DELETED":
            if worker is not None:
                worker.forget()
        elif kind in ("ADDED", "MODIFIED"):
            if worker is not None:
                worker.update(pod)
            elif uid not in self._lives:
                self._begin(uid, pod)

    def _begin(self, uid: str, pod: Object) -> None:
        meta = pod["metadata"]
        self.uids[(meta["namespace"], meta["name"])] = uid
        worker = self._workers[uid] = PodWorker(self._node, pod)
        life = asyncio.get_running_loop().create_task(worker.life(), name=f"pod {meta['name']}")
        self._lives[uid] = life
        life.add_done_callback(lambda done: self._end(uid, done))

    def _end(self, uid: str, life: asyncio.Task[None]) -> None:
        # A Pod kept by a finalizer is seen again; it must not be started again. UIDs are few.
        self._workers.pop(uid, None)
        if not life.cancelled() and (failed := life.exception()) is not None:
            traceback.print_exception(failed)


async def serve(options: NodeOptions) -> None:
    """Run the kubelet until TERM or INT."""
    loop = asyncio.get_running_loop()
    asked_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_end.set)
    options.folder.mkdir(parents=True, exist_ok=True)
    # What an earlier kubelet of this node left running would hold devices that we think are free.
    end_marked(str(options.folder), NODE_MARK)
    async with Api(options.kubeconfig) as api, aiohttp.ClientSession(trust_env=False) as probes:
        node = Node(options, api, probes)
        kubelet = Kubelet(node)
        logs = LogServer(options.folder, kubelet.uids)
        if options.certificate is not None and options.client_ca is not None:
            certificate, key = options.certificate
            node.logs_port = await logs.start(server_tls(certificate, key, options.client_ca))
        work = [loop.create_task(node.run()), loop.create_task(kubelet.run())]
        ending = loop.create_task(asked_to_end.wait())
        done, _ = await asyncio.wait([*work, ending], return_when=asyncio.FIRST_COMPLETED)
        for task in [*work, ending]:
            task.cancel()
        await asyncio.gather(*work, ending, return_exceptions=True)
        await kubelet.close()
        await logs.close()
        await node.close()
        for task in done:
            if task is not ending:
                task.result()  # heartbeats and the watch end by a mistake of ours only


def parse(argv: Sequence[str] | None = None) -> NodeOptions:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A kubelet for tests: Pods are local processes.")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--name", required=True, help="name of the Node")
    parser.add_argument("--folder", type=Path, required=True, help="state, logs and volumes of it")
    parser.add_argument("--resource", action="append", default=[], metavar="NAME=COUNT")
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help='entry point of an image, as a JSON list: modelpool.test/member=["python","-m","x"]',
    )
    parser.add_argument("--backoff", type=float, default=1.0, help="first crash back-off, seconds")
    parser.add_argument("--backoff-cap", type=float, default=30.0)
    parser.add_argument("--certificate", type=Path, help="of the log server")
    parser.add_argument("--key", type=Path)
    parser.add_argument("--client-ca", type=Path)
    given = parser.parse_args(argv)
    return NodeOptions(
        name=given.name,
        folder=given.folder,
        kubeconfig=given.kubeconfig,
        resources={name: int(count) for name, count in _pairs(given.resource)},
        labels=dict(_pairs(given.label)),
        images={name: json.loads(words) for name, words in _pairs(given.image)},
        backoff_s=given.backoff,
        backoff_cap_s=given.backoff_cap,
        certificate=(given.certificate, given.key) if given.certificate else None,
        client_ca=given.client_ca,
    )


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (word.partition("=") for word in words)]


if __name__ == "__main__":
    asyncio.run(serve(parse()))
