"""Redis over TLS: certificates and host names are checked, and waiting works as without."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.state import check_consistency
from helpers.tasks import make_task, push
from helpers.tls import Authority, TlsFront
from helpers.waiting import in_thread, until_blocked
from prometheus_client import CollectorRegistry

from fairqueue.errors import ConfigurationError, RedisUnavailable
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.worker.worker import Worker

# A client that does not tell its name, with redis-py before and since driver_info.
_NAMELESS: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in signature(redis.Redis).parameters
    else {"lib_name": None, "lib_version": None}
)

Fronting = Callable[..., TlsFront]


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other-authority"))


@pytest.fixture(scope="session")
def certificate(authority: Authority) -> Path:
    """For localhost, and for no address."""
    return authority.issue("server", "DNS:localhost")


@pytest.fixture
def front(redis_client: redis.Redis) -> Iterator[Fronting]:
    """Speak TLS before the shared server, with a certificate."""
    options = redis_client.connection_pool.connection_kwargs
    upstream = options.get("path") or (options["host"], options["port"])
    fronts: list[TlsFront] = []

    def front(certificate: Path, clients_of: Path | None = None) -> TlsFront:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        if clients_of is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(clients_of)
        fronts.append(TlsFront(upstream, context))
        return fronts[-1]

    yield front
    for each in fronts:
        each.close()


@pytest.fixture
def secure(
    front: Fronting, authority: Authority, certificate: Path, redis_client: redis.Redis
) -> Iterator[TaskQueue]:
    """A queue over TLS, with all checks."""
    with TaskQueue.from_url(front(certificate).url(ssl_ca_certs=authority.path)) as queue:
        yield queue
    check_consistency(redis_client)


# --- what must work -------------------------------------------------------------------------------


def test_a_task_is_pushed_claimed_and_finished_over_tls(secure: TaskQueue) -> None:
    secure.check()
    push(secure, "a")
    (claim,) = secure.claim("w")
    secure.finish(claim, {"done": True})
    info = secure.get("a")
    assert info is not None
    assert info.result == {"done": True}


def test_large_tasks_and_many_at_once_come_back_whole(secure: TaskQueue) -> None:
    text = "x" * 200_000  # many records of TLS, and many reads
    tasks = [make_task(task_id=f"large-{n}", payload={"text": text, "n": n}) for n in range(12)]
    secure.push_many(tasks + [make_task(task_id=f"small-{n}") for n in range(500)])
    claims = []
    while claimed := secure.claim("w", limit=600):  # each answer has about a megabyte
        claims += claimed
    assert {claim.task.task_id for claim in claims} >= {task.task_id for task in tasks}
    assert all(c.task.payload["text"] == text for c in claims if "text" in c.task.payload)
    assert secure.finish_many((claim, None) for claim in claims) == ["finished"] * 512
    pings = secure.link.ask(*[("PING",)] * 2000)
    assert pings == [b"PONG"] * 2000


def test_a_wait_over_tls_ends_with_the_task(secure: TaskQueue, redis_client: redis.Redis) -> None:
    for n in range(5):
        waiting = in_thread(lambda: secure.claim("w", wait=60))
        until_blocked(redis_client)
        push(secure, f"task-{n}")
        (claim,) = waiting()
        assert claim.task.task_id == f"task-{n}"
        secure.finish(claim)


def test_waits_for_what_is_there_already_end_at_once(secure: TaskQueue) -> None:
    listener = secure.link.listener("wake")
    for _ in range(50):
        secure.link.ask(("LPUSH", secure.keys["wake"], "1"))
        assert listener.wait(60) is True
    assert listener.wait(0.001) is False
    secure.link.ask(("LPUSH", secure.keys["wake"], "1"))  # between two waits
    assert listener.wait(60) is True
    listener.close()


def test_another_thread_ends_a_wait_over_tls(secure: TaskQueue, redis_client: redis.Redis) -> None:
    listener = secure.link.listener("wake")
    waiting = in_thread(lambda: listener.wait(60))
    until_blocked(redis_client)
    listener.nudge()
    assert waiting() is True
    listener.close()


@pytest.mark.own_user  # to log in is to ask something first
def test_what_tls_says_of_itself_is_not_taken_for_an_answer(
    front: Fronting, authority: Authority, certificate: Path, redis_client: redis.Redis
) -> None:
    # Tickets for the next handshake make the socket readable, and are no answer to the wait. They
    # come while it goes on, as nothing was asked on this connection before it.
    gate = front(certificate)
    gate.hold_tickets = True
    client = redis.Redis.from_url(gate.url(ssl_ca_certs=authority.path), **_NAMELESS)
    with TaskQueue(client, timeout=0.4) as queue:
        listener = queue.link.listener("wake")
        waiting = in_thread(lambda: listener.wait(2))
        until_blocked(redis_client)
        gate.let_tickets_go()
        assert waiting() is False
        redis_client.lpush(queue.keys["wake"], "1")
        assert listener.wait(60) is True
        listener.close()


def test_scheduler_and_worker_work_over_tls(secure: TaskQueue) -> None:
    done = threading.Event()
    worker = Worker(secure, lambda task: done.set(), concurrency=2)
    scheduler = TaskScheduler(secure, check_interval=0.2, registry=CollectorRegistry())
    scheduler.add_schedule(schedule_id="often", every=1, user_id="alice")
    try:
        worker.start()
        scheduler.start()
        assert done.wait(60)
    finally:
        assert scheduler.stop()
        assert worker.stop()


# --- what must be refused -------------------------------------------------------------------------


def refused(url: str, **settings: Any) -> str:
    """Why a queue cannot be used."""
    queue = TaskQueue.from_url(url, timeout=3, **settings)
    with queue, pytest.raises(RedisUnavailable) as caught:
        queue.push(make_task())
    return str(caught.value)


def test_a_certificate_for_another_name_is_refused(
    front: Fronting, authority: Authority, redis_client: redis.Redis
) -> None:
    gate = front(authority.issue("elsewhere", "DNS:redis.example"))
    why = refused(gate.url(ssl_ca_certs=authority.path))
    assert why.startswith("the certificate of Redis was rejected")
    assert "certificate is not valid for 'localhost'" in why
    assert redis_client.dbsize() == 0


def test_an_address_is_no_name(front: Fronting, authority: Authority, certificate: Path) -> None:
    gate = front(certificate)
    why = refused(gate.url("127.0.0.1", ssl_ca_certs=authority.path))
    assert "certificate is not valid for '127.0.0.1'" in why


def test_an_unknown_authority_is_refused(
    front: Fronting, other_authority: Authority, certificate: Path
) -> None:
    gate = front(certificate)
    assert "certificate verify failed: unable to get local issuer" in refused(gate.url())
    why = refused(gate.url(ssl_ca_certs=other_authority.path))
    assert "certificate verify failed" in why


def test_an_expired_certificate_is_refused(front: Fronting, authority: Authority) -> None:
    gate = front(authority.issue("old", "DNS:localhost", days=-1))
    assert "certificate has expired" in refused(gate.url(ssl_ca_certs=authority.path))


def test_a_port_without_tls_is_refused(authority: Authority) -> None:
    # As Redis does, it answers to what it cannot read with an error, in plain text.
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    sock, _ = listening.accept()
                except OSError:
                    return
                with sock:
                    sock.recv(65536)
                    sock.sendall(b"-ERR Protocol error: invalid multibulk length\r\n")

        threading.Thread(target=answer, daemon=True).start()
        port = listening.getsockname()[1]
        why = refused(f"rediss://localhost:{port}/0?ssl_ca_certs={authority.path}")
        listening.shutdown(socket.SHUT_RDWR)
    assert "wrong version number" in why


def test_a_port_that_says_nothing_is_given_up_within_the_time_out(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        why = refused(f"rediss://localhost:{port}/0?ssl_ca_certs={authority.path}")
    assert "imed out" in why or "imeout" in why


def test_a_tls_server_refuses_plain_clients(front: Fronting, certificate: Path) -> None:
    gate = front(certificate)
    assert refused(f"redis://localhost:{gate.port}/0")


def test_client_certificates_are_shown_and_wanted(
    front: Fronting, authority: Authority, certificate: Path, other_authority: Authority
) -> None:
    gate = front(certificate, clients_of=authority.path)
    own = authority.issue("client", "DNS:client")
    url = gate.url(ssl_ca_certs=authority.path, ssl_certfile=own, ssl_keyfile=own)
    with TaskQueue.from_url(url) as queue:
        push(queue, "a")
        assert queue.size() == 1
    assert refused(gate.url(ssl_ca_certs=authority.path))
    foreign = other_authority.issue("foreign", "DNS:client")
    assert refused(gate.url(ssl_ca_certs=authority.path, ssl_certfile=foreign, ssl_keyfile=foreign))


@pytest.mark.parametrize(
    "option", ["ssl_cert_reqs=none", "ssl_cert_reqs=none&ssl_check_hostname=0"]
)
def test_checks_end_only_where_the_url_says_so(
    front: Fronting, certificate: Path, option: str
) -> None:
    gate = front(certificate)
    with TaskQueue.from_url(gate.url("127.0.0.1") + option) as queue:
        push(queue, "a")
        assert queue.size() == 1


def test_the_name_can_be_left_unchecked_alone(
    front: Fronting, authority: Authority, other_authority: Authority, certificate: Path
) -> None:
    gate = front(certificate)
    options = {"ssl_check_hostname": "false"}
    url = gate.url("127.0.0.1", ssl_ca_certs=authority.path, **options)
    with TaskQueue.from_url(url) as queue:
        queue.check()
    assert "certificate verify failed" in refused(
        gate.url("127.0.0.1", ssl_ca_certs=other_authority.path, **options)
    )


@pytest.mark.parametrize(
    "option",
    ["ssl_cert_reqs=sometimes", "ssl_nonsense=1", "ssl_ca_certs=/nowhere", "ssl_keyfile=/nowhere"],
)
def test_options_of_tls_that_cannot_be_used_are_told(option: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a Redis URL"):
        TaskQueue.from_url(f"rediss://localhost/0?{option}")
