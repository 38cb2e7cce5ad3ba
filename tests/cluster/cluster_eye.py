"""An eye on Pods that never blinks: who lived at the same time as whom."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster_kubectl import Kubectl, Object, changes
from cluster_objects import member_of


class Together:
    """
    Who lived at the same time as whom, from what a watch of Pods tells.

    Only Pods of members count, and only live ones: a Pod is over when it does not exist any more,
    or when it is final with every container ended, as the rules of the slot say.

    Args of the constructor:
        pool_of: Returns the pool of a member; members of different pools may live together.

    Attributes:
        overlaps: Pool and two members of it that lived at the same time.
        forgotten: UIDs of Pods that a person has declared gone.
        seen: Members that had a live Pod, in order.
    """

    def __init__(self, pool_of: Callable[[str], str] = lambda name: "") -> None:
        self.overlaps: list[tuple[str, str, str]] = []
        self.forgotten: set[str] = set()
        self.seen: list[str] = []
        self._pool_of = pool_of
        self._alive: dict[str, str] = {}

    def begin(self) -> None:
        """Forget who is alive: whoever still is will be told again."""
        self._alive.clear()

    def take(self, change: str, pod: Object) -> None:
        """Take in one event."""
        uid, name = str(pod["metadata"]["uid"]), member_of(pod)
        if not name:
            return
        if change == "DELETED" or is_over(pod):
            self._alive.pop(uid, None)
            return
        if uid in self._alive:
            return
        self.seen.append(name)
        self._alive[uid] = name
        for other_uid, other in self._alive.items():
            if other_uid in self.forgotten or other == name:
                continue
            if self._pool_of(other) == self._pool_of(name):
                self.overlaps.append((self._pool_of(name), other, name))


class PodEye(Together):
    """
    A watch of the Pods of one namespace, begun anew whenever it ends.

    Args of the constructor:
        kubectl: The cluster.
        namespace: Where.
        pool_of: See `Together`.
    """

    def __init__(
        self, kubectl: Kubectl, namespace: str, pool_of: Callable[[str], str] = lambda name: ""
    ) -> None:
        super().__init__(pool_of)
        self._kubectl = kubectl
        self._namespace = namespace
        self._is_closed = False
        self._process: subprocess.Popen[str] | None = None
        self._reading = threading.Thread(target=self._look)
        self._reading.start()

    def close(self) -> None:
        """End the watch, after everything that has happened by now was seen."""
        time.sleep(0.3)  # events are on their way for less than that
        self._is_closed = True
        if self._process is not None:
            self._process.terminate()
        self._reading.join()

    def _look(self) -> None:
        while not self._is_closed:
            with self._kubectl.watch("pods", "-n", self._namespace) as self._process:
                if self._is_closed:
                    self._process.terminate()  # `close` has seen the one before
                # Whatever is still there is told first; what is not told is gone.
                self.begin()
                assert self._process.stdout is not None
                for change, pod in changes(self._process.stdout):
                    self.take(change, pod)
            time.sleep(0.2)  # the API server may be away


def is_over(pod: Object) -> bool:
    """Whether nothing of *pod* runs, as far as its status tells."""
    status = pod.get("status") or {}
    if status.get("phase") not in ("Succeeded", "Failed"):
        return False
    containers = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    return all("terminated" in (each.get("state") or {}) for each in containers)


@contextmanager
def never_two(
    kubectl: Kubectl, namespace: str, pool_of: Callable[[str], str] = lambda name: ""
) -> Iterator[PodEye]:
    """Watch all the while; insist that no two members of a pool lived at the same time."""
    eye = PodEye(kubectl, namespace, pool_of)
    try:
        yield eye
    finally:
        eye.close()
    assert eye.overlaps == []
    assert eye.seen, "nothing was watched"
