"""Load the worker that `--app` names: `module:name`, relative to the current folder."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import click

from fairqueue.errors import ConfigurationError, FairQueueError, kind_of, shown
from fairqueue.queue.queue import TaskQueue
from fairqueue.worker.worker import Worker

WANTED, EXAMPLE = "a Worker, or a function that returns one", "myapp.jobs:make_worker"
pool_option = click.option(
    "--pool",
    "pools",
    multiple=True,
    metavar="POOL",
    help="Take tasks of this pool. Repeatable. Default: the app's, or the pool default.",
)


def load_worker(app: str, queue: TaskQueue, settings: Mapping[str, Any]) -> Worker:
    """The worker of an app, on a queue.

    `module:name` names a Worker, or a function that is called with the queue (and with the given
    `concurrency`, `pools`, `processes`, `lease` and `alerts`, if it accepts them) and returns one.
    A module alone registers its handler classes. Raises ConfigurationError naming what is missing.
    """
    path, found = find(app)
    if found is None:
        return Worker(queue, **settings, modules=[path])
    if callable(found) and not isinstance(found, Worker):
        found = _call(found, queue, settings, app)
    elif settings:
        names = _options_of(settings)
        raise ConfigurationError(
            f"--app {shown(app)} is a Worker object, so {names} cannot be given: name a function "
            "that takes the queue and returns a Worker"
        )
    if not isinstance(found, Worker):
        raise ConfigurationError(f"--app {shown(app)} must be {WANTED}, not {kind_of(found)}")
    return found


def check_app(app: str) -> None:
    """Check that an app can use the queue of `up`.

    Raises ConfigurationError if the module or the name in it does not exist, or if it is a Worker
    object, which has a queue of its own.
    """
    _, found = find(app)
    if isinstance(found, Worker):
        raise ConfigurationError(
            f"--app {shown(app)} is a Worker object with a queue of its own: name a function that "
            "takes the queue of `up` and returns a Worker, for example "
            "def make_worker(queue): return Worker(queue, modules=['myapp.jobs'])"
        )


def find(
    app: str, option: str = "--app", wanted: str = WANTED, example: str = EXAMPLE
) -> tuple[str, Any]:
    """The path of the module, and the object that is named in it; None for a module alone.

    Raises ConfigurationError with the option, what it expects and an example.
    """
    path, colon, name = app.partition(":")
    told = f"{option} {shown(app)}"
    module = _import(path, told, example)
    return path, _attribute(module, name, told, wanted) if colon else None


def call(make: Callable[..., Any], told: str, *args: Any, **settings: Any) -> Any:
    """Call a function of the user's app; `told` is the option that names it, with its value.

    Raises our own errors as they are, and any other error as ConfigurationError.
    """
    try:
        return make(*args, **settings)
    except FairQueueError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{told} was called and raised {shown(error)}") from error


def _import(path: str, told: str, example: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if path.endswith(".py"):
        module = path.removesuffix(".py").removeprefix("./").replace(os.sep, ".")
        raise ConfigurationError(f"{told} is a file: name the module, {module!r}")
    if not path or path.startswith("."):
        raise ConfigurationError(f"{told} must name a module, for example {example}")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            raise _not_imported(told, path, error) from error
        raise ConfigurationError(
            f"{told}: there is no module {error.name!r} in {here} or on the Python path"
        ) from None
    except Exception as error:
        raise _not_imported(told, path, error) from error


def _not_imported(told: str, path: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"{told}: {path} cannot be imported: {shown(error)}")


def _attribute(module: ModuleType, name: str, told: str, wanted: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise ConfigurationError(
                f"{told}: module {module.__name__} has no {shown(name)}; expected {wanted}"
            )
    return found


def _call(make: Any, queue: TaskQueue, settings: Mapping[str, Any], app: str) -> Any:
    told = f"--app {shown(app)}"
    try:
        takes = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return call(make, told, queue, **settings)  # it has no signature to read
    any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    unknown = [name for name in settings if name not in takes and not any_name]
    if unknown:
        options = _options_of(unknown)
        raise ConfigurationError(
            f"{told} does not accept {', '.join(unknown)}, so {options} cannot be given"
        )
    return call(make, told, queue, **settings)


def _options_of(settings: Iterable[str]) -> str:
    """The names of the options of these settings."""
    special = {"alerts": "--alerts, --alert-webhook, --alert-log", "pools": "--pool"}
    return ", ".join(special.get(name, f"--{name}") for name in settings)
