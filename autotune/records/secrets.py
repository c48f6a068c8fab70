"""Which parts of a script's command are secrets: they reach the script, and never a file.

    --token abc   --wandb-key=1f2e   HF_TOKEN=hf_x   https://me:pw@host   ?api_key=1f2e   ghp_... in any word

A name tells most of them. Where it leaves a doubt (`--tokenizer`, `--sort-key`) the value has to look drawn at random:
what is hidden is not compared either, so that another secret is the same training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

MASK = "***"
"""Stands for a secret in records, reports and messages."""

_NAMED = re.compile(r"(?P<name>[-+~]{0,2}[A-Za-z][\w.-]*)=(?P<value>.+)", re.DOTALL)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_PLACEHOLDER = re.compile(r"(?<!\{)\{[A-Za-z_]\w*(?::[^{}]*)?\}")
_USER_INFO = re.compile(r"(?<=://)(?P<value>[^/?#@\s]{1,256}|[^/:?#@\s]{1,256}:[^@\s]{1,256})(?=@)")
_QUERY = re.compile(r"(?<=[?&])(?P<name>[\w.-]+)=(?P<value>[^&#\s]+)")
_BEARER = re.compile(r"(?i)(?<=\bbearer )(?P<value>\S+)|(?<=\bbasic )(?P<value2>\S+)")
_WELL_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,2048}\.[\w-]{8,4096}\.[\w-]*)"
)
_RUN = re.compile(r"[A-Za-z0-9]{16,}")
_MIXED_RUN = re.compile(r"[A-Za-z0-9+/=_-]{32,}")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

_SECRET = re.compile(
    r".*(?:passw(?:or)?d|passphrase|secret|credential).*|pwd|apikey|(?:auth|access|api|bearer)token", re.DOTALL
)
_MAYBE = re.compile(r".*(?:token|key|auth).*", re.DOTALL)
_ABOUT = re.compile(r"file|path|dir|folder|name|env|var|type|size|dims?|len(?:gth)?")
"""Part of a name that is about a secret, or about something else: `--token-file`, `--key-dim`."""
_OF_TEXT = re.compile(
    r"pad|mask|[ebs]os|unk|sep|cls|[es]ot|special|start|end|stop|begin|image|audio|video|text|class|prompt|max|min|num"
    r"|new|per|extra|patch|time|query|vision"
)
"""Part of a name whose token is one of a vocabulary: `--pad-token`."""
_OF_ACCESS = re.compile(
    r"api|access|private|secret|auth|account|encryption|signing|license|service|wandb|comet|neptune|openai|hf"
    r"|huggingface|aws|azure|gcp|s3|mlflow|clearml|ssh"
)
"""Part of a name whose key opens something: `--api-key`."""
_NO_SECRETS = frozenset(["", "true", "false", "yes", "no", "none", "null", "0", "1"])

_MOST_PASSES = 8
_LEAST_HIDDEN = 6  # letters: anything shorter stands in many a text by accident


def mask_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command with `***` for each secret in them."""
    masked = words
    for _ in range(_MOST_PASSES):  # what is left of a word that was shortened may show another one
        before, masked = masked, tuple(_hide(word, before, []) for word, before in _with_word_before(masked))
        if masked == tuple(before):
            break
    return tuple(masked)


def find_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """Return the secrets in the words of a command."""
    found: list[str] = []
    for word, before in _with_word_before(words):
        _hide(word, before, found)
    return tuple(dict.fromkeys(one for one in found if one != MASK))


def hide_secrets(text: str, words: Sequence[str]) -> str:
    """Return a text with `***` for each secret of a command, e.g. what a script said of its arguments."""
    for secret in sorted(find_secrets(words), key=len, reverse=True):
        if len(secret) >= _LEAST_HIDDEN:
            text = text.replace(secret, MASK)
    return text


def is_masked(words: Sequence[str]) -> bool:
    """Return whether a command was read from a record, which does not have all of its words."""
    return any(MASK in word for word in words)


def _with_word_before(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(words, ("", *words), strict=False))


def _hide(word: str, before: str, found: list[str]) -> str:
    """Return a word with its secrets masked, which are added to those found."""
    if _PLACEHOLDER.search(word):
        return word  # a knob's value, which a search chooses

    def mask(is_secret: Callable[[re.Match[str]], bool]) -> Callable[[re.Match[str]], str]:
        def replace(match: re.Match[str]) -> str:
            value = next((match[name] for name in match.re.groupindex if name != "name" and match[name]), match[0])
            if not is_secret(match):
                return match[0]
            found.append(value)
            return match[0].removesuffix(value) + MASK

        return replace

    def is_named(match: re.Match[str]) -> bool:
        return _is_secret(match["name"], match["value"])

    if _OPTION.fullmatch(before) and not word.startswith("-") and _is_secret(before, word):
        found.append(word)
        return MASK
    named = _NAMED.fullmatch(word)
    if named is not None and is_named(named):
        return mask(is_named)(named)
    word = _USER_INFO.sub(mask(lambda match: match[0] != "git"), word)
    word = _QUERY.sub(mask(is_named), word)
    word = _BEARER.sub(mask(lambda _match: True), word)
    return _WELL_KNOWN.sub(mask(lambda _match: True), word)


def _is_secret(name: str, value: str) -> bool:
    """Return whether the value of an option, a variable or a parameter is a secret."""
    if value.lower() in _NO_SECRETS:
        return False
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = [part for part in re.split(r"[^a-z0-9]+", parts) if part]

    def has(pattern: re.Pattern[str]) -> bool:
        return any(pattern.fullmatch(part) for part in words)

    if has(_ABOUT):
        return False
    if has(_SECRET) or words[-1:] in (["auth"], ["authorization"]):
        return True
    if words[-1:] == ["token"] and not has(_OF_TEXT):
        return True
    if words[-1:] == ["key"] and has(_OF_ACCESS):
        return True
    return has(_MAYBE) and _looks_random(value)


def _looks_random(value: str) -> bool:
    def has(run: str, *kinds: Callable[[str], bool]) -> bool:
        return all(any(map(kind, run)) for kind in kinds)

    return (
        any(has(run, str.isdigit, str.isalpha) for run in _RUN.findall(value))
        or any(has(run, str.isdigit, str.islower, str.isupper) for run in _MIXED_RUN.findall(value))
        or _UUID.search(value) is not None
    )
