"""Find the worker that `--app` names: `module:name`, from the folder where the program runs."""

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from fairqueue.errors import ConfigurationError
from fairqueue.queue import TaskQueue
from fairqueue.worker import Worker


def load_worker(app: str, queue: TaskQueue, settings: Mapping[str, Any]) -> Worker:
    """The worker that an app stands for, on a queue.

    `module:name` names a Worker, or a function that is called with the queue (and with those of
    `concurrency`, `processes`, `lease` that were given and that it takes) and returns one. With a
    module alone, its handler classes are registered. Raises ConfigurationError naming what is
    missing.
    """
    path, found = _find(app)
    if found is None:
        return Worker(queue, **settings, modules=[path])
    if callable(found) and not isinstance(found, Worker):
        found = _call(found, queue, settings, app)
    elif settings:
        names = ", ".join(f"--{each}" for each in settings)
        raise ConfigurationError(
            f"--app {app!r} is a Worker that is made already, so {names} cannot be given: name a "
            "function that gets the queue and returns a Worker"
        )
    if not isinstance(found, Worker):
        raise ConfigurationError(
            f"--app {app!r} is a {type(found).__name__}: a Worker, or a function that returns one"
        )
    return found


def check_app(app: str) -> None:
    """See that an app can be given the queue of `up`.

    Raises ConfigurationError if there is no such module or nothing of the name in it, or if it is a
    Worker that is made already: its tasks would come from its own queue.
    """
    _, found = _find(app)
    if isinstance(found, Worker):
        raise ConfigurationError(
            f"--app {app!r} is a Worker that is made already, with a queue of its own: name a "
            "function that gets the queue of `up` and returns a Worker, such as "
            "def make_worker(queue): return Worker(queue, modules=['myapp.jobs'])"
        )


def _find(app: str) -> tuple[str, Any]:
    """The module's path, and what is named in it; None if nothing is."""
    path, colon, name = app.partition(":")
    module = _import(path, app)
    return path, _attribute(module, name, app) if colon else None


def _import(path: str, app: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if not path or path.startswith("."):
        raise ConfigurationError(f"--app {app!r} names no module: such as myapp.jobs:make_worker")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            raise _not_imported(app, path, error) from error
        raise ConfigurationError(
            f"--app {app!r}: there is no module {error.name!r} in {here} or where Python looks"
        ) from None
    except Exception as error:
        raise _not_imported(app, path, error) from error


def _not_imported(app: str, path: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"--app {app!r}: {path} cannot be imported: {error!r}")


def _attribute(module: ModuleType, name: str, app: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise ConfigurationError(
                f"--app {app!r}: module {module.__name__} has no {name!r}: a Worker, or a "
                "function that returns one"
            )
    return found


def _call(make: Any, queue: TaskQueue, settings: Mapping[str, Any], app: str) -> Any:
    try:
        takes = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return make(queue, **settings)  # it says itself what it does not take
    any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    unknown = [name for name in settings if name not in takes and not any_name]
    if unknown:
        names = ", ".join(f"--{name}" for name in unknown)
        raise ConfigurationError(
            f"--app {app!r} takes no {', '.join(unknown)}, so {names} cannot be given"
        )
    return make(queue, **settings)
