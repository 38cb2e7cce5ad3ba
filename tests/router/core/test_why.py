"""Why a request waits: the exact sentences for every state of a slot."""

from __future__ import annotations

import pytest

from modelpool_router.core.spec import MemberName
from modelpool_router.core.view import MemberStatus, Obstacle, PoolView, SlotState
from modelpool_router.core.why import why
from poolviews import ALPHA, BETA, GAMMA, member_view, pool_view

IDLE = member_view(ALPHA, status=MemberStatus.LOADED)
BUSY = member_view(ALPHA, status=MemberStatus.LOADED, in_flight=1)
FULL = member_view(ALPHA, status=MemberStatus.LOADED, in_flight=4, held=2, oldest_hold_s=3.0)
COLD_ALPHA = member_view(ALPHA)
HELD = member_view(BETA, held=1, wanted=True, oldest_hold_s=19.0, wait_s=64.0)
HELD_LINE = "1 request for beta held, the oldest for 19 s; swapBudget is 5 min"
WAIT_LINE = "a request for beta that comes now waits about 64 s"
LOADING = member_view(BETA, status=MemberStatus.LOADING, wanted=True, wait_s=12.0)

STUCK = Obstacle(
    waits_for="proof that alpha is gone",
    since_s=75.0,
    tries=3,
    error="goneCommand of member 'alpha' does not succeed (exit code 1)",
    way_out="stop by hand what it still finds, or correct goneCommand",
)

CASES: list[tuple[str, PoolView, MemberName, list[str]]] = [
    (
        "no-such-member",
        pool_view(),
        GAMMA,
        ["gpu0 has no member gamma"],
    ),
    (
        "obstructed",
        pool_view(
            member_view(ALPHA),
            member_view(BETA, wait_s=None),
            state=SlotState.UNLOADING,
            resident=None,
            incumbent=ALPHA,
            since_s=75.0,
            obstacle=STUCK,
        ),
        BETA,
        [
            "the slot waits for proof that alpha is gone, for 75 s and 3 tries so far: goneCommand "
            "of member 'alpha' does not succeed (exit code 1)",
            "way out: stop by hand what it still finds, or correct goneCommand",
            "alpha is being unloaded for 75 s of about 3 s",
        ],
    ),
    (
        "resident-with-room",
        pool_view(BUSY, member_view(BETA), in_flight=1),
        ALPHA,
        ["alpha is resident and works on 1 of 4 requests: one more is served at once"],
    ),
    (
        "resident-full",
        pool_view(FULL, member_view(BETA), in_flight=4, held=2),
        ALPHA,
        [
            "alpha is resident and works on 4 of 4 requests, as many as it can",
            "2 requests for alpha held, the oldest for 3 s; swapBudget is 5 min",
        ],
    ),
    (
        "resident-with-others-waiting",
        pool_view(BUSY, HELD, in_flight=1, held=1, turn_left_s=41.2),
        ALPHA,
        [
            "alpha is resident and works on 1 of 4 requests: one more is served at once",
            "beta is wanted too; the turn of alpha ends in 41 s",
        ],
    ),
    (
        "resident-closed",
        pool_view(
            BUSY,
            HELD,
            in_flight=1,
            admission="closed",
            closing_reason="turn",
            incumbent=ALPHA,
            target=BETA,
        ),
        ALPHA,
        [
            "alpha admits nobody any more because its turn is over; it finishes 1 stream and "
            "gives the slot to beta"
        ],
    ),
    (
        "resident-closed-for-nobody",
        pool_view(BUSY, in_flight=1, admission="closed", closing_reason="unload", incumbent=ALPHA),
        ALPHA,
        [
            "alpha admits nobody any more because somebody asked for the slot to be emptied; it "
            "finishes 1 stream and gives the slot to nobody"
        ],
    ),
    (
        "behind-one-stream",
        pool_view(BUSY, HELD, in_flight=1, held=1, oldest_lease_s=12.3, turn_left_s=41.0),
        BETA,
        [
            "beta waits behind 1 stream of alpha (started 12 s ago); alpha's turn ends in 41 s",
            HELD_LINE,
            WAIT_LINE,
        ],
    ),
    (
        "behind-streams-that-drain",
        pool_view(
            BUSY,
            HELD,
            in_flight=3,
            held=1,
            oldest_lease_s=185.0,
            admission="closed",
            closing_reason="deadline",
            incumbent=ALPHA,
            target=BETA,
        ),
        BETA,
        [
            "beta waits behind 3 streams of alpha (the oldest started 3 min 5 s ago); alpha "
            "admits nobody any more because its turn ended early, so that those who wait are "
            "served in time",
            HELD_LINE,
            WAIT_LINE,
        ],
    ),
    (
        "nobody-asked-yet",
        pool_view(BUSY, member_view(BETA, wait_s=23.0), in_flight=1, oldest_lease_s=0.5),
        BETA,
        [
            "beta would wait behind 1 stream of alpha (started 0.5 s ago)",
            "a request for beta that comes now waits about 23 s",
        ],
    ),
    (
        "lingering",
        pool_view(IDLE, HELD, held=1, turn_left_s=58.0),
        BETA,
        [
            "beta waits for alpha, which is idle, to leave; alpha's turn ends in 58 s",
            HELD_LINE,
            WAIT_LINE,
        ],
    ),
    (
        "deferred-busy",
        pool_view(IDLE, HELD, held=1, deferred_reason="PodsBusy", deferred_retry_s=4.0),
        BETA,
        [
            "beta waits for alpha, which is idle, to leave",
            "the swap is put off (PodsBusy): alpha still works on something that did not come "
            "through here; next try in 4 s",
            HELD_LINE,
            WAIT_LINE,
        ],
    ),
    (
        "deferred-unreachable",
        pool_view(IDLE, HELD, held=1, deferred_reason="IdleCheckFailed", deferred_retry_s=None),
        ALPHA,
        [
            "alpha is resident and works on 0 of 4 requests: one more is served at once",
            "the swap is put off (IdleCheckFailed): alpha did not say whether it is idle",
        ],
    ),
    (
        "third-in-line",
        pool_view(
            BUSY,
            HELD,
            member_view(GAMMA, held=1, wanted=True, oldest_hold_s=40.0),
            in_flight=1,
            held=2,
            oldest_lease_s=12.0,
            turn_left_s=20.0,
        ),
        BETA,
        [
            "beta waits behind 1 stream of alpha (started 12 s ago); alpha's turn ends in 20 s",
            "gamma is before beta: asked for earlier",
            HELD_LINE,
            WAIT_LINE,
        ],
    ),
    (
        "third-in-line-while-draining",
        pool_view(
            BUSY,
            HELD,
            member_view(GAMMA, held=1, wanted=True, oldest_hold_s=40.0),
            in_flight=1,
            held=2,
            oldest_lease_s=12.0,
            admission="closed",
            closing_reason="turn",
            incumbent=ALPHA,
            target=GAMMA,
        ),
        BETA,
        [
            "beta waits behind 1 stream of alpha (started 12 s ago); alpha admits nobody any more "
            "because its turn is over",
            "gamma is next, beta comes after it",
            HELD_LINE,
            WAIT_LINE,
        ],
    ),
    (
        "loading",
        pool_view(
            COLD_ALPHA,
            LOADING,
            state=SlotState.LOADING,
            resident=None,
            target=BETA,
            admission="closed",
            load_elapsed_s=8.0,
            load_expected_s=20.0,
        ),
        BETA,
        [
            "beta is loading for 8 s of about 20 s",
            "a request for beta that comes now waits about 12 s",
        ],
    ),
    (
        "loading-longer-than-usual",
        pool_view(
            COLD_ALPHA,
            LOADING,
            state=SlotState.LOADING,
            resident=None,
            target=BETA,
            admission="closed",
            load_elapsed_s=35.0,
            load_expected_s=20.0,
        ),
        BETA,
        [
            "beta is loading for 35 s, longer than the usual 20 s",
            "a request for beta that comes now waits about 12 s",
        ],
    ),
    (
        "loading-another",
        pool_view(
            COLD_ALPHA,
            LOADING,
            state=SlotState.LOADING,
            resident=None,
            target=BETA,
            admission="closed",
            load_elapsed_s=8.0,
            load_expected_s=20.0,
        ),
        ALPHA,
        ["alpha comes after beta, which is loading for 8 s of about 20 s"],
    ),
    (
        "unloading-for-me",
        pool_view(
            member_view(ALPHA, status=MemberStatus.UNLOADING),
            HELD,
            state=SlotState.UNLOADING,
            since_s=0.4,
            resident=None,
            incumbent=ALPHA,
            target=BETA,
            admission="closed",
            held=1,
        ),
        BETA,
        [
            "alpha is being unloaded for 0.4 s of about 3 s",
            "beta is next; its load takes about 20 s",
            HELD_LINE,
            WAIT_LINE,
        ],
    ),
    (
        "unloading-for-another",
        pool_view(
            member_view(ALPHA, status=MemberStatus.UNLOADING),
            member_view(BETA, load_measured=False),
            state=SlotState.UNLOADING,
            since_s=2.0,
            resident=None,
            incumbent=ALPHA,
            target=GAMMA,
            admission="closed",
        ),
        BETA,
        ["alpha is being unloaded for 2 s of about 3 s", "gamma is next, beta comes after it"],
    ),
    (
        "cold",
        pool_view(
            COLD_ALPHA,
            member_view(BETA, load_measured=False, load_estimate_s=60.0),
            state=SlotState.COLD,
            resident=None,
            admission="closed",
        ),
        BETA,
        [
            "the slot is empty; a request for beta starts its load, which takes about 60 s (a "
            "guess: it has not been measured yet)"
        ],
    ),
    (
        "released",
        pool_view(
            COLD_ALPHA,
            member_view(BETA),
            state=SlotState.COLD,
            resident=None,
            released=True,
            admission="closed",
        ),
        BETA,
        [
            "the slot was emptied on purpose; a request for beta starts its load, which takes "
            "about 20 s"
        ],
    ),
    (
        "starting",
        pool_view(
            COLD_ALPHA,
            member_view(BETA),
            state=SlotState.STARTING,
            since_s=1.25,
            resident=None,
            admission="closed",
        ),
        BETA,
        ["the router looks which members are up, for 1.2 s so far"],
    ),
    (
        "backed-off",
        pool_view(
            IDLE,
            member_view(
                BETA,
                status=MemberStatus.FAILED,
                backoff_s=12.0,
                failures=2,
                last_error="exited: code 1",
            ),
        ),
        BETA,
        [
            "beta is backed off for 12 s after 2 failed loads, until then requests for it get 503 "
            "member_backoff: exited: code 1",
            "beta would wait for alpha, which is idle, to leave",
        ],
    ),
    (
        "backed-off-in-an-empty-slot",
        pool_view(
            member_view(ALPHA),
            member_view(BETA, backoff_s=12.0, failures=1, last_error="exited", wait_s=12.0),
            state=SlotState.COLD,
            resident=None,
        ),
        BETA,
        [
            "beta is backed off for 12 s after 1 failed load, until then requests for it get 503 "
            "member_backoff: exited",
            "the slot is empty; the next load of beta takes about 20 s",
        ],
    ),
    (
        "failed-before",
        pool_view(IDLE, member_view(BETA, failures=1, last_error="load_timeout")),
        BETA,
        [
            "the last load of beta failed: load_timeout; it may be tried again now",
            "beta would wait for alpha, which is idle, to leave",
        ],
    ),
    (
        "paused",
        pool_view(IDLE, HELD, held=1, paused=True),
        BETA,
        [
            "gpu0 is paused: no swap begins until it is resumed",
            "beta waits for alpha, which is idle, to leave",
            HELD_LINE,
            WAIT_LINE + " from then on",
        ],
    ),
    (
        "paused-but-resident",
        pool_view(IDLE, member_view(BETA), paused=True),
        ALPHA,
        ["alpha is resident and works on 0 of 4 requests: one more is served at once"],
    ),
    (
        "paused-and-cold",
        pool_view(
            COLD_ALPHA,
            HELD,
            state=SlotState.COLD,
            resident=None,
            paused=True,
            admission="closed",
            held=1,
        ),
        BETA,
        [
            "gpu0 is paused: no swap begins until it is resumed",
            "the slot is empty; the load of beta has not begun, it takes about 20 s",
            HELD_LINE,
            WAIT_LINE + " from then on",
        ],
    ),
    (
        "withheld",
        pool_view(IDLE, member_view(BETA), withheld="another router holds it"),
        BETA,
        [
            "the slot of gpu0 may not be moved: another router holds it; requests for beta get "
            "503 slot_unavailable",
            "beta would wait for alpha, which is idle, to leave",
        ],
    ),
    (
        "stopping",
        pool_view(IDLE, member_view(BETA), stopping=True),
        BETA,
        [
            "the router goes down: whoever waits gets 503 pool_draining",
            "beta would wait for alpha, which is idle, to leave",
        ],
    ),
]


@pytest.mark.parametrize(
    ("view", "member", "sentences"),
    [pytest.param(*case[1:], id=case[0]) for case in CASES],
)
def test_given_a_pool_when_asked_why_then_the_sentences_say_it(
    view: PoolView, member: MemberName, sentences: list[str]
) -> None:
    assert why(view, member) == sentences


@pytest.mark.parametrize("state", list(SlotState))
@pytest.mark.parametrize("member", [ALPHA, BETA])
def test_given_any_state_when_asked_why_then_there_is_an_answer(
    state: SlotState, member: MemberName
) -> None:
    resident = ALPHA if state is SlotState.RESIDENT else None

    assert why(pool_view(state=state, resident=resident), member)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0 s"),
        (0.26, "0.3 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (119.4, "119 s"),
        (119.6, "2 min"),
        (3605.0, "60 min 5 s"),
    ],
)
def test_given_a_duration_when_told_then_it_is_rounded_for_people(
    seconds: float, text: str
) -> None:
    view = pool_view(state=SlotState.STARTING, resident=None, since_s=seconds)

    assert why(view, BETA) == [f"the router looks which members are up, for {text} so far"]
