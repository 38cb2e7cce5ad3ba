"""Views of a pool to begin a test with: two members, alpha resident and idle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelpool_router.core.spec import Epoch, MemberName, PoolName
from modelpool_router.core.view import MemberStatus, MemberView, PoolView, SlotState

ALPHA = MemberName("alpha")
BETA = MemberName("beta")
GAMMA = MemberName("gamma")
GPU0 = PoolName("gpu0")


def member_view(name: MemberName, **changes: Any) -> MemberView:
    """Return an unloaded member nobody wants, with *changes*."""
    view = MemberView(
        name=name,
        status=MemberStatus.UNLOADED,
        held=0,
        in_flight=0,
        parallel=4,
        oldest_hold_s=None,
        wanted=False,
        wait_s=0.0,
        load_estimate_s=20.0,
        load_measured=True,
        unload_estimate_s=3.0,
        backoff_s=None,
        failures=0,
        last_error="",
    )
    return replace(view, **changes)


def pool_view(*members: MemberView, **changes: Any) -> PoolView:
    """Return pool gpu0 with *members* (alpha loaded, beta not), with *changes*."""
    alpha = member_view(ALPHA, status=MemberStatus.LOADED)
    view = PoolView(
        name=GPU0,
        state=SlotState.RESIDENT,
        epoch=Epoch(1),
        since_s=30.0,
        resident=ALPHA,
        incumbent=None,
        target=None,
        cause="demand",
        admission="open",
        closing_reason="",
        turn_left_s=None,
        deferred_reason="",
        deferred_retry_s=None,
        load_elapsed_s=None,
        load_expected_s=None,
        held=0,
        in_flight=0,
        oldest_lease_s=None,
        released=False,
        paused=False,
        withheld="",
        stopping=False,
        default=None,
        swap_budget_s=300.0,
        loads_total=1,
        swaps_total=1,
        obstacle=None,
        members=members or (alpha, member_view(BETA)),
    )
    return replace(view, **changes)
