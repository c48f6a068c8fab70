"""Print docs/api.md: what `import autotune` gives, from the docstrings.

python tests/docs/api_pages.py > docs/api.md
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator

from knob_pages import list_fields
from pydantic import BaseModel

import autotune
from autotune.errors import AutotuneError

_HEAD = """\
# The Python interface

What `import autotune` gives. The page is written by `python tests/docs/api_pages.py > docs/api.md` from the docstrings;
a test holds it up to date. [From Python](from-python.md) shows how it is used.

Importing the package imports neither torch nor Optuna. A call does what the command of the same name does, and raises
an `AutotuneError` where that ends with an error.
"""
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$")
_ITEM = re.compile(r"^ {4}(\w+): (.*)$")
_MOST_DEFAULT = 30


def render() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_list_lines()]).rstrip() + "\n"


def _list_lines() -> Iterator[str]:
    names = [name for name in autotune.__all__ if not name.startswith("__")]
    for name in sorted(names, key=lambda one: (not inspect.isfunction(getattr(autotune, one)), one)):
        found = getattr(autotune, name)
        if inspect.isfunction(found):
            yield from (f"## `{name}`", "", *_show_call(name, found), "", *_render_docstring(found), "")
        elif issubclass(found, AutotuneError):
            yield from (f"## `{name}`", "", *_render_docstring(found), "", *_list_errors(), "")
        else:
            yield from (f"## `{name}`", "", *_render_docstring(found), "", *_list_members(found), "")


def _show_call(name: str, function: object) -> Iterator[str]:
    """Yield a signature, a line for each parameter."""
    assert callable(function)
    signature = inspect.signature(function)
    yield "```python"
    yield f"def {name}("
    is_named = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_named:
            is_named = True
            yield "    *,"
        yield f"    {_show_parameter(parameter)},"
    yield f") -> {signature.return_annotation}: ..."
    yield "```"


def _show_parameter(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return f"{parameter.name}: {parameter.annotation}"
    default = "..." if len(repr(parameter.default)) > _MOST_DEFAULT else repr(parameter.default)
    return f"{parameter.name}: {parameter.annotation} = {default}"


def _render_docstring(found: object) -> Iterator[str]:
    """Yield a docstring; the items of its sections become lists."""
    in_section = False
    for line in _join_items(inspect.getdoc(found) or ""):
        title, item = _SECTION.match(line), _ITEM.match(line)
        in_section = bool(title) or (in_section and (bool(item) or not line))
        if title:
            yield from (f"*{title[1]}*", "")
        elif in_section and item:
            yield f"- `{item[1]}`: {item[2]}"
        else:
            yield line


def _join_items(text: str) -> list[str]:
    """Return the lines of a docstring, those that go on with an item joined to it."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" " * 8) and lines and lines[-1].startswith(" " * 4):
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return lines


def _list_members(found: type) -> Iterator[str]:
    """Yield the fields of a record or of options, and the methods."""
    if issubclass(found, BaseModel):
        yield from ("| field | default | |", "| --- | --- | --- |")
        said = list_fields(found)
        for name, about in found.model_fields.items():
            follows = about.default_factory_takes_validated_data  # from the other fields
            default = "" if about.is_required() or follows else _shorten(about.get_default(call_default_factory=True))
            yield f"| `{name}` | {default} | {said.get(name, '')} |"
        yield ""
    elif dataclasses.is_dataclass(found):
        defaults = [one for one in dataclasses.fields(found) if one.default is not dataclasses.MISSING]
        shown = [f"`{one.name}={one.default!r}`" for one in defaults if not callable(one.default)]
        yield from ("", f"*Defaults:* {', '.join(shown)}.", "")
    for name, method in vars(found).items():
        if name.startswith("_") or not (inspect.isfunction(method) or isinstance(method, classmethod | property)):
            continue
        about = (inspect.getdoc(method) or "").splitlines()
        if about:
            call = name if isinstance(method, property) else f"{name}()"
            yield f"- `{call}`: {about[0]}"


def _shorten(value: object) -> str:
    text = repr(value).replace("|", r"\|")
    return f"`{text}`" if len(text) <= _MOST_DEFAULT else ""


def _list_errors() -> Iterator[str]:
    """Yield the kinds of error, by the exit status of the command."""
    yield from ("| error | exit status | |", "| --- | --: | --- |")
    kinds = [one for one in AutotuneError.__subclasses__() if one.__module__ == AutotuneError.__module__]
    for kind in sorted(kinds, key=lambda one: one.exit_code):
        yield f"| `{kind.__name__}` | {kind.exit_code} | {(inspect.getdoc(kind) or '').splitlines()[0]} |"


if __name__ == "__main__":
    print(render(), end="")
