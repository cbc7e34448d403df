"""Old names of modules, kept for one version: importing one gives the new module, and warns."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Documented once, and moved; the names are those below `fairqueue`.
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
    """Finds the modules of the table. It comes last: no other import is slowed down."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Say that a module of the table is ours to load."""
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == "fairqueue" and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python: what it makes is replaced at once."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of today in the place of the old one."""
        old = module.__name__
        new = f"fairqueue.{MOVED[old.rpartition('.')[2]]}"
        warnings.warn(
            f"{old} is now {new}: the old name goes with the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        sys.modules[old] = importlib.import_module(new)


def install() -> None:
    """Have the old names found, once."""
    if not any(type(finder).__name__ == Aliases.__name__ for finder in sys.meta_path):
        sys.meta_path.append(Aliases())
