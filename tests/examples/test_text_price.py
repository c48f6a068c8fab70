from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.engine.activation_checkpointing import apply_activation_checkpointing
from autotune.errors import TargetError
from autotune.presets import find_preset
from autotune.records.config import TrainConfig
from autotune.targets.load import load_workload
from autotune.targets.workload import LoadedWorkload, Metric

FOLDER = Path(__file__).parents[2] / "examples" / "text_price"
HEADER = "text,price,grams\n"
LINES = [f'"a plain {kind} mug, no {number}",{5 + number}.5,{200 + number}\n' for number, kind in enumerate("abcd" * 6)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedWorkload]:
    """The workload, made small, with a cache of its own."""
    paths, module = list(sys.path), sys.modules.get("workload")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in ("EXAMPLE_DATA", "EXAMPLE_SIZE", "EXAMPLE_ENCODER"):
            patch.delenv(name, raising=False)
        found = load_workload("workload.py:workload", folder=FOLDER)
        import price_regression

        size = dataclasses.replace(price_regression.SIZES["cpu"], simulated=700, limit=96, layers=2, width=32, heads=2)
        patch.setitem(price_regression.SIZES, "cpu", size)
        patch.setattr(found.workload, "_data", price_regression.PriceData(None, size))
        yield found
    sys.path[:] = paths
    sys.modules.pop("workload", None)
    if module is not None:
        sys.modules["workload"] = module


@pytest.fixture
def workload(loaded: LoadedWorkload) -> Iterator[Any]:
    yield loaded.workload
    loaded.set_knobs(loaded.baseline)


@pytest.fixture
def script(loaded: LoadedWorkload) -> Any:
    spec = importlib.util.spec_from_file_location("text_price_train", FOLDER / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def take_batch(workload: Any, count: int = 8, *, longest: int = 96) -> Any:
    dataset = workload.train_dataset()
    samples = [dataset[index] for index in range(3 * count)]
    return workload.collate([sample for sample in samples if len(sample.token_ids) <= longest][:count])


def read_gradients(workload: Any, model: nn.Module, batch: Any) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    loss = workload.compute_loss(model, batch)
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_it_is_a_workload(loaded: LoadedWorkload) -> None:
    assert loaded.metrics == (Metric(name="smape", direction="minimize"),)
    assert loaded.baseline.effective_batch_size == 8
    assert loaded.baseline.user_knobs == {"padding": "max-length", "feature_cache": False}
    assert loaded.knob_numerics == {"padding": "rounding", "feature_cache": "exact"}
    assert loaded.gradient_clip_norm == 1.0


def test_it_learns(loaded: LoadedWorkload, workload: Any) -> None:
    torch.manual_seed(0)
    model, dataset = workload.build_model(), workload.train_dataset()
    with torch.no_grad():
        before = loaded.evaluate(model.eval(), torch.device("cpu"))["smape"]
    model.train()
    workload.padding = "longest"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # it is a small model here
    scheduler, losses = workload.build_scheduler(optimizer), []
    for step in range(60):
        batch = workload.collate([dataset[(8 * step + k) % len(dataset)] for k in range(8)])
        loss = workload.compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        after = loaded.evaluate(model.eval(), torch.device("cpu"))["smape"]
    assert sum(losses[-15:]) < 0.7 * sum(losses[:15])
    assert 10 < after < 0.8 * before < 100


def test_smape_by_hand(workload: Any) -> None:
    from price_regression import smape

    actual, predicted = torch.tensor([10.0, 20.0, 5.0]), torch.tensor([10.0, 10.0, 15.0])
    assert smape(predicted, actual) == pytest.approx((0 + 100 * 10 / 15 + 100 * 10 / 10) / 3)
    assert smape(actual, predicted) == pytest.approx(smape(predicted, actual))


@pytest.mark.parametrize("padding", ["longest", "grouped"])
def test_padding_changes_nothing_but_rounding(workload: Any, padding: str) -> None:
    torch.manual_seed(0)
    model, batch = workload.build_model().eval(), take_batch(workload, 16, longest=80)
    expected_loss, expected = read_gradients(workload, model, batch)
    shapes: list[torch.Size] = []
    model.register_forward_pre_hook(lambda _model, inputs: shapes.append(inputs[0].shape))
    workload.padding = padding
    loss, gradients = read_gradients(workload, model, batch)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert float((gradients - expected).norm() / expected.norm()) < 1e-5
    assert (len(shapes) > 1) == (padding == "grouped")
    assert sum(math.prod(shape) for shape in shapes) < batch.token_ids.numel()


def test_a_group_ends_where_half_the_length_is_reached(workload: Any) -> None:
    from price_regression import cut_rows

    lengths = (90, 60, 46, 45, 30, 22, 9)
    found = [lengths[rows] for rows in cut_rows(lengths, "grouped")]
    assert found == [(90, 60, 46), (45, 30), (22,), (9,)]
    assert [lengths[rows] for rows in cut_rows(lengths, "longest")] == [lengths]
    assert list(cut_rows((12,), "grouped")) == [slice(0, 1)]


def test_a_batch_is_padded_and_ordered_by_length(workload: Any) -> None:
    batch = take_batch(workload)
    assert batch.token_ids.shape == (8, 96)
    assert list(batch.lengths) == sorted(batch.lengths, reverse=True)
    assert (batch.token_ids != 0).sum(1).tolist() == list(batch.lengths)


def test_the_cache_holds_what_is_computed_without_it(workload: Any) -> None:
    plain = workload.train_dataset()
    workload.feature_cache = True
    cached = pickle.loads(pickle.dumps(workload.train_dataset()))
    assert len(plain) == len(cached) == 630
    for index in range(0, len(plain), 7):
        one, other = plain[index], cached[index]
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.features, other.features)
        assert one.log_price == other.log_price


@pytest.mark.parametrize("kind", ["own", "huggingface"])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_checkpointing_keeps_the_gradients(workload: Any, kind: str, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "huggingface":
        pytest.importorskip("transformers")
    monkeypatch.setattr(workload, "_encoder", kind)
    torch.manual_seed(0)
    model, batch = workload.build_model().train(), take_batch(workload, 4)
    expected_loss, expected = read_gradients(workload, model, batch)
    apply_activation_checkpointing(model, TrainConfig(activation_checkpointing=how))
    calls = []
    counted = model.encoder.blocks[0] if kind == "own" else model.encoder.model.encoder.layer[0].attention
    (counted.widen if kind == "own" else counted).register_forward_hook(lambda *_: calls.append(1))
    loss, gradients = read_gradients(workload, model, batch)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
    assert len(calls) == 2  # once forward, once again


def test_script_and_workload_are_the_same_training(
    workload: Any, script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[Any, Any, Any, float]] = []

    def note(model: nn.Module, batch: Any, padding: Any) -> torch.Tensor:
        if len(seen) == 3:
            raise InterruptedError
        state, generator = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
        loss: torch.Tensor = plain(model, batch, padding)
        seen.append((state, generator, batch, loss.item()))
        return loss

    def note_schedule(*arguments: Any, **options: Any) -> Any:
        schedules.append(build_scheduler(*arguments, **options))
        return schedules[-1]

    schedules: list[Any] = []
    plain, build_scheduler = script.price_loss, script.build_scheduler
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script, "price_loss", note)
    monkeypatch.setattr(script, "build_scheduler", note_schedule)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InterruptedError):
        script.train(script.read_options(["--epochs", "1000"]))
    model = workload.build_model()
    model.load_state_dict(seen[0][0])
    optimizer = workload.build_optimizer(model)
    scheduler = workload.build_scheduler(optimizer)
    # The schedule does not depend on how long the script is to train.
    factors = [one.lr_lambdas[0] for one in (scheduler, schedules[0])]
    assert [factors[0](step) for step in (0, 500, 1000, 9999)] == [factors[1](step) for step in (0, 500, 1000, 9999)]
    for _, generator, batch, expected in seen:
        torch.set_rng_state(generator)
        loss = workload.compute_loss(model, batch)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), workload.gradient_clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def test_accumulated_batches_weigh_by_their_samples(
    workload: Any, script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Of 24 listings 22 are trained on: batches of 12 and 10 are one step.
    (tmp_path / "listings.csv").write_text(HEADER + "".join(LINES))
    seen: list[tuple[nn.Module, Any]] = []
    plain = script.price_loss

    def note(model: nn.Module, batch: Any, padding: Any) -> torch.Tensor:
        seen.append((model, batch))
        loss: torch.Tensor = plain(model, batch, padding)
        return loss

    def stop(parameters: Any, _norm: float) -> None:
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script, "price_loss", note)
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", stop)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InterruptedError):
        script.train(script.read_options(["--data", str(tmp_path), "--batch-size", "12", "--accum", "3"]))
    model, batches = seen[0][0], [batch for _, batch in seen]
    assert [len(batch.lengths) for batch in batches] == [12, 10]
    found = torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None])
    model.zero_grad()
    (sum(len(batch.lengths) * plain(model, batch, "max-length") for batch in batches) / 22).backward()
    expected = torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None])
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_the_script_trains_and_says_what_it_reached(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "listings.csv").write_text(HEADER + "".join(LINES))
    monkeypatch.chdir(tmp_path)
    script.train(script.read_options(["--data", str(tmp_path), "--epochs", "2", "--accum", "2", "--batch-size", "4"]))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert all(0 < line["smape"] < 200 for line in lines)
    assert (tmp_path / "text_price.pt").is_file()


def test_the_script_ends_with_one_line(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"train.py: '{tmp_path}' has no listings.csv: it has a header line")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no listings.csv"),
        ("", "has no column 'text' but none"),
        ("text,cost\nmug,5\n", "has no column 'price' but text, cost"),
        ("text,price,price\nmug,5,6\n", "has the column 'price' twice"),
        (HEADER + "".join(LINES[:5]), "has 5 listings"),
        (HEADER + "".join(LINES[:3]) + "mug,0,100\n", "listings.csv, line 5: price is 0"),
        (HEADER + "mug,-3.5,100\n", "listings.csv, line 2: price is -3.5"),
        (HEADER + LINES[0] + "mug,cheap,100\n", "listings.csv, line 3: price is 'cheap', not a number"),
        (HEADER + "mug,inf,100\n", "listings.csv, line 2: price is 'inf', not a number"),
        (HEADER + '"two\nlines",5,heavy\n', "listings.csv, line 3: grams is 'heavy', not a number"),
        (HEADER + "mug,5,\n", "listings.csv, line 2: grams is '', not a number"),
        (HEADER + '" ",5,100\n', "listings.csv, line 2 has no text"),
        (HEADER + "a mug, blue,5,100\n", "listings.csv, line 2 has more or fewer values than the header"),
        (HEADER + "mug,5\n", "listings.csv, line 2 has more or fewer values than the header"),
        (HEADER + '"mug" x,5,100\n', "listings.csv, line 2: "),
    ],
)
def test_data_that_cannot_be_used_is_told_in_a_line(
    loaded: LoadedWorkload, tmp_path: Path, content: str | None, message: str
) -> None:
    from listings import load_listings

    if content is not None:
        (tmp_path / "listings.csv").write_text(content)
    with pytest.raises(TargetError) as caught:
        load_listings(tmp_path, simulated=0)
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_a_folder_that_is_missing_and_a_file_that_is_no_text(loaded: LoadedWorkload, tmp_path: Path) -> None:
    from listings import load_listings

    with pytest.raises(TargetError, match="there is no folder"):
        load_listings(tmp_path / "nowhere", simulated=0)
    (tmp_path / "listings.csv").write_bytes(HEADER.encode() + b"m\xff\xfeg,5,100\n")
    with pytest.raises(TargetError, match=r"listings\.csv, line \d: .*decode"):
        load_listings(tmp_path, simulated=0)


def test_a_file_that_may_not_be_read(loaded: LoadedWorkload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from listings import load_listings

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "listings.csv").write_text(HEADER + "".join(LINES))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(TargetError) as caught:
            load_listings(tmp_path, simulated=0)
    assert caught.value.message == f"{tmp_path / 'listings.csv'} cannot be read: Permission denied"


def test_a_cache_that_cannot_be_written(
    loaded: LoadedWorkload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from listings import load_listings

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(TargetError, match=r"cannot write .*listings-\d+-50\.csv: Not a directory") as caught:
        load_listings(None, simulated=50)
    assert "XDG_CACHE_HOME" in caught.value.hint


@pytest.mark.parametrize("share", [0.0, 0.5, 0.98])
def test_a_torn_cache_is_made_anew(
    loaded: LoadedWorkload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    from price_regression import SIZES, PriceData

    (tmp_path / "listings.csv").write_text(HEADER + "".join(LINES))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = PriceData(tmp_path, SIZES["cpu"]).training_set(cached=True)[3]
    (path,) = tmp_path.rglob("tokens-*.pt")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    for _ in range(2):
        assert PriceData(tmp_path, SIZES["cpu"]).training_set(cached=True)[3].token_ids.equal(expected.token_ids)
    assert len(torch.load(path, weights_only=True)) == 2


def test_a_column_that_is_constant_in_the_training_part(loaded: LoadedWorkload) -> None:
    from listings import _standardise

    figures = torch.tensor([[7.0, 1.0], [7.0, 3.0], [7.0, 2.0], [90.0, 4.0]], dtype=torch.float64)
    found = _standardise(figures, torch.tensor([0, 1, 2]))
    assert found[:, 0].tolist() == pytest.approx([0.0, 0.0, 0.0, math.log(91 / 8)], abs=1e-6)
    assert found[:3, 1].std(correction=0).item() == pytest.approx(1.0, abs=1e-5)


def test_listings_without_figures(loaded: LoadedWorkload, tmp_path: Path) -> None:
    from price_regression import SIZES, PriceData

    (tmp_path / "listings.csv").write_text("price,text\n" + "".join(f"{n + 1},mug {n}\n" for n in range(30)))
    data = PriceData(tmp_path, SIZES["cpu"])
    sample = data.training_set(cached=False)[0]
    predicted = data.build_model("own").eval()(sample.token_ids[None], sample.features[None])
    assert predicted.item() == pytest.approx(math.log(15), abs=1.0)


@pytest.mark.parametrize("name", ["EXAMPLE_SIZE", "EXAMPLE_ENCODER"])
def test_an_unknown_setting_of_the_environment(workload: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "huge")
    with pytest.raises(TargetError, match=f"{name} is 'huge'") as caught:
        type(workload)()
    assert caught.value.hint.startswith("it is one of ")


def test_simulated_listings_are_always_the_same(loaded: LoadedWorkload, tmp_path: Path) -> None:
    from listings import load_listings
    from simulated_listings import write_listings

    torch.manual_seed(1)
    before = torch.get_rng_state()
    write_listings(tmp_path / "one.csv", count=150)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    write_listings(tmp_path / "two.csv", count=150)
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
    training, held_out = load_listings(None, simulated=150)
    assert (len(training), len(held_out)) == (135, 15)
    assert not set(training.texts) & set(held_out.texts)
    assert training.features.mean(0).abs().max() < 1e-5
    words = sorted(len(text.split()) for text in training.texts)
    assert words[0] < 20
    assert 35 < words[67] < 60
    assert words[-1] > 150


def test_words_are_read_greedily(loaded: LoadedWorkload) -> None:
    from word_pieces import UNKNOWN_ID, WordPieces

    pieces = WordPieces(["[PAD]", "[UNK]", "caf", "##e", "mu", "mug", "##s", "-", "c"])
    assert pieces.encode("Café-MUGS", limit=9) == [2, 3, 7, 5, 6]
    assert pieces.encode("mug zebra mug", limit=9) == [5, UNKNOWN_ID, 5]
    assert pieces.encode("cafe mugs", limit=3) == [2, 3, 5]
    assert pieces.encode(" ", limit=3) == [UNKNOWN_ID]


def test_merges_are_those_of_a_plain_count(loaded: LoadedWorkload) -> None:
    from word_pieces import learn_vocabulary

    texts = ["banana bandana ban", "an anna banana", "aaaa aa nana cabana", "band and an"]
    counts = Counter(word for text in texts for word in text.split())
    words = {word: [word[0], *("##" + mark for mark in word[1:])] for word in counts}
    expected = set(learn_vocabulary(texts, size=2 + len({piece for word in words.values() for piece in word})))
    while True:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in words.items():
            for pair in pairwise(parts):
                pairs[pair] += counts[word]
        if not pairs:
            break
        first, second = min(pairs, key=lambda pair: (-pairs[pair], pair))
        for word, parts in words.items():
            merged: list[str] = []
            for part in parts:
                if merged and (merged[-1], part) == (first, second):
                    merged[-1] = first + second[2:]
                else:
                    merged.append(part)
            words[word] = merged
        expected.add(first + second[2:])
        assert set(learn_vocabulary(texts, size=len(expected))) == expected


def test_the_schedule_warms_up_and_keeps_a_tenth(workload: Any) -> None:
    factor = workload.build_scheduler(workload.build_optimizer(nn.Linear(1, 1))).lr_lambdas[0]
    total = 20 * 79
    assert factor(0) == pytest.approx(1 / 20)
    assert factor(19) == pytest.approx(1.0, abs=0.01)
    assert factor(total // 2) == pytest.approx(0.55, abs=0.01)
    assert factor(total) == factor(3 * total) == pytest.approx(0.1)


def test_the_recipe_is_a_preset() -> None:
    recipe = find_preset(str(FOLDER / "recipe.json"))
    assert recipe.name == "text-price-recipe"
    assert recipe.settings["gradient_accumulation_steps"] == 4
    assert recipe.settings["precision"] == "fp16"
