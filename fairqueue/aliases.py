"""Deprecated module names: importing one returns the new module, with a DeprecationWarning."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Old name -> new name, both below `fairqueue`.
MOVED = {
    "cron": "recurrence.cron",
    "embedded": "runtime.embedded",
    "exchange": "schedules.import_export",
    "frequency": "recurrence.frequency",
    "jitter": "recurrence.jitter",
    "seeder": "demo.seeder",
    "up": "service",
    "windows": "recurrence.windows",
    "workers": "queue.workers",
}


class Aliases(MetaPathFinder, Loader):
    """Finds the modules of the table. It is the last finder, so other imports are not slower."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module of the table."""
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == "fairqueue" and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the old name by the new module in sys.modules."""
        old = module.__name__
        new = f"fairqueue.{MOVED[old.rpartition('.')[2]]}"
        warnings.warn(
            f"{old} has moved to {new}; the old name will be removed in the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        sys.modules[old] = importlib.import_module(new)


def install() -> None:
    """Add the finder to sys.meta_path, unless it is there."""
    if not any(type(finder).__name__ == Aliases.__name__ for finder in sys.meta_path):
        sys.meta_path.append(Aliases())
