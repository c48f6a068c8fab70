"""Students' answers: simulated or read from a csv file, as padded sequences of questions and ordered categories.

answers.csv ─▶ one sequence per student ─▶ cut to the longest ─▶ training students | held-out students
"""

from __future__ import annotations

import csv
import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from autotune.errors import TargetError
from memory_network import PADDING

FILE_NAME = "answers.csv"
COLUMNS = ("user_id", "question_id", "category")
MOST_QUESTIONS, MOST_CATEGORIES = 100_000, 16
LEAST_STUDENTS = 10
# A change of the simulation, or of a constant below, makes files of its own.
_CACHE_VERSION = 1
HELD_OUT_SHARE = 5
"""One student of so many is held out."""

_FORMAT = f"{FILE_NAME} has a header with the columns {','.join(COLUMNS)} and one answer per line, in order of time"

Answers = tuple[Tensor, Tensor]
"""One student's questions and categories, both int64 `[answers]`."""


@dataclass(frozen=True)
class Simulation:
    """Students who answer questions by a generalised partial credit model, and learn a little by it.

    Attributes:
        students: how many.
        shortest: fewest answers of a student.
        longest: most answers of a student.
        questions: each trains and asks for one skill.
        categories: of an answer, from 0.
        skills: latent abilities of a student.
        seed: of everything random.
    """

    students: int
    shortest: int
    longest: int
    questions: int = 399
    categories: int = 4
    skills: int = 8
    seed: int = 1


SIMULATIONS = {
    "cpu": Simulation(students=2_000, shortest=30, longest=100),
    "gpu": Simulation(students=5_000, shortest=50, longest=200),
}
"""By size of the training."""

# Students differ by more than questions do, and mostly in what their skills have in common: who knows a student's
# first answers can tell much of the next. Standard deviations are in units of the latent ability.
_ABILITY_STD, _SHARED_VARIANCE, _LEARNING_PER_ANSWER = 2.0, 0.7, 0.02
_DIFFICULTY_STD, _THRESHOLD_DISTANCE, _THRESHOLD_STD = 0.8, 1.0, 0.3
_LOG_DISCRIMINATION_MEAN, _LOG_DISCRIMINATION_STD = 0.7, 0.3


class AnswerSequences(Dataset[Answers]):
    """One sample per sequence: questions and categories, both int64 `[answers]`."""

    def __init__(self, sequences: Sequence[Answers]) -> None:
        self._sequences = list(sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> Answers:
        return self._sequences[index]


@dataclass(frozen=True)
class AnswerLog:
    """The answers of all students.

    Attributes:
        training: sequences to learn from.
        held_out: sequences of other students.
        questions: number of different questions.
        categories: number of categories.
    """

    training: AnswerSequences
    held_out: AnswerSequences
    questions: int
    categories: int


def pad_answers(samples: Sequence[Answers]) -> Answers:
    """Return questions and categories, int64 `[batch, steps]`, padded to the longest with 0 and `PADDING`."""
    questions = pad_sequence([questions for questions, _ in samples], batch_first=True)
    categories = [categories for _, categories in samples]
    return questions, pad_sequence(categories, batch_first=True, padding_value=PADDING)


@functools.cache
def load_answers(folder: Path | None, size: str) -> AnswerLog:
    """Return the answers in a folder, or simulated ones.

    Args:
        folder: holds `answers.csv`; None to simulate, which is done once and kept in the cache folder.
        size: `cpu` or `gpu`: what is simulated, and to how many answers a sequence is cut.

    Raises:
        TargetError: the file cannot be read or holds too little, or the simulated one cannot be written.
    """
    simulation = SIMULATIONS[size]
    path = (write_simulated(simulation) if folder is None else folder) / FILE_NAME
    students, names = read_students(path)
    if len(students) < LEAST_STUDENTS:
        raise TargetError(
            f"{path}: {len(students)} students have two answers or more, at least {LEAST_STUDENTS} are needed",
            hint=f"{_FORMAT}; a student with one answer is skipped",
        )
    categories = 1 + max(int(categories.max()) for _, categories in students)
    if categories < 2:
        raise TargetError(f"{path}: every category is 0, so there is nothing to predict", hint="see the README")
    # Any order in the file may mean something; held-out and training students are to be alike.
    order = torch.randperm(len(students), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = len(students) // HELD_OUT_SHARE
    parts = [
        AnswerSequences([piece for index in chosen for piece in _cut(students[index], simulation.longest)])
        for chosen in (order[held_out:], order[:held_out])
    ]
    return AnswerLog(training=parts[0], held_out=parts[1], questions=len(names), categories=categories)


def _cut(student: Answers, longest: int) -> Iterator[Answers]:
    for questions, categories in zip(*(torch.split(part, longest) for part in student), strict=True):
        if len(questions) > 1:
            yield questions, categories


def read_students(path: Path) -> tuple[list[Answers], tuple[str, ...]]:
    """Return the sequences of all students with two answers or more, and the questions' names in order of their index.

    Raises:
        TargetError: the file is missing, is not UTF-8 text, lacks a column, or a line has no valid answer.
    """
    rows: dict[str, list[tuple[str, int]]] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for user, question, category in _read_rows(file, path):
                rows.setdefault(user, []).append((question, category))
    except OSError as reason:
        raise TargetError(f"cannot read {path}: {reason.strerror}", hint=_FORMAT) from None
    except (UnicodeDecodeError, csv.Error) as reason:
        raise TargetError(f"{path} is not a csv file in UTF-8: {reason}", hint=_FORMAT) from None
    names = tuple(sorted({question for answers in rows.values() for question, _ in answers}))
    if len(names) > MOST_QUESTIONS:
        raise TargetError(
            f"{path} has {len(names):,} questions, at most {MOST_QUESTIONS:,} are allowed",
            hint="number the skills instead, or leave out questions that are hardly ever asked",
        )
    numbers = {name: index for index, name in enumerate(names)}
    kept = [answers for answers in rows.values() if len(answers) > 1]
    return [_to_tensors(answers, numbers) for answers in kept], names


def _to_tensors(answers: list[tuple[str, int]], numbers: dict[str, int]) -> Answers:
    questions, categories = zip(*answers, strict=True)
    return torch.tensor([numbers[question] for question in questions]), torch.tensor(categories)


def _read_rows(file: Iterator[str], path: Path) -> Iterator[tuple[str, str, int]]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        found = ",".join(header) or "nothing"
        raise TargetError(f"{path}: line 1 has no column {missing[0]!r}, it has {found}", hint=_FORMAT)
    user, question, category = (header.index(name) for name in COLUMNS)
    for row in reader:
        if not row:
            continue
        if len(row) != len(header):
            message = f"{path}: line {reader.line_num} has {len(row)} values, the header has {len(header)}"
            raise TargetError(message, hint=_FORMAT)
        for name, index in (("user_id", user), ("question_id", question)):
            if not row[index].strip():
                raise TargetError(f"{path}: line {reader.line_num} has an empty {name}", hint=_FORMAT)
        yield row[user].strip(), row[question].strip(), _read_category(row[category], path, reader.line_num)


def _read_category(text: str, path: Path, line: int) -> int:
    digits = text.strip()
    if digits.isascii() and digits.isdigit() and len(digits) <= 2 and int(digits) < MOST_CATEGORIES:
        return int(digits)
    raise TargetError(
        f"{path}: line {line} has the category {text!r}, which is not a whole number from 0 to {MOST_CATEGORIES - 1}",
        hint="number the categories 0, 1, 2, ... from the worst answer to the best",
    )


def write_simulated(simulation: Simulation) -> Path:
    """Return the cache folder that holds the answers of a simulation; they are written at first use.

    Raises:
        TargetError: the cache folder cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotune-examples"
    folder = cache / "-".join([f"knowledge-tracing-v{_CACHE_VERSION}", *map(str, astuple(simulation))])
    path = folder / FILE_NAME
    try:
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            _write_answers(path, simulation)
    except OSError as reason:
        hint = "set XDG_CACHE_HOME to a folder that can be written, or EXAMPLE_DATA to answers of your own"
        raise TargetError(f"cannot write {path}: {reason.strerror}", hint=hint) from None
    return folder


def _write_answers(path: Path, simulation: Simulation) -> None:
    questions, categories, lengths = simulate_answers(simulation)
    # Several processes may get here at once: each writes a file of its own, the last one to finish stays.
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for student, length in enumerate(lengths.tolist()):
                answers = zip(questions[student, :length].tolist(), categories[student, :length].tolist(), strict=True)
                writer.writerows((student, question, category) for question, category in answers)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def simulate_answers(simulation: Simulation) -> tuple[Tensor, Tensor, Tensor]:
    """Return simulated questions and categories, int64 `[students, longest]`, and lengths `[students]`.

    An answer follows the generalised partial credit model (Muraki 1992) at the student's ability in the question's
    skill; each answer raises that ability a little.
    """
    generator = torch.Generator().manual_seed(simulation.seed)
    shape = (simulation.students, simulation.longest)
    questions = torch.randint(simulation.questions, shape, generator=generator)
    lengths = torch.randint(simulation.shortest, simulation.longest + 1, shape[:1], generator=generator)
    skill_of = torch.randint(simulation.skills, (simulation.questions,), generator=generator)
    discrimination, thresholds = _draw_questions(simulation, generator)
    shared = torch.randn(simulation.students, 1, generator=generator) * _SHARED_VARIANCE**0.5
    own = torch.randn(simulation.students, simulation.skills, generator=generator) * (1 - _SHARED_VARIANCE) ** 0.5
    ability = _ABILITY_STD * (shared + own)
    categories = torch.empty_like(questions)
    rows = torch.arange(simulation.students)
    for step, asked in enumerate(questions.unbind(1)):
        distances = ability[rows, skill_of[asked], None] - thresholds[asked]
        logits = F.pad(torch.cumsum(discrimination[asked] * distances, dim=1), (1, 0))
        reached = torch.softmax(logits, dim=1).cumsum(dim=1)[:, :-1]
        categories[:, step] = (torch.rand(simulation.students, 1, generator=generator) > reached).sum(dim=1)
        ability[rows, skill_of[asked]] += _LEARNING_PER_ANSWER
    return questions, categories, lengths


def _draw_questions(simulation: Simulation, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return discriminations `[questions, 1]` and ordered thresholds `[questions, categories - 1]`."""
    spread = torch.randn(simulation.questions, 1, generator=generator)
    difficulty = _DIFFICULTY_STD * torch.randn(simulation.questions, 1, generator=generator)
    noise = _THRESHOLD_STD * torch.randn(simulation.questions, simulation.categories - 1, generator=generator)
    places = _THRESHOLD_DISTANCE * (torch.arange(1, simulation.categories) - simulation.categories / 2)
    thresholds = (difficulty + places + noise).sort(dim=1).values
    return torch.exp(_LOG_DISCRIMINATION_MEAN + _LOG_DISCRIMINATION_STD * spread), thresholds
