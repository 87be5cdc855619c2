"""Keep secrets out of the files and the output of a run.

A setting is a secret if its name ends in token, password, passwd, passphrase, secret, api key,
access key, secret key or private key, as in hub_token, --api-key, hftoken, secrets or token_1.
Other names do not count (token_count, secretary). The ending `tokens` counts only after a word such
as access (access_tokens, not max_tokens). Special tokens of a tokenizer are not secrets: they have
names such as eos_token. In settings, but not in text, the value of a name that ends in token or
tokens also counts as a special token if it is in brackets (<image>, [INST]) or has fewer than 6
characters.

Settings with secrets are refused. In text, values with such names are masked, and so are values
named credentials, pwd or authorization. Bearer tokens, private keys in PEM format and credentials
in URLs need no name. Any other secret without a name is found only if it is also the value of an
environment variable with a secret's name, and has at least 8 characters.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from ..words import printable

MASK = "***"
SECRET_END = re.compile(
    r"(password|passwd|passphrase|secret|(api|access|secret|private)_?key)s?$|token$|"
    r"(^|_)(access|api|auth|bearer|git|github|gitlab|hf|hub|huggingface|private|refresh|secret"
    r"|session|user|wandb)_?tokens$"
)
SPECIAL_TOKEN_END = re.compile(
    r"(^|_)(answer|bos|cls|end|eos|image|initializer|lang|language|mask|max|min|next|pad|padding"
    r"|placeholder|sep|soft|start|stop|trigger|unk)_?token$"
)
MASKED_END = re.compile("(credentials?|pwd|authorization)$")
NAMED = re.compile(  # name=value, 'name': 'value', --name value
    r"""(?P<name>(?<![\w.-])(?P<option>--)?[\w.-]*
        (?:token|password|passwd|passphrase|secret|key|credential|pwd|authorization)s?[_\d]*)
    (?P<sign>["']?\s*[=:]\s*["']?|(?(option)(?:["'],\s*["']|\s+(?!-)["']?)|(?!)))
    (?P<value>(?:(?:bearer|basic)\s+)?(?:
        (?<=")(?:\\.|[^"\\])*|(?<=')(?:\\.|[^'\\])*|[^\s"',;&)}\]]+
        (?:[,;&)}\]]+(?![\w.-]*["']?\s*[=:])[^\s"',;&)}\]]+)*  # not the next name=value
    ))""",
    re.IGNORECASE | re.VERBOSE,
)
PRIVATE_KEY = re.compile(r"(?s)(-----BEGIN [\w ]*PRIVATE KEY-----)(.*?)(?=-----END )")
# A line of such a key, after the sign of a patch and the indentation.
KEY_LINE = re.compile(r"(?m)^(?>([ +-]?[ \t]*))\S.*$")
NAME = re.compile(r"""(?<![\w.-])[\w.-]+(?=["']?\s*[=:])""")
BEARER = re.compile(r"(?<=\bbearer )(?=\S*\d)[\w.~+/=-]{8,}", re.IGNORECASE)
# Credentials in a URL, up to the last @, since a password may have any character; not host:port/.
IN_URL = re.compile(r"(?<=://)(?!git@)(?:[^/\s?#:@]*:(?!:|\d{1,5}[/?#])\S{0,300}|[^/\s?#:]+)(?=@)")


@cache
def is_secret(name: str) -> bool:
    """Return whether a setting, option or variable of this name is a secret."""
    name = _snake_case(name)
    return bool(SECRET_END.search(name)) and not SPECIAL_TOKEN_END.search(name)


def is_masked(name: str) -> bool:
    """Return whether a value with this name is masked in text."""
    return is_secret(name) or bool(MASKED_END.search(_snake_case(name)))


def _snake_case(name: str) -> str:
    """Return a name in snake_case, without a number at the end."""
    words = re.findall("[a-z0-9]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return "_".join(words).rstrip("_0123456789")


def mask(text: str) -> str:
    """Mask secrets in a text: values after their names, credentials in URLs, and known values."""
    return NAMED.sub(_mask_value, mask_unnamed(text))


def mask_unnamed(text: str) -> str:
    """Mask known values, private keys, bearer tokens and credentials in URLs."""
    for value in sorted(_known_secrets(), key=len, reverse=True):
        text = text.replace(value, MASK)
    return IN_URL.sub(MASK, BEARER.sub(MASK, mask_private_keys(text)))


def mask_private_keys(text: str) -> str:
    """Mask private keys in PEM format, line by line, also in a patch."""
    return PRIVATE_KEY.sub(lambda key: key[1] + KEY_LINE.sub(rf"\1{MASK}", key[2]), text)


def mask_command(arguments: Iterable[str]) -> list[str]:
    """Mask secrets in the arguments of a command.

    The argument after a secret option is always masked. If an argument has a secret's name before a
    colon or an equals sign, as in YAML, all but its option (--x=) is masked.
    """
    masked = []
    is_next = False
    for argument in arguments:
        if is_next:
            masked.append(MASK)
        elif any(map(is_masked, NAME.findall(argument))):
            option = re.match(r"[\w.+-]+=", argument)
            masked.append(f"{option[0] if option else ''}{MASK}")
        else:
            masked.append(mask(argument))
        is_next = argument.startswith("-") and "=" not in argument and is_masked(argument)
    return masked


def _mask_value(match: re.Match[str]) -> str:
    return match["name"] + match["sign"] + MASK if is_masked(match["name"]) else match[0]


def _known_secrets() -> Iterator[str]:
    """Yield the values of secret environment variables."""
    for name in os.environ:  # items() would decode each value, for each line of a log
        if is_secret(name) and len(value := os.environ[name]) >= 8:
            yield value


class MaskedFormatter(logging.Formatter):
    """A log formatter that masks secrets and characters that control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as masked text."""
        return printable(mask(super().format(record)), keep="\n\t")


def secrets_in(settings: Any, name: str = "", secret: str = "") -> Iterator[str]:
    """Yield the dotted names of the settings that contain a secret.

    Secrets are strings and bytes under a secret's name (and numbers, unless the name ends in token
    or tokens), also inside lists, sets, groups and dictionaries. Strings that mask_unnamed changes
    are secrets too. A secret's name inside other text is allowed, as in a prompt ("Password: ...").

    Args:
        settings: a dataclass, or the value of a setting.
        name: the dotted name of the setting.
        secret: the name of the innermost group around the setting that is named like a secret; ""
            if there is none.
    """
    secret = name if is_secret(name) else secret
    is_token = _snake_case(secret).endswith(("token", "tokens"))
    if dataclasses.is_dataclass(settings):
        settings = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from secrets_in(value, f"{name}.{key}" if name else str(key), secret)
    elif isinstance(settings, (list, tuple, set, frozenset)):
        for value in settings:
            yield from secrets_in(value, name, secret)
    else:
        text = settings if isinstance(settings, str) else ""
        # a number is special too, since `text` is empty for it
        is_special = not isinstance(settings, bytes) and re.fullmatch(r".{0,5}|[<\[].*[>\]]", text)
        is_value = settings and type(settings) in (str, bytes, int, float)
        if (secret and is_value and not (is_token and is_special)) or mask_unnamed(text) != text:
            yield name


def secrets_problem(settings: object) -> str:
    """Return the message that refuses settings with a secret; empty if there is none."""
    for name in secrets_in(settings):
        return (
            f"{name} holds a secret, which config.yaml and the list of processes would show: leave"
            " it empty and set an environment variable, such as HF_TOKEN or WANDB_API_KEY, or give"
            " the path of a file with the secret, in a field such as token_file."
        )
    return ""
