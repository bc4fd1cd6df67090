r"""Secrets: what looks like one, and what is written instead.

A secret is known by the name that its value stands under (``wandb_api_key``, ``HF_TOKEN``,
``--wandb-key``) or by its own form, which the services that give them out publish. Nothing is lost
by it: no number depends on a secret.

Standard library only: it is used inside training processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "[redacted]"

#: Last words of a name that always mean a secret.
_SECRET = frozenset(
    ("secret", "secrets", "password", "passwd", "pwd", "passphrase", "credential", "credentials",
     "authorization", "apikey", "cookie", "webhook", "pat")
)  # fmt: skip
#: What stands before "key" where it opens something; data.prompt_key names a column.
_KEYS = frozenset(
    ("api", "access", "secret", "private", "wandb", "swanlab", "encryption", "signing", "auth",
     "account", "storage", "subscription", "license", "ssh", "hmac", "aes", "session", "master",
     "shared", "openai", "anthropic", "client", "security", "host", "deploy")
)  # fmt: skip
#: What stands before "token" where it is one of a text; every other token lets somebody in.
_OF_TEXT = frozenset(
    ("pad", "padding", "eos", "bos", "unk", "mask", "sep", "cls", "image", "video", "audio",
     "special", "stop", "per", "start", "end", "think", "tool", "first", "last", "next", "new",
     "prompt", "response", "max", "min", "num", "total", "mean", "sum", "by", "of", "to", "each",
     "single", "every", "on", "message", "generation", "rollout")
)  # fmt: skip
#: Endings that say where a secret is, and not what.
_PLACES = frozenset(("path", "file", "name", "env", "id", "dir", "type", "mode", "len", "length"))
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

#: Values by their own form, as GitHub's and GitLab's secret scanning and the services tell.
_FORMS = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    r"hf_[A-Za-z0-9]{20,}|(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,}"
    r"|glpat-[A-Za-z0-9_-]{20,}|sk-[A-Za-z0-9_-]{20,}|xox[abeoprs]-[A-Za-z0-9-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*|npm_[A-Za-z0-9]{36}"
    r"|pypi-[A-Za-z0-9_-]{50,}|dckr_pat_[A-Za-z0-9_-]{20,}|LTAI[A-Za-z0-9]{12,30}"
    r"|wandb_v1_[A-Za-z0-9_]{20,})(?![A-Za-z0-9])"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)", re.DOTALL
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{12,}")
_USERINFO = re.compile(r"(?<=://)[^\s/:@'\"]*:[^\s/@'\"]+(?=@)")
#: NAME=VALUE, "name": "value", --name value: a name, what divides, the value in its quotes.
_ASSIGNED = re.compile(
    r"(?P<flag>--)?(?<![A-Za-z0-9_.])(?P<name>[A-Za-z][A-Za-z0-9_.\-]{2,80})(?P<between>['\"]?\s*[=:]\s*|\s+)"
    r"(?P<value>\[redacted\]|'[^'\n]*'|\"[^\"\n]*\"|[^\s,;'\"}\])]+)"
)
#: Values that say where the secret comes from, or that there is none.
_REFERENCE = re.compile(
    r"\$\{?.*|null|none|true|false|\[redacted\]|''|\"\"|<.*>"
    # a number, as logs print metrics: 1.5e-05, np.float64(0.1
    r"|(?:np\.\w+\()?[-+]?(?:[0-9]{1,6}|[0-9]*\.[0-9]*)(?:e[-+]?[0-9]+)?\)?",
    re.I,
)
#: Shorter values of secret names are not sought elsewhere: they would be found everywhere.
_KNOWN = 8


def is_secret_name(name: str) -> bool:
    """Whether what stands under a name lets somebody in."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if words == ["pwd"]:
        return False  # the working directory, in every environment
    if not words or words[-1] in _PLACES:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "key":
        return before in _KEYS
    if last == "token":
        return before not in _OF_TEXT
    return last in _SECRET


def is_secret(name: str, value: Any) -> bool:
    """Whether a value may not be written down: by its name, or by its own form."""
    if not isinstance(value, str) or _REFERENCE.fullmatch(value.strip()):
        return False
    return is_secret_name(name) or _formed(value)


def _formed(text: str) -> bool:
    return any(form.search(text) for form in (_FORMS, _PRIVATE_KEY, _BEARER, _USERINFO))


def known(environ: Mapping[str, str]) -> frozenset[str]:
    """Secrets of an environment, to be sought wherever they turn up."""
    return frozenset(
        value for name, value in environ.items() if len(value) >= _KNOWN and is_secret(name, value)
    )


def text(value: str, secrets: Iterable[str] = (), *, names: bool = True) -> str:
    """A text without the secrets in it.

    Args:
        value: a line of a log, a word of a command.
        secrets: further ones, as :func:`known` finds them.
        names: also what stands behind a name; not for prose, where "token: not found" is none.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        value = value.replace(secret, REDACTED)
    value = _PRIVATE_KEY.sub(REDACTED, value)
    value = _FORMS.sub(REDACTED, value)
    value = _BEARER.sub(rf"\1 {REDACTED}", value)
    value = _USERINFO.sub(REDACTED, value)
    return _without_assigned(value) if names else value


def _without_assigned(line: str) -> str:
    parts, at = [], 0
    while found := _ASSIGNED.search(line, at):
        divided = "=" in found["between"] or ":" in found["between"] or found["flag"]
        hidden = found["value"].strip("'\"")
        if divided and is_secret(found["name"], hidden):
            parts.append(line[at : found.start("value")] + found["value"].replace(hidden, REDACTED))
            at = found.end()
        else:
            # the value may be an assignment itself: --env=HF_TOKEN=…
            parts.append(line[at : found.start("value")])
            at = found.start("value")
    return "".join(parts) + line[at:]


def command(words: Iterable[str], secrets: Iterable[str] = ()) -> list[str]:
    """The words of a command line, also where a flag and its value are two."""
    redacted, secrets = [], tuple(secrets)
    flag = ""
    for word in words:
        hidden = flag and not word.startswith("--") and is_secret(flag, word)
        redacted.append(REDACTED if hidden else text(word, secrets))
        flag = word.lstrip("-") if word.startswith("--") and "=" not in word else ""
    return redacted


def value(found: Any, name: str = "", secrets: Iterable[str] = ()) -> Any:
    """Nested mappings and lists without secrets; ``name`` is what it all stands under."""
    secrets = tuple(secrets)
    if isinstance(found, Mapping):
        return {key: value(inner, str(key), secrets) for key, inner in found.items()}
    if isinstance(found, list | tuple):
        if all(isinstance(inner, str) for inner in found):
            return [_one(word, name) for word in command(found, secrets)]
        return [value(inner, name, secrets) for inner in found]
    if isinstance(found, str):
        return _one(text(found, secrets), name)
    return found


def _one(word: str, name: str) -> str:
    return REDACTED if is_secret_name(name) and is_secret(name, word) else word
