"""
Why a request for a member waits, or would wait: sentences for people, from a view of its pool.

The first sentence is the answer, the others are what it rests on. Words are those of the logs
and metrics; every number is from the view, rounded.
"""

from __future__ import annotations

from collections.abc import Iterator

from .spec import MemberName
from .view import MemberView, Obstacle, PoolView, SlotState

_CLOSED_BECAUSE = {
    "turn": "its turn is over",
    "deadline": "its turn ended early, so that those who wait are served in time",
    "linger": "it has been idle while others wait",
    "idle": "it is idle while others wait",
    "idle_unload": "it has been idle for long enough to be unloaded",
    "unload": "somebody asked for the slot to be emptied",
    "reclaim": "the default takes its place back",
    "removed": "it was removed from the configuration",
}
_DEFERRED_BECAUSE = {
    "PodsBusy": "still works on something that did not come through here",
    "IdleCheckFailed": "did not say whether it is idle",
}


def why(view: PoolView, member: MemberName) -> list[str]:
    """Return sentences that say what a request for *member* waits for now, if for anything."""
    wanted = view.member(member)
    if wanted is None:
        return [f"{view.name} has no member {member}"]
    return [*_obstacles(view, wanted), *_slot(view, wanted), *_line(view, wanted)]


def _obstacles(view: PoolView, wanted: MemberView) -> Iterator[str]:
    """Yield what keeps the member away whatever the slot does."""
    name = wanted.name
    if view.stopping:
        yield "the router goes down: whoever waits gets 503 pool_draining"
    if view.obstacle is not None and view.resident != name:
        yield obstacle_sentence(view.obstacle)
        yield f"way out: {view.obstacle.way_out}"
    if view.withheld and view.resident != name:
        yield (
            f"the slot of {view.name} may not be moved: {view.withheld}; requests for {name} "
            "get 503 slot_unavailable"
        )
    if wanted.backoff_s is not None and view.resident != name:
        yield (
            f"{name} is backed off for {_time(wanted.backoff_s)} after "
            f"{_count(wanted.failures, 'failed load')}, until then requests for it get 503 "
            f"member_backoff: {wanted.last_error}"
        )
    elif wanted.failures and view.resident != name:
        yield f"the last load of {name} failed: {wanted.last_error}; it may be tried again now"
    if view.paused and view.resident != name:
        yield f"{view.name} is paused: no swap begins until it is resumed"


def obstacle_sentence(obstacle: Obstacle) -> str:
    """Say what a slot waits for, since when, and what came of the last try."""
    tries = "1 try" if obstacle.tries == 1 else f"{obstacle.tries} tries"
    return (
        f"the slot waits for {obstacle.waits_for}, for {_time(obstacle.since_s)} and "
        f"{tries} so far: {obstacle.error}"
    )


def _slot(view: PoolView, wanted: MemberView) -> Iterator[str]:
    """Yield what the slot is doing, seen from the member."""
    name = wanted.name
    match view.state:
        case SlotState.STARTING:
            yield f"the router looks which members are up, for {_time(view.since_s)} so far"
        case SlotState.COLD:
            yield from _cold(view, wanted)
        case SlotState.LOADING:
            loading = view.target or name
            progress = _progress(view)
            if loading == name:
                yield f"{name} is loading for {progress}"
            else:
                yield f"{name} comes after {loading}, which is loading for {progress}"
        case SlotState.UNLOADING:
            yield from _unloading(view, wanted)
        case SlotState.RESIDENT if view.resident == name:
            yield from _own_turn(view, wanted)
        case SlotState.RESIDENT:
            yield from _foreign_turn(view, wanted)


def _cold(view: PoolView, wanted: MemberView) -> Iterator[str]:
    empty = "was emptied on purpose" if view.released else "is empty"
    load = f"takes about {_time(wanted.load_estimate_s)}{_unmeasured(wanted)}"
    if wanted.backoff_s is not None:
        yield f"the slot {empty}; the next load of {wanted.name} {load}"
    elif wanted.wanted:
        yield f"the slot {empty}; the load of {wanted.name} has not begun, it {load}"
    else:
        yield f"the slot {empty}; a request for {wanted.name} starts its load, which {load}"


def _unloading(view: PoolView, wanted: MemberView) -> Iterator[str]:
    name = wanted.name
    leaving = view.incumbent or name
    member = view.member(leaving)
    usual = f" of about {_time(member.unload_estimate_s)}" if member is not None else ""
    yield f"{leaving} is being unloaded for {_time(view.since_s)}{usual}"
    if view.target == name:
        load = _time(wanted.load_estimate_s)
        yield f"{name} is next; its load takes about {load}{_unmeasured(wanted)}"
    elif view.target is not None:
        yield f"{view.target} is next, {name} comes after it"


def _own_turn(view: PoolView, wanted: MemberView) -> Iterator[str]:
    name = wanted.name
    busy = f"{wanted.in_flight} of {wanted.parallel}"
    if view.admission != "open":
        yield (
            f"{name} admits nobody any more because {_closed(view)}; it finishes "
            f"{_work(view)} and gives the slot to {view.target or 'nobody'}"
        )
    elif wanted.in_flight >= wanted.parallel:
        yield f"{name} is resident and works on {busy} requests, as many as it can"
    else:
        yield f"{name} is resident and works on {busy} requests: one more is served at once"
    if view.turn_left_s is not None and view.admission == "open":
        others = _names(m for m in view.members if m.wanted and m.name != name)
        yield f"{others} wanted too; the turn of {name} ends in {_time(view.turn_left_s)}"
    yield from _deferred(view)


def _foreign_turn(view: PoolView, wanted: MemberView) -> Iterator[str]:
    name, resident = wanted.name, view.resident
    verb = "waits" if wanted.wanted else "would wait"
    turn = ""
    if view.admission != "open":
        turn = f"; {resident} admits nobody any more because {_closed(view)}"
    elif view.turn_left_s is not None:
        turn = f"; {resident}'s turn ends in {_time(view.turn_left_s)}"
    if view.in_flight:
        yield f"{name} {verb} behind {_work(view)} of {resident}{_begun(view)}{turn}"
    else:
        yield f"{name} {verb} for {resident}, which is idle, to leave{turn}"
    yield from _deferred(view)
    if view.admission != "open" and view.target is not None and view.target != name:
        yield f"{view.target} is next, {name} comes after it"


def _line(view: PoolView, wanted: MemberView) -> Iterator[str]:
    """Yield who else waits, and how long it takes."""
    name = wanted.name
    if wanted.held and wanted.oldest_hold_s is not None:
        age = wanted.oldest_hold_s
        ahead = [
            other
            for other in view.members
            if other.name not in (name, view.resident, view.target)
            and other.oldest_hold_s is not None
            and other.oldest_hold_s > age
        ]
        if ahead and view.target != name and view.resident != name:
            yield f"{_names(ahead)} before {name}: asked for earlier"
        yield (
            f"{_count(wanted.held, 'request')} for {name} held, the oldest for {_time(age)}; "
            f"swapBudget is {_time(view.swap_budget_s)}"
        )
    if wanted.wait_s and (wanted.backoff_s is None or view.resident == name):
        # A load that has begun goes on while the pool is paused.
        stands = view.paused and not (view.state is SlotState.LOADING and view.target == name)
        after = " from then on" if stands else ""
        yield f"a request for {name} that comes now waits about {_time(wanted.wait_s)}{after}"


def _deferred(view: PoolView) -> Iterator[str]:
    if view.deferred_reason:
        told = _DEFERRED_BECAUSE.get(view.deferred_reason, "cannot leave yet")
        retry = view.deferred_retry_s
        again = "" if retry is None else f"; next try in {_time(retry)}"
        yield f"the swap is put off ({view.deferred_reason}): {view.resident} {told}{again}"


def _closed(view: PoolView) -> str:
    return _CLOSED_BECAUSE.get(view.closing_reason, view.closing_reason)


def _work(view: PoolView) -> str:
    return _count(view.in_flight, "stream")


def _begun(view: PoolView) -> str:
    if view.oldest_lease_s is None:
        return ""
    which = "the oldest " if view.in_flight > 1 else ""
    return f" ({which}started {_time(view.oldest_lease_s)} ago)"


def _progress(view: PoolView) -> str:
    elapsed, expected = view.load_elapsed_s or 0.0, view.load_expected_s
    if expected is None:
        return _time(elapsed)
    if elapsed > expected:
        return f"{_time(elapsed)}, longer than the usual {_time(expected)}"
    return f"{_time(elapsed)} of about {_time(expected)}"


def _unmeasured(member: MemberView) -> str:
    return "" if member.load_measured else " (a guess: it has not been measured yet)"


def _names(members: Iterator[MemberView] | list[MemberView]) -> str:
    names = [str(member.name) for member in members]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    """Return e.g. ``0.4 s``, ``41 s``, ``3 min 5 s``."""
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"
