from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.errors import AutotuneError, TargetError, UsageError
from autotune.records.config import TrainConfig
from autotune.targets.load import load_workload
from autotune.targets.source.location import split_spec
from autotune.targets.workload import REQUIRED, LoadedWorkload, Metric, Workload, check_workload

COMPLETE = """
class Training:
    def build_model(self): ...
    def build_optimizer(self, model): ...
    def train_dataset(self): ...
    def compute_loss(self, model, batch): ...

workload = Training()
"""


class Complete:
    """The four required methods and nothing else."""

    def build_model(self) -> Any:
        return torch.nn.Linear(1, 1)

    def build_optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_dataset(self) -> Any:
        return [torch.zeros(1)]

    def compute_loss(self, model: Any, batch: Any) -> Any:
        return model(batch).mean()


@pytest.fixture(autouse=True)
def restored_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    importlib.invalidate_caches()
    yield
    sys.path[:] = path
    # A part of torch that is imported a second time registers its operators twice, which torch refuses.
    for name in {one for one in set(sys.modules) - modules if one.partition(".")[0] != "torch"}:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "complete.py").write_text(COMPLETE)
    return tmp_path


def complete_with(**parts: Any) -> Complete:
    found = Complete()
    for name, value in parts.items():
        setattr(found, name, value)
    return found


def check(**parts: Any) -> LoadedWorkload:
    return check_workload(complete_with(**parts), label="train.py:workload", fingerprint="0")


def refusal(spec: str, folder: Path, kind: type[AutotuneError]) -> AutotuneError:
    with pytest.raises(kind) as caught:
        load_workload(spec, folder=folder)
    assert type(caught.value) is kind
    return caught.value


@pytest.mark.parametrize(
    ("spec", "halves"),
    [
        ("train.py:workload", ("train.py", "workload")),
        ("package.module:factory.workload", ("package.module", "factory.workload")),
        ("C:/code/train.py:workload", ("C:/code/train.py", "workload")),
    ],
)
def test_a_spec_splits_at_its_last_colon(spec: str, halves: tuple[str, str]) -> None:
    assert split_spec(spec) == halves


@pytest.mark.parametrize("spec", ["", "train.py", ":workload", "train.py:", ":"])
def test_a_spec_without_two_halves_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="is not LOCATION:ATTRIBUTE") as caught:
        split_spec(spec)
    assert repr(spec) in caught.value.message
    assert "train.py:workload" in caught.value.hint


@pytest.mark.parametrize("spec", ["complete.py:workload", "complete:workload"])
def test_a_file_and_a_module_name_the_same_workload(folder: Path, spec: str) -> None:
    loaded = load_workload(spec, folder=folder)
    assert loaded.label == spec
    assert isinstance(loaded.workload, Workload)
    assert loaded.fingerprint == load_workload("complete.py:workload", folder=folder).fingerprint
    assert re.fullmatch("m-[0-9a-f]{12}", loaded.fingerprint)


def test_the_fingerprint_follows_the_source(folder: Path) -> None:
    before = load_workload("complete.py:workload", folder=folder).fingerprint
    (folder / "complete.py").write_text(COMPLETE + "# changed\n")
    assert load_workload("complete.py:workload", folder=folder).fingerprint != before


def test_a_dotted_attribute_is_followed(folder: Path) -> None:
    (folder / "nested.py").write_text(COMPLETE + "class Choices:\n    small = workload\n")
    assert load_workload("nested.py:Choices.small", folder=folder).label == "nested.py:Choices.small"


def test_a_file_may_import_its_neighbours(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "neighbour_of_it.py").write_text("value = 1")
    (folder / "sub" / "with_neighbour.py").write_text("import neighbour_of_it\n" + COMPLETE)
    assert load_workload("sub/with_neighbour.py:workload", folder=folder).label == "sub/with_neighbour.py:workload"


# As files are named, and what a process that has loaded one does with it: its worker unpickles the dataset.
NAMED_LIKE_ANOTHER = (
    """
import neighbour_of_it
import torch
from torch.utils.data import Dataset

class Squares(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return neighbour_of_it.square(index)
"""
    + COMPLETE
)
PROGRAM = """
import json, sys
from pathlib import Path
if __name__ == "__main__":
    import {stem} as before
    from torch.utils.data import DataLoader
    from autotune.targets.load import load_workload
    workload = load_workload("{stem}.py:workload", folder=Path.cwd()).workload
    import {stem} as after
    dataset = sys.modules[type(workload).__module__].Squares()
    loader = DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context=sys.argv[1])
    batches = [batch.tolist() for batch in loader]
    print(json.dumps([before is after, hasattr(after, "workload"), batches]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "context"),
    [
        ("random", "spawn"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("random", "fork"), ("queue", "forkserver"))),
    ],
)
def test_a_file_named_like_a_module_leaves_that_module_alone(tmp_path: Path, stem: str, context: str) -> None:
    folder = tmp_path / "with some-signs_in.it"
    folder.mkdir()
    (folder / f"{stem}.py").write_text(NAMED_LIKE_ANOTHER)
    (folder / "neighbour_of_it.py").write_text("def square(x): return x * x")
    (tmp_path / "program.py").write_text(PROGRAM.format(stem=stem))
    command = [sys.executable, "-P", str(tmp_path / "program.py"), context]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, False, [[0, 1], [4, 9]]]


def test_a_file_named_like_a_module_that_is_in_use_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(COMPLETE)
    typer = importlib.import_module("typer")
    loaded = load_workload("typer.py:workload", folder=tmp_path)
    assert sys.modules["typer"] is typer
    assert type(loaded.workload).__module__.startswith("autotune.targets.source.by_path.")
    assert refusal("typer.py:other", tmp_path, UsageError).message.endswith("typer has no 'other'")


def test_a_file_can_be_imported_by_its_neighbours_while_it_is_loaded(folder: Path) -> None:
    (folder / "looks_back.py").write_text("import in_a_circle\nvalue = in_a_circle.early")
    (folder / "in_a_circle.py").write_text("early = 3\nimport looks_back\n" + COMPLETE)
    load_workload("in_a_circle.py:workload", folder=folder)
    assert sys.modules["looks_back"].value == 3


@pytest.mark.parametrize("spec", ["with_a_neighbour.py:workload", "with_a_neighbour:workload"])
def test_a_module_that_was_changed_after_it_was_imported_is_not_trained(tmp_path: Path, spec: str) -> None:
    neighbour, file = tmp_path / "changed_later.py", tmp_path / "with_a_neighbour.py"
    neighbour.write_text("value = 1")
    file.write_text("import changed_later\n" + COMPLETE)
    load_workload(spec, folder=tmp_path)
    assert load_workload(spec, folder=tmp_path).label == spec
    neighbour.write_text("value = 2\nother = 3")
    file.write_text("from changed_later import other\n" + COMPLETE)  # which the old module does not have
    with pytest.raises(UsageError, match="was changed since this process imported it") as caught:
        load_workload(spec, folder=tmp_path)
    assert "restart the program" in caught.value.hint
    for name in ("changed_later", "with_a_neighbour"):
        del sys.modules[name]
    importlib.invalidate_caches()
    assert load_workload(spec, folder=tmp_path).label == spec


def test_a_missing_file_is_named_with_the_folder_searched(tmp_path: Path) -> None:
    error = refusal("absent.py:workload", tmp_path, UsageError)
    assert "'absent.py'" in error.message
    assert str(tmp_path) in error.hint


@pytest.mark.parametrize("location", ["no_such_module", "no_such_package.module"])
def test_a_missing_module_is_named(tmp_path: Path, location: str) -> None:
    error = refusal(f"{location}:workload", tmp_path, UsageError)
    assert error.message == f"there is no module {location!r}"


def test_a_missing_attribute_is_named_with_those_there_are(folder: Path) -> None:
    error = refusal("complete.py:workloda", folder, UsageError)
    assert "complete has no 'workloda'" in error.message
    assert error.hint == "did you mean 'workload'? workloads in it: workload"


def test_a_class_in_place_of_an_instance_is_told_how_to_make_one(folder: Path) -> None:
    error = refusal("complete.py:Training", folder, TargetError)
    assert error.message == "complete.py:Training is the class Training"
    assert "Training()" in error.hint


@pytest.mark.parametrize("spec", ["needy.py:workload", "needy:workload"])
def test_a_missing_dependency_of_the_users_module_is_named(tmp_path: Path, spec: str) -> None:
    (tmp_path / "needy.py").write_text("import surely_not_installed\n")
    assert "No module named 'surely_not_installed'" in refusal(spec, tmp_path, TargetError).message


@pytest.mark.parametrize("spec", ["raising.py:workload", "raising:workload"])
def test_an_error_inside_the_users_module_is_shown(tmp_path: Path, spec: str) -> None:
    (tmp_path / "raising.py").write_text("raise ValueError('the data folder is empty')\n")
    error = refusal(spec, tmp_path, TargetError)
    assert "ValueError: the data folder is empty" in error.message
    assert error.__cause__ is not None


def test_a_syntax_error_in_the_users_file_is_shown(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text("def build_model(:\n")
    assert "SyntaxError" in refusal("torn.py:workload", tmp_path, TargetError).message


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_missing_method_is_named(missing: str) -> None:
    methods = {name: print for name in REQUIRED if name != missing}
    with pytest.raises(TargetError) as caught:
        check_workload(SimpleNamespace(**methods), label="train.py:workload", fingerprint="0")
    assert caught.value.message == f"train.py:workload is a SimpleNamespace without {missing}()"


def test_all_missing_methods_are_named_at_once() -> None:
    with pytest.raises(TargetError) as caught:
        check_workload(SimpleNamespace(build_model=print, compute_loss=3), label="it", fingerprint="0")
    assert "without build_optimizer(), train_dataset(), compute_loss()" in caught.value.message


def test_optional_parts_have_defaults() -> None:
    loaded = check()
    assert loaded.baseline == TrainConfig()
    assert loaded.metrics == ()
    assert loaded.gradient_clip_norm is None
    assert loaded.collate is None
    assert (loaded.drop_last, loaded.shuffle) == (False, True)
    assert loaded.knobs == {}
    assert loaded.build_scheduler(torch.optim.SGD([torch.zeros(1)], lr=0.1)) is None


def test_optional_parts_are_read() -> None:
    loaded = check(
        baseline=TrainConfig(micro_batch_size=7),
        metric=("accuracy", "maximize"),
        evaluate=lambda model, device: 0.5,
        build_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer),
        gradient_clip_norm=2,
        collate=len,
        drop_last=True,
        shuffle=False,
    )
    assert loaded.baseline.micro_batch_size == 7
    assert loaded.metrics == (Metric(name="accuracy", direction="maximize"),)
    assert loaded.gradient_clip_norm == 2.0
    assert loaded.collate is len
    assert (loaded.drop_last, loaded.shuffle) == (True, False)
    assert loaded.evaluate(torch.nn.Identity(), torch.device("cpu")) == {"accuracy": 0.5}
    assert loaded.build_scheduler(torch.optim.SGD([torch.zeros(1)], lr=0.1)) is not None


@pytest.mark.parametrize("baseline", [{"micro_batch_size": 64}, 64, TrainConfig])
def test_a_baseline_of_another_type_is_refused(baseline: Any) -> None:
    with pytest.raises(TargetError, match=f"baseline is an? {type(baseline).__name__}") as caught:
        check(baseline=baseline)
    assert "TrainConfig(micro_batch_size=64)" in caught.value.hint


@pytest.mark.parametrize(
    "metric", ["accuracy", ("accuracy",), ("accuracy", "up"), (1, "minimize"), ("a", "minimize", 1), None]
)
def test_a_bad_metric_is_refused(metric: Any) -> None:
    with pytest.raises(TargetError) as caught:
        check(metric=metric, evaluate=lambda model, device: 0.5)
    assert f"metric is {metric!r}" in caught.value.message


def test_evaluate_without_a_metric_is_minimised() -> None:
    assert check(evaluate=lambda model, device: 0.5).metrics == (Metric(name="metric", direction="minimize"),)


def test_evaluating_without_evaluate_is_refused() -> None:
    with pytest.raises(TargetError, match="has no evaluate"):
        check().evaluate(torch.nn.Identity(), torch.device("cpu"))


@pytest.mark.parametrize("value", [None, "high", [0.5], torch.zeros(2)])
def test_a_metric_that_is_no_number_is_refused(value: Any) -> None:
    loaded = check(evaluate=lambda model, device: value)
    with pytest.raises(TargetError, match=f"evaluate returned {type(value).__name__}"):
        loaded.evaluate(torch.nn.Identity(), torch.device("cpu"))


def test_a_one_element_tensor_is_a_number() -> None:
    loaded = check(evaluate=lambda model, device: torch.tensor(0.25))
    assert loaded.evaluate(torch.nn.Identity(), None) == {"metric": 0.25}


BOTH = {"accuracy": "maximize", "kappa": "maximize"}


def test_several_metrics_are_returned_by_name() -> None:
    returned = {"kappa": torch.tensor(0.5), "accuracy": 1, "unasked": "text"}
    loaded = check(metrics=BOTH, evaluate=lambda model, device: returned)
    assert loaded.metrics == (Metric("accuracy", "maximize"), Metric("kappa", "maximize"))
    assert list(loaded.evaluate(torch.nn.Identity(), None).items()) == [("accuracy", 1.0), ("kappa", 0.5)]


def test_a_metric_may_be_nan() -> None:
    loaded = check(metrics=BOTH, evaluate=lambda model, device: {"accuracy": math.nan, "kappa": 0.5})
    assert math.isnan(loaded.evaluate(torch.nn.Identity(), None)["accuracy"])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.5, "train.py:workload: evaluate returned float"),
        ({"accuracy": 0.5}, "train.py:workload: evaluate returned no 'kappa'"),
        ({"accuracy": 0.5, "kappa": None}, "train.py:workload: evaluate returned NoneType for 'kappa'"),
        ({"accuracy": [1, 2], "kappa": 0.5}, "train.py:workload: evaluate returned list for 'accuracy'"),
    ],
)
def test_a_metric_that_is_missing_or_no_number_is_named(returned: Any, message: str) -> None:
    loaded = check(metrics=BOTH, evaluate=lambda model, device: returned)
    with pytest.raises(TargetError) as caught:
        loaded.evaluate(torch.nn.Identity(), None)
    assert caught.value.message == message
    assert "accuracy, kappa" in caught.value.hint


@pytest.mark.parametrize("metrics", [None, {}, ("accuracy", "maximize"), {"accuracy": "up"}, {1: "minimize"}])
def test_bad_metrics_are_refused(metrics: Any) -> None:
    with pytest.raises(TargetError) as caught:
        check(metrics=metrics, evaluate=lambda model, device: {})
    assert caught.value.message == f"train.py:workload: metrics is {metrics!r}"
    assert '{"accuracy": "maximize", "kappa": "maximize"}' in caught.value.hint


def test_metric_and_metrics_are_not_both_read() -> None:
    with pytest.raises(TargetError, match="has both metric and metrics"):
        check(metric=("error", "minimize"), metrics=BOTH, evaluate=lambda model, device: {})


@pytest.mark.parametrize(
    "values",
    [("only one",), "text", 3, (1, None), (0.5, float("nan")), (1, [2])],
    ids=["one", "text", "number", "none", "nan", "list"],
)
def test_a_knob_without_two_plain_values_is_refused(values: Any) -> None:
    with pytest.raises(TargetError, match="knob 'implementation' has the values"):
        check(knobs={"implementation": values}, implementation=1)


def test_knobs_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(TargetError, match="knobs is a list"):
        check(knobs=["implementation"])


@pytest.mark.parametrize("parts", [{}, {"implementation": "c"}])
def test_a_knob_needs_its_current_value_on_the_workload(parts: dict[str, Any]) -> None:
    with pytest.raises(TargetError, match="knob 'implementation' needs an attribute of that name"):
        check(knobs={"implementation": ("a", "b")}, **parts)


def test_own_knobs_are_part_of_the_baseline_and_can_be_set() -> None:
    loaded = check(knobs={"implementation": ["a", "b"], "chunks": (1, 2)}, implementation="b", chunks=1)
    assert loaded.knobs == {"implementation": ("a", "b"), "chunks": (1, 2)}
    assert loaded.baseline.user_knobs == {"implementation": "b", "chunks": 1}
    loaded.set_knobs(loaded.baseline.replace(user_knobs={"implementation": "a", "chunks": 2}))
    assert (loaded.workload.implementation, loaded.workload.chunks) == ("a", 2)  # type: ignore[attr-defined]
