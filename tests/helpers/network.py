"""Networks that lose or delay replies."""

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self


def is_closed_after(sock: socket.socket, more: bytes) -> bool:
    """Send data; return True if the peer has closed the connection."""
    try:
        sock.sendall(more)
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


class Port:
    """A local TCP port that serves each connection in a thread until it is closed."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._end, self._ending = socket.socketpair()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._ending.close()
        for thread in list(self._threads):
            thread.join(10)
        self._listening.close()
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            readable, _, _ = select.select([self._listening, self._end], [], [])
            if self._end in readable:
                return
            client, _ = self._listening.accept()
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        """Serve one connection until it ends or `_end` is readable."""
        raise NotImplementedError


class LossyProxy(Port):
    """A port in front of a server that can drop a reply after the command was applied."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._lock = threading.Lock()
        self._to_drop = 0
        self.dropped = 0
        super().__init__()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def drop_replies(self, count: int = 1) -> None:
        """Drop the replies to the next scripts that are applied, and their connections."""
        with self._lock:
            self._to_drop = count

    def losing(self, action: Callable[[], Any], replies: int = 1) -> Any:
        """Lose replies of an action, which must not notice; its answer."""
        before = self.dropped
        self.drop_replies(replies)
        answer = action()
        assert self.dropped == before + replies
        return answer

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as upstream, suppress(OSError):
            upstream.connect(self._socket_path)
            script = False
            while True:
                readable, _, _ = select.select([client, upstream, self._end], [], [])
                if self._end in readable:
                    return
                source, other = (client, upstream) if client in readable else (upstream, client)
                data = source.recv(65536)
                if not data:
                    return
                self._hold()
                if source is client:
                    script = b"EVALSHA" in data
                elif script and not data.startswith(b"-") and self._drops():
                    return
                other.sendall(data)

    def _hold(self) -> None:
        """Called before data is passed on; a subclass may block here."""

    def _drops(self) -> bool:
        with self._lock:
            if self._to_drop == 0:
                return False
            self._to_drop -= 1
            self.dropped += 1
            return True


class StallingProxy(LossyProxy):
    """A LossyProxy that can also stall: nothing arrives, and no connection breaks."""

    def __init__(self, socket_path: str) -> None:
        self._flows = threading.Event()
        self._flows.set()
        super().__init__(socket_path)

    def stall(self) -> None:
        """Stop passing data on in both directions."""
        self._flows.clear()

    def resume(self) -> None:
        """Deliver everything that was held up, and pass data on again."""
        self._flows.set()

    def close(self) -> None:
        self.resume()
        super().close()

    def _hold(self) -> None:
        self._flows.wait()
