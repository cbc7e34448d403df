"""Certificates of a test authority, and a TLS server in front of Redis."""

import select
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.network import Port

CHUNK = 65536
NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


class Authority:
    """Makes certificates with openssl, in a folder."""

    def __init__(self, folder: Path) -> None:
        found = shutil.which("openssl")
        if found is None:
            pytest.skip("there is no openssl here to make a certificate with")
        self._openssl: str = found
        self._folder = folder
        # Python 3.13 and later accept no authority that does not say what its key is for.
        self._run(
            f"req -x509 {NEW_KEY} -days 2 -subj /CN=authority -keyout ca.key -out ca.pem "
            "-addext keyUsage=critical,keyCertSign,cRLSign"
        )
        self.path = folder / "ca.pem"

    def _run(self, line: str) -> None:
        subprocess.run(
            [self._openssl, *line.split()],
            cwd=self._folder,
            check=True,
            capture_output=True,
            timeout=60,
        )

    def issue(self, name: str, subject: str, *, days: int = 2) -> Path:
        """A certificate for a subject such as DNS:localhost, and its key, in one file."""
        extensions = [f"subjectAltName={subject}", "authorityKeyIdentifier=keyid"]
        (self._folder / f"{name}.ext").write_text("\n".join(extensions))
        self._run(f"req -new {NEW_KEY} -subj /CN={name} -keyout {name}.key -out {name}.csr")
        self._run(
            f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days {days} "
            f"-extfile {name}.ext -out {name}.crt"
        )
        both = self._folder / f"{name}.pem"
        parts = [(self._folder / f"{name}.{part}").read_bytes() for part in ("key", "crt")]
        both.write_bytes(b"".join(parts))
        return both


class TlsFront(Port):
    """A TLS port that passes the plain data on to a server."""

    def __init__(self, upstream: str | tuple[str, int], context: ssl.SSLContext) -> None:
        self._upstream = upstream
        self._context = context
        # What the server says of itself after the handshake, such as tickets for the next one.
        self.hold_tickets = False
        self._tickets = threading.Event()
        super().__init__()

    def url(self, host: str = "localhost", **options: object) -> str:
        """The address, with options of redis-py."""
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"rediss://{host}:{self.port}/0?{query}"

    def let_tickets_go(self) -> None:
        """Send the tickets that were held back."""
        self._tickets.set()

    def close(self) -> None:
        self._tickets.set()
        super().close()

    def _serve(self, client: socket.socket) -> None:
        family = socket.AF_UNIX if isinstance(self._upstream, str) else socket.AF_INET
        with client, socket.socket(family) as upstream, suppress(OSError):
            upstream.connect(self._upstream)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Conversation(self, client, upstream, self._context).run()


class _Conversation:
    """One connection. TLS data goes through memory, so that it can be held back."""

    def __init__(
        self,
        front: TlsFront,
        client: socket.socket,
        upstream: socket.socket,
        context: ssl.SSLContext,
    ) -> None:
        self._front, self._client, self._upstream = front, client, upstream
        self._received, self._sending = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._sending, server_side=True)

    def run(self) -> None:
        """Pass data on until one side or the front is closed."""
        try:
            if not self._shake_hands():
                return
        except ssl.SSLError:
            with suppress(OSError):
                self._client.sendall(self._sending.read())  # the alert says why
            return
        held = self._sending.read()
        if self._front.hold_tickets:
            holder = threading.Thread(target=self._send_held, args=(held,), daemon=True)
            self._front._threads.append(holder)
            holder.start()
        else:
            self._client.sendall(held)
        # What the client said right after the handshake may be here already.
        while self._read_all() and self._pass_on():
            pass

    def _send_held(self, held: bytes) -> None:
        # Nothing else is sent before: the test sees to that.
        self._front._tickets.wait(60)
        with suppress(OSError):
            self._client.sendall(held)

    def _shake_hands(self) -> bool:
        while True:
            try:
                self._tls.do_handshake()
                return True
            except ssl.SSLWantReadError:
                self._client.sendall(self._sending.read())
            if self._client not in self._wait():
                return False
            data = self._client.recv(CHUNK)
            if not data:
                return False
            self._received.write(data)

    def _wait(self) -> list[socket.socket]:
        sockets = [self._client, self._upstream, self._front._end]
        readable: list[socket.socket] = select.select(sockets, [], [])[0]
        return [] if self._front._end in readable else readable

    def _pass_on(self) -> bool:
        readable = self._wait()
        if self._upstream in readable:
            data = self._upstream.recv(CHUNK)
            if not data:
                return False
            self._tls.write(data)
            self._client.sendall(self._sending.read())
        if self._client in readable:
            data = self._client.recv(CHUNK)
            if not data:
                return False
            self._received.write(data)
        return bool(readable)

    def _read_all(self) -> bool:
        """Pass on everything received so far; False at the end of the stream."""
        while True:
            try:
                text = self._tls.read(CHUNK)
            except ssl.SSLWantReadError:
                return True
            except ssl.SSLError:
                return False
            if not text:
                return False
            self._upstream.sendall(text)
