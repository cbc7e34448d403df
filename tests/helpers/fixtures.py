"""Types of the fixtures `own_server` and `spawn`."""

import subprocess
from collections.abc import Callable

from fairqueue.runtime.embedded import EmbeddedServer

OwnServer = Callable[..., EmbeddedServer]
Spawn = Callable[..., "subprocess.Popen[str]"]
