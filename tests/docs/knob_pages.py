"""Print docs/knobs.md: every setting that a search varies, from the table and the records themselves.

python tests/docs/knob_pages.py > docs/knobs.md
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import get_args

from autotune.knobs import KNOBS, Knob
from autotune.records import TrainConfig
from autotune.records.config import SHORT_NAMES

_HEAD = """\
# The settings

What a search varies. The page is written by `python tests/docs/knob_pages.py > docs/knobs.md` from the table that the
search itself goes by; a test holds it up to date. Which values are tried is decided on your machine: `autotune probe`
says which are worth it, and why the others are not.

- *exact*: the losses are those of your own settings, bit for bit.
- *rounding*: the same arithmetic in another order or width. Gradients are compared, and trainings where they cannot
  tell.
- *semantic*: another training, compared by whole trainings.

Some have a shorter name in what is printed. `--only` and `--exclude` take either; `best.json`, presets and exports have
the longer one.
"""
_FOOT = (
    "Knobs of your own: [scripts](scripts.md#the-batch-and-other-flags-of-yours), "
    "[workloads](workloads.md#what-else-it-may-have)."
)
_COSTS = {"restart": "", "environment": "set before the process starts", "compile": "compiles first"}


def list_fields(record: type = TrainConfig) -> dict[str, str]:
    """Return what the record says of each field."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(definition, ast.ClassDef)
    said: dict[str, str] = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                said[name] = " ".join(meaning.split())
    return said


def describe_values(knob: Knob) -> str:
    """Return the values that a field may have, where they can be listed."""
    annotation = TrainConfig.model_fields[knob.field].annotation
    kinds = [annotation, *get_args(annotation)]
    values = [value for kind in kinds for value in get_args(kind) if isinstance(value, str)]
    return ", ".join(f"`{value}`" for value in dict.fromkeys(values))


def render() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_list_lines()]) + "\n"


def _list_lines() -> Iterator[str]:
    said = list_fields()
    yield "| setting | what it does | values | numerics | |"
    yield "| --- | --- | --- | --- | --- |"
    for knob in KNOBS:
        name = f"`{knob.field}`"
        name += f", in talk `{SHORT_NAMES[knob.field]}`" if knob.field in SHORT_NAMES else ""
        cells = (name, said[knob.field], describe_values(knob), knob.numerics, _COSTS[knob.cost])
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield _FOOT


if __name__ == "__main__":
    print(render(), end="")
