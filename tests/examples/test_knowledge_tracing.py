"""The knowledge tracing example: its model, data and metrics, and that script and workload are one training."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from autotune.engine.loop import Training
from autotune.engine.windows import GivenWindows, Window
from autotune.errors import TargetError
from autotune.presets import find_preset
from autotune.targets.load import load_workload
from autotune.targets.workload import LoadedWorkload

FOLDER = Path(__file__).parents[2] / "examples" / "knowledge_tracing"
OWN_MODULES = ("workload", "answers", "memory_network", "ordinal_metrics")
CPU = torch.device("cpu")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import the example's modules anew, and leave no trace of them."""
    path = list(sys.path)
    monkeypatch.delenv("EXAMPLE_DATA", raising=False)
    monkeypatch.delenv("EXAMPLE_SIZE", raising=False)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in OWN_MODULES:
        sys.modules.pop(name, None)
    sys.path[:] = path


@pytest.fixture
def few_students(example: None, monkeypatch: pytest.MonkeyPatch) -> LoadedWorkload:
    """The workload on fewer and shorter sequences."""
    loaded = load_workload("workload.py:workload", folder=FOLDER)
    answers = sys.modules["answers"]
    small = answers.Simulation(students=320, shortest=8, longest=14, questions=30)
    monkeypatch.setitem(answers.SIMULATIONS, "cpu", small)
    return loaded


def import_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("knowledge_tracing_script", FOLDER / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_network(implementation: str, dtype: torch.dtype) -> Any:
    from memory_network import MemoryNetwork, NetworkShape

    torch.manual_seed(0)
    shape = NetworkShape(slots=5, key_width=6, value_width=7, summary_width=8)
    network = MemoryNetwork(questions=11, categories=4, shape=shape, implementation=implementation).to(dtype)
    with torch.no_grad():  # freshly drawn, the memory hardly shows in the logits
        network.initial_memory.mul_(20)
        network.ability.weight.mul_(5)
    return network


def draw_batch(lengths: tuple[int, ...] = (9, 4, 2)) -> tuple[torch.Tensor, torch.Tensor]:
    from answers import pad_answers

    generator = torch.Generator().manual_seed(1)
    draw = [
        (torch.randint(11, (n,), generator=generator), torch.randint(4, (n,), generator=generator)) for n in lengths
    ]
    return pad_answers(draw)


def loss_and_gradients(network: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    from memory_network import answer_loss

    questions, categories = draw_batch()
    loss, _ = answer_loss(network(questions, categories), categories)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in network.named_parameters()}


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_parallel_reads_are_the_same_mathematics(dtype: torch.dtype, tolerance: float) -> None:
    loss, gradients = loss_and_gradients(build_network("sequential", dtype))
    ours, theirs = loss_and_gradients(build_network("parallel-reads", dtype))
    assert abs(ours - loss) <= tolerance * loss
    for name, gradient in gradients.items():
        assert gradient is not None
        assert (theirs[name] - gradient).norm() <= tolerance * gradient.norm(), name
        assert gradient.norm() > 0


@pytest.mark.usefixtures("example")
def test_every_implementation_has_the_same_parameters() -> None:
    states = [build_network(name, torch.float32).state_dict() for name in ("sequential", "parallel-reads")]
    states.append(build_network("wrong-parallel", torch.float32).state_dict())
    for state in states[1:]:
        assert list(state) == list(states[0])
        assert all(torch.equal(state[name], states[0][name]) for name in state)


@pytest.mark.usefixtures("example")
def test_wrong_parallel_is_another_model() -> None:
    loss, _ = loss_and_gradients(build_network("sequential", torch.float64))
    wrong, gradients = loss_and_gradients(build_network("wrong-parallel", torch.float64))
    assert abs(wrong - loss) > 1e-3
    assert gradients["answer_vectors.weight"] is None  # no answer is ever seen


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("implementation", ["sequential", "parallel-reads", "wrong-parallel"])
def test_no_implementation_sees_an_answer_before_it_predicts_it(implementation: str) -> None:
    network = build_network(implementation, torch.float64)
    questions, categories = draw_batch()
    changed = categories.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 4
    before, after = network(questions, categories)[0], network(questions, changed)[0]
    assert torch.equal(before[:5], after[:5])
    assert torch.allclose(before[5:], after[5:]) == (implementation == "wrong-parallel")


@pytest.mark.usefixtures("example")
def test_padding_changes_nothing() -> None:
    from memory_network import answer_loss

    network = build_network("sequential", torch.float64)
    questions, categories = draw_batch()
    alone = network(questions[1:2, :4], categories[1:2, :4])
    assert torch.allclose(network(questions, categories)[1:2, :4], alone)
    loss, count = answer_loss(network(questions, categories), categories)
    by_hand = [
        -torch.log_softmax(network(questions, categories), -1)[row, step, categories[row, step]]
        for row, length in enumerate((9, 4, 2))
        for step in range(length)
    ]
    assert count == 15
    assert torch.allclose(loss, torch.stack(by_hand).mean())


@pytest.mark.usefixtures("example")
def test_gpcm_logits_by_hand() -> None:
    from memory_network import gpcm_logits

    logits = gpcm_logits(torch.tensor([0.5]), torch.tensor([2.0]), torch.tensor([-1.0, 0.0, 2.0]))
    assert logits.tolist() == pytest.approx([0.0, 3.0, 4.0, 1.0])


@pytest.mark.usefixtures("example")
def test_metrics_against_brute_force() -> None:
    from ordinal_metrics import ordinal_metrics

    generator = torch.Generator().manual_seed(3)
    observed, predicted = torch.randint(4, (2, 60), generator=generator)
    found = ordinal_metrics(observed, predicted, categories=4)
    pairs = list(zip(observed.tolist(), predicted.tolist(), strict=True))
    seen = sum((a - b) ** 2 for a, b in pairs) / len(pairs)
    chance = sum((a - b) ** 2 for a, _ in pairs for _, b in pairs) / len(pairs) ** 2
    assert found == pytest.approx(
        {
            "categorical_accuracy": sum(a == b for a, b in pairs) / 60,
            "ordinal_accuracy": sum(abs(a - b) <= 1 for a, b in pairs) / 60,
            "kappa": 1 - seen / chance,
            "mae": sum(abs(a - b) for a, b in pairs) / 60,
        }
    )


@pytest.mark.usefixtures("example")
def test_kappa_of_perfect_constant_and_reversed_predictions() -> None:
    from ordinal_metrics import ordinal_metrics

    levels = torch.arange(4)
    assert ordinal_metrics(levels, levels, categories=4)["kappa"] == 1
    assert ordinal_metrics(levels, torch.full((4,), 2), categories=4)["kappa"] == pytest.approx(0)
    assert ordinal_metrics(levels, levels.flip(0), categories=4)["kappa"] == pytest.approx(-1)
    assert ordinal_metrics(torch.zeros(3).long(), torch.zeros(3).long(), categories=4)["kappa"] == 0


@pytest.mark.parametrize("implementation", ["sequential", "parallel-reads", "wrong-parallel"])
def test_the_workload_learns(few_students: LoadedWorkload, implementation: str) -> None:
    config = few_students.baseline.replace(user_knobs={"implementation": implementation})
    training = Training(few_students, config, device=CPU, seed=1)
    assert training.model.implementation == implementation
    losses = [float(training.step().loss) for _ in range(20)]
    training.model.eval()
    with torch.no_grad():
        found = few_students.evaluate(training.model, CPU)
    assert sum(losses[-4:]) / 4 < sum(losses[:4]) / 4 - 0.05
    assert list(found) == ["categorical_accuracy", "ordinal_accuracy", "kappa", "mae"]
    assert 0.25 < found["categorical_accuracy"] < found["ordinal_accuracy"] < 1
    assert 0 < found["mae"] < 3
    # Who knows a student tells the hard question from the easy one, and the strong student from the weak one.
    assert (found["kappa"] > 0.3) == (implementation != "wrong-parallel")


def run_three_steps(script: ModuleType, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the script trains with, and on what; its own loader and optimizer do it."""
    found: dict[str, Any] = {}
    train_epoch = script.train_epoch

    def note(model: Any, loader: Any, optimizer: Any, *, accum: int, device: torch.device) -> None:
        found["start"] = {name: value.clone() for name, value in model.state_dict().items()}
        found["batches"] = list(islice(loader, 3 * accum))
        found["drop_last"] = loader.drop_last
        steps = train_epoch(model, found["batches"], optimizer, accum=accum, device=device)
        found["losses"] = [float(loss) for loss in steps]
        found["end"] = model.state_dict()
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script, "train_epoch", note)
    with pytest.raises(InterruptedError):
        script.train(script.read_options(arguments))
    return found


@pytest.mark.parametrize(("arguments", "accum"), [([], 1), (["--batch-size", "32", "--accum", "2"], 2)])
def test_script_and_workload_are_one_training(
    few_students: LoadedWorkload, arguments: list[str], accum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = run_three_steps(import_script(), arguments, monkeypatch)
    config = few_students.baseline.replace(
        micro_batch_size=few_students.baseline.micro_batch_size // accum, gradient_accumulation_steps=accum
    )
    sizes = [len(questions) for questions, _ in script["batches"]]
    assert sizes == [config.micro_batch_size] * 3 * accum
    assert script["drop_last"] == few_students.drop_last
    training = Training(few_students, config, device=CPU, seed=5)
    training.model.load_state_dict(script["start"])
    training.windows = GivenWindows(
        Window(script["batches"][first : first + accum], sizes[first : first + accum], ends_epoch=False)
        for first in range(0, 3 * accum, accum)
    )
    ours = [float(training.step().loss) for _ in range(3)]
    assert script["losses"] == pytest.approx(ours, rel=1e-5)
    for name, value in training.model.state_dict().items():
        assert float((value - script["end"][name]).norm()) <= 1e-3 * float(value.norm()), name


def test_the_dataset_is_deterministic_and_can_be_pickled(few_students: LoadedWorkload, tmp_path: Path) -> None:
    from answers import Simulation, simulate_answers

    simulation = Simulation(students=12, shortest=2, longest=6)
    first, again = simulate_answers(simulation), simulate_answers(simulation)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], simulate_answers(replace(simulation, seed=2))[0])
    dataset = few_students.workload.train_dataset()
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == len(dataset) == 256
    assert torch.equal(copy[7][0], dataset[7][0])


@pytest.mark.usefixtures("example")
def test_what_is_simulated_is_written_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from answers import Simulation, read_students, simulate_answers, write_simulated

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    simulation = Simulation(students=20, shortest=2, longest=6, questions=9)
    folder = write_simulated(simulation)
    assert [path.name for path in folder.iterdir()] == ["answers.csv"]
    students, names = read_students(folder / "answers.csv")
    questions, categories, lengths = simulate_answers(simulation)
    for row, (asked, answered) in enumerate(students):
        assert [int(names[index]) for index in asked] == questions[row, : lengths[row]].tolist()
        assert torch.equal(answered, categories[row, : lengths[row]])


@pytest.mark.usefixtures("example")
def test_answers_in_order_of_lines_and_cut_to_the_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import answers

    short = replace(answers.SIMULATIONS["cpu"], longest=3)
    monkeypatch.setitem(answers.SIMULATIONS, "cpu", short)
    lines = [f"{user},extra,q{step},{step % 3}" for step in range(4) for user in "abcdefghij"]
    write_answers(tmp_path, lines=["single,extra,q9,5", *lines], header="user_id,note,question_id,category")
    log = answers.load_answers(tmp_path, "cpu")
    # Of four answers a piece of three is kept, and one of a single answer is left out.
    assert (len(log.training), len(log.held_out), log.questions, log.categories) == (8, 2, 5, 3)
    assert [part.tolist() for part in log.training[0]] == [[0, 1, 2], [0, 1, 2]]


def write_answers(folder: Path, *, lines: list[str], header: str = "user_id,question_id,category") -> None:
    (folder / "answers.csv").write_text("\n".join([header, *lines]) + "\n")


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "line 1 has no column 'user_id', it has nothing"),
        (b"user_id,item,category\n", "line 1 has no column 'question_id', it has user_id,item,category"),
        (b"user_id,question_id,category\n", "0 students have two answers or more, at least 10 are needed"),
        (b"user_id,question_id,category\na,q,1\na,q,high\n", "line 3 has the category 'high', which is not a whole"),
        (b"user_id,question_id,category\na,q,16\n", "line 2 has the category '16', which is not a whole number from 0"),
        (b"user_id,question_id,category\na,q,-1\n", "line 2 has the category '-1', which is not a whole number"),
        (b"user_id,question_id,category\na,q\n", "line 2 has 2 values, the header has 3"),
        (b"user_id,question_id,category\n\n ,q,1\n", "line 3 has an empty user_id"),
        (b"user_id,question_id,category\na,,1\n", "line 2 has an empty question_id"),
        (b"user_id,question_id,category\n\xff\xfe,q,1\n", "is not a csv file in UTF-8"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: bytes, message: str, tmp_path: Path) -> None:
    from answers import load_answers

    (tmp_path / "answers.csv").write_bytes(text)
    with pytest.raises(TargetError) as caught:
        load_answers(tmp_path, "cpu")
    assert message in caught.value.message
    assert str(tmp_path / "answers.csv") in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint


@pytest.mark.usefixtures("example")
def test_too_many_questions_and_a_single_category(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import answers

    write_answers(tmp_path, lines=[f"{user},q{step},0" for step in range(3) for user in range(12)])
    with pytest.raises(TargetError, match="every category is 0"):
        answers.load_answers(tmp_path, "cpu")
    monkeypatch.setattr(answers, "MOST_QUESTIONS", 2)
    with pytest.raises(TargetError, match="has 3 questions, at most 2 are allowed"):
        answers.load_answers(tmp_path, "cpu")


@pytest.mark.usefixtures("example")
def test_a_missing_folder_and_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from answers import Simulation, load_answers, write_simulated

    with pytest.raises(TargetError, match=r"cannot read .*nowhere/answers\.csv: No such file or directory"):
        load_answers(tmp_path / "nowhere", "cpu")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(TargetError, match=r"cannot write .*answers\.csv: Not a directory"):
        write_simulated(Simulation(students=2, shortest=2, longest=3))


@pytest.mark.usefixtures("example")
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import answers

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    simulation = answers.Simulation(students=2, shortest=2, longest=3)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(TargetError, match=r"cannot write .*answers\.csv: No space left on device"):
            answers.write_simulated(simulation)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    first = answers.write_simulated(simulation)
    monkeypatch.setattr(answers, "_CACHE_VERSION", answers._CACHE_VERSION + 1)
    assert answers.write_simulated(simulation) != first


@pytest.mark.usefixtures("example")
def test_the_environment_names_size_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_SIZE", "tpu")
    with pytest.raises(TargetError, match="EXAMPLE_SIZE is 'tpu'") as caught:
        load_workload("workload.py:workload", folder=FOLDER)
    assert caught.value.hint == "it is one of cpu, gpu"
    monkeypatch.setenv("EXAMPLE_SIZE", "cpu")
    monkeypatch.setenv("EXAMPLE_DATA", str(tmp_path))
    with pytest.raises(TargetError, match=r"answers\.csv"):
        load_workload("workload.py:workload", folder=FOLDER).workload.train_dataset()
    monkeypatch.setenv("EXAMPLE_SIZE", "")
    monkeypatch.setenv("EXAMPLE_DATA", "")
    unset: Any = load_workload("workload.py:workload", folder=FOLDER).workload
    assert (unset._folder, unset._size) == (None, "cpu")


def test_the_recipe_is_a_preset_of_the_documented_settings() -> None:
    settings = find_preset(str(FOLDER / "recipe.json")).settings
    assert settings["precision"] == "fp16"
    assert (settings["micro_batch_size"], settings["gradient_accumulation_steps"]) == (64, 2)


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    code: int = import_script().main()
    return code


@pytest.mark.usefixtures("example")
def test_the_script_trains_on_own_answers_and_says_what_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_answers(
        tmp_path, lines=[f"{user},q{step % 5},{(user + step) % 4}" for user in range(12) for step in range(6)]
    )
    assert run_script(monkeypatch, "--data", ".", "--epochs", "2", "--accum", "2", "--batch-size", "4") == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["epoch"] for line in printed] == [1, 2]
    assert {"loss", "categorical_accuracy", "ordinal_accuracy", "kappa", "mae"} < printed[0].keys()
    assert "keys" in torch.load(tmp_path / "knowledge_tracing.pt")
    assert run_script(monkeypatch, "--data", "nowhere") == 2
    said = capsys.readouterr().err
    assert said.startswith("train.py: cannot read nowhere/answers.csv: No such file or directory; answers.csv has a")
    assert said.count("\n") == 1
