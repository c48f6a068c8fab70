"""Read the command line of a training script: its placeholders, its own knobs, the figures it prints.

Words in, `Script` out; a `Script` and a value per knob in, the words to start out. No shell and no file is involved.

    --lr {lr:1e-3}             a knob, and the user's own value of it
    --bs={micro_batch_size}    a knob; without a value the word is left out, and the script's default counts
    {{name}}  {"a": 1}  ${X}   one pair of braces less around a name; every other brace stays as it is
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autotune.errors import UsageError
from autotune.records.config import KnobValue, TrainConfig, get_knob
from autotune.records.reading import is_text
from autotune.records.script import Script, UserKnob
from autotune.records.secrets import mask_words
from autotune.targets.metric import read_metrics
from autotune.targets.user_knob import format_value, parse_value, read_knob

PLACEHOLDER_FIELDS = {
    "micro_batch_size": "64",
    "gradient_accumulation_steps": "1",
    "num_workers": "4",
    "prefetch_factor": "2",
    "precision": "fp32",
    "compile_mode": "off",
    "pin_memory": "false",
    "persistent_workers": "false",
    "num_threads": "8",
}
"""Fields of TrainConfig that a command may be given, each with a value to show in a hint."""

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_BRACES = re.compile(
    r"\$\{+[^{}]*\}+"  # a shell's or a config language's own, e.g. ${HOME}
    rf"|\{{(?P<doubled>\{{{_NAME}(?::[^{{}}]*)?\}})\}}"
    rf"|\{{(?P<name>{_NAME})(?::(?P<own>[^{{}}]*))?\}}"
)
_FLAG = re.compile(r"--?[A-Za-z_][^={}]*")
_FLAG_AND_PLACEHOLDER = re.compile(rf"{_FLAG.pattern}=\{{{_NAME}\}}")


class _Placeholder(NamedTuple):
    """A name in braces, as it stands in a word.

    Attributes:
        text: as typed, braces included.
        name: of the knob.
        own: the user's own value as typed; None when there is none.
    """

    text: str
    name: str
    own: str | None


def read_script(
    command: Sequence[str],
    *,
    knobs: Sequence[str] = (),
    metric_regexes: Sequence[str] = (),
    metric_keys: Sequence[str] = (),
    directions: Sequence[str] = (),
    quality_steps: int | None = None,
    quality_epochs: int | None = None,
) -> Script:
    """Check a command with placeholders and what goes with it, as far as that needs no file.

    Args:
        command: words as typed after `--`.
        knobs: the script's own, each `name=v1,v2[,...][:exact|rounding|semantic]`.
        metric_regexes: each finds a figure of merit in a printed line; has one group.
        metric_keys: each finds one in a printed JSON object.
        directions: `minimize` or `maximize`, one for all figures or one for each, those of the expressions first.
        quality_steps: optimizer steps of a quality run.
        quality_epochs: passes over the training data of a quality run.

    Raises:
        UsageError: a part does not parse, or two parts do not fit; says which, and what is allowed.
    """
    _check_words(command)
    for text in (*knobs, *metric_regexes, *metric_keys):
        if not is_text(text):
            raise UsageError(f"the option's value {text!r} is not UTF-8, or has a NUL in it", hint="type it again")
    script = Script(
        command=tuple(command),
        knobs=_read_knobs(knobs),
        metrics=read_metrics(regexes=metric_regexes, keys=metric_keys, directions=directions),
        quality_steps=_check_count("--check-steps", quality_steps),
        quality_epochs=_check_count("--check-epochs", quality_epochs),
    )
    if quality_steps is not None and quality_epochs is not None:
        raise UsageError(
            f"--check-steps {quality_steps} and --check-epochs {quality_epochs} are both given",
            hint="give the length of a quality run in one of them",
        )
    _check_names(script)
    render_command(script, own_values(script))
    return script


def own_values(script: Script) -> dict[str, KnobValue]:
    """Return the baseline's value of each placeholder: the command's, else the first of a knob; others are absent.

    Raises:
        UsageError: a value does not fit its knob, or a name has two.
    """
    knobs = {knob.name: knob for knob in script.knobs}
    values: dict[str, KnobValue] = {}
    for placeholder in _find_placeholders(script.command):
        if placeholder.own is None:
            continue
        knob = knobs.get(placeholder.name)
        value = _read_field(placeholder) if knob is None else _read_choice(placeholder, knob)
        first = values.setdefault(placeholder.name, value)
        if first != value:
            raise UsageError(
                f"{placeholder.text!r}: {placeholder.name} is {format_value(first)} elsewhere in the command",
                hint=f"give your own value once, and write {{{placeholder.name}}} in the other places",
            )
    return {knob.name: knob.values[0] for knob in script.knobs} | values


def placeholder_names(script: Script) -> frozenset[str]:
    """Return the names that the command can be given values for."""
    return frozenset(placeholder.name for placeholder in _find_placeholders(script.command))


def script_values(script: Script, config: TrainConfig | None) -> dict[str, KnobValue]:
    """Return what a script's placeholders stand for under a config; None for the script's own values."""
    if config is None:
        return own_values(script)
    values = {}
    for name in placeholder_names(script):
        value = get_knob(config, name if name in TrainConfig.model_fields else f"user_knobs.{name}")
        if value is not None:
            values[name] = value
    return values


def render_command(script: Script, values: Mapping[str, KnobValue]) -> tuple[str, ...]:
    """Return the words to start: placeholders filled in, those without a value left out together with their flag.

    Args:
        script: the command.
        values: by placeholder; other names have no effect.

    Raises:
        UsageError: a placeholder has no value and is no flag's whole value, so it cannot be left out.
    """
    words: list[str] = []
    for index, word in enumerate(script.command):
        placeholders = _find_placeholders([word])
        missing = next((placeholder for placeholder in placeholders if placeholder.name not in values), None)
        if missing is None:
            words.append(_fill(word, values))
        elif word == missing.text and index and _FLAG.fullmatch(script.command[index - 1]):
            words.pop()
        elif not _FLAG_AND_PLACEHOLDER.fullmatch(word):
            example = PLACEHOLDER_FIELDS.get(missing.name, "VALUE")
            raise UsageError(
                f"placeholder {missing.text!r} has no value, and {word!r} is no flag's value that could be left out",
                hint=f"give the value you use now: {{{missing.name}:{example}}}",
            )
    return tuple(words)


def script_label(command: Sequence[str]) -> str:
    """Return the command as one line, quoted as a shell would need it, `***` for each secret in it."""
    return shlex.join(mask_words(command))


def _check_words(command: Sequence[str]) -> None:
    if not command or not command[0].strip():
        given = "after -- there is no command" if not command else f"the command's first word {command[0]!r} is empty"
        raise UsageError(given, hint="write autotune search -- python train.py ...")
    for word in command:
        if not is_text(word):
            wrong = "has a NUL in it" if "\0" in word else "is not UTF-8"
            raise UsageError(f"the command's word {word!r} {wrong}", hint="rename what it stands for")


def _check_count(option: str, count: int | None) -> int | None:
    if count is not None and count < 1:
        raise UsageError(f"{option} {count} is too small", hint="it must be at least 1")
    return count


def _read_knobs(texts: Sequence[str]) -> tuple[UserKnob, ...]:
    knobs: dict[str, UserKnob] = {}
    for text in texts:
        knob = read_knob(text)
        name = knob.name
        if name in knobs:
            raise UsageError(f"--knob {text!r}: {name} is declared twice", hint="give all its values in one --knob")
        if name in PLACEHOLDER_FIELDS:
            raise UsageError(
                f"--knob {text!r}: {name} is a knob that autotune knows, and it chooses the values",
                hint=f"use the placeholder alone: {{{name}}} or {{{name}:{PLACEHOLDER_FIELDS[name]}}} in the command",
            )
        if name in TrainConfig.model_fields:
            raise UsageError(f"--knob {text!r}: {name} is autotune's own name", hint="give your knob another one")
        knobs[name] = knob
    return tuple(knobs.values())


def _check_names(script: Script) -> None:
    own = [knob.name for knob in script.knobs]
    names = placeholder_names(script)
    for placeholder in _find_placeholders(script.command):
        if placeholder.name not in PLACEHOLDER_FIELDS and placeholder.name not in own:
            raise _unknown(placeholder, [*own, *PLACEHOLDER_FIELDS])
    for name in own:
        if name not in names:
            raise UsageError(
                f"--knob {name}: the command has no {{{name}}}, so the script would never see it",
                hint=f"write it where the value goes, e.g. --{name} {{{name}}}",
            )


def _unknown(placeholder: _Placeholder, known: Sequence[str]) -> UsageError:
    name, text = placeholder.name, placeholder.text
    literal = f"double the braces if they are meant as they stand: {{{text}}}"
    if name in TrainConfig.model_fields:
        return UsageError(
            f"placeholder {text!r}: {name} is nothing a command is given",
            hint=f"allowed are {', '.join(known)}; {literal}",
        )
    near = difflib.get_close_matches(name, known, n=1)
    suggestion = f"did you mean {{{near[0]}}}?" if near else f"declare it with --knob {name}=VALUE,VALUE"
    return UsageError(
        f"placeholder {text!r} is no knob: allowed are {', '.join(known)}", hint=f"{suggestion}; {literal}"
    )


def _find_placeholders(words: Sequence[str]) -> list[_Placeholder]:
    matches = [match for word in words for match in _BRACES.finditer(word)]
    return [_Placeholder(match[0], match["name"], match["own"]) for match in matches if match["name"]]


def _fill(word: str, values: Mapping[str, KnobValue]) -> str:
    def replacement(match: re.Match[str]) -> str:
        if match["name"]:
            return format_value(values[match["name"]])
        return match["doubled"] or match[0]

    return _BRACES.sub(replacement, word)


def _read_choice(placeholder: _Placeholder, knob: UserKnob) -> KnobValue:
    assert placeholder.own is not None
    value = parse_value(placeholder.own.strip())
    for choice in knob.values:
        if choice == value and isinstance(choice, bool) == isinstance(value, bool):
            return choice
    raise UsageError(
        f"{placeholder.text!r}: {placeholder.own!r} is not one of the values of --knob {knob.name}",
        hint=f"its values are {', '.join(format_value(choice) for choice in knob.values)}",
    )


def _read_field(placeholder: _Placeholder) -> KnobValue:
    """Return the value of a field of TrainConfig, checked against the field's own schema."""
    assert placeholder.own is not None
    schema: dict[str, Any] = TrainConfig.model_json_schema()["properties"][placeholder.name]
    schema = schema.get("anyOf", [schema])[0]
    value = parse_value(placeholder.own.strip())
    if "enum" in schema:
        fits, allowed = value in schema["enum"], "one of " + ", ".join(schema["enum"])
    elif schema["type"] == "boolean":
        fits, allowed = isinstance(value, bool), "true or false"
    else:
        low, high = schema["minimum"], schema["maximum"]
        fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        allowed = f"a whole number from {low} to {high}"
    if not fits:
        raise UsageError(
            f"{placeholder.text!r}: {placeholder.own!r} is not {allowed}",
            hint=f"write e.g. {{{placeholder.name}:{PLACEHOLDER_FIELDS[placeholder.name]}}}",
        )
    return value
