"""Recipients of alerts: the log, a function, a webhook or e-mail addresses."""

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
from fairqueue.errors import ConfigurationError, kind_of, shown
from fairqueue.validation import (
    check_count,
    check_items,
    check_name,
    check_one_of,
    check_seconds,
    check_type,
)

logger = logging.getLogger("fairqueue.alerts")

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9.-]+")


class Recipient(Protocol):
    """A destination of alerts.

    `send` may take `timeout` seconds; an exception means failure, and the alert is sent again. It
    is called in its own thread, never twice at once. `name` appears in logs and must not contain
    secrets.
    """

    name: str
    timeout: float

    def send(self, alert: Alert) -> None:
        """Send an alert, or raise."""


class LogRecipient:
    """Writes alerts to a logger, `fairqueue.alerts` by default, at the level of their severity."""

    def __init__(self, to: logging.Logger | None = None, timeout: float = 10.0) -> None:
        """Raise ConfigurationError for a bad argument."""
        chosen = logger if to is None else to
        self._logger = check_type(chosen, "to", logging.Logger, ConfigurationError)
        self.name = f"log {self._logger.name}"
        self.timeout = check_timeout(timeout)

    def __repr__(self) -> str:
        return f"LogRecipient({self._logger.name!r})"

    def send(self, alert: Alert) -> None:
        """Write one line, with the alert as a field of the record."""
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
        """Raise ConfigurationError for a bad argument. `name` appears in logs."""
        if not callable(function):
            raise ConfigurationError(f"function must be callable, not {shown(function):.80}")
        self._function = function
        if name is None:
            # Not its repr: that of a partial contains arguments, which may be secrets.
            name = str(getattr(function, "__qualname__", type(function).__qualname__))
        self.name = check_name(name, "name", ConfigurationError)
        self.timeout = check_timeout(timeout)

    def __repr__(self) -> str:
        return f"CallableRecipient({self.name})"

    def send(self, alert: Alert) -> None:
        """Call the function and ignore its result."""
        self._function(alert)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: object, **more: object) -> None:
        """Return None: a redirect is a failure, like any answer that is not 2xx."""


class WebhookRecipient:
    """Posts each alert as JSON to a URL.

    With `secret` the body is signed: `FairQueue-Signature: t=<seconds since 1970>,v1=<hex>`, the
    HMAC-SHA256 of `<t>.<body>`. Redirects are not followed, and the proxies of the environment are
    not used. Any answer but 2xx is a failure.
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
        """Raise ConfigurationError for a bad argument. Pass `context` to trust your own authority.

        Messages show neither path nor query of the URL, nor header values: these may be secret.
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
            raise AlertNotSent(f"{self.name} is unreachable: {_safe_reason(error)}") from None


def _signature(secret: bytes, seconds: int, body: bytes) -> str:
    digest = hmac.new(secret, b"%d." % seconds + body, hashlib.sha256).hexdigest()
    return f"t={seconds},v1={digest}"


def _safe_reason(error: Exception) -> str:
    """Describe an error without the words of the other side, which may repeat secrets."""
    reason = getattr(error, "reason", error)  # a URLError contains the error of the socket
    if isinstance(reason, smtplib.SMTPResponseException):
        return f"{type(reason).__name__} {reason.smtp_code}"
    if isinstance(reason, smtplib.SMTPException | http.client.HTTPException):
        return type(reason).__name__
    return error_text(reason)


TLS_PORTS = {"starttls": 587, "ssl": 465, "none": 25}


class EmailRecipient:
    """Sends each alert as a plain text e-mail over SMTP.

    `tls` is "starttls", "ssl" (encrypted from the first byte) or "none". The server's certificate
    and host name are verified. A password is never sent without encryption.
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
        """Raise ConfigurationError for a bad argument, without showing the password.

        `port` depends on `tls` by default. Pass `context` to trust your own authority.
        """
        self._tls = check_one_of(tls, "tls", TLS_PORTS, ConfigurationError)
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
            raise ConfigurationError("to must be a list of addresses, not an empty list")
        self._sender = _check_address(sender, "sender")
        self._to = [_check_address(address, "to") for address in addresses]
        self._login = _check_login(username, password, tls)
        self._context = _check_context(context)
        self.name = f"e-mail by {self._host}:{self._port}"
        self.timeout = check_timeout(timeout)

    def __repr__(self) -> str:
        return f"EmailRecipient({self._host}:{self._port}, {self._sender!r}, to={self._to!r})"

    def send(self, alert: Alert) -> None:
        """Send one e-mail to all addresses. Raises AlertNotSent if no address was accepted."""
        message = self._message(alert)
        try:
            with self._connect() as smtp:
                if self._tls == "starttls":
                    smtp.starttls(context=self._context)
                if self._login is not None:
                    smtp.login(*self._login)
                refused = smtp.send_message(message, self._sender, self._to)
                with suppress(OSError):  # the mail was accepted already
                    smtp.quit()
        except OSError as error:  # also SMTPException
            raise AlertNotSent(f"{self.name} failed: {_safe_reason(error)}") from None
        if refused:
            log_warning("alert_address_refused", recipient=self.name, addresses=sorted(refused))

    def _connect(self) -> smtplib.SMTP:
        # Without a name, smtplib would look up that of this host, which can take long.
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
        # The same for each try, so that a duplicate can be recognised.
        message["Message-ID"] = f"<{alert.alert_id}@{self._sender.partition('@')[2]}>"
        message["Auto-Submitted"] = "auto-generated"  # prevents automatic replies
        message.set_content(alert.text())
        return message


def check_timeout(timeout: float) -> float:
    """Check the seconds that one delivery may take. Raises ConfigurationError."""
    return check_seconds(timeout, "timeout", ConfigurationError, least=0.001, most=600)


def _check_context(context: ssl.SSLContext | None) -> ssl.SSLContext:
    if context is None:
        return ssl.create_default_context()
    return check_type(context, "context", ssl.SSLContext, ConfigurationError)


def _check_url(url: object, allow_http: bool) -> tuple[str, str]:
    """Return the URL of a webhook, and the part that may be shown."""
    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigurationError(
            "the url of a webhook must be a string of printable ASCII characters"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigurationError("the url of a webhook is malformed") from None
    schemes = ("https", "http") if allow_http else ("https",)
    if parts.scheme not in schemes or not host:
        raise ConfigurationError(
            f"the url of a webhook must be {' or '.join(schemes)} with a host, not "
            f"{parts.scheme}://{host or ''} (pass allow_http=True to allow http)"
        )
    if "@" in parts.netloc:
        raise ConfigurationError(
            f"the url of webhook {host} must not contain a user: pass credentials in headers"
        )
    return url, f"{parts.scheme}://{host}" + (f":{port}" if port else "")


def _check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        raise ConfigurationError(f"headers must be a dict, not {kind_of(headers)}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ConfigurationError(f"header name {shown(name):.80} is not valid in HTTP")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigurationError(
                f"the value of header {shown(name)} must be a string without control characters"
            )
    return dict(headers)


def _check_secret(secret: str | bytes | None) -> bytes | None:
    if secret is None:
        return None
    if not isinstance(secret, str | bytes) or not secret:
        raise ConfigurationError("the secret of a webhook must be str or bytes, and not empty")
    return secret.encode() if isinstance(secret, str) else secret


def _check_address(address: object, what: str) -> str:
    if isinstance(address, str) and len(address) <= 254 and _ADDRESS.fullmatch(address):
        return address
    raise ConfigurationError(
        f"{what} must be an e-mail address such as ops@example.org, not {shown(address):.80}"
    )


def _check_login(username: object, password: object, tls: str) -> tuple[str, str] | None:
    if username is None and password is None:
        return None
    for what, value in (("username", username), ("password", password)):
        if not isinstance(value, str) or not value.isascii() or not value:
            raise ConfigurationError(
                f"{what} must be an ASCII string: pass both username and password, or neither"
            )
    if tls == "none":
        raise ConfigurationError("tls must be 'starttls' or 'ssl' to send a password, not 'none'")
    return str(username), str(password)
