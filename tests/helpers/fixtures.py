"""Types of the fixtures `own_server`, `spawn` and `logged`."""

import subprocess
from collections.abc import Callable
from typing import Any

from fairqueue.runtime.embedded import EmbeddedServer

OwnServer = Callable[..., EmbeddedServer]
Spawn = Callable[..., "subprocess.Popen[str]"]
Logged = Callable[[str], list[dict[str, Any]]]
