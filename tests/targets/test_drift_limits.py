from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_factory import read_drift_limits

from autotune.errors import UsageError
from autotune.records import DriftLimits, Margin
from autotune.targets.drift_limits import require_metrics

USUAL = Margin(amount=0.005)


def absolute(amount: float) -> Margin:
    return Margin(amount=amount, unit="absolute")


def refusal(*texts: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_drift_limits(texts)
    assert "\n" not in f"{caught.value.message}{caught.value.hint}"
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("text", "margin"),
    [
        ("0.5%", Margin(amount=0.005)),
        (" 99.9% ", Margin(amount=0.999)),
        ("0%", Margin(amount=0.0)),
        ("percent-max-degradation=0.5", Margin(amount=0.005)),
        ("0.1pp", absolute(0.001)),
        ("250pp", absolute(2.5)),
        ("max-degradation=0.1", absolute(0.1)),
        ("max-degradation=12", absolute(12.0)),
        ("min-improvement=0.01", absolute(-0.01)),
    ],
)
@pytest.mark.parametrize("metric", ["", "accuracy", "eval:top 1"])
def test_a_limit_is_read_for_all_or_for_one(text: str, margin: Margin, metric: str) -> None:
    limits = read_drift_limits([f"{metric}:{text}" if metric else text])
    assert limits.of(metric or "anything").unit == margin.unit
    assert limits.of(metric or "anything").amount == pytest.approx(margin.amount, rel=1e-12)
    if metric:
        assert limits.of("another") == limits.loss == USUAL


def test_without_a_limit_everything_has_the_usual_one() -> None:
    assert read_drift_limits([]) == DriftLimits()
    assert DriftLimits().loss == DriftLimits().of("accuracy") == USUAL


def test_a_relative_limit_without_a_name_is_the_losses_too() -> None:
    limits = read_drift_limits(["1%", "accuracy:0.1pp"])
    assert limits.loss == limits.of("kappa") == Margin(amount=0.01)
    assert limits.of("accuracy") == absolute(0.001)


@pytest.mark.parametrize("text", ["0.1pp", "max-degradation=0.001", "min-improvement=0.2"])
def test_an_absolute_limit_without_a_name_leaves_the_loss_its_own(text: str) -> None:
    limits = read_drift_limits([text])
    assert limits.loss == USUAL
    assert limits.of("accuracy").unit == "absolute"


@pytest.mark.parametrize("texts", [["loss:2%"], ["loss:2%", "0.5%"], ["0.5%", " loss : 2%"]])
def test_a_limit_of_the_loss_is_its_alone(texts: list[str]) -> None:
    limits = read_drift_limits(texts)
    assert limits.loss == Margin(amount=0.02)
    assert limits.of("accuracy") == USUAL
    assert limits.metrics == {}


def test_the_same_limits_are_the_same_record_however_they_are_written() -> None:
    assert read_drift_limits(["0.5%"]) == DriftLimits()
    assert read_drift_limits(["b:1%", "a:2%"]) == read_drift_limits(["a:percent-max-degradation=2", "b:1%"])


def test_no_improvement_required_is_no_negative_zero() -> None:
    assert math.copysign(1.0, read_drift_limits(["min-improvement=0"]).of("accuracy").amount) == 1.0


@pytest.mark.parametrize(
    ("text", "hint"),
    [("0.5", "0.5% or 0.5pp?"), ("0.005", "0.005% or 0.005pp?"), ("-1", "1% or 1pp?"), ("a: 2", "a:2% or a:2pp?")],
)
def test_a_number_without_a_unit_is_asked_about(text: str, hint: str) -> None:
    error = refusal(text)
    assert error.message == f"--max-drift {text!r} is a number without a unit"
    assert error.hint == hint


@pytest.mark.parametrize("text", ["-1%", "a:-0.1pp", "max-degradation=-0.1", "min-improvement=-1"])
def test_a_negative_limit_is_refused(text: str) -> None:
    error = refusal("1%", text)
    assert error.message == f"--max-drift {text!r} is negative"
    assert "min-improvement=0.01" in error.hint


@pytest.mark.parametrize("text", ["100%", "accuracy:150%", "percent-max-degradation=100"])
def test_a_relative_limit_is_below_all_of_it(text: str) -> None:
    error = refusal(text)
    assert error.message == f"--max-drift {text!r} is out of range"
    assert error.hint == "it must be at least 0% and below 100%"


@pytest.mark.parametrize(
    "text",
    ["", "half", "accuracy", "accuracy:", "5 %", "1e-3%", "nan%", "inf", "max-degradation=0.1%", "max_degradation=0.1",
     "max-degradation=", "0.1pp:accuracy", "0.1 pp", "9" * 400 + "%", "0.5%%", "\u0665%"],
)  # fmt: skip
def test_nonsense_is_named_as_typed(text: str) -> None:
    error = refusal(text)
    assert error.message == f"--max-drift {text!r} is not a limit"
    assert "0.5%" in error.hint
    assert "0.1pp" in error.hint


def test_a_colon_needs_a_name() -> None:
    assert "names no metric" in refusal(" :0.5%").message


@pytest.mark.parametrize(
    ("texts", "name"),
    [(["1%", "0.1pp"], "every metric"), (["a:1%", "b:1%", "a:2%"], "a"), (["loss:1%", "loss:1%"], "loss")],
)
def test_a_second_limit_of_a_name_is_refused(texts: list[str], name: str) -> None:
    error = refusal(*texts)
    assert error.message == f"--max-drift {texts[-1]!r}: {name} has a limit already"


@pytest.mark.parametrize("limit", ["0.1pp", "max-degradation=0.1", "min-improvement=0.01"])
def test_an_absolute_limit_of_the_loss_is_refused(limit: str) -> None:
    error = refusal(f"loss:{limit}")
    assert error.message == f"--max-drift 'loss:{limit}': the loss can only have a relative limit"
    assert error.hint == "write loss:0.5%"


# ---- by the options of today


def read(*texts: str, loss: str | None = None) -> DriftLimits:
    return read_drift_limits(loss=loss, metrics=texts)


def test_the_loss_and_the_metrics_have_options_of_their_own() -> None:
    limits = read(loss="2%")
    assert limits.loss == Margin(amount=0.02)
    assert limits.of("accuracy") == USUAL
    limits = read("1%", "accuracy=0.1pp", "top=1=min-improvement=0.01")
    assert limits.loss == USUAL
    assert limits.of("kappa") == Margin(amount=0.01)
    assert limits.of("accuracy") == absolute(0.001)
    assert limits.of("top=1") == absolute(-0.01)


@pytest.mark.parametrize(
    ("older", "loss", "metrics"),
    [
        (["2%"], "2%", ["2%"]),
        (["loss:2%"], "2%", []),
        (["0.1pp"], None, ["0.1pp"]),
        (["max-degradation=0.1"], None, ["max-degradation=0.1"]),
        (["accuracy:min-improvement=0.01"], None, ["accuracy=min-improvement=0.01"]),
    ],
)
def test_they_say_what_the_older_option_says(older: list[str], loss: str | None, metrics: list[str]) -> None:
    assert read_drift_limits(older) == read_drift_limits(loss=loss, metrics=metrics)


def test_both_ways_may_be_used_where_they_do_not_contradict() -> None:
    limits = read_drift_limits(["1%"], loss="2%", metrics=["accuracy=3%"])
    assert [limits.loss.amount, limits.of("accuracy").amount, limits.of("kappa").amount] == [0.02, 0.03, 0.01]
    with pytest.raises(UsageError, match="accuracy has a limit already"):
        read_drift_limits(["accuracy:1%"], metrics=["accuracy=3%"])


@pytest.mark.parametrize(
    ("loss", "metric", "message", "hint"),
    [
        ("0.5", None, "--max-loss-increase '0.5' is a number without a unit", "0.5%?"),
        ("0.1pp", None, "--max-loss-increase '0.1pp': the loss can only have a relative limit", "write 0.5%"),
        ("small", None, "--max-loss-increase 'small' is not a limit", "write 0.5%, a share of your own settings' loss"),
        (None, "accuracy=0.1", "--metric-limit 'accuracy=0.1' is a number without a unit", "accuracy=0.1% or"),
        (None, "accuracy:0.1pp", "--metric-limit 'accuracy:0.1pp' is not a limit", "write accuracy=0.1pp"),
        (None, "accuracy=", "--metric-limit 'accuracy=' is not a limit", "write 0.5% (relative)"),
        (None, "loss=1%", "--metric-limit 'loss=1%': the loss is no metric", "write --max-loss-increase 1%"),
        (None, "=1%", "--metric-limit '=1%' names no metric", "write accuracy=0.5%, or 0.5% for all of them"),
    ],
)
def test_what_is_no_limit_is_named_with_its_option(
    loss: str | None, metric: str | None, message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read_drift_limits(loss=loss, metrics=[] if metric is None else [metric])
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)


parts = st.sampled_from(
    ["", "a", "loss", ":", "-", "1", "0.5", "%", "pp", "max-degradation=", "percent-max-degradation=",
     "min-improvement=", " ", "=", "\n", "e9"]
)  # fmt: skip


@given(st.lists(st.lists(parts, max_size=5).map("".join) | st.text(max_size=20), max_size=4))
def test_any_texts_are_read_or_refused(texts: list[str]) -> None:
    with contextlib.suppress(UsageError):
        limits = read_drift_limits(texts)
        assert limits.loss.unit == "relative"
        assert 0.0 <= limits.loss.amount < 1.0
    with contextlib.suppress(UsageError):
        limits = read_drift_limits(loss=texts[0] if texts else None, metrics=texts[1:])
        assert limits.loss.unit == "relative"
        assert 0.0 <= limits.loss.amount < 1.0


def test_a_limit_of_a_metric_that_is_not_there_is_refused() -> None:
    limits = read_drift_limits(["1%", "loss:2%", "accuracy:0.1pp"])
    require_metrics(limits, {"accuracy": "maximize", "kappa": "maximize"})
    with pytest.raises(UsageError) as caught:
        require_metrics(limits, {"error": "minimize", "kappa": "maximize"})
    assert caught.value.message == "a limit is given for 'accuracy', and the training has no metric of that name"
    assert caught.value.hint == "its metrics are error, kappa"
    with pytest.raises(UsageError) as caught:
        require_metrics(limits, {})
    assert caught.value.hint == "it has no metric: limit the training loss alone"
    require_metrics(read_drift_limits(["1%", "loss:2%"]), {})
    with pytest.raises(UsageError, match="no metric that it could hold for"):
        require_metrics(read_drift_limits(["0.1pp"]), {})
