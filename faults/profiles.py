"""The storms: each in a short form for every change, and in a long form."""

from faults.storm import Profile

# All faults, with a steady clock.
ANYTHING = {
    "kill": 4,
    "stop": 2,
    "pause_leader": 2,
    "pause_before_fire": 2,
    "network": 6,
    "drop_replies": 4,
    "kill_server": 1,
    "client_pause": 1,
    "script_flush": 1,
    "full_memory": 1,
}

SHORT = (
    Profile(
        name="kills",
        faults={"kill": 1},
        goals={"kill": 40},
        tasks=3_000,
        gap=0.15,
        proxied=False,
    ),
    Profile(
        name="anything",
        faults=ANYTHING,
        seconds=12.0,
        tasks=500,
        most_seconds=120.0,
        gap=0.3,
        timeout=2.0,
        part={"largest": 700},
    ),
    Profile(
        name="clock",
        faults={"clock_jump": 2, "kill": 1},
        seconds=5.0,
        tasks=500,
        most_seconds=120.0,
        proxied=False,
        jumping=True,
        editors=0,
    ),
    # Tenants, pools, keys with slots and unique keys.
    Profile(
        name="flow",
        faults={"kill": 2, "drop_replies": 3, "kill_server": 1},
        goals={"kill": 8, "dropped_reply": 20},
        seconds=12.0,
        tasks=500,
        most_seconds=60.0,
        gap=0.3,
        backlog=500,
        part={"flow": True, "pace": 0.01, "batch": 30},
    ),
)

LONG = (
    # SIGKILL of producers, workers, schedulers and editors.
    Profile(
        name="kills",
        faults={"kill": 1},
        goals={"kill": 1_000},
        tasks=1_000_000,
        gap=0.2,
        workers=2,
        concurrency=32,
        backlog=50_000,
        proxied=False,
    ),
    # SIGSTOP of the leader for 0.5, 1, 2 and 5 terms, half of them right before it fires.
    Profile(
        name="pauses",
        faults={"pause_leader": 1, "pause_before_fire": 1},
        goals={"pause_leader": 250, "pause_before_fire": 250},
        gap=0.3,
        workers=1,
        producers=1,
        editors=0,
        lock_timeout=0.5,
        proxied=False,
        lanes=6,
    ),
    Profile(
        name="replies",
        faults={"drop_replies": 1},
        goals={"dropped_reply": 10_000},
        gap=0.05,
        backlog=2_000,
        part={"largest": 700},
    ),
    Profile(
        name="server",
        faults={"kill_server": 1},
        goals={"kill_server": 100},
        gap=0.7,
        backlog=2_000,
        on_disk=True,
        proxied=False,
    ),
    Profile(
        name="everysec",
        faults={"kill_server": 1},
        goals={"kill_server": 100},
        gap=0.7,
        backlog=2_000,
        fsync="everysec",
        on_disk=True,
        proxied=False,
    ),
    # By sentinels: not under D, since a replica may not have what was acknowledged.
    Profile(
        name="failover",
        faults={"failover": 1},
        goals={"failover": 30},
        gap=2.0,
        backlog=500,
        fleet=True,
        proxied=False,
        # Not more than replicas can copy each time, since nothing is trimmed.
        part={"pace": 0.02},
    ),
    Profile(
        name="anything",
        faults=ANYTHING,
        seconds=600.0,
        gap=0.3,
        timeout=2.0,
        part={"largest": 700},
    ),
    Profile(
        name="clock",
        faults={"clock_jump": 2, "kill": 1, "stop": 1},
        goals={"clock_jump": 200},
        proxied=False,
        jumping=True,
        editors=0,
    ),
    # Tenants, pools, keys with slots and unique keys.
    Profile(
        name="flow",
        faults={"kill": 2, "drop_replies": 3, "kill_server": 1},
        goals={"kill": 100, "dropped_reply": 1_000, "kill_server": 20},
        gap=0.2,
        backlog=500,
        part={"flow": True, "pace": 0.01, "batch": 30},
    ),
    # Without durability a lease may be lost with its primary, so that only structures are judged.
    Profile(
        name="flow-failover",
        faults={"failover": 1},
        goals={"failover": 10},
        gap=2.0,
        backlog=300,
        fleet=True,
        proxied=False,
        part={"flow": True, "pace": 0.02, "batch": 20},
    ),
)

# Short, and each aimed at one kind of guard: `scripts/proof.py` removes the guards.
PROOF = (
    # Leaders that act late, and schedules that change between reading and firing.
    Profile(
        name="terms",
        faults={"pause_before_fire": 4, "pause_before_resign": 2, "pause_leader": 1},
        seconds=9.0,
        gap=0.1,
        workers=1,
        producers=1,
        editors=2,
        lock_timeout=0.5,
        proxied=False,
    ),
    # Workers that continue after others have got their tasks.
    Profile(
        name="leases",
        faults={"stop_worker": 2, "end_worker": 1},
        seconds=10.0,
        gap=0.4,
        schedulers=1,
        editors=0,
        producers=1,
        concurrency=8,
        backlog=60,
        lease=1.0,
        proxied=False,
        part={"pace": 0.4, "failing": 500, "hopeless": 200, "patience": 0.0, "batch": 20},
    ),
    # Commands that are applied and repeated, without other faults.
    Profile(
        name="replies",
        faults={"drop_replies": 1},
        seconds=8.0,
        gap=0.1,
        editors=2,
        backlog=500,
        timeout=25.0,
        lease=8.0,
    ),
    # Keys and unique keys, of which commands are repeated and workers killed.
    Profile(
        name="flow",
        faults={"drop_replies": 3, "kill": 1},
        seconds=8.0,
        gap=0.2,
        backlog=300,
        part={"flow": True, "pace": 0.02, "batch": 20},
    ),
)

FORMS = {"short": SHORT, "long": LONG, "proof": PROOF}
