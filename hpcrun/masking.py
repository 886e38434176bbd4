"""Secrets out of text that others get to read: known values, values under telling names, well-known shapes.

A name is told by its words: `db_password`, `apiKey`, `HF_TOKEN`, `aws_secret_access_key`. `token_ids`,
`tokens/s`, `pad_token` and `primary key` are none. Where it is not clear how far a value goes, more is taken.
"""

from __future__ import annotations

import json
import re
import shlex
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MASK = "(masked)"
MIN_SECRET_LENGTH = 6
"""A shorter value is also a part of other words, which would make logs unreadable."""

_SECRET_WORDS = frozenset(
    {
        *("secret", "secrets", "password", "passwords", "passwd", "passphrase", "passphrases", "credential"),
        *("credentials", "apikey", "apikeys"),
    }
)
"""A name with one of these words in it is a secret's."""
_SECRET_LAST_WORDS = frozenset(
    {
        *("token", "auth", "authtoken", "authorization", "cookie", "cookies", "pwd", "pass", "pat", "psk"),
        *("signature", "accesskey", "secretkey"),
    }
)
"""So is one that ends with one of these, unless its value is plainly none."""
_SECRET_KEY_KINDS = frozenset(
    {
        *(
            "api",
            "access",
            "secret",
            "private",
            "auth",
            "account",
            "signing",
            "encryption",
            "shared",
            "license",
        ),
        *("master", "ssh", "session", "storage", "deploy", "service", "consumer", "client", "hmac", "cookie"),
        *("webhook", "app", "application", "subscription", "recovery", "admin", "user"),
    }
)
"""What makes a key secret that is named so: access_key, AccountKey."""
_SECRET_WORDS_IN_CAPITALS = frozenset(
    {"TOKEN", "TOKENS", "KEY", "KEYS", "AUTH", "PWD", "PASS", "PSK", "PAT", "COOKIE"}
)
"""Words of environment variables, wherever they stand in a name in capitals."""
_TOKENIZER_WORDS = frozenset(
    {
        *(
            "pad",
            "eos",
            "bos",
            "unk",
            "sep",
            "cls",
            "mask",
            "next",
            "last",
            "first",
            "special",
            "prev",
            "per",
        ),
        *("previous", "image", "stop", "start", "end", "cur", "current", "new", "each", "every", "a", "the"),
        *("one", "this", "that", "control", "bot", "eot", "eom", "audio", "video"),
    }
)
"""Tokens of a text, and not of a service."""
_HARMLESS_VALUE = re.compile(
    r"[-+]?(\d{1,5}|\d*\.\d+([eE][-+]?\d+)?)%?|true|false|null|none|yes|no|str|bytes|~", re.IGNORECASE
)

_NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ASSIGNMENT = re.compile(
    r"(?<![\w.-])(?P<name>[A-Za-z_-][\w.-]{0,199})(?P<between>\\*[\"']?\]?[ \t]*(?:=>|:=|==?|:)[ \t]*)"
)
_QUOTED_VALUE = re.compile(
    r"(?P<quote>\\*[\"'])(?P<inside>(?:(?!(?P=quote))(?:\\.|[^\\])){0,20000})(?P=quote)", re.DOTALL
)
_BARE_VALUE = re.compile(r"(?:\\.|\$\(\S*|[^\s'\",;&\0<>\\)\]}|])+")
_INLINE_LIST = re.compile(r"\[[^\]\n]*\]")
_YAML_BLOCK = re.compile(
    r"[|>][-+0-9]{0,2}[ \t]*\n(?P<first>(?P<indent>[ \t]+)[^\n]*)(?:\n(?P=indent)[^\n]*|\n(?=\n))*"
)
_LINE_START = re.compile(
    r"(?:[^\n'\"=]{0,80}:[ \t]+)?[ \t]*"
    r"(?:[-+][ \t]*|\d+:[ \t]*)?(?:export[ \t]+|declare[ \t]+-x[ \t]+)?[\"']?"
)

_KNOWN_SECRET_FORMATS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{20,}|[srp]k_(?:live|test)_\w{10,}|(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}|xox[abeoprs]-[\w-]{10,}"
    r"|xapp-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{20,}|dckr_pat_[\w-]{20,}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|wandb_v1_\w{20,}"
    r"|AGE-SECRET-KEY-1\w{20,}"
    r"|hvs\.[\w-]{20,}|dapi[0-9a-f]{32}|nvapi-[\w-]{20,}|gsk_\w{20,}|r8_\w{20,})"
    r"|-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
_KEY_END = re.compile(r"-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINE = re.compile(r"[ \t]*[A-Za-z0-9+/=]{8,}[ \t]*\r?")
_SECRET_CONTEXTS: tuple[re.Pattern[str], ...] = (
    re.compile(r"(\w://[^\s/:@'\"]*:)[^\s/'\"<>]+(@)"),
    re.compile(r"(\w://)(?=[^\s/:@'\"]*\d)[^\s/:@'\"]{16,}(@)"),
    re.compile(
        r"(https://(?:hooks\.slack\.com/(?:services|workflows)"
        r"|discord(?:app)?\.com/api/webhooks)/)[^\s'\"<>]+()"
    ),
    re.compile(r"(?m)(^[ \t>*+-]*(?:proxy-)?authorization[ \t]*:[ \t]*)[^\r\n]+()", re.IGNORECASE),
    re.compile(r"(?m)(^[ \t>*<+-]*(?:set-)?cookie2?[ \t]*:[ \t]*)[^\r\n]+()", re.IGNORECASE),
    re.compile(
        r"(?<!['\"\\])\b((?:(?:proxy-)?authorization|(?:set-)?cookie2?)"
        r"[ \t]*[:=][ \t]*)(?!['\"\\])[^\r\n]+()",
        re.IGNORECASE,
    ),
    re.compile(
        r"\b((?:(?:proxy-)?authorization|(?:set-)?cookie2?)"
        r"\\*[\"']?[ \t]*[:=][ \t]*\\*[\"']?)[^\r\n'\"\\]+()",
        re.IGNORECASE,
    ),
    re.compile(r"\b(Bearer[ \t]+)(?=\S*\d|\S{20})[\w.~+/=-]{6,}()", re.IGNORECASE),
    re.compile(r"\b((?:Token|ApiKey|Digest|Negotiate)[ \t]+)(?=[A-Za-z]*\d)[\w.~+/=-]{16,}()"),
    re.compile(
        r"([?&;](?:sig|signature|key|auth|code|x-(?:amz|goog)-(?:signature|credential))=)[^\s&'\"#<>]+()",
        re.IGNORECASE,
    ),
    re.compile(r"((?<![\w-])sig=)[\w%+/=-]{20,}()"),
    re.compile(r"(\blogin\s+\S+\s+(?:account\s+\S+\s+)?password\s+)\S+()"),
    re.compile(r"(\bmachine\s+\S+\s+(?:account\s+\S+\s+)?password\s+)(?=\S*[^a-z\s])\S+()"),
    re.compile(r"(\bcurl\b[^\n]{0,200}?\s(?:-u|--user|--proxy-user|-U)[ =]*['\"]?[^\s:'\"]+:)[^\s'\"]+()"),
    re.compile(r"(\bsshpass[ \t]+-p[ \t]*)(?:'[^'\n]*'|\"[^\"\n]*\"|\S+)()"),
    re.compile(r"(\b(?:mysql|mysqldump|mariadb)\b[^\n]{0,200}?\s-p)[^\s]+()"),
    re.compile(r"(wandb[^\n]{0,60}?(?<![0-9a-f]))[0-9a-f]{40}(?![0-9a-f])()", re.IGNORECASE),
)
"""What stands before and after a secret; both stay."""
_BASIC_AUTH = re.compile(r"\b(Basic[ \t]+)([A-Za-z0-9+/]{8,}={0,2})", re.IGNORECASE)
_SPACED_OPTION = re.compile(
    r"(?P<before>(?<![\w-])(?:--?|setenv[ \t]+|set[ \t]+-\w+[ \t]+)(?P<name>[A-Za-z][\w-]{2,80})[ \t]+)"
    r"(?P<value>'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"-][^\s'\"]*)"
)
_QUOTED_OPTION = re.compile(
    r"(?P<before>(?P<quote>['\"])--?(?P<name>[\w-]+)(?P=quote)\s*,\s*(?P<other>['\"]))(?P<value>[^'\"\n]*)"
)
_NAME_VALUE_PAIR = re.compile(
    r"(?P<before>name\\*['\"]?\s*[:=]\s*\\*['\"]?(?P<name>[\w.-]+)"
    r"\\*['\"]?\s*[,;]?\s*\\*['\"]?value\\*['\"]?\s*[:=]\s*)"
    r"(?P<value>'[^'\n]*'|\\*\"[^\"\n]*\"|[^\s,'\"}]+)",
    re.IGNORECASE,
)
_XML_ELEMENT = re.compile(r"(?P<before><(?P<name>[A-Za-z][\w.-]*)(?:\s[^<>]*)?>)(?P<value>[^<>]+)(?=</)")


def is_secret_name(name: str) -> bool:
    """Whether a variable, key, option, field or file of this name holds a secret."""
    words = [word.lower() for word in _NAME_WORDS.findall(name)]
    return _has_secret_word(name, words) or _has_secret_last_word(words)


def _has_secret_word(name: str, words: Sequence[str]) -> bool:
    if _SECRET_WORDS.intersection(words):
        return True
    has_lower = any(letter.islower() for letter in name.rpartition(".")[2])
    return not has_lower and bool(_SECRET_WORDS_IN_CAPITALS.intersection(re.split(r"[^A-Za-z0-9]+", name)))


def _has_secret_last_word(words: Sequence[str]) -> bool:
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] in ("key", "keys"):
        return before in _SECRET_KEY_KINDS
    if words[-1] == "token":
        return before not in _TOKENIZER_WORDS
    return words[-1] in _SECRET_LAST_WORDS and (
        len(words) > 1 or words[-1] not in ("pass", "pat", "signature")
    )


class Masker:
    """Takes secrets out of text; `values` are known ones, which go wherever they stand."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        written = {
            form for value in values for form in _written_forms(value) if len(form) >= MIN_SECRET_LENGTH
        }
        secrets_by_length = sorted(written, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, secrets_by_length))) if secrets_by_length else None

    def mask(self, text: str) -> str:
        """The same text without them."""
        if self._known is not None:
            text = self._known.sub(MASK, text)
        text = _mask_key_ends(_KNOWN_SECRET_FORMATS.sub(MASK, text))
        for pattern in _SECRET_CONTEXTS:
            text = pattern.sub(rf"\g<1>{MASK}\g<2>", text)
        text = _BASIC_AUTH.sub(_mask_login, text)
        for pattern in (_SPACED_OPTION, _QUOTED_OPTION, _NAME_VALUE_PAIR, _XML_ELEMENT):
            text = pattern.sub(_mask_value, text)
        return _mask_assigned(text)

    def mask_record(self, value: Any) -> Any:
        """Plain values out of a record: what stands under a telling name goes, and secrets in all text."""
        if isinstance(value, Mapping):
            return {
                key: MASK if _is_secret_value(str(key), entry) else self.mask_record(entry)
                for key, entry in value.items()
            }
        if isinstance(value, list):
            words = [word if isinstance(word, str) else None for word in value]
            if value and None not in words:
                return self.mask_words([word for word in words if word is not None])
            return [self.mask_record(entry) for entry in value]
        return self.mask(value) if isinstance(value, str) else value

    def mask_words(self, words: Sequence[str]) -> list[str]:
        """A command line, word by word: of NAME=VALUE all of the value, of --password VALUE the word."""
        masked: list[str] = []
        for number, word in enumerate(words):
            option = words[number - 1] if number else ""
            name, equals, value = word.partition("=")
            if (
                option.startswith("-")
                and "=" not in option
                and not word.startswith("-")
                and _is_secret_value(option, word)
            ):
                masked.append(MASK)
            elif equals and re.fullmatch(r"[\w.-]+", name) and _is_secret_value(name, value):
                masked.append(f"{name}={MASK}")
            else:
                masked.append(self.mask(word))
        return masked


def _is_secret_value(name: str, value: Any) -> bool:
    """Whether a value, whole as it is, is a secret by its name."""
    if value is None or value == "" or isinstance(value, bool | Mapping):
        return False
    words = [word.lower() for word in _NAME_WORDS.findall(name)]
    if isinstance(value, list):
        return (
            bool(_SECRET_WORDS.intersection(words))
            and all(isinstance(word, str) for word in value)
            and bool(value)
        )
    return _has_secret_word(name, words) or (
        _has_secret_last_word(words) and not _HARMLESS_VALUE.fullmatch(str(value))
    )


def _mask_login(match: re.Match[str]) -> str:
    """`Basic` before letters is also a word of a sentence: only what reads as user:password goes."""
    data = match[2]
    try:
        is_login = b":" in b64decode(data + "=" * (-len(data) % 4))
    except ValueError:
        is_login = False
    return f"{match[1]}{MASK}" if is_login else match[0]


def _mask_value(match: re.Match[str]) -> str:
    value = match["value"]
    bare = value.strip("\\'\"")
    if not _is_secret_value(match["name"], bare) or bare == MASK:
        return match[0]
    quote = value[: len(value) - len(value.lstrip("\\'\""))]
    return f"{match['before']}{quote}{MASK}{quote}"


def _mask_key_ends(text: str) -> str:
    """Of a private key whose beginning was cut off, the lines before its end."""
    pieces: list[str] = []
    done = 0
    for match in _KEY_END.finditer(text):
        begin = text.rfind("\n", done, match.start()) + 1
        while begin > done:
            line = text.rfind("\n", done, begin - 1) + 1 or done
            if _KEY_LINE.fullmatch(text, line, begin - 1) is None:
                break
            begin = line
        pieces += [text[done : max(begin, done)], MASK]
        done = match.end()
    return "".join([*pieces, text[done:]]) if pieces else text


def _mask_assigned(text: str) -> str:
    """NAME=value, NAME: "value" and the like, with the quotes of the value: what was JSON stays JSON."""
    pieces: list[str] = []
    done = at = 0
    while (match := _ASSIGNMENT.search(text, at)) is not None:
        at = match.end()
        end, quote = _assigned_value_end(text, match)
        if end > at:
            pieces += [text[done:at], quote, MASK, quote]
            done = at = end
    return "".join([*pieces, text[done:]]) if pieces else text


def _assigned_value_end(text: str, match: re.Match[str]) -> tuple[int, str]:
    """Where the value of a name ends, and the quotes around it; its beginning where it is no secret."""
    name, at = match["name"], match.end()
    words = [word.lower() for word in _NAME_WORDS.findall(name)]
    always, at_end = _has_secret_word(name, words), _has_secret_last_word(words)
    if not (always or at_end) or text.startswith(("//", "{"), at):
        return at, ""
    if (block := _YAML_BLOCK.match(text, at)) is not None:
        return block.end(), ""
    if (listed := _INLINE_LIST.match(text, at)) is not None:
        return (listed.end() if always and not name.isupper() else at), ""
    end, quotes = at, list[str]()
    while (
        piece := _QUOTED_VALUE.match(text, end) or _BARE_VALUE.match(text, end)
    ) is not None and piece.end() > end:
        quotes.append(piece.groupdict().get("quote") or "")
        end = piece.end()
    if not always and not any(quotes):
        bare = text[at:end]
        if _HARMLESS_VALUE.fullmatch(bare) or len(bare) < MIN_SECRET_LENGTH or "(" in bare:
            return at, ""
    begin = text.rfind("\n", 0, match.start()) + 1
    is_line = _LINE_START.fullmatch(text, begin, match.start()) is not None
    if always and end > at and is_line and not any(quotes) and text[end : end + 1] not in ("'", '"'):
        line = text.find("\n", end)
        rest = text[end : line if line >= 0 else len(text)]
        if not re.match(r"\s*$|[ \t]*#", rest) and "\0" not in rest:
            end += len(rest.rstrip("\r"))
    opened = text[match.start() - 1 : match.start()]
    if end > at and opened in ("'", '"') and opened not in match["between"] and not any(quotes):
        # NAME=VALUE between quotes, blanks and all.
        line = text.find("\n", end)
        close = text.find(opened, end, line if line >= 0 else len(text))
        end = max(end, close)
    return end, quotes[0] if len(quotes) == 1 else ""


def _written_forms(value: str) -> Iterator[str]:
    """A value as it may stand in a file: as it is, its lines, and with the escapes of JSON, YAML and bash."""
    yield value
    yield from value.splitlines()
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield value.replace("'", "''")
    yield shlex.quote(value)[1:-1]
    yield repr(value)[1:-1]
