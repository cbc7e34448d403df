"""Who is told: the log, a function, a webhook or an e-mail address."""

import hashlib
import hmac
import http.client
import json
import logging
import re
import smtplib
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.message import EmailMessage
from email.utils import format_datetime
from typing import Protocol
from urllib.parse import urlsplit

from fairqueue.alerts.alert import (
    MAX_SUBJECT,
    SEVERITIES,
    Alert,
    AlertNotSent,
    error_text,
    log_warning,
    one_line,
)
from fairqueue.errors import (
    ConfigurationError,
    kind_of,
    shown,
)
from fairqueue.validation import (
    check_count,
    check_items,
    check_name,
    check_seconds,
)

logger = logging.getLogger("fairqueue.alerts")

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9.-]+")


class Recipient(Protocol):
    """Somebody who can be told.

    `send` may take `timeout` seconds; whatever it raises is a failure and is tried again. It is
    called in a thread of its own, never twice at once. `name` is shown in logs: no secrets in it.
    """

    name: str
    timeout: float

    def send(self, alert: Alert) -> None:
        """Tell it, or raise."""


class LogRecipient:
    """Writes alerts to a logger, `fairqueue.alerts` if none is given, at the level they have."""

    def __init__(self, to: logging.Logger | None = None, timeout: float = 10.0) -> None:
        """Raises ConfigurationError naming the argument."""
        if to is not None and not isinstance(to, logging.Logger):
            raise ConfigurationError(f"to {shown(to):.80} is no logging.Logger")
        self._logger = logger if to is None else to
        self.name = f"log {self._logger.name}"
        self.timeout = check_timeout(timeout)

    def __repr__(self) -> str:
        return f"LogRecipient({self._logger.name!r})"

    def send(self, alert: Alert) -> None:
        """Write one line; the parts of the alert are fields of the record."""
        self._logger.log(
            SEVERITIES[alert.severity],
            "alert %s: %s",
            alert.kind,
            alert.headline(),
            extra={"event": "alert", "alert": alert.as_dict()},
        )


class CallableRecipient:
    """Calls a function with each alert."""

    def __init__(
        self, function: Callable[[Alert], object], timeout: float = 10.0, name: str | None = None
    ) -> None:
        """`name` is what logs call it. Raises ConfigurationError naming the argument."""
        if not callable(function):
            raise ConfigurationError(f"function {shown(function):.80} cannot be called")
        self._function = function
        if name is None:
            # Not its repr: that of a partial shows arguments, which may be secrets.
            name = str(getattr(function, "__qualname__", type(function).__qualname__))
        self.name = check_name(name, "name", ConfigurationError)
        self.timeout = check_timeout(timeout)

    def __repr__(self) -> str:
        return f"CallableRecipient({self.name})"

    def send(self, alert: Alert) -> None:
        """Call the function; what it returns is ignored."""
        self._function(alert)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: object, **more: object) -> None:
        """None: a redirect is an answer like any other that is not 2xx, and a failure."""


class WebhookRecipient:
    """Posts each alert as JSON to a URL that the operator has chosen.

    With `secret` the body is signed: `FairQueue-Signature: t=<seconds since 1970>,v1=<hex>`, the
    HMAC-SHA256 of `<t>.<body>`. Redirects are not followed, and proxies that the environment names
    are not used. Any answer but 2xx is a failure.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        secret: str | bytes | None = None,
        timeout: float = 10.0,
        allow_http: bool = False,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`context` is for a certificate authority of your own.

        Raises ConfigurationError; it shows neither path nor query of the URL, nor header values,
        which are often secrets.
        """
        self._url, shown = _check_url(url, allow_http)
        self._headers = _check_headers({} if headers is None else headers)
        self._secret = _check_secret(secret)
        self.name = f"webhook {shown}"
        self.timeout = check_timeout(timeout)
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=_check_context(context)),
            _NoRedirect(),
        )

    def __repr__(self) -> str:
        return f"WebhookRecipient({self.name.removeprefix('webhook ')!r})"

    def send(self, alert: Alert) -> None:
        """Post it. Raises AlertNotSent."""
        body = json.dumps(alert.as_dict(), ensure_ascii=False, separators=(",", ":")).encode()
        headers = {"User-Agent": "FairQueue", **self._headers, "Content-Type": "application/json"}
        if self._secret is not None:
            headers["FairQueue-Signature"] = _signature(self._secret, int(time.time()), body)
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            self._url, data=body, headers=headers, method="POST"
        )
        try:
            self._opener.open(request, timeout=self.timeout).close()
        except urllib.error.HTTPError as error:
            error.close()
            raise AlertNotSent(f"{self.name} answered {error.code}, not 2xx") from None
        except (OSError, http.client.HTTPException) as error:
            raise AlertNotSent(f"{self.name} was not reached: {_safe_reason(error)}") from None


def _signature(secret: bytes, seconds: int, body: bytes) -> str:
    digest = hmac.new(secret, b"%d." % seconds + body, hashlib.sha256).hexdigest()
    return f"t={seconds},v1={digest}"


def _safe_reason(error: Exception) -> str:
    """What went wrong, in words of this machine: those of the other side may repeat secrets."""
    reason = getattr(error, "reason", error)  # a URLError wraps the error of the socket
    if isinstance(reason, smtplib.SMTPResponseException):
        return f"{type(reason).__name__} {reason.smtp_code}"
    if isinstance(reason, smtplib.SMTPException | http.client.HTTPException):
        return type(reason).__name__
    return error_text(reason)


TLS_PORTS = {"starttls": 587, "ssl": 465, "none": 25}


class EmailRecipient:
    """Sends each alert as a plain text mail by SMTP.

    `tls` is "starttls", "ssl" (encrypted from the first byte) or "none". The server's certificate
    and host name are checked. A password is never sent without encryption.
    """

    def __init__(
        self,
        *,
        host: str,
        sender: str,
        to: Sequence[str],
        port: int | None = None,
        username: str | None = None,
        password: str | None = None,
        tls: str = "starttls",
        timeout: float = 10.0,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`port` is that of `tls` if None; `context` is for a certificate authority of your own.

        Raises ConfigurationError naming the argument; the password is never shown.
        """
        if not isinstance(tls, str) or tls not in TLS_PORTS:
            raise ConfigurationError(f"tls {shown(tls):.80} is none of {', '.join(TLS_PORTS)}")
        self._tls = tls
        self._host = check_name(host, "host", ConfigurationError)
        self._port = check_count(
            TLS_PORTS[tls] if port is None else port,
            "port",
            ConfigurationError,
            least=1,
            most=65535,
        )
        addresses = check_items(to, "to", "addresses", ConfigurationError)
        if not addresses:
            raise ConfigurationError("to must be a list of addresses, not an empty one")
        self._sender = _check_address(sender, "sender")
        self._to = [_check_address(address, "to") for address in addresses]
        self._login = _check_login(username, password, tls)
        self._context = _check_context(context)
        self.name = f"e-mail by {self._host}:{self._port}"
        self.timeout = check_timeout(timeout)

    def __repr__(self) -> str:
        return f"EmailRecipient({self._host}:{self._port}, {self._sender!r}, to={self._to!r})"

    def send(self, alert: Alert) -> None:
        """Send one mail to all addresses. Raises AlertNotSent if no address was accepted."""
        message = self._message(alert)
        try:
            with self._connect() as smtp:
                if self._tls == "starttls":
                    smtp.starttls(context=self._context)
                if self._login is not None:
                    smtp.login(*self._login)
                refused = smtp.send_message(message, self._sender, self._to)
                with suppress(OSError):  # the mail is accepted: how they part does not matter
                    smtp.quit()
        except OSError as error:  # also SMTPException
            raise AlertNotSent(f"{self.name} failed: {_safe_reason(error)}") from None
        if refused:
            log_warning("alert_address_refused", recipient=self.name, addresses=sorted(refused))

    def _connect(self) -> smtplib.SMTP:
        # smtplib would ask the name servers who we are, for as long as they take.
        name = socket.gethostname()
        me = name if "." in name and name.isascii() else "[127.0.0.1]"
        if self._tls == "ssl":
            return smtplib.SMTP_SSL(
                self._host, self._port, me, timeout=self.timeout, context=self._context
            )
        return smtplib.SMTP(self._host, self._port, me, timeout=self.timeout)

    def _message(self, alert: Alert) -> EmailMessage:
        message = EmailMessage()
        message["Subject"] = one_line(
            f"[FairQueue] {alert.severity}: {alert.headline()}", MAX_SUBJECT
        )
        message["From"] = self._sender
        message["To"] = ", ".join(self._to)
        message["Date"] = format_datetime(alert.at)
        # The same for each try, so that a mail that arrives twice can be recognised.
        message["Message-ID"] = f"<{alert.alert_id}@{self._sender.partition('@')[2]}>"
        message["Auto-Submitted"] = "auto-generated"  # no answers by robots
        message.set_content(alert.text())
        return message


def check_timeout(timeout: float) -> float:
    """Seconds for one delivery. Raises ConfigurationError."""
    return check_seconds(timeout, "timeout", ConfigurationError, least=0.001, most=600)


def _check_context(context: ssl.SSLContext | None) -> ssl.SSLContext:
    if context is None:
        return ssl.create_default_context()
    if not isinstance(context, ssl.SSLContext):
        raise ConfigurationError(f"context {shown(context):.80} is no ssl.SSLContext")
    return context


def _check_url(url: object, allow_http: bool) -> tuple[str, str]:
    """A URL that can be posted to, and what may be shown of it."""
    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigurationError("the url of a webhook is no text of printable ASCII characters")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigurationError("the url of a webhook cannot be read") from None
    schemes = ("https", "http") if allow_http else ("https",)
    if parts.scheme not in schemes or not host:
        raise ConfigurationError(
            f"the url of a webhook begins with {parts.scheme}://{host or ''}: it has to be "
            f"{' or '.join(schemes)} with a host (allow_http=True takes http)"
        )
    if "@" in parts.netloc:
        raise ConfigurationError(f"the url of webhook {host} has a user: use headers for that")
    return url, f"{parts.scheme}://{host}" + (f":{port}" if port else "")


def _check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        raise ConfigurationError(f"headers must be a dict, not {kind_of(headers)}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ConfigurationError(f"header name {shown(name):.80} cannot be used")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigurationError(
                f"the value of header {shown(name)} cannot be used: a string without control "
                "characters"
            )
    return dict(headers)


def _check_secret(secret: str | bytes | None) -> bytes | None:
    if secret is None:
        return None
    if not isinstance(secret, str | bytes) or not secret:
        raise ConfigurationError("the secret of a webhook is empty or no text: give str or bytes")
    return secret.encode() if isinstance(secret, str) else secret


def _check_address(address: object, what: str) -> str:
    if isinstance(address, str) and len(address) <= 254 and _ADDRESS.fullmatch(address):
        return address
    raise ConfigurationError(f"{what} {shown(address):.80} is no address such as ops@example.org")


def _check_login(username: object, password: object, tls: str) -> tuple[str, str] | None:
    if username is None and password is None:
        return None
    for what, value in (("username", username), ("password", password)):
        if not isinstance(value, str) or not value.isascii() or not value:
            raise ConfigurationError(f"{what} is no ASCII text: username and password go together")
    if tls == "none":
        raise ConfigurationError("a password needs encryption: tls 'starttls' or 'ssl', not 'none'")
    return str(username), str(password)
