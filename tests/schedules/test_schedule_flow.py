"""Tasks of schedules and the flow: tenants, pools, keys, unique tasks, expiry and cost."""

from collections import Counter
from collections.abc import Callable

import pytest
from helpers.world import World

MINUTE = "* * * * *"


# --- tenants --------------------------------------------------------------------------------------


def fire(world: World) -> None:
    for _ in range(6):
        world.tick_after(60)


def fire_after_an_outage(world: World) -> None:
    world.advance(360)
    while world.tick().fired:
        pass


def run_now(world: World) -> None:
    for schedule in [*world.scheduler.list_schedules()] * 6:
        world.scheduler.trigger(schedule.schedule_id)


def backfill(world: World) -> None:
    for schedule in world.scheduler.list_schedules():
        world.scheduler.backfill(schedule.schedule_id, world.now().timestamp() - 360, world.now())


@pytest.mark.parametrize("begin", [fire, fire_after_an_outage, run_now, backfill])
def test_tenants_have_equal_shares_of_scheduled_tasks(
    world: World, begin: Callable[[World], None]
) -> None:
    """Three users of one tenant against one user of another, whose id is also in the first."""
    users = [("acme", "ann"), ("acme", "bob"), ("acme", "cy"), ("globex", "ann")]
    for tenant, user in users:
        world.add(
            f"{tenant}-{user}",
            cron_expr=MINUTE,
            user_id=user,
            tenant=tenant,
            misfire="fire_all",
        )
    begin(world)
    sizes = {owner: world.queue.size(owner[1], tenant=owner[0]) for owner in users}
    assert sizes == dict.fromkeys(users, 6)

    served = [claim.task for _ in range(12) for claim in world.queue.claim("w")]

    assert Counter(task.tenant for task in served) == {"acme": 6, "globex": 6}
    of_acme = Counter(task.user_id for task in served if task.tenant == "acme")
    assert of_acme == {"ann": 2, "bob": 2, "cy": 2}
