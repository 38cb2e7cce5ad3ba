"""
The rules, as pure functions over the books of `sim_trace.PoolModel`.

A function judges one command before it is booked, or the end of one `handle`. It raises
`Violation` and counts every check that could have failed, so that a rule which was never put to
the test is seen. Names of rules: the design's O and H rules; S and L are the invariants of the
fault model.
"""

from __future__ import annotations

from modelpool_router.core import commands as c
from modelpool_router.core import events as e
from modelpool_router.core.spec import HoldLedger, MemberName
from sim_trace import PoolModel, Violation

RULES = (
    "S1",
    "S2",
    "S3",
    "S4",
    "S5",
    "S13",
    "S14",
    "S17",
    "L1",
    "L2",
    "once",
    "parallel",
    "fifo",
    "ledger",
    "spin",
    "stop",
    "pause",
    "withhold",
    "view",
    "H2",
    "H3",
    "H4",
    "H5",
    "H7",
    "H7a",
    "H8",
    "H9",
    "H10",
    "H11",
    "H12",
    "O2",
    "O3",
)
"""Every rule that is counted by a run; one with zero checks fails a long run."""


def check(model: PoolModel, rule: str, holds: bool, text: str) -> None:
    """Count a check of *rule*; raise if it does not hold."""
    model.checks[rule] += 1
    if not holds:
        raise Violation(rule, model.t, text)


# -- one command ---------------------------------------------------------------------------------


def judge(model: PoolModel, event: e.Event, command: c.Command) -> None:
    """Judge *command*, which came out when *event* went in. To be called before it is booked."""
    match command:
        case c.Grant():
            grant(model, event, command)
        case c.Refuse():
            refuse(model, event, command)
        case c.Load():
            load(model, command)
        case c.Unload():
            unload(model, command)
        case c.CancelLoad(member, epoch):
            life = model.lives[member]
            check(model, "S3", life.state == "loading", f"cancels a load of {member} not begun")
            check(model, "S4", life.epoch == epoch, f"cancels {member} with another epoch")
            late = model.t - life.load_began - model.spec.load_timeout_s
            check(
                model,
                "H9",
                late >= -1e-6 or model.reconfigured_at > life.load_began,
                f"load of {member} cancelled before loadTimeout",
            )
            still(model, f"CancelLoad {member}")
        case c.ProbeIdle(member):
            life = model.lives[member]
            check(model, "H7", life.state == "up", f"idle probe of {member}, which is {life.state}")
            check(model, "H7", not model.leases[member], f"idle probe of {member} with leases out")
            still(model, f"ProbeIdle {member}")
        case c.EndLease():
            end_lease(model, command)
        case c.Check() | c.Note():
            pass


def grant(model: PoolModel, event: e.Event, command: c.Grant) -> None:
    """S3, S4, S5, parallel, FIFO, turn: may this request have the resident now?"""
    ticket, member = command.ticket, command.member
    request = model.requests.get(ticket)
    if request is None:
        raise Violation("once", model.t, f"grant of unknown ticket {ticket}")
    life = model.lives[member]
    check(model, "once", request.state == "held", f"grant of {ticket}, which is {request.state}")
    check(
        model,
        "once",
        request.grants <= request.dispatch_refusals,
        f"{ticket} granted {request.grants + 1} times",
    )
    check(model, "S3", request.member == member, f"{ticket} wants {request.member}, got {member}")
    check(model, "S4", life.state == "up", f"grant to {member}, {life.state}")
    check(
        model,
        "S4",
        life.epoch == command.epoch,
        f"grant to {member} epoch {command.epoch}, landed {life.epoch}",
    )
    check(model, "S5", model.t <= request.deadline, f"{ticket} granted after its deadline")
    check(
        model,
        "H10",
        not life.suspect,
        f"grant to {member} before the refused connection of it was looked into",
    )
    out = len(model.leases[member])
    check(
        model,
        "parallel",
        out < model.most_parallel(member),
        f"{member} has {out} leases out, one more granted",
    )
    first = next(iter(model.held[member]))
    check(model, "fifo", first == ticket, f"{ticket} granted before {first}")
    others = [
        next(iter(line.values())).arrived
        for name, line in model.held.items()
        if line and name != member
    ]
    if others and not (life.deferred or model.paused or model.withheld):
        turn_end = max(min(others), life.landed_at) + model.spec.max_turn_s
        check(
            model,
            "H5",
            model.t <= turn_end or model.reconfigured_at >= life.landed_at,
            f"{ticket} granted to {member} after its turn ended at {turn_end:.3f}",
        )


def refuse(model: PoolModel, event: e.Event, command: c.Refuse) -> None:
    """S3, S5, H9, H11, H12: may this request be refused now, with this code?"""
    ticket, code = command.ticket, command.code
    request = model.requests.get(ticket)
    if request is None:
        raise Violation("once", model.t, f"refusal of unknown ticket {ticket}")
    check(model, "once", request.state == "held", f"refusal of {ticket}, which is {request.state}")
    wait = command.retry_after_s
    check(model, "H12", wait is None or 1.0 <= wait <= 60.0, f"Retry-After {wait}")
    honest = wait is not None or not command.retryable
    check(model, "H12", honest, f"retryable {code} without Retry-After")
    life = model.lives[request.member]
    match code:
        case c.RefusalCode.SWAP_BUDGET_EXCEEDED:
            at_once = model.spec.swap_budget_s == 0 and request.arrived == model.t
            check(
                model,
                "S5",
                model.t >= request.deadline or at_once,
                f"{ticket} refused for its budget at {model.t}, before {request.deadline}",
            )
        case c.RefusalCode.MEMBER_FAILED:
            failed = model.t in (model.failed_at.get(request.member), life.lost_at, life.hung_at)
            check(
                model,
                "H9",
                failed or request.dispatch_refusals > 1,
                f"{ticket} refused as failed, but {request.member} did not fail",
            )
        case c.RefusalCode.MEMBER_BACKOFF:
            check(
                model,
                "H9",
                life.state not in ("up", "loading"),
                f"{ticket} refused for back-off, {request.member} is {life.state}",
            )
        case c.RefusalCode.POOL_DRAINING:
            check(model, "stop", model.stopping, "refused as draining, but nobody stopped it")
        case c.RefusalCode.SLOT_UNAVAILABLE:
            check(model, "withhold", model.withheld, "slot unavailable, but it was not withheld")
        case c.RefusalCode.MODEL_NOT_FOUND:
            check(
                model,
                "O2",
                request.member not in model.spec.members,
                f"{request.member} not found, but it is a member",
            )
        case c.RefusalCode.QUEUE_FULL | c.RefusalCode.RATE_LIMIT_EXCEEDED:
            check(model, "H11", request.arrived == model.t, f"{ticket} refused as too many, late")


def load(model: PoolModel, command: c.Load) -> None:
    """S1, S13, O3, H4, H9: may this member be started now?"""
    member = command.member
    for name, life in model.lives.items():
        check(model, "S1", life.state == "gone", f"load of {member} while {name} is {life.state}")
    still(model, f"Load {member}")
    check(model, "O2", member in model.spec.members, f"load of {member}, no member any more")
    wanted = model.wanted(member)
    check(model, "H8", wanted or not any(model.held.values()), f"{member} loaded, others wait")
    if not wanted and member not in model.displaced_for:
        spare = member == model.restorable and model.spec.restore
        warm = member == model.spec.default and model.warm_tokens > 0
        check(model, "S13", spare or warm, f"load of {member}, which nobody wants")
        check(model, "O3", not any(model.held.values()), f"{member} warmed while clients wait")
        check(model, "O3", spare or not model.released, f"{member} warmed in a released pool")
    else:
        model.checks["S13"] += 1
    if model.held[member] and member not in model.ghosts and member not in model.asked:
        mine = max(next(iter(model.held[member].values())).arrived, model.lives[member].left_at)
        for name, line in model.held.items():
            if name != member and line:
                other = max(next(iter(line.values())).arrived, model.lives[name].left_at)
                check(model, "H4", mine <= other, f"{member} loaded before {name}, longer in line")
    failed = model.failed_at.get(member)
    if failed is not None and member not in model.asked and model.reconfigured_at < failed:
        check(
            model,
            "H9",
            model.t - failed >= 5.0 - 1e-6,
            f"{member} loaded {model.t - failed:.3f} s after it failed",
        )


def unload(model: PoolModel, command: c.Unload) -> None:
    """S2, S13, H7, H8: may this member be taken down now?"""
    member = command.member
    life = model.lives[member]
    still(model, f"Unload {member}")
    check(
        model,
        "S1",
        life.state not in ("loading", "cancelling"),
        f"unload of {member} while its load runs",
    )
    check(
        model,
        "S1",
        life.state not in ("gone", "unloading"),
        f"unload of {member}, which is {life.state}",
    )
    if life.state != "up":
        model.checks["S2"] += 1  # lost, failed or not proven gone: the clean-up that S2 names
        return
    if model.is_hung(member):
        model.checks["H7a"] += 1
        return
    out = model.leases[member]
    check(model, "S2", not out, f"unload of {member} with {len(out)} leases out")
    asked = model.spec.members.get(member)
    if asked is not None and asked.has_idle_probe:
        probe = life.probe
        check(
            model,
            "H7",
            probe is not None and probe.idle and probe.valid,
            f"unload of {member} without an idle answer that counts: {probe}",
        )
    if life.extra and any(n != member and x.state == "up" for n, x in model.lives.items()):
        return
    reasons = model.reasons_to_move(member)
    check(model, "S13", bool(reasons), f"unload of {member} for nobody")
    check(model, "pause", not model.paused, f"unload of {member} while paused")


def end_lease(model: PoolModel, command: c.EndLease) -> None:
    """H7, H7a: may this answer be broken off?"""
    request = model.requests.get(command.ticket)
    if request is None:
        raise Violation("H7a", model.t, f"end of unknown lease {command.ticket}")
    check(
        model,
        "H7a",
        request.state == "leased",
        f"end of the lease of {command.ticket}, {request.state}",
    )
    member, spec = request.member, model.spec
    match command.reason:
        case "drain_timeout":
            check(
                model,
                "H7a",
                spec.drain_timeout_s is not None and model.may_move(member),
                f"lease of {member} ended by a drain that nobody asked for",
            )
        case "max_generation":
            limit = spec.max_generation_s
            check(
                model,
                "H7a",
                limit is not None
                and model.t - request.granted_at >= limit - 1e-6
                and model.may_move(member),
                f"lease of {member} ended before maxGeneration",
            )
        case "resident_hung":
            check(model, "H7a", model.is_hung(member), f"{member} taken for hung")
        case "resident_lost":
            check(model, "H7a", model.lives[member].state != "up", f"{member} taken for lost")
        case other:
            raise Violation("H7a", model.t, f"lease ended for an unknown reason: {other}")


def still(model: PoolModel, what: str) -> None:
    """Nothing is moved when stopping, when the slot is withheld, or before it was looked at."""
    check(model, "stop", not model.stopping, f"{what} after stopping")
    check(model, "withhold", not model.withheld, f"{what} while the slot is withheld")
    check(model, "S4", model.started, f"{what} before the pool was observed")


# -- the end of one handle -----------------------------------------------------------------------


def landing(model: PoolModel, event: e.Loaded, waiting: int, commands: list[c.Command]) -> None:
    """H3: those who waited are served before anything else is decided."""
    life = model.lives[event.member]
    if life.state != "up" or life.epoch != event.epoch or event.member not in model.spec.members:
        return
    grants = sum(1 for command in commands if isinstance(command, c.Grant))
    room = event.parallel or model.spec.members[event.member].parallel
    if waiting:
        check(
            model,
            "H3",
            grants >= min(waiting, room),
            f"{waiting} waited for {event.member}, room {room}, granted {grants}",
        )


def settled(model: PoolModel, event: e.Event, wake: float | None) -> None:
    """What must be true whenever the scheduler has nothing more to say. *wake*: next_deadline."""
    if not model.started:
        return
    t = model.t
    if model.held_total:
        if model.stopping:
            raise Violation("stop", t, "requests held after stopping")
        soonest = min(r.deadline for line in model.held.values() for r in line.values())
        check(model, "S5", soonest > t, f"a request is held past its deadline {soonest:.3f}")
        check(
            model,
            "S5",
            wake is not None and wake <= soonest,
            f"next_deadline {wake} is later than a hold's {soonest:.3f}",
        )
        idle_slot(model, wake)
    if isinstance(event, e.LoadFailed) and model.failed_at.get(event.member) == t:
        check(model, "H9", not model.held[event.member], f"{event.member} failed, its waiters wait")
    for name, life in model.lives.items():
        if life.state != "up" or not model.held[name] or life.suspect or life.extra:
            continue
        if not model.may_move(name) and len(model.leases[name]) < model.least_parallel(name):
            raise Violation("H2", t, f"requests held for the resident {name}, admission is open")
        model.checks["H2"] += 1
    gone = [n for n in model.held if n not in model.spec.members and model.held[n]]
    if gone:
        raise Violation("O2", t, f"requests held for {gone[0]}, no member any more")


def idle_slot(model: PoolModel, wake: float | None) -> None:
    """L8, step by step: a slot nobody works on does not stay so while somebody waits."""
    if model.paused or model.withheld:
        return
    if all(life.state == "gone" for life in model.lives.values()):
        raise Violation("L2", model.t, "clients wait, nobody is up, and nothing is being loaded")
    model.checks["L2"] += 1


def ledger_agrees(ledger: HoldLedger, models: list[PoolModel]) -> None:
    """S14: the shared ledger counts what is held, and never more than its bounds allow."""
    first, *others = models
    held, returned, keys = first.held_total, first.returned, first.keys
    for model in others:
        held, returned = held + model.held_total, returned + model.returned
        keys = {key: keys.get(key, 0) + model.keys.get(key, 0) for key in {*keys, *model.keys}}
    check(first, "ledger", ledger.held == held, "ledger counts other holds than are held")
    check(first, "ledger", ledger.by_key == keys, "ledger counts other keys than are held")
    check(first, "H11", held - returned <= ledger.bounds.max_held, "more held than allowed")


def waited(model: PoolModel, bound: float) -> None:
    """L1: no head of a line waited longer than *bound*."""
    worst: tuple[MemberName, float] | None = max(model.waits, key=lambda w: w[1], default=None)
    if worst is not None:
        model.checks["L1"] += len(model.waits)
        check(
            model,
            "L1",
            worst[1] <= bound + 1e-6,
            f"{worst[0]} waited {worst[1]:.3f} s, bound {bound:.3f} s",
        )


def at_rest(model: PoolModel) -> None:
    """S3, S14: after everything ended, everything is zero and everybody had one outcome."""
    check(model, "S14", model.held_total == 0, f"{model.held_total} requests are held for ever")
    check(model, "S14", model.lease_total == 0, f"{model.lease_total} leases are out for ever")
    for request in model.requests.values():
        check(model, "S3", request.state == "ended", f"{request.ticket} ended as {request.state}")
    total = sum(model.outcomes.values())
    check(
        model,
        "S3",
        total == len(model.requests),
        f"{len(model.requests)} requests, {total} outcomes",
    )
