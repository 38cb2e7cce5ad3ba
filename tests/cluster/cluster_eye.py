"""An eye on Pods that never blinks unseen: who lived at the same time as whom."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from cluster_kubectl import Kubectl, KubectlFailed, Object, changes
from cluster_objects import member_of


class Together:
    """
    Who lived at the same time as whom, from what a watch of Pods tells.

    Only Pods of members count, and only live ones: a Pod is over when it does not exist any more,
    or when it is final with every container ended, as the rules of the slot say.

    Args of the constructor:
        pool_of: Returns the pool of a member; members of different pools may live together.

    Attributes:
        overlaps: Pool and two members of it that lived at the same time; of a member with two Pods
            its name twice.
        forgotten: UIDs of Pods that a person has declared gone.
        seen: Members that had a live Pod, in order.
    """

    def __init__(self, pool_of: Callable[[str], str] = lambda name: "") -> None:
        self.overlaps: list[tuple[str, str, str]] = []
        self.forgotten: set[str] = set()
        self.seen: list[str] = []
        self._pool_of = pool_of
        self._alive: dict[str, str] = {}

    def begin(self, pods: Iterable[Object]) -> None:
        """Take *pods* for all that there are."""
        self._alive.clear()
        for pod in pods:
            self.take("ADDED", pod)

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
            if other_uid in (uid, *self.forgotten):
                continue
            if self._pool_of(other) == self._pool_of(name):
                self.overlaps.append((self._pool_of(name), other, name))


class PodEye(Together):
    """
    A watch of the Pods of one namespace, from before the constructor returns.

    A watch that ends is taken up where it ended. Where the API server does not know any more what
    has happened since (it was restarted), the eye was blind for a while.

    Args of the constructor:
        kubectl: The cluster.
        namespace: Where.
        pool_of: See `Together`.

    Attributes:
        gaps: How often it was blind for a while.
    """

    def __init__(
        self, kubectl: Kubectl, namespace: str, pool_of: Callable[[str], str] = lambda name: ""
    ) -> None:
        super().__init__(pool_of)
        self.gaps = 0
        self._kubectl = kubectl
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._is_closed = False
        self._process: subprocess.Popen[str] | None = None
        self._version = self._list()
        self._reading = threading.Thread(target=self._look)
        self._reading.start()

    def close(self) -> None:
        """End the watch, after everything that has happened by now was seen."""
        time.sleep(0.3)  # events are on their way for less than that
        self._is_closed = True
        if self._process is not None:
            self._process.terminate()
        self._reading.join()

    def _list(self) -> str:
        listed = json.loads(self._kubectl("get", "--raw", self._path))
        self.begin(listed["items"])
        return str(listed["metadata"]["resourceVersion"])

    def _look(self) -> None:
        is_blind = False
        while not self._is_closed:
            if not is_blind and not self._is_told():
                is_blind = True
                self.gaps += 1
            if is_blind:
                with suppress(KubectlFailed):
                    self._version = self._list()
                    is_blind = False
            time.sleep(0.2)  # the API server may be away

    def _is_told(self) -> bool:
        """Take in what happens from the last known version on; False when that is too old."""
        query = f"watch=1&allowWatchBookmarks=1&resourceVersion={self._version}"
        with subprocess.Popen(
            [str(self._kubectl.program), "get", "--raw", f"{self._path}?{query}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._kubectl.environ(),
            text=True,
        ) as self._process:
            assert self._process.stdout is not None
            assert self._process.stderr is not None
            if self._is_closed:
                self._process.terminate()  # `close` has seen the one before
            for change, pod in changes(self._process.stdout):
                if change == "ERROR":
                    self._process.terminate()
                    return False
                if change != "BOOKMARK":
                    self.take(change, pod)
                self._version = str(pod["metadata"]["resourceVersion"])
            return "too old" not in self._process.stderr.read()


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
    kubectl: Kubectl,
    namespace: str,
    pool_of: Callable[[str], str] = lambda name: "",
    *,
    may_be_blind: bool = False,
) -> Iterator[PodEye]:
    """
    Watch all the while; insist that no two Pods of a pool's members lived at the same time.

    Args:
        kubectl: The cluster.
        namespace: Where.
        pool_of: See `Together`.
        may_be_blind: Whether the test stops the API server on purpose.
    """
    eye = PodEye(kubectl, namespace, pool_of)
    try:
        yield eye
    finally:
        eye.close()
    assert eye.overlaps == []
    assert may_be_blind or eye.gaps == 0, f"the watch was blind {eye.gaps} times"
    assert eye.seen, "nothing was watched"
