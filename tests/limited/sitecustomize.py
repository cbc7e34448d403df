"""Log FairQueue in as the user of the documented minimum: all tests, with FAIRQUEUE_TEST_ACL=1.

The tests' own clients stay who they are. Processes that tests start do the same: this folder is
on their PYTHONPATH, and Python imports a module of this name first. So it must not import FairQueue
before they do.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "FAIRQUEUE_TEST_ACL"
NAME = "documented-minimum"
PASSWORD = "of-the-tests"  # it opens nothing but servers of the tests


def is_on() -> bool:
    return bool(os.environ.get(VARIABLE))


def install() -> None:
    """Patch what FairQueue makes connections and servers with, once it is imported."""
    folder = str(Path(__file__).parent)
    path = os.environ.get("PYTHONPATH", "")
    if folder not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [path])])
    for name, patch in PATCHES.items():
        if name in sys.modules:
            _patch_once(sys.modules[name], patch)
    sys.meta_path.insert(0, _Patching())


class _Patching(MetaPathFinder):
    """Finds the modules to patch where they are, and patches them when they have run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            _patch_after_running(spec.loader, PATCHES[name])
        return spec


def _patch_after_running(loader: Loader, patch: Callable[[Any], None]) -> None:
    run = loader.exec_module

    def run_and_patch(module: ModuleType) -> None:
        run(module)
        _patch_once(module, patch)

    loader.exec_module = run_and_patch  # type: ignore[method-assign]


def _patch_once(module: Any, patch: Callable[[Any], None]) -> None:
    """In a process that was started with this folder on its path, conftest.py comes second."""
    if not getattr(module, "is_patched_for_the_limited_user", False):
        module.is_patched_for_the_limited_user = True
        patch(module)


def _patch_connection(connection: Any) -> None:
    """Our connections log in as the limited user, unless the test has said as whom."""
    make = connection.connection_maker
    connection.connection_maker = lambda client, timeout: make(limited(client), timeout)


def _patch_embedded(embedded: Any) -> None:
    """Each embedded server knows the limited user."""
    configuration = embedded.EmbeddedServer._configuration

    def with_user(server: Any) -> bytes:
        from fairqueue.link.acl import rules

        line = ["user", NAME, "on", f">{PASSWORD}", *rules(None)]
        return bytes(configuration(server)) + " ".join(line).encode() + b"\n"

    embedded.EmbeddedServer._configuration = with_user


def _patch_fleet(fleet: Any) -> None:
    """Each server with replicas and sentinels does, too."""
    start = fleet.Fleet._start_servers

    def with_user(self: Any, replicas: int, fsync: str, config: Any) -> None:
        from fairqueue.link.acl import rules

        user = {f"user {NAME}": " ".join(["on", f">{PASSWORD}", *rules(None)])}
        start(self, replicas, fsync, {**config, **user})

    fleet.Fleet._start_servers = with_user


PATCHES: dict[str, Callable[[Any], None]] = {
    "fairqueue.link.whole": _patch_connection,
    "fairqueue.runtime.embedded": _patch_embedded,
    "faults.fleet": _patch_fleet,
}


def limited(client: Any) -> Any:
    """A client like this one that logs in as the limited user."""
    import redis
    from redis.connection import BlockingConnectionPool, ConnectionPool

    pool: Any = getattr(client, "connection_pool", None)
    if type(pool) not in (ConnectionPool, BlockingConnectionPool):
        return client  # no client of a single server: Sentinel, or no client at all
    options = pool.connection_kwargs
    has_own = any(options.get(name) for name in ("username", "password", "credential_provider"))
    if has_own or pool.connection_class.__module__ != "redis.connection":  # or fakeredis
        return client
    settings = {**options, "username": NAME, "password": PASSWORD}
    own = ConnectionPool(connection_class=pool.connection_class)
    own.connection_kwargs = settings
    return redis.Redis(connection_pool=own)


def make_user(client: Any) -> None:
    """Make the limited user on a server that the tests have not started themselves."""
    from fairqueue.link.acl import rules

    client.execute_command("ACL", "SETUSER", NAME, "reset", "on", f">{PASSWORD}", *rules(None))


if is_on():
    install()
