from __future__ import annotations

import importlib
import importlib.util
import json
import math
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._utils import ExceptionWrapper

from autotune.errors import TargetError
from autotune.records.codec import read_record
from autotune.records.search import Preset
from autotune.targets.load import load_workload
from autotune.targets.workload import LoadedWorkload, Metric

FOLDER = Path(__file__).parents[2] / "examples" / "detector"
MODULES = ("banknotes", "detection_boxes", "detection_loss", "detector_training", "mean_average_precision")


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedWorkload]:
    path, workload = list(sys.path), sys.modules.get("workload")
    patch = pytest.MonkeyPatch()
    patch.delenv("EXAMPLE_SIZE", raising=False)
    patch.delenv("EXAMPLE_DATA", raising=False)
    found = load_workload("workload.py:workload", folder=FOLDER)
    patch.undo()
    yield found
    sys.path[:] = path
    sys.modules.pop("workload", None)
    if workload is not None:
        sys.modules["workload"] = workload


@pytest.fixture(scope="module")
def parts(loaded: LoadedWorkload) -> dict[str, Any]:
    return {name: importlib.import_module(name) for name in MODULES}


@pytest.fixture(scope="module")
def script(loaded: LoadedWorkload) -> ModuleType:
    spec = importlib.util.spec_from_file_location("detector_train", FOLDER / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        (tmp_path / "images" / split).mkdir(parents=True)
        (tmp_path / "labels" / split).mkdir(parents=True)
        for name, suffix in (("a", "png"), ("b", "jpg")):
            image.new("RGB", (80, 40), (200, 10, 10)).save(tmp_path / "images" / split / f"{name}.{suffix}")
            (tmp_path / "labels" / split / f"{name}.txt").write_text("1 0.5 0.5 0.25 0.5\n")
    return tmp_path


def boxes_of(parts: dict[str, Any], corners: list[list[float]], labels: list[int], scores: Any = None) -> Any:
    return parts["mean_average_precision"].Boxes(
        torch.tensor(corners).view(-1, 4), torch.tensor(labels), None if scores is None else torch.tensor(scores)
    )


def draw_batch(loaded: LoadedWorkload, count: int, *, seed: int) -> Any:
    torch.manual_seed(seed)
    dataset: Any = loaded.workload.train_dataset()
    assert loaded.collate is not None
    return loaded.collate([dataset[index] for index in range(count)])


def test_it_is_a_workload(loaded: LoadedWorkload) -> None:
    assert loaded.metrics == (Metric(name="map50", direction="maximize"),)
    assert loaded.baseline.micro_batch_size == 4
    assert loaded.baseline.num_workers == 0
    assert loaded.drop_last


def test_the_recipe_is_a_preset() -> None:
    settings = read_record(FOLDER / "recipe.json", Preset).settings
    assert settings["precision"] == "fp16"
    assert settings["micro_batch_size"] * settings["gradient_accumulation_steps"] == 8


def test_another_size_is_refused(loaded: LoadedWorkload, parts: dict[str, Any]) -> None:
    assert parts["detector_training"].find_size("gpu").batch_size == 16
    with pytest.raises(TargetError, match="EXAMPLE_SIZE is 'tpu'") as caught:
        parts["detector_training"].find_size("tpu")
    assert caught.value.hint == "it must be cpu or gpu"


def test_training_pictures_are_new_and_held_out_ones_fixed(loaded: LoadedWorkload, parts: dict[str, Any]) -> None:
    data = parts["banknotes"].draw_banknotes(image_size=64, train_images=8, held_out_images=4)
    torch.manual_seed(3)
    one, two = data.train[0], data.train[0]
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(one, pickle.loads(pickle.dumps(data.train))[5], strict=True))
    assert not torch.equal(one[0], two[0])
    before = torch.get_rng_state()
    fixed = data.held_out[2]
    again = parts["banknotes"].draw_banknotes(image_size=64, train_images=8, held_out_images=4).held_out[2]
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(fixed, again, strict=True))
    assert not torch.equal(fixed[0], data.held_out[3][0])
    with pytest.raises(IndexError):
        data.held_out[4]


def test_boxes_lie_in_the_picture_around_what_is_seen(loaded: LoadedWorkload) -> None:
    dataset: Any = loaded.workload.train_dataset()
    torch.manual_seed(0)
    counts = []
    for _ in range(20):
        image, boxes, labels = dataset[0]
        assert image.shape == (3, 160, 160)
        assert 0.0 <= image.min() < image.max() <= 1.0
        assert boxes.shape == (len(labels), 4)
        low, high = boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2
        assert (low > -1e-6).all()
        assert (high < 1 + 1e-6).all()
        assert (boxes[:, 2:] > 0.02).all()
        counts.append(len(labels))
    assert 1 <= min(counts) <= max(counts) == 3


def test_a_box_surrounds_the_pixels_of_a_note(loaded: LoadedWorkload) -> None:
    scenes = importlib.import_module("banknote_scenes")
    owner = torch.zeros(10, 10, dtype=torch.long)
    owner[2:6, 1:9] = 1
    owner[4:6, 1:9] = 2
    boxes, kept = scenes._find_boxes(owner, [32, 16, 40])
    assert kept == [0, 1]  # nothing is seen of the third
    torch.testing.assert_close(boxes, torch.tensor([[0.5, 0.3, 0.8, 0.2], [0.5, 0.5, 0.8, 0.2]]))
    assert scenes._find_boxes(owner, [48, 100])[1] == [0]  # less than the share that has to be seen


def test_collation_fills_up_boxes(parts: dict[str, Any]) -> None:
    image = torch.zeros(3, 32, 32)
    two = (image, torch.full((2, 4), 0.5), torch.tensor([3, 4]))
    none = (image, torch.empty(0, 4), torch.empty(0, dtype=torch.long))
    images, boxes, labels = parts["banknotes"].collate_banknotes([two, none])
    assert images.shape == (2, 3, 32, 32)
    assert boxes.shape == (2, 2, 4)
    assert labels.tolist() == [[3, 4], [-1, -1]]
    assert parts["banknotes"].collate_banknotes([none])[2].tolist() == [[-1]]


def test_cells_and_the_boxes_they_stand_for(parts: dict[str, Any]) -> None:
    cells = parts["detection_boxes"].locate_cells(64, 32, device=torch.device("cpu"))
    assert cells.centres.shape == (8 * 4 + 4 * 2 + 2, 2)
    assert cells.centres[1].tolist() == [12.0, 4.0]
    assert cells.centres[-1].tolist() == [16.0, 48.0]
    raw = torch.zeros(1, 42, 7)
    raw[0, -1, :4] = torch.tensor([0.5, -0.25, math.log(2.0), 0.0])
    boxes = parts["detection_boxes"].decode_boxes(raw, cells)
    assert boxes[0, 0].tolist() == [0.0, 0.0, 8.0, 8.0]
    torch.testing.assert_close(boxes[0, -1], torch.tensor([0.0, 24.0, 64.0, 56.0]))


def test_overlaps_are_those_worked_out_by_hand(parts: dict[str, Any]) -> None:
    one, other = torch.tensor([0.0, 0.0, 4.0, 2.0]), torch.tensor([2.0, 0.0, 4.0, 4.0])
    assert float(parts["detection_boxes"].measure_overlaps(one, other)) == pytest.approx(4 / 12)
    # Centres (2, 1) and (3, 2): d^2 = 2; around both 4 x 4: c^2 = 32; aspect ratios 2 and 1/2.
    slant = 4 / math.pi**2 * (math.atan(0.5) - math.atan(2.0)) ** 2
    expected = 4 / 12 - 2 / 32 - slant**2 / (1 - 4 / 12 + slant)
    assert float(parts["detection_boxes"].measure_complete_overlaps(one, other)) == pytest.approx(expected)
    assert float(parts["detection_boxes"].measure_complete_overlaps(one, one)) == pytest.approx(1.0)


def test_cells_around_a_centre_are_to_find_the_smaller_box_on_the_stride_of_its_size(parts: dict[str, Any]) -> None:
    cells = parts["detection_boxes"].locate_cells(160, 160, device=torch.device("cpu"))
    corners = torch.tensor([[[50.0, 50.0, 110.0, 110.0], [56.0, 56.0, 104.0, 104.0], [10.0, 10.0, 30.0, 30.0]]])
    assigned = parts["detection_loss"].assign_cells(corners, torch.tensor([[True, True, False]]), cells)
    assert set(cells.strides[assigned.positive[0]].tolist()) == {16.0}
    # Centres 72 and 88 are 8 pixels from 80, 56 and 104 are 24, which is no longer less than 1.5 strides.
    assert sorted(cells.centres[assigned.positive[0]].tolist()) == [[72, 72], [72, 88], [88, 72], [88, 88]]
    assert assigned.matched[assigned.positive].unique().tolist() == [1]


def test_perfect_predictions_cost_nothing(parts: dict[str, Any]) -> None:
    boxes, labels = torch.tensor([[[0.5, 0.5, 0.4, 0.3]]]), torch.tensor([[1]])
    cells = parts["detection_boxes"].locate_cells(160, 160, device=torch.device("cpu"))
    corners = parts["detection_boxes"].to_corners(boxes, image_height=160, image_width=160)
    positive = parts["detection_loss"].assign_cells(corners, labels >= 0, cells).positive
    raw = torch.zeros(1, len(cells.strides), 7)
    raw[..., :2] = (80 - cells.centres) / cells.strides[:, None]
    raw[..., 2:4] = (torch.tensor([64.0, 48.0]) / cells.strides[:, None]).log()
    raw[..., 4] = torch.where(positive, 30.0, -30.0)
    raw[..., 6] = 30.0
    compute = parts["detection_loss"].compute_detection_loss
    loss, count = compute(raw, boxes, labels, size=(160, 160))
    assert float(loss) == pytest.approx(0.0, abs=1e-5)
    assert int(count) == int(positive.sum()) == 4
    assert float(compute(raw, boxes, 0 * labels, size=(160, 160))[0]) == pytest.approx(3.0 * 30, rel=1e-4)


def test_micro_batches_add_up_where_no_statistics_are_shared(loaded: LoadedWorkload) -> None:
    images, boxes, labels = draw_batch(loaded, 4, seed=1)
    torch.manual_seed(0)
    model = loaded.workload.build_model().eval()
    pairs: list[Any] = [
        loaded.workload.compute_loss(model, (images[part], boxes[part], labels[part]))
        for part in (slice(0, 1), slice(1, 4), slice(0, 4))
    ]
    (one, first), (other, second), (whole, total) = [(loss.item(), count.item()) for loss, count in pairs]
    assert first + second == total > 4
    assert (one * first + other * second) / total == pytest.approx(whole, rel=1e-5)


def test_a_batch_without_boxes_still_has_finite_gradients(loaded: LoadedWorkload) -> None:
    model = loaded.workload.build_model()
    empty = (torch.rand(2, 3, 64, 64), torch.zeros(2, 1, 4), torch.full((2, 1), -1))
    loss, count = loaded.workload.compute_loss(model, empty)  # type: ignore[misc]
    loss.backward()
    assert float(count) == 1.0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_channels_last_gives_the_same(loaded: LoadedWorkload) -> None:
    torch.manual_seed(0)
    model = loaded.workload.build_model().eval()
    images = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        plain = model(images)
        model.to(memory_format=torch.channels_last)
        torch.testing.assert_close(model(images.contiguous(memory_format=torch.channels_last)), plain)
    assert plain.shape == (1, 8 * 12 + 4 * 6 + 2 * 3, 10)


def test_suppression_is_by_class(parts: dict[str, Any]) -> None:
    corners = [[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 9.0], [0.0, 0.0, 10.0, 9.5], [20.0, 0.0, 30.0, 10.0]]
    candidates = boxes_of(parts, corners, [0, 0, 1, 0], [0.5, 0.9, 0.3, 0.001])
    kept = parts["mean_average_precision"].suppress_overlaps(candidates)
    assert kept.scores.tolist() == pytest.approx([0.9, 0.3])
    assert kept.labels.tolist() == [0, 1]


def test_average_precision_is_the_area_worked_out_by_hand(parts: dict[str, Any]) -> None:
    compute = parts["mean_average_precision"].compute_average_precision
    hits = torch.tensor([True, False, True, True])
    # Precisions 1, 1/2, 2/3, 3/4 at recalls 1/5, 1/5, 2/5, 3/5; raised from the right: 1, 3/4, 3/4.
    assert compute(torch.tensor([0.9, 0.8, 0.7, 0.6]), hits, truths=5) == pytest.approx((1 + 0.75 + 0.75) / 5)
    assert compute(torch.tensor([0.6, 0.8, 0.7, 0.9]), hits, truths=3) == pytest.approx((1 + 0.75 + 0.75) / 3)
    assert compute(torch.empty(0), torch.empty(0, dtype=torch.bool), truths=3) == 0.0


def test_the_mean_is_over_the_classes_that_there_are(parts: dict[str, Any]) -> None:
    compute = parts["mean_average_precision"].compute_mean_average_precision
    left, right = [0.0, 0.0, 10.0, 10.0], [20.0, 0.0, 30.0, 10.0]
    truth = [boxes_of(parts, [left, right], [0, 1]), boxes_of(parts, [left], [0])]
    # Class 0: a hit, a second detection of the same box, none in the second image: 1/2. Class 1: too small an overlap.
    found = [
        boxes_of(parts, [left, left, [20.0, 0.0, 24.0, 10.0]], [0, 0, 1], [0.9, 0.8, 0.7]),
        boxes_of(parts, [right], [7], [0.99]),
    ]
    assert compute(found, truth) == pytest.approx((0.5 + 0.0) / 2)
    assert compute(found, truth, least_overlap=0.4) == pytest.approx((0.5 + 1.0) / 2)
    assert math.isnan(compute(found, [boxes_of(parts, [], []), boxes_of(parts, [], [])]))


def test_a_taken_box_leaves_the_next_best_one(parts: dict[str, Any]) -> None:
    match = parts["mean_average_precision"].match_detections
    truth = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 8.0]])
    found = torch.tensor([[0.0, 0.0, 10.0, 9.5], [0.0, 0.0, 10.0, 9.6], [0.0, 0.0, 10.0, 9.7]])
    assert match(found, truth, least_overlap=0.5).tolist() == [True, True, False]


def train_script_and_workload(
    loaded: LoadedWorkload, script: ModuleType, batches: list[Any]
) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = loaded.workload.build_model().train()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = loaded.workload.build_optimizer(model)
    scheduler = loaded.build_scheduler(optimizer)
    assert scheduler is not None
    losses = []
    for batch in batches:
        loss: Tensor = loaded.workload.compute_loss(model, batch)[0]
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    size = script.SIZES["cpu"]
    again = script.build_detector(size, num_classes=5)
    again.load_state_dict(start)
    optimizer = script.build_optimizer(again, learning_rate=size.learning_rate)
    scheduler = script.build_scheduler(optimizer)
    own = [script.train_epoch(again, [batch], optimizer, scheduler, accum=1) for batch in batches[:3]]
    return losses, own


def test_the_loss_falls_and_is_the_scripts_own(loaded: LoadedWorkload, script: ModuleType) -> None:
    images, boxes, labels = draw_batch(loaded, 2, seed=7)
    batches = [(F.interpolate(images, size=96), boxes, labels)] * 8
    losses, own = train_script_and_workload(loaded, script, batches)
    assert losses[:3] == pytest.approx(own, rel=1e-6)
    assert losses[-1] < 0.9 * losses[0]


def draw_uneven_batches(loaded: LoadedWorkload) -> list[Any]:
    """Return two batches, the second with a single box."""
    images, boxes, labels = draw_batch(loaded, 2, seed=7)
    images, single = F.interpolate(images, size=96), torch.full_like(labels, -1)
    single[0, 0] = labels[0, 0]
    return [(images, boxes, labels), (images.flip(0), boxes, single)]


def test_accumulated_batches_weigh_by_their_positive_cells(loaded: LoadedWorkload, script: ModuleType) -> None:
    torch.manual_seed(0)
    model = loaded.workload.build_model().train()
    batches = draw_uneven_batches(loaded)
    pairs: list[Any] = [loaded.workload.compute_loss(model, batch) for batch in batches]
    assert pairs[0][1] > pairs[1][1] > 1
    mean = sum(loss * count for loss, count in pairs) / sum(count for _, count in pairs)
    expected = torch.autograd.grad(mean, list(model.parameters()))
    assert float(script.accumulate_gradients(model, batches)) == pytest.approx(float(mean.detach()), rel=1e-5)
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    wanted = torch.cat([gradient.flatten() for gradient in expected])
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4


def test_the_script_drops_what_makes_no_whole_step(loaded: LoadedWorkload, script: ModuleType) -> None:
    torch.manual_seed(0)
    model = loaded.workload.build_model()
    optimizer = script.build_optimizer(model, learning_rate=1e-3)
    scheduler = script.build_scheduler(optimizer)
    batches = draw_uneven_batches(loaded)
    script.train_epoch(model, [*batches, batches[0]], optimizer, scheduler, accum=2)
    assert scheduler.last_epoch == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    loader = script.open_loader(script.find_banknotes(None, script.SIZES["cpu"]), 4, workers=0)
    assert (loader.batch_size, loader.drop_last) == (loaded.baseline.micro_batch_size, loaded.drop_last)


def answer_with(parts: dict[str, Any], samples: list[Any], *, shifts: list[float]) -> Tensor:
    """Return raw predictions `[images, cells, 8]` of exactly the true boxes, moved by a share of their size."""
    cells = parts["detection_boxes"].locate_cells(160, 160, device=torch.device("cpu"))
    raw = torch.full((len(samples), len(cells.strides), 8), -30.0)
    for row, (_, boxes, labels), shift in zip(raw, samples, shifts, strict=True):
        for cell, (box, label) in enumerate(zip(160 * boxes, labels.tolist(), strict=True)):
            row[cell, :2] = (box[:2] + shift * box[2:] - cells.centres[cell]) / cells.strides[cell]
            row[cell, 2:4] = (box[2:] / cells.strides[cell]).log()
            row[cell, 4] = row[cell, 5 + label] = 30.0
    return raw


@pytest.mark.parametrize(
    ("shifts", "expected"),
    [
        ([0.0, 0.0], 1.0),
        ([0.1, 0.1], 1.0),  # overlaps of 0.81 / 1.19
        ([0.4, 0.4], 0.0),  # overlaps of 0.36 / 1.64
        ([0.0, 0.4], 0.5),  # class 0 is found once of twice, class 1 always, class 2 never
    ],
)
def test_right_predictions_score_and_shifted_ones_less(
    parts: dict[str, Any], shifts: list[float], expected: float
) -> None:
    image = torch.zeros(3, 160, 160)
    samples = [
        (image, torch.tensor([[0.3, 0.3, 0.2, 0.3], [0.7, 0.6, 0.3, 0.2]]), torch.tensor([0, 1])),
        (image, torch.tensor([[0.5, 0.2, 0.4, 0.2], [0.5, 0.7, 0.2, 0.2]]), torch.tensor([0, 2])),
    ]
    answers = iter(answer_with(parts, samples, shifts=shifts).split(1))
    found = parts["detector_training"].evaluate_detector(
        lambda _images: next(answers), samples, device=torch.device("cpu"), batch_size=1
    )
    assert found == pytest.approx(expected)


def test_an_untrained_model_finds_next_to_nothing(loaded: LoadedWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded.workload.banknotes.held_out, "_length", 6)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = loaded.workload.build_model().eval()
    before = torch.get_rng_state()
    with torch.inference_mode():
        values = [loaded.evaluate(model, torch.device("cpu"), batch_size=size)["map50"] for size in (4, 6)]
    assert torch.equal(before, torch.get_rng_state())
    assert 0.0 <= values[0] < 0.1
    assert values[0] == pytest.approx(values[1], abs=1e-6)


def test_the_script_trains_prints_and_saves(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {**script.SIZES["cpu"].__dict__, "image_size": 64, "width": 8, "train_images": 8, "held_out_images": 2}
    monkeypatch.setitem(script.SIZES, "cpu", type(script.SIZES["cpu"])(**fields))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "2", "--batch-size", "2", "--accum", "2"])
    script.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert all(0.0 <= line["map50"] <= 1.0 and line["train_loss"] > 0 for line in lines)
    assert (tmp_path / script.CHECKPOINT).is_file()


def test_photographs_are_fitted_into_squares(parts: dict[str, Any], photographs: Path) -> None:
    data = parts["banknotes"].open_banknotes(photographs, image_size=32)
    assert data.class_names == ("0", "1")
    image, boxes, labels = data.held_out[0]
    assert image.shape == (3, 32, 32)
    torch.testing.assert_close(image[:, 16, 16], torch.tensor([200.0, 10.0, 10.0]) / 255)
    assert image[:, 2, 16].tolist() == pytest.approx([114 / 255] * 3)
    # 80 x 40 pixels become 32 x 16 between borders of 8: half of the height is a quarter of the square's.
    torch.testing.assert_close(boxes, torch.tensor([[0.5, 0.5, 0.25, 0.25]]))
    assert labels.tolist() == [1]
    torch.manual_seed(0)
    varied = [data.train[0] for _ in range(4)]
    assert len({float(image.mean()) for image, _, _ in varied}) == 4


def test_mirroring_mirrors_the_boxes(parts: dict[str, Any], photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (photographs / "labels" / "train" / "a.txt").write_text("0 0.2 0.5 0.1 0.5\n")
    data = parts["banknotes"].open_banknotes(photographs, image_size=32)
    monkeypatch.setattr(torch, "rand", lambda _count: torch.tensor([0.1, 0.5]))
    assert data.train[0][1][0].tolist() == pytest.approx([0.8, 0.5, 0.1, 0.25])
    monkeypatch.setattr(torch, "rand", lambda _count: torch.tensor([0.9, 0.5]))
    assert data.train[0][1][0].tolist() == pytest.approx([0.2, 0.5, 0.1, 0.25])


def test_a_photograph_is_turned_as_its_labels_were_drawn(parts: dict[str, Any], tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    lying = pil.new("RGB", (80, 40), (200, 10, 10))
    lying.paste((10, 10, 200), (0, 0, 40, 40))  # blue at its left
    orientation = pil.Exif()
    orientation[0x0112] = 6  # to be turned clockwise by a quarter: left becomes top
    lying.save(tmp_path / "a.png", exif=orientation)
    image = parts["banknotes"].read_image(tmp_path / "a.png")
    assert image.shape == (3, 80, 40)
    torch.testing.assert_close(image[:, 10, 20], torch.tensor([10.0, 10.0, 200.0]) / 255)
    torch.testing.assert_close(image[:, 70, 20], torch.tensor([200.0, 10.0, 10.0]) / 255)


def test_class_names_are_read(parts: dict[str, Any], photographs: Path) -> None:
    (photographs / "classes.txt").write_text("five\nten\n\ntwenty\n")
    assert parts["banknotes"].open_banknotes(photographs, image_size=32).class_names == ("five", "ten", "twenty")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1 0.5 0.5 0.2", r"a\.txt, line 3: '1 0.5 0.5 0.2' has 4 columns, not 5"),
        ("ten 0.5 0.5 0.2 0.2", r"a\.txt, line 3: 'ten .*' is not a class and four numbers"),
        ("1 0.5 x 0.2 0.2", r"a\.txt, line 3: .* is not a class and four numbers"),
        ("-1 0.5 0.5 0.2 0.2", r"a\.txt, line 3: class -1"),
        ("2 0.5 0.5 0.2 0.2", r"a\.txt, line 3: class 2"),
        ("1 1.5 0.5 0.2 0.2", r"a\.txt, line 3: cx is 1\.5"),
        ("1 0.5 0.5 0 0.2", r"a\.txt, line 3: width is 0"),
        ("1 0.5 0.5 0.2 nan", r"a\.txt, line 3: height is nan"),
    ],
)
def test_a_bad_line_is_named(parts: dict[str, Any], photographs: Path, line: str, said: str) -> None:
    (photographs / "classes.txt").write_text("five\nten\n")
    (photographs / "labels" / "train" / "a.txt").write_text(f"1 0.5 0.5 0.2 0.2\n\n{line}\n")
    with pytest.raises(TargetError, match=said) as caught:
        parts["banknotes"].open_banknotes(photographs, image_size=32)
    assert caught.value.hint


@pytest.mark.parametrize("label", ["1000", "1000000000", "9" * 400])
def test_a_class_without_a_name_is_limited(parts: dict[str, Any], photographs: Path, label: str) -> None:
    (photographs / "labels" / "train" / "a.txt").write_text("999 0.5 0.5 0.2 0.2\n")
    assert len(parts["banknotes"].open_banknotes(photographs, image_size=32).class_names) == 1_000
    (photographs / "labels" / "train" / "a.txt").write_text(f"{label} 0.5 0.5 0.2 0.2\n")
    with pytest.raises(TargetError, match=rf"a\.txt, line 1: class {label[:20]}$") as caught:
        parts["banknotes"].open_banknotes(photographs, image_size=32)
    assert caught.value.hint == "it must be 0 to 999"
    (photographs / "classes.txt").write_text("note\n" * 1_001)
    with pytest.raises(TargetError, match=r"classes\.txt has 1,001 names"):
        parts["banknotes"].open_banknotes(photographs, image_size=32)


def test_a_label_file_that_cannot_be_read_is_named(parts: dict[str, Any], photographs: Path) -> None:
    path = photographs / "labels" / "train" / "a.txt"
    path.unlink()
    path.mkdir()
    with pytest.raises(TargetError, match=r"a\.txt cannot be read: Is a directory"):
        parts["banknotes"].open_banknotes(photographs, image_size=32)


def test_what_is_missing_is_named(parts: dict[str, Any], photographs: Path, tmp_path: Path) -> None:
    def said(folder: Path = photographs) -> str:
        with pytest.raises(TargetError) as caught:
            parts["banknotes"].open_banknotes(folder, image_size=32)
        assert caught.value.hint
        assert "\n" not in caught.value.message
        return caught.value.message

    assert said(tmp_path / "nowhere").endswith("images/train is not a folder")
    (photographs / "classes.txt").write_text("\n")
    assert said().endswith("classes.txt is empty")
    (photographs / "classes.txt").unlink()
    for path in (photographs / "labels" / "val").iterdir():
        path.unlink()
    assert said().endswith("labels/val: no file has a box")
    (photographs / "labels" / "val").rmdir()
    assert said().endswith("labels/val is not a folder")
    for path in (photographs / "images" / "val").iterdir():
        path.unlink()
    assert said().endswith("images/val has no image")


def test_an_image_without_a_label_file_is_background(parts: dict[str, Any], photographs: Path) -> None:
    (photographs / "labels" / "train" / "b.txt").unlink(missing_ok=True)
    data = parts["banknotes"].open_banknotes(photographs, image_size=32)
    assert [len(data.train[index][2]) > 0 for index in range(2)] == [True, False]


def test_a_broken_image_is_named(parts: dict[str, Any], photographs: Path) -> None:
    (photographs / "images" / "val" / "a.png").write_bytes(b"no image")
    with pytest.raises(TargetError, match=r"a\.png cannot be read as an image"):
        parts["banknotes"].open_banknotes(photographs, image_size=32).held_out[0]


def test_a_huge_image_is_refused(parts: dict[str, Any], photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 1_000)
    with pytest.raises(TargetError, match=r"a\.png cannot be read as an image: .*3200 pixels"):
        parts["banknotes"].read_image(photographs / "images" / "val" / "a.png")


def test_missing_pillow_is_said_with_the_command_to_run(
    parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(TargetError, match="Pillow, which is not installed") as caught:
        parts["banknotes"].open_banknotes(tmp_path, image_size=32)
    assert caught.value.hint == "pip install pillow"


def test_the_script_says_it_in_one_line(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL")
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_a_worker_s_error_is_said_in_one_line(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        try:
            raise TargetError("a.png cannot be read as an image: it is torn", hint="replace it")
        except TargetError:
            wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
        wrapped.reraise()

    monkeypatch.setattr(script, "find_banknotes", fail)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert capsys.readouterr().err == "error: a.png cannot be read as an image: it is torn\n"


@pytest.mark.parametrize("empty", ["EXAMPLE_SIZE", "EXAMPLE_DATA"])
def test_an_empty_variable_counts_as_unset(
    loaded: LoadedWorkload, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, empty: str
) -> None:
    for name in ("EXAMPLE_SIZE", "EXAMPLE_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(empty, "")
    found = sys.modules[type(loaded.workload).__module__].read_environment()
    assert found._size == parts["detector_training"].SIZES["cpu"]
    assert found._folder is None
