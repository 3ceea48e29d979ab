"""Texts for display: without secrets (`redact_url`, `redact_message`), and without control characters (`printable`).

A URL is cut, not parsed. A password may contain `/`, `#`, `?` and `@`, and a scheme may be mistyped, so a parser may
return a piece of the password as the host. If in doubt, more is removed. Depends on text only.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any
from urllib.parse import quote, unquote, unquote_plus

HIDDEN = "***"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_HOST = re.compile(r"([^:/?#@\[\]\s]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?|")
_URL = re.compile(r"[^\s'\"<>()=]*(?:://|@)(?:[^\s'\"<>()]*[^\s'\"<>().,;:!?])?")
_PAIR = re.compile(r"(?P<name>[\w.-]+)(?P<is>=)(?P<value>[^&\s;,'\")]+)")
_URL_DELIMITERS = re.compile(r"[:/?#@&=;,\s\[\]'\"]+")
_SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)?$|pwd$|secret|token$|credential|signature$|(api|access|private|store|account)[_-]?key$|^(key|sig|auth)$",
    re.IGNORECASE,
)
_MAX_MESSAGE_CHARS = 2000
_MAX_DELIMITERS = 24  # marks in a password at which it may have been cut
_MIN_PIECE_CHARS = 3  # shortest piece of a password that is searched for: shorter ones occur in any text


def redact_url(url: str) -> str:
    """Return the URL's scheme, host and path. Text before the last `@` is replaced by `***`; a query is left out.

    An invalid host is replaced by `***` as well, together with the path.

    >>> redact_url("redis://:secret@cache:6379/0?socket_timeout=1")
    'redis://***@cache:6379/0'
    """
    match = _SCHEME.match(url)
    scheme = match[0] if match else ""
    _, at, rest = url[len(scheme) :].rpartition("@")
    rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    host, slash, path = rest.partition("/")
    if not _HOST.fullmatch(host):  # `user:password` whose host was forgotten, or a piece of a password
        host, slash, path = HIDDEN, "", ""
    return scheme + (HIDDEN + at if at else "") + host + slash + path


def redact_message(message: str, url: str) -> str:
    """Return a library's error message without secrets. The library was called with `url`.

    The message may contain `url`, a piece of it, or other URLs. Their secrets are replaced by `***`.

    >>> redact_message("Port could not be cast to integer value as 'sec'", "redis://:sec#ret@cache")
    "Port could not be cast to integer value as '***'"
    """
    message = message.replace(url, redact_url(url)) if url else message
    for piece in sorted(set(_pieces(url)), key=len, reverse=True):
        message = message.replace(piece, HIDDEN)
    message = _URL.sub(lambda match: redact_url(match[0]), message)
    return _PAIR.sub(lambda pair: f"{pair['name']}={HIDDEN}" if is_secret(pair["name"]) else pair[0], message)


def printable(text: str) -> str:
    """Return a message for a log or a client: control characters are escaped, and the end of a long one is left out.

    Messages may quote what a client sent: megabytes, line breaks that forge log lines, half a surrogate.

    >>> printable("the mode is a\\x1b[31m"), len(printable("a" * 9999)) < 2100
    ('the mode is a\\\\x1b[31m', True)
    """
    if len(text) > _MAX_MESSAGE_CHARS:
        text = f"{text[:_MAX_MESSAGE_CHARS]}... ({len(text)} characters)"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def hide_address(message: str, url: str, name: str) -> str:
    """Return a message for clients without secrets and without the address in `url`, for which it says `name`.

    >>> url = "postgresql://rag:secret@db.internal:5432/rag"
    >>> hide_address(f"{redact_url(url)} does not answer (db.internal: timeout); run: ragblend doctor", url, "CATALOG")
    'CATALOG does not answer (CATALOG: timeout); run: ragblend doctor'
    """
    for each in (url, redact_url(url)):
        message = message.replace(each, name)
    place = re.split(r"[/?#]", _SCHEME.sub("", url.rpartition("@")[2], count=1), maxsplit=1)[0]
    first, *others = place.split(",")  # libpq's URLs may name several hosts
    hosts = [re.sub(r":\d*$", "", each).strip("[]") for each in (first, *others)]
    hosts += re.findall(r"[?&]host(?:addr)?=([^&,]+)", url)  # libpq's, too
    for host in sorted(filter(None, hosts), key=len, reverse=True):
        message = re.sub(rf"(?<![\w.-])\[?{re.escape(host)}\]?(:\d+)?(?![\w-])", name, message)
    return redact_message(message, url.replace(place, first) if others else url)


def url_in_command(text: str) -> str:
    """Return a URL that was redacted for display as a word of a command that a message suggests.

    If something is hidden in it, the word is `URL`, because a command with `***` cannot be run.

    >>> url_in_command("s3://bucket/kv"), url_in_command("redis://***@cache:6379/0")
    ('s3://bucket/kv', 'URL')
    """
    return "URL" if HIDDEN in text else shlex.quote(text)


def has_secret(url: str) -> bool:
    """True if `redact_url` would change `url`."""
    return redact_url(url) != url


def password_encoding_hint(url: str) -> str:
    """Return a hint for the end of an error message: the percent-encoding of `#`, `/`, `?` and `@` in a password.

    These characters must be encoded in a URL. Returns "" if the password in `url` has none of them.

    >>> password_encoding_hint("redis://:a#b@cache")
    "; in a password, write '#' as %23, '/' as %2F, '?' as %3F, '@' as %40"
    """
    scheme = _SCHEME.match(url)
    before = url[scheme.end() if scheme else 0 :].rpartition("@")[0]
    if not re.search(r"[#/?@]", before):
        return ""
    return "; in a password, write '#' as %23, '/' as %2F, '?' as %3F, '@' as %40"


def is_secret(name: str) -> bool:
    """True if the value of a setting or flag of that name is a secret.

    >>> is_secret("--api-key"), is_secret("hf_token"), is_secret("max_tokens"), is_secret("--max-model-len")
    (True, True, False, False)
    """
    return bool(_SECRET_NAME.search(name.lstrip("-")))


def hide_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for display: values of secret options are hidden, URLs redacted (`redact_url`).

    >>> hide_secrets({"hf_token": "abc", "remote": "redis://:abc@cache", "memory_gib": 2})
    {'hf_token': '***', 'remote': 'redis://***@cache', 'memory_gib': 2}
    """
    hidden: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            hidden[name] = hide_secrets(value)
        elif is_secret(str(name)) and value is not None:
            hidden[name] = HIDDEN
        else:
            hidden[name] = redact_url(value) if isinstance(value, str) and ("://" in value or "@" in value) else value
    return hidden


def redact_command(words: list[str]) -> list[str]:
    """Return a command for display: values of secret flags are hidden, URLs redacted (`redact_url`).

    >>> redact_command(["vllm", "--api-key", "abc", "--hf-token=abc", "--port", "80"])
    ['vllm', '--api-key', '***', '--hf-token=***', '--port', '80']
    """
    redacted: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        flag, is_set, value = word.partition("=")
        if before.startswith("--") and "=" not in before and is_secret(before):
            redacted.append(HIDDEN)
        elif word.startswith("--") and is_set and is_secret(flag):
            redacted.append(f"{flag}={HIDDEN}")
        elif word.startswith("--") and is_set:
            redacted.append(f"{flag}={redact_url(value)}" if "://" in value else word)
        else:
            redacted.append(redact_url(word) if _SCHEME.match(word) else word)
    return redacted


def _pieces(url: str) -> Iterator[str]:
    """Return the secret parts of a URL, in each spelling in which a message may contain them."""
    scheme = _SCHEME.match(url)
    rest = url[scheme.end() :] if scheme else url
    before, _, after = rest.rpartition("@")
    place, *options = re.split(r"[?#]", after, maxsplit=1)
    host = place.partition("/")[0]
    if not _HOST.fullmatch(host):
        host, before, options = "", rest, []
    user, has_password, password = before.partition(":")
    before = password if has_password else user  # a user's name may be any word of a message
    for hidden in (before, *options):
        marks = [0, *sorted({end for match in _URL_DELIMITERS.finditer(hidden) for end in match.span()}), len(hidden)][
            -_MAX_DELIMITERS:
        ]
        for start, end in combinations(marks, 2):  # a parser that cuts it elsewhere shows what is between two marks
            part = hidden[start:end].strip(":/?#@&=;, ")
            for spelled in (part, unquote(part), unquote_plus(part), quote(part), quote(part, safe="")):
                for each in (spelled, repr(spelled)[1:-1], ascii(spelled)[1:-1]):
                    if len(each) >= _MIN_PIECE_CHARS and each not in host:
                        yield each
