from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import UsageError
from autotune.records.codec import parse_record
from autotune.records.config import KnobValue, TrainConfig
from autotune.records.script import Numerics, PrintedMetric, Script, UserKnob
from autotune.targets.metric import name_metric
from autotune.targets.script import (
    PLACEHOLDER_FIELDS,
    own_values,
    placeholder_names,
    read_script,
    render_command,
    script_label,
)

COMMAND = shlex.split(
    "python train.py --batch-size {micro_batch_size:64} --accum {gradient_accumulation_steps} --lr {lr}"
)
ODD_WORDS = (
    "",
    " ",
    "two words",
    "it's",
    '"quoted"',
    "$HOME",
    "${HOME}",
    "${oc.env:HOME}",
    "${a:${b:${c}}}",
    "${{x}}",
    "`id`",
    "$(id)",
    "line\nbreak",
    "tab\t",
    "back\\slash",
    "*.py",
    "~",
    "#",
    "ünïcödé",
    "{}",
    "{",
    "}",
    "{{",
    "}}",
    "{{}}",
    "}{",
    '{"a": 1}',
    '{"a": {"b": {"c": 1}}}',
    "{ name }",
    "{{ name }}",
    "{1}",
    "{1:2}",
    "{a,b}",
    "{a b}",
    "{a-b}",
    "{a.b}",
    "{ä}",
    "{:3}",
    "[{'a': 1}]",
    "%s",
    "{0!r}",
)

TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
"""What the words of a command are made of."""


def refusal(command: Sequence[str] = ("python", "train.py"), **settings: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_script(command, **settings)
    assert "\n" not in f"{caught.value.message}{caught.value.hint}"
    assert caught.value.hint
    return caught.value


def knob_of(text: str) -> UserKnob:
    name = text.partition("=")[0].strip()
    return read_script(["python", "train.py", f"{{{name}}}"], knobs=[text]).knobs[0]


def test_a_command_is_read_as_typed() -> None:
    script = read_script(
        COMMAND,
        knobs=["lr=1e-3,2e-3:semantic"],
        metric_regexes=["val_acc=([0-9.]+)"],
        directions=["maximize"],
        quality_steps=300,
    )
    assert script == Script(
        command=tuple(COMMAND),
        knobs=(UserKnob(name="lr", values=(0.001, 0.002), numerics="semantic"),),
        metrics=(PrintedMetric(name="val_acc", direction="maximize", pattern="val_acc=([0-9.]+)"),),
        quality_steps=300,
    )
    assert placeholder_names(script) == {"micro_batch_size", "gradient_accumulation_steps", "lr"}
    assert own_values(script) == {"micro_batch_size": 64, "lr": 0.001}
    assert parse_record(script.to_json(), Script, name="script") == script


def test_a_command_without_placeholders_needs_nothing_else() -> None:
    script = read_script(["python", "train.py"])
    assert script == Script(command=("python", "train.py"))
    assert placeholder_names(script) == frozenset()
    assert own_values(script) == {}
    assert render_command(script, {}) == ("python", "train.py")


@pytest.mark.parametrize(
    ("command", "message"), [([], "no command"), ([""], "first word ''"), (["  ", "train.py"], "first word '  '")]
)
def test_an_empty_command_is_refused(command: list[str], message: str) -> None:
    error = refusal(command)
    assert message in error.message
    assert "python train.py" in error.hint


def test_a_word_that_is_not_utf8_is_refused() -> None:
    assert r"'a\udc80'" in refusal(["python", "train.py", "a\udc80"]).message


# --- knobs


@pytest.mark.parametrize(
    ("text", "values", "numerics"),
    [
        ("x=1,2", (1, 2), "semantic"),
        ("x=1,2:exact", (1, 2), "exact"),
        ("x=1,2:rounding", (1, 2), "rounding"),
        ("x=1,2:semantic", (1, 2), "semantic"),
        ("x=-1,0,1", (-1, 0, 1), "semantic"),
        ("x=1e-3,2e-3", (0.001, 0.002), "semantic"),
        ("x=.5,1.,+2.5,-1E+3", (0.5, 1.0, 2.5, -1000.0), "semantic"),
        ("x=true,false", (True, False), "semantic"),
        ("x=True,False", ("True", "False"), "semantic"),
        ("x=adam,sgd:exact", ("adam", "sgd"), "exact"),
        ("x=1,two,3.0,true", None, None),
        ("x=007,+7,1_000,-0,0x10", ("007", "+7", "1_000", "-0", "0x10"), "semantic"),
        ("x=nan,inf,1e999", ("nan", "inf", "1e999"), "semantic"),
        (f"x={'9' * 30},1", ("9" * 30, 1), "semantic"),
        (" x = 1e-3 , 2e-3 : exact", (0.001, 0.002), "exact"),
        (r"x=a\,b,c\:d", ("a,b", "c:d"), "semantic"),
        (r"x=C\:\\data,D\:\new\\:exact", ("C:\\data", "D:\\new\\"), "exact"),
        ("x=a=b,c=d", ("a=b", "c=d"), "semantic"),
        ("x={a},$HOME,it's", ("{a}", "$HOME", "it's"), "semantic"),
        ("x=a b,line\nbreak", ("a b", "line\nbreak"), "semantic"),
    ],
)
def test_a_knob_is_read(text: str, values: tuple[KnobValue, ...] | None, numerics: str | None) -> None:
    if values is None:
        assert "twice" in refusal(["p", "{x}"], knobs=[text]).message
        return
    knob = knob_of(text)
    assert [(type(value), value) for value in knob.values] == [(type(value), value) for value in values]
    assert knob.numerics == numerics


@given(
    st.lists(st.text(TEXT, min_size=1).filter(lambda text: text == text.strip()), min_size=2, max_size=4, unique=True)
)
def test_every_text_can_be_written_as_a_value(texts: list[str]) -> None:
    words = [f"word {text}" for text in texts]  # a word before it: not a number, not a boolean
    escaped = [re.sub(r"([\\,:])", r"\\\1", word) for word in words]
    assert knob_of(f"x={','.join(escaped)}").values == tuple(words)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("lr", "has no values", "NAME=VALUE,VALUE"),
        ("", "has no values", "NAME=VALUE,VALUE"),
        ("=1,2", "'' is not a name", "NAME=VALUE,VALUE"),
        ("learning-rate=1,2", "'learning-rate' is not a name", "NAME=VALUE,VALUE"),
        ("größe=1,2", "'größe' is not a name", "NAME=VALUE,VALUE"),
        ("lr=", "empty value", "NAME=VALUE,VALUE"),
        ("lr=1,", "empty value", "NAME=VALUE,VALUE"),
        ("lr=1,,2", "empty value", "NAME=VALUE,VALUE"),
        ("lr=1", "one value", "NAME=VALUE,VALUE"),
        ("lr=1:exact", "one value", "NAME=VALUE,VALUE"),
        ("lr=1,1", "the value '1' twice", "once"),
        ("lr=1,2,1.0", "the value '1.0' twice", "once"),
        ("lr=1,2:", "'' is no class", "exact, rounding, semantic"),
        ("lr=1,2:Exact", "'Exact' is no class", "exact, rounding, semantic"),
        ("lr=1,2:exact:exact", "'exact:exact' is no class", "exact, rounding, semantic"),
        ("path=a:b,c:d", "'b,c:d' is no class", "a colon inside a value is written \\:"),
    ],
)
def test_a_knob_that_does_not_parse_is_refused(text: str, message: str, hint: str) -> None:
    error = refusal(["python", "train.py", "--lr", "{lr}"], knobs=[text])
    assert message in error.message
    assert repr(text) in error.message
    assert hint in error.hint


def test_the_classes_are_the_records() -> None:
    for numerics in get_args(Numerics):
        assert knob_of(f"x=1,2:{numerics}").numerics == numerics


def test_a_knob_declared_twice_is_refused() -> None:
    error = refusal(["p", "{lr}"], knobs=["lr=1,2", "lr=3,4"])
    assert "lr is declared twice" in error.message
    assert "'lr=3,4'" in error.message


@pytest.mark.parametrize("name", PLACEHOLDER_FIELDS)
def test_a_knob_with_a_known_placeholders_name_is_refused(name: str) -> None:
    error = refusal(["p", f"{{{name}}}"], knobs=[f"{name}=1,2"])
    assert f"--knob '{name}=1,2'" in error.message
    assert f"the placeholder alone: {{{name}}} or {{{name}:" in error.hint


@pytest.mark.parametrize("name", sorted({*TrainConfig.model_fields} - {*PLACEHOLDER_FIELDS}))
def test_a_knob_with_another_field_s_name_is_refused(name: str) -> None:
    error = refusal(["p", f"{{{name}}}"], knobs=[f"{name}=1,2"])
    assert f"--knob '{name}=1,2': {name} is autotune's own name" in error.message
    assert "another" in error.hint


def test_a_knob_that_the_script_would_never_see_is_refused() -> None:
    error = refusal(["python", "train.py", "--lr", "{{lr}}", "${lr}"], knobs=["lr=1,2"])
    assert "--knob lr: the command has no {lr}" in error.message
    assert "--lr {lr}" in error.hint


# --- placeholders


def test_the_placeholder_fields_are_fields_with_valid_examples() -> None:
    assert PLACEHOLDER_FIELDS.keys() <= TrainConfig.model_fields.keys()
    for name, example in PLACEHOLDER_FIELDS.items():
        assert own_values(read_script(["p", f"--x={{{name}:{example}}}"])).keys() == {name}


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("{micro_batch_size:64}", "micro_batch_size", 64),
        ("{micro_batch_size: 64 }", "micro_batch_size", 64),
        ("{gradient_accumulation_steps:2}", "gradient_accumulation_steps", 2),
        ("{num_workers:0}", "num_workers", 0),
        ("{prefetch_factor:8}", "prefetch_factor", 8),
        ("{precision:bf16}", "precision", "bf16"),
        ("{compile_mode:max-autotune}", "compile_mode", "max-autotune"),
        ("{pin_memory:true}", "pin_memory", True),
        ("{persistent_workers:false}", "persistent_workers", False),
        ("{num_threads:16}", "num_threads", 16),
        ("--x={num_threads:16}", "num_threads", 16),
        ("a{num_threads:16}b", "num_threads", 16),
        ('{"threads": {num_threads:16}}', "num_threads", 16),
        ("{{{num_threads:16}", "num_threads", 16),
    ],
)
def test_an_own_value_is_read_as_its_field_s_type(word: str, name: str, value: KnobValue) -> None:
    script = read_script(["p", word])
    (found,) = own_values(script).items()
    assert found == (name, value)
    assert type(found[1]) is type(value)
    assert placeholder_names(script) == {name}
    assert getattr(TrainConfig().replace(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("word", "message", "hint"),
    [
        ("{micro_batch_size:}", "'' is not a whole number from 1 to", "{micro_batch_size:64}"),
        ("{micro_batch_size:many}", "'many' is not a whole number from 1 to", "{micro_batch_size:64}"),
        ("{micro_batch_size:1.5}", "'1.5' is not a whole number from 1 to", "{micro_batch_size:64}"),
        ("{micro_batch_size:064}", "'064' is not a whole number from 1 to", "{micro_batch_size:64}"),
        ("{micro_batch_size:true}", "'true' is not a whole number from 1 to", "{micro_batch_size:64}"),
        ("{micro_batch_size:0}", "'0' is not a whole number from 1 to", "{micro_batch_size:64}"),
        ("{micro_batch_size:16777217}", "from 1 to 16777216", "{micro_batch_size:64}"),
        ("{num_workers:-1}", "'-1' is not a whole number from 0 to", "{num_workers:4}"),
        ("{num_threads:none}", "'none' is not a whole number from 1 to", "{num_threads:8}"),
        ("{precision:fp8}", "'fp8' is not one of fp32, bf16, fp16", "{precision:fp32}"),
        ("{precision:16}", "'16' is not one of fp32, bf16, fp16", "{precision:fp32}"),
        ("{compile_mode:fast}", "'fast' is not one of off, default", "{compile_mode:off}"),
        ("{pin_memory:yes}", "'yes' is not true or false", "{pin_memory:false}"),
        ("{pin_memory:True}", "'True' is not true or false", "{pin_memory:false}"),
        ("{persistent_workers:1}", "'1' is not true or false", "{persistent_workers:false}"),
    ],
)
def test_an_own_value_that_does_not_fit_is_refused(word: str, message: str, hint: str) -> None:
    error = refusal(["p", f"--x={word}"])
    assert repr(word) in error.message
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    ("knob", "word", "value"),
    [
        ("lr=1e-3,2e-3", "{lr:2e-3}", 0.002),
        ("lr=1e-3,2e-3", "{lr:0.002}", 0.002),
        ("lr=1.0,2.0", "{lr:2}", 2.0),
        ("lr=1,2", "{lr:2.0}", 2),
        ("flag=true,false", "{flag:false}", False),
        ("name=adam,sgd", "{name:sgd}", "sgd"),
        (r"name=a\,b,c\:d", "{name:c:d}", "c:d"),
        ("lr=1e-3,2e-3", "{lr}", 0.001),
    ],
)
def test_the_own_value_of_an_own_knob_is_one_of_its_values(knob: str, word: str, value: KnobValue) -> None:
    (found,) = own_values(read_script(["p", word], knobs=[knob])).values()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("knob", "word", "hint"),
    [
        ("lr=1e-3,2e-3", "{lr:3e-3}", "its values are 0.001, 0.002"),
        ("lr=1e-3,2e-3", "{lr:}", "its values are 0.001, 0.002"),
        ("lr=0,1", "{lr:true}", "its values are 0, 1"),
        ("lr=true,false", "{lr:1}", "its values are true, false"),
        ("lr=a,b", "{lr:A}", "its values are a, b"),
    ],
)
def test_the_own_value_of_an_own_knob_that_is_none_of_its_values_is_refused(knob: str, word: str, hint: str) -> None:
    error = refusal(["p", word], knobs=[knob])
    assert repr(word) in error.message
    assert "--knob lr" in error.message
    assert error.hint == hint


@pytest.mark.parametrize(
    ("words", "knobs"),
    [
        (["{micro_batch_size:32}", "{micro_batch_size:64}"], []),
        (["{micro_batch_size:32}x{micro_batch_size:64}"], []),
        (["{lr:1}", "{lr}", "{lr:2}"], ["lr=1,2"]),
    ],
)
def test_two_own_values_of_one_name_are_refused(words: list[str], knobs: list[str]) -> None:
    error = refusal(["p", *words], knobs=knobs)
    assert "elsewhere in the command" in error.message
    assert "once" in error.hint


def test_one_own_value_may_be_given_twice() -> None:
    script = read_script(["p", "{num_workers:4}", "--again={num_workers:4}", "{num_workers}"])
    assert own_values(script) == {"num_workers": 4}
    assert render_command(script, {"num_workers": 8}) == ("p", "8", "--again=8", "8")


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("{micro_batchsize}", "did you mean {micro_batch_size}?"),
        ("--x={num_worker:3}", "did you mean {num_workers}?"),
        ("{learning_ratte}", "did you mean {learning_rate}?"),
        ("{unknown}", "--knob unknown=VALUE,VALUE"),
        ("a{_x9:z}b", "--knob _x9=VALUE,VALUE"),
    ],
)
def test_an_unknown_placeholder_is_refused(word: str, suggestion: str) -> None:
    error = refusal(["p", "{learning_rate}", word], knobs=["learning_rate=1,2"])
    typed = word[word.index("{") : word.index("}") + 1]
    assert repr(typed) in error.message
    assert "learning_rate, micro_batch_size, gradient_accumulation_steps" in error.message
    assert suggestion in error.hint
    assert f"double the braces if they are meant as they stand: {{{typed}}}" in error.hint


@pytest.mark.parametrize("name", sorted({*TrainConfig.model_fields} - {*PLACEHOLDER_FIELDS}))
def test_a_field_that_no_command_is_given_is_refused(name: str) -> None:
    error = refusal(["p", f"{{{name}}}"])
    assert f"'{{{name}}}'" in error.message
    assert ", ".join(PLACEHOLDER_FIELDS) in error.hint


# --- rendering


def test_words_without_placeholder_stay_as_they_are() -> None:
    scripts = {word: read_script(["python", word, "--x", word]) for word in ODD_WORDS}
    assert [word for word, script in scripts.items() if placeholder_names(script)] == []
    rendered = {word: render_command(script, {"a": 1, "x": 2, "name": 3}) for word, script in scripts.items()}
    assert rendered == {word: ("python", word, "--x", word) for word in ODD_WORDS}


@given(st.lists(st.text(TEXT).filter(lambda word: not re.search(r"{\w", word))))
def test_words_without_placeholders_are_never_changed(words: list[str]) -> None:
    script = read_script(["python", *words, *ODD_WORDS])
    assert render_command(script, own_values(script)) == ("python", *words, *ODD_WORDS)


@given(st.text("${}ab:1\" \n'\\"), st.text("${}ab:1\" \n'\\"))
def test_any_braces_either_stay_or_are_refused_or_are_a_doubled_name(before: str, after: str) -> None:
    try:
        script = read_script(["p", before + after])
    except UsageError as error:
        assert "double the braces" in error.hint  # noqa: PT017
        return
    expected = re.sub(r"(\$\{+[^{}]*\}+)|\{(\{[ab][ab1]*(?::[^{}]*)?\})\}", lambda m: m[1] or m[2], before + after)
    assert render_command(script, {}) == ("p", expected)


@given(st.text("ab \"'$\n\\[]()", max_size=8), st.text("ab \"'$\n\\[]()", max_size=8), st.integers(1, 2**24))
def test_what_surrounds_a_placeholder_stays(before: str, after: str, size: int) -> None:
    before = before.rstrip("$")
    script = read_script(["p", f"{before}{{micro_batch_size:8}}{after}"])
    assert render_command(script, {"micro_batch_size": size}) == ("p", f"{before}{size}{after}")


@pytest.mark.parametrize(
    ("word", "rendered"),
    [
        ("{{name}}", "{name}"),
        ("{{name:1}}", "{name:1}"),
        ("{{{name}}}", "{{name}}"),
        ("a{{b}}c{{d}}", "a{b}c{d}"),
        ("{{micro_batch_size}}", "{micro_batch_size}"),
        ('{"a": {{name}}}', '{"a": {name}}'),
    ],
)
def test_doubled_braces_around_a_name_are_literal(word: str, rendered: str) -> None:
    assert render_command(read_script(["p", word]), {"name": 1}) == ("p", rendered)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (64, "64"),
        (-1, "-1"),
        (0.001, "0.001"),
        (1e-7, "1e-07"),
        (2.0, "2.0"),
        (True, "true"),
        (False, "false"),
        ("it's $HOME", "it's $HOME"),
        ("{name}", "{name}"),
        (r"\g<0>", r"\g<0>"),
    ],
)
def test_a_value_is_filled_in(value: KnobValue, text: str) -> None:
    script = Script(command=("p", "{lr}", "--lr={lr}", "{{lr}}", "x{lr:1}y{lr}"))
    assert render_command(script, {"lr": value}) == ("p", text, f"--lr={text}", "{lr}", f"x{text}y{text}")


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("--bs {micro_batch_size} -v", "-v"),
        ("--bs={micro_batch_size} -v", "-v"),
        ("-b {micro_batch_size}", ""),
        ("-b={micro_batch_size}", ""),
        ("--no-cache --bs {micro_batch_size}", "--no-cache"),
        ("--train.batch_size {micro_batch_size} 7", "7"),
        ("--a 1 --bs {micro_batch_size} --b {num_workers} --c={num_threads} end", "--a 1 end"),
        ("--bs {micro_batch_size} --workers {num_workers:3}", "--workers 3"),
    ],
)
def test_a_placeholder_without_value_is_left_out_with_its_flag(template: str, rendered: str) -> None:
    script = read_script(["p", *template.split()])
    assert render_command(script, own_values(script)) == ("p", *rendered.split())
    everything = {name: 5 for name in placeholder_names(script)}
    filled = re.sub(r"\{\w+(:\d+)?\}", "5", template)
    assert render_command(script, everything) == ("p", *filled.split())


@pytest.mark.parametrize(
    "template",
    [
        "{micro_batch_size}",
        "data {micro_batch_size}",
        "- {micro_batch_size}",
        "-- {micro_batch_size}",
        "--offset -1 {micro_batch_size}",
        "--offset=3 {micro_batch_size}",
        "--pair {micro_batch_size} {micro_batch_size}",
        "--both {num_workers:1} {micro_batch_size}",
        "-b{micro_batch_size}",
        "batch_size={micro_batch_size}",
        "--shape={micro_batch_size}x3",
        "--shape {micro_batch_size}x3",
        "--shape={num_workers:1}x{micro_batch_size}",
        "--{{x}} {micro_batch_size}",
    ],
)
def test_a_placeholder_without_value_and_without_flag_is_refused(template: str) -> None:
    error = refusal(["p", *template.split()])
    assert "'{micro_batch_size}'" in error.message
    assert repr(next(word for word in reversed(template.split()) if "{micro_batch_size}" in word)) in error.message
    assert "{micro_batch_size:64}" in error.hint


def test_the_program_itself_may_not_be_left_out() -> None:
    assert "'{micro_batch_size}'" in refusal(["{micro_batch_size}", "train.py"]).message


@pytest.mark.parametrize(
    "words", [["python", "train.py"], ["python", "a b", "it's", "$HOME", "{lr}", "line\nbreak", ""], ["p", "{{x}}"]]
)
def test_a_label_is_the_command_as_a_shell_would_take_it(words: list[str]) -> None:
    assert shlex.split(script_label(words)) == words


# --- metric and quality


@pytest.mark.parametrize(
    ("regex", "name"),
    [
        ("val_acc=([0-9.]+)", "val_acc"),
        ("val_acc=(?P<figure>[0-9.]+)", "val_acc"),
        (r"epoch \d+ val acc: ([\d.]+)", "val acc"),
        ('"val_acc": ([0-9.]+)', "val_acc"),
        (r"(?i)Accuracy\s*[:=]\s*([\d.]+)", "Accuracy"),
        (r"^acc = (.*)$", "acc"),
        (r"(?:val|test)_acc=(.*)", "acc"),
        (r"\(acc\) (.*)", "acc"),
        (r"[(]loss[)] {1,3}(.*)", "loss"),
        (r"test\.acc=(.*)", "test.acc"),
        (r"[^]a]top1[\]x]*=(.*)", "top1"),
        ("(?P<acc>[0-9.]+)", "acc"),
        ("([0-9.]+)", "metric"),
        (r"\d+ = (.*) acc", "metric"),
    ],
)
def test_a_regex_names_its_metric(regex: str, name: str) -> None:
    script = read_script(["p"], metric_regexes=[regex], directions=["minimize"])
    assert script.metrics == (PrintedMetric(name=name, direction="minimize", pattern=regex),)


def test_an_expression_without_group_has_no_name_of_its_own() -> None:
    assert name_metric("loss") == "metric"


def test_a_key_is_its_metric_s_name() -> None:
    script = read_script(["p"], metric_keys=["eval/acc"], directions=["maximize"], quality_epochs=2)
    assert script.metrics == (PrintedMetric(name="eval/acc", direction="maximize", key="eval/acc"),)
    assert script.quality_epochs == 2


@pytest.mark.parametrize(
    ("directions", "expected"),
    [(["minimize", "maximize", "minimize"], ["minimize", "maximize", "minimize"]), (["maximize"], 3 * ["maximize"])],
)
def test_directions_go_to_the_expressions_and_then_to_the_keys(directions: list[str], expected: list[str]) -> None:
    script = read_script(["p"], metric_regexes=["error=(.*)", "acc=(.*)"], metric_keys=["kappa"], directions=directions)
    assert [metric.name for metric in script.metrics] == ["error", "acc", "kappa"]
    assert [metric.direction for metric in script.metrics] == expected
    assert [(metric.pattern, metric.key) for metric in script.metrics] == [
        ("error=(.*)", None),
        ("acc=(.*)", None),
        (None, "kappa"),
    ]


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"metric_regexes": ["acc=(["]}, "'acc=([' is not a regular expression: unterminated", "one group"),
        ({"metric_regexes": ["a{99999999999999999999}"]}, "is not a regular expression: the rep", "one group"),
        ({"metric_regexes": ["acc=[0-9]+"]}, "'acc=[0-9]+' has 0 groups", "val_acc=([0-9.]+)"),
        ({"metric_regexes": ["b=(.*)", ""]}, "'' has 0 groups", "val_acc=([0-9.]+)"),
        ({"metric_regexes": ["(acc)=([0-9]+)"]}, "'(acc)=([0-9]+)' has 2 groups", "(?:...)"),
        ({"metric_keys": ["acc", " "]}, "--metric-key ' ' is empty", "--metric-key val_acc"),
        ({"metric_keys": ["acc"], "directions": []}, "--metric-key 'acc' is given without", "--direction maximize"),
        ({"metric_regexes": ["a(b)"], "directions": []}, "--metric-regex 'a(b)' is given", "--direction maximize"),
        ({}, "--direction maximize is given without a metric", "--metric-key"),
        ({"directions": ["maximise"], "metric_keys": ["a"]}, "'maximise' is neither", "did you mean --direction maxim"),
        ({"directions": ["maximize", "up"]}, "--direction 'up' is neither", "--direction maximize or --direction min"),
        ({"directions": [""]}, "--direction '' is neither", "--direction maximize"),
        (
            {"metric_keys": ["a", "b", "c"], "directions": ["minimize", "maximize"]},
            "2 times --direction for 3 metrics",
            "once for each",
        ),
        (
            {"metric_regexes": ["a=(.*)", "acc=(.*)"], "metric_keys": ["acc"]},
            "--metric-regex 'acc=(.*)' and --metric-key 'acc' are both called 'acc'",
            "before the figure",
        ),
    ],
)
def test_a_metric_that_does_not_fit_is_refused(settings: dict[str, Any], message: str, hint: str) -> None:
    error = refusal(**{"directions": ["maximize"], **settings})
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quality_steps": 10, "quality_epochs": 1}, "--check-steps 10 and --check-epochs 1"),
        ({"quality_steps": 0}, "--check-steps 0"),
        ({"quality_epochs": -3}, "--check-epochs -3"),
    ],
)
def test_a_length_of_a_quality_run_that_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    assert message in refusal(**settings).message


def test_nothing_of_it_imports_torch() -> None:
    program = (
        "import sys, autotune.targets.script, autotune.targets.launch.command, autotune.targets.source.fingerprint;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0
