"""The one timer of the data path."""

from __future__ import annotations

import asyncio

from modelpool_router.web.sweep import Sweep


class Item:
    """Counts looks; may take another item out."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.looks = 0
        self.looked = asyncio.Event()
        self.others: list[Item] = []

    def check(self, now: float) -> None:
        self.looks += 1
        self.looked.set()
        for other in self.others:
            self.sweep.discard(other)


async def test_given_something_to_watch_then_it_is_looked_at_until_it_is_taken_out() -> None:
    sweep = Sweep(asyncio.get_running_loop(), 0.001)
    item = Item(sweep)
    assert sweep._timer is None

    sweep.add(item)
    for _ in range(3):
        await asyncio.wait_for(item.looked.wait(), 10)
        item.looked.clear()
    sweep.discard(item)
    sweep.discard(item)

    assert len(sweep) == 0
    sweep._run()
    assert sweep._timer is None and item.looks == 3, "it sleeps while it has nothing"
    sweep.add(item)
    assert sweep._timer is not None
    sweep.close()
    assert sweep._timer is None and len(sweep) == 0


async def test_given_one_that_takes_the_other_out_then_that_one_is_not_looked_at() -> None:
    sweep = Sweep(asyncio.get_running_loop(), 3600)
    one, two = Item(sweep), Item(sweep)
    one.others, two.others = [two], [one]
    sweep.add(one)
    sweep.add(two)

    sweep._run()

    assert one.looks + two.looks == 1 and len(sweep) == 1
    sweep.close()
