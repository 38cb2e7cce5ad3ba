"""
Objects that a test or a tool makes in a cluster that others use too, and takes away again.

Each is marked with a token of its own. When the answer to a create is lost, the token tells whether
what stands under the name was made by us; without it nothing is deleted, and never by name alone.
"""

from __future__ import annotations

from collections.abc import Callable

from modelpool_kube.errors import AlreadyExists, NotFound, Unanswered
from modelpool_kube.kinds import Json, Kind, meta, uid
from modelpool_kube.port import ClusterPort

TOKEN_LABEL = "modelpool.dev/test-token"


class NotOurs(Exception):
    """Something of the name is there, and nothing says that we made it."""


class OwnedObjects:
    """What one test or tool has made."""

    def __init__(self, port: ClusterPort, make_token: Callable[[], str]) -> None:
        self._port = port
        self._make_token = make_token
        self._made: list[tuple[Kind, str, str, str, str]] = []
        """Kind, namespace, name, token, UID (empty while unknown)."""

    async def create(self, kind: Kind, namespace: str, body: Json) -> str:
        """
        Create an object and return its UID, also when the answer is lost.

        Raises:
            NotOurs: somebody else has the name.
            Unanswered: it is not there; it may still come, and `remove_all` will look for it.
        """
        name, token = str(meta(body)["name"]), self._make_token()
        labels = {**(meta(body).get("labels") or {}), TOKEN_LABEL: token}
        marked = {**body, "metadata": {**meta(body), "labels": labels}}
        self._made.append((kind, namespace, name, token, ""))
        try:
            found = uid(await self._port.create(kind, namespace, marked))
        except AlreadyExists:
            self._made.pop()
            raise NotOurs(f"{kind.kind} {namespace}/{name} is there already") from None
        except Unanswered:
            try:
                found = await self._ours(kind, namespace, name, token)
            except NotFound:
                raise Unanswered(f"{kind.kind} {namespace}/{name} may still come") from None
        self._made[-1] = (kind, namespace, name, token, found)
        return found

    async def _ours(self, kind: Kind, namespace: str, name: str, token: str) -> str:
        there = await self._port.get(kind, namespace, name)
        if (meta(there).get("labels") or {}).get(TOKEN_LABEL) != token:
            raise NotOurs(f"{kind.kind} {namespace}/{name} does not carry our token")
        return uid(there)

    async def remove_all(self) -> None:
        """
        Delete everything that was made, newest first, by UID.

        Raises:
            NotOurs: under a name of ours stands what we cannot prove to have made; it is left.
        """
        while self._made:
            kind, namespace, name, token, known = self._made.pop()
            try:
                its = known or await self._ours(kind, namespace, name, token)
                await self._port.delete(kind, namespace, name, uid=its)
            except NotFound:
                continue
