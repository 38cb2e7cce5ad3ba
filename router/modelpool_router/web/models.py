"""
The model list: every name a key may use, loaded or not, answered from memory.

Clients fill their menus with it and give up after seconds (Open WebUI: 10 s), so it never waits
for a slot, a member or an upstream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.catalog import Entry
from ..core.spec import PoolName
from ..core.view import MemberStatus, PoolView

OWNER = "modelpool"


def model_list(
    views: Sequence[PoolView], entries: Iterable[Entry], *, created: int
) -> dict[str, Any]:
    """
    Return the answer to ``GET /v1/models``.

    Args:
        views: all pools, now.
        entries: what the caller may use, as `Catalog.visible` returns it.
        created: Unix time that all items carry; the start of the router, since models have none.
    """
    by_pool = {view.name: view for view in views}
    items = [_item(by_pool, entry, name, created) for entry in entries for name in entry.names]
    return {"object": "list", "data": items}


def model_item(
    views: Sequence[PoolView], entry: Entry, name: str, *, created: int
) -> dict[str, Any]:
    """Return the answer to ``GET /v1/models/{name}``; *name* is one of the entry's."""
    return _item({view.name: view for view in views}, entry, name, created)


def _item(views: dict[PoolName, PoolView], entry: Entry, name: str, created: int) -> dict[str, Any]:
    route = entry.route
    # An upstream is never swapped: as far as we are concerned it is always there.
    status, held, in_flight = MemberStatus.LOADED, 0, 0
    if route.pool is not None:
        view = views.get(route.pool)
        member = view.member(route.member) if view is not None else None
        # Unknown to its pool only for the moment between two steps of a reload.
        status = member.status if member is not None else MemberStatus.UNLOADED
        held = member.held if member is not None else 0
        in_flight = member.in_flight if member is not None else 0
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "status": str(status),
        "modelpool": {
            "pool": route.pool,
            "member": route.member,
            "status": str(status),
            "held": held,
            "in_flight": in_flight,
        },
    }
