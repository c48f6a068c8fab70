from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import pickle
import sys
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.errors import TargetError
from autotune.records.codec import read_record
from autotune.records.search import Preset
from autotune.targets.load import load_workload
from autotune.targets.workload import LoadedWorkload, Metric

FOLDER = Path(__file__).parents[2] / "examples" / "anti_spoofing"
MODULES = ("workload", "se_resnet", "speech", "speech_synthesis", "generated_corpus", "equal_error_rate")
TRAIN_CLIPS, DEV_CLIPS = 64, 40


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The example's modules by name, and its script as `train`; gone from `sys.modules` at the end."""
    path = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    found = {name: importlib.import_module(name) for name in MODULES[1:]}
    spec = importlib.util.spec_from_file_location("anti_spoofing_script", FOLDER / "train.py")
    assert spec is not None
    assert spec.loader is not None
    found["train"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found["train"])
    yield found
    sys.path[:] = path
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def corpus(modules: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    modules["speech_synthesis"].write_corpus(folder, train_clips=TRAIN_CLIPS, dev_clips=DEV_CLIPS)
    return folder


@pytest.fixture
def loaded(modules: dict[str, ModuleType], corpus: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedWorkload:
    monkeypatch.setenv("EXAMPLE_DATA", str(corpus))
    return load_workload("workload.py:workload", folder=FOLDER)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A valid folder of two clips a part, to be damaged."""
    (tmp_path / "protocol").mkdir()
    for part in ("train", "dev"):
        (tmp_path / part).mkdir()
        (tmp_path / "protocol" / f"{part}.txt").write_text("S1 a - - bonafide\nS1 b - A01 spoof\n")
        for name in "ab":
            write_wav(tmp_path / part / f"{name}.wav", torch.arange(8_000))
    return tmp_path


def write_wav(path: Path, samples: Tensor, *, rate: int = 16_000, channels: int = 1, width: int = 2) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.to(torch.int16).numpy().tobytes())


def stack_batches(loaded: LoadedWorkload, *, steps: int) -> list[tuple[Tensor, Tensor]]:
    clips = loaded.workload.train_dataset()
    samples = [clips[index] for index in range(16)]
    batch = (torch.stack([one for one, _ in samples]), torch.tensor([label for _, label in samples]))
    return [batch] * steps


# The workload and the script


def test_it_is_a_workload_of_the_recipe(loaded: LoadedWorkload) -> None:
    assert loaded.metrics == (Metric(name="eer", direction="minimize"),)
    assert loaded.baseline.effective_batch_size == 32
    assert loaded.drop_last
    image, label = loaded.workload.train_dataset()[0]
    assert (image.shape, image.dtype, label) == ((1, 257, 101), torch.float32, 1)


def test_it_learns(loaded: LoadedWorkload) -> None:
    torch.manual_seed(0)
    model = loaded.workload.build_model()
    optimizer = loaded.workload.build_optimizer(model)
    losses = []
    for batch in stack_batches(loaded, steps=8):
        loss = loaded.workload.compute_loss(model, batch)
        assert isinstance(loss, Tensor)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(2), abs=0.15)
    assert losses[-1] < 0.85 * losses[0]


def test_evaluation_gives_a_fraction_whatever_the_batch_and_draws_nothing(loaded: LoadedWorkload) -> None:
    torch.manual_seed(0)
    model = loaded.workload.build_model().eval()
    before = torch.get_rng_state()
    with torch.no_grad():
        found = [loaded.evaluate(model, torch.device("cpu"), batch_size=size)["eer"] for size in (DEV_CLIPS, 7)]
    assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == pytest.approx(found[1], abs=0.03)
    assert 0.2 < found[0] <= 0.5


@pytest.fixture
def uneven(corpus: Path, tmp_path: Path) -> Path:
    """Thirty bona fide clips and ten spoofed ones to train on: one batch, and eight clips that make none."""
    lines = (corpus / "protocol" / "train.txt").read_text().splitlines()
    bona_fide, spoofed = ([line for line in lines if line.endswith(key)] for key in ("bonafide", "spoof"))
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol" / "train.txt").write_text("\n".join([*bona_fide[:30], *spoofed[:10]]))
    (tmp_path / "protocol" / "dev.txt").write_text((corpus / "protocol" / "dev.txt").read_text())
    for part in ("train", "dev"):
        (tmp_path / part).symlink_to(corpus / part)
    return tmp_path


def run_two_epochs(script: ModuleType, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the script trains with, on what, and to which weights; its own loader and optimizer do it."""
    found: dict[str, Any] = {}
    train_epoch = script.train_epoch

    def note(model: Any, loader: Any, optimizer: Any, **options: Any) -> list[float]:
        found["start"] = {name: value.clone() for name, value in model.state_dict().items()}
        found["batches"] = [*loader, *loader]
        found["losses"] = train_epoch(model, found["batches"], optimizer, **options)
        found["end"] = model.state_dict()
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script, "train_epoch", note)
    with pytest.raises(InterruptedError):
        script.train(script.read_options(arguments))
    return found


def test_script_and_workload_are_one_training(
    modules: dict[str, ModuleType], uneven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = run_two_epochs(modules["train"], ["--data", str(uneven)], monkeypatch)
    monkeypatch.setenv("EXAMPLE_DATA", str(uneven))
    loaded = load_workload("workload.py:workload", folder=FOLDER)
    assert loaded.drop_last
    assert [len(labels) for _, labels in script["batches"]] == [loaded.baseline.effective_batch_size] * 2
    model = loaded.workload.build_model()
    model.load_state_dict(script["start"])
    optimizer = loaded.workload.build_optimizer(model)
    for batch, expected in zip(script["batches"], script["losses"], strict=True):
        loss: Any = loaded.workload.compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(model.state_dict(), script["end"], rtol=1e-6, atol=1e-7)


def test_the_script_accumulates_and_drops_what_is_no_step(
    loaded: LoadedWorkload, modules: dict[str, ModuleType]
) -> None:
    model = loaded.workload.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = stack_batches(loaded, steps=5)
    losses = modules["train"].train_epoch(model, batches, optimizer, class_weights=(1.0, 1.0), accum=2)
    assert len(losses) == 2
    assert modules["train"].train_epoch(model, [], optimizer, class_weights=(1.0, 1.0), accum=2) == []


def run_script(modules: dict[str, ModuleType], arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    modules["train"].main()


def test_the_script_prints_json_and_saves(
    corpus: Path,
    modules: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_script(modules, ["--data", str(corpus), "--epochs", "1", "--batch-size", "16"], monkeypatch)
    line = json.loads(capsys.readouterr().out)
    assert line.keys() == {"epoch", "loss", "eer"}
    assert 0.0 <= line["eer"] <= 0.5
    assert "head.weight" in torch.load(tmp_path / "anti_spoofing.pt")


def test_the_script_says_errors_in_one_line(
    corpus: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in ((["--data", "nowhere"], "cannot be read"), (["--batch-size", "65"], "make no step")):
        with pytest.raises(SystemExit, match="2"):
            run_script(modules, ["--data", str(corpus), *arguments], monkeypatch)
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_another_size_is_refused(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_SIZE", "huge")
    with pytest.raises(TargetError, match="EXAMPLE_SIZE is 'huge'"):
        load_workload("workload.py:workload", folder=FOLDER)


def test_empty_variables_count_as_unset(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_SIZE", "")
    monkeypatch.setenv("EXAMPLE_DATA", "")
    workload: Any = load_workload("workload.py:workload", folder=FOLDER).workload
    assert workload._data is None
    assert workload._architecture == modules["se_resnet"].ARCHITECTURES["cpu"]


def test_the_presets_are_those_of_the_recipe() -> None:
    presets = {path.stem: read_record(path, Preset) for path in (FOLDER / "presets").glob("*.json")}
    found = {name: (one.name, one.settings["precision"], one.settings["compile_mode"]) for name, one in presets.items()}
    assert found == {
        "fastest": ("anti-spoofing-fastest", "fp16", "default"),
        "balanced": ("anti-spoofing-balanced", "fp16", "off"),
        "reproducible": ("anti-spoofing-reproducible", "fp32", "off"),
    }


# The model and its loss


def test_the_gates_scale_channels(modules: dict[str, ModuleType]) -> None:
    squeeze = modules["se_resnet"].SqueezeExcitation(16)
    features = torch.randn(2, 16, 5, 7)
    reduce, _, expand, _ = squeeze.gate
    hidden = torch.relu(features.mean((2, 3)) @ reduce.weight.T + reduce.bias)
    expected = torch.sigmoid(hidden @ expand.weight.T + expand.bias)
    assert torch.allclose(squeeze(features), features * expected[..., None, None], atol=1e-6)


def test_the_gpu_size_takes_long_clips(modules: dict[str, ModuleType]) -> None:
    architecture = modules["se_resnet"].ARCHITECTURES["gpu"]
    with torch.device("meta"):
        model = modules["se_resnet"].SEResNet(architecture)
        assert model(torch.empty(2, 1, 257, 401)).shape == (2, 2)
    assert sum(parameter.numel() for parameter in model.parameters()) > 20e6


def test_weighted_losses_add_up_over_parts_of_a_batch(modules: dict[str, ModuleType]) -> None:
    loss = modules["se_resnet"].weighted_cross_entropy
    logits, labels = torch.randn(8, 2), torch.tensor([1, 0, 0, 0, 0, 0, 1, 0])
    weights = (8 / 12, 2.0)
    whole = loss(logits, labels, weights)
    parts = [loss(logits[part], labels[part], weights) for part in (slice(0, 4), slice(4, 8))]
    assert whole.item() == pytest.approx(sum(part.item() for part in parts) / 2)
    plain = [-logits[i].log_softmax(0)[label].item() * weights[label] for i, label in enumerate(labels.tolist())]
    assert whole.item() == pytest.approx(sum(plain) / 8, rel=1e-5)


# The equal error rate


def eer(modules: dict[str, ModuleType], scores: list[float], labels: list[int]) -> float:
    found: float = modules["equal_error_rate"].equal_error_rate(torch.tensor(scores), torch.tensor(labels))
    return found


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], [0, 0, 1, 1], 0.0),  # apart
        ([1.0, 1.0, 1.0], [0, 1, 1], 0.5),  # nothing told apart
        ([3.0, 4.0, 1.0, 2.0], [0, 0, 1, 1], 0.5),  # the wrong way round: a hull is never worse than chance
        ([1.0, 2.0, 3.0, 4.0], [0, 1, 0, 1], 0.25),  # hull (1, 0), (1/2, 0), (0, 1/2), (0, 1): between the inner two
    ],
)
def test_the_equal_error_rate_of_few_trials(
    modules: dict[str, ModuleType], scores: list[float], labels: list[int], expected: float
) -> None:
    assert eer(modules, scores, labels) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_equal_error_rate_is_the_worst_prior_s_least_error(modules: dict[str, ModuleType], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(60, generator=generator) < 0.4).long()
    scores = (2 * (torch.randn(60, generator=generator) + labels)).round() / 2  # with equal scores
    rates = [
        ((scores[labels == 0] >= cut).double().mean().item(), (scores[labels == 1] < cut).double().mean().item())
        for cut in [*scores.unique().tolist(), math.inf]
    ]
    # On the hull both rates are equal where the prior is the least favourable one: a minimax.
    worst = max(min(share * a + (1 - share) * m for a, m in rates) for share in torch.linspace(0, 1, 20_001).tolist())
    assert eer(modules, scores.tolist(), labels.tolist()) == pytest.approx(worst, abs=1e-4)
    crossing = min(max(pair) for pair in rates)
    assert eer(modules, scores.tolist(), labels.tolist()) <= crossing


def test_an_equal_error_rate_of_one_class_or_broken_scores(modules: dict[str, ModuleType]) -> None:
    assert math.isnan(eer(modules, [1.0, math.nan], [0, 1]))
    with pytest.raises(ValueError, match="both bona fide and spoofed"):
        eer(modules, [1.0, 2.0], [1, 1])


# The generated corpus


def test_the_corpus_is_the_same_each_time_and_balanced(modules: dict[str, ModuleType], corpus: Path) -> None:
    again = list(itertools.islice(modules["speech_synthesis"].synthesise_clips("dev", DEV_CLIPS), 4))
    for index, (_, _, clip) in enumerate(again):
        with wave.open(str(corpus / "dev" / f"DEV_{index:05d}.wav"), "rb") as file:
            written = file.readframes(file.getnframes())
        assert written == clip.numpy().tobytes()
        assert 16_000 <= len(clip) < 32_000
        assert 9_000 < clip.abs().max().item() < 32_768
    lines = [line.split() for line in (corpus / "protocol" / "dev.txt").read_text().splitlines()]
    counts = {attack: sum(line[3] == attack for line in lines) for attack in ("-", "A01", "A02", "A03", "A04")}
    assert counts == {"-": 20, "A01": 5, "A02": 5, "A03": 5, "A04": 5}
    assert {line[4] for line in lines if line[3] == "-"} == {"bonafide"}


def test_each_attack_changes_the_speech(modules: dict[str, ModuleType]) -> None:
    synthesis = modules["speech_synthesis"]
    voices = synthesis.draw_voices(5, torch.Generator().manual_seed(1))
    voice = type(voices)(*(value[:1].repeat(5) for value in vars(voices).values()))
    spectrum = synthesis._speak(voice, torch.ones(5), torch.Generator().manual_seed(2))
    strength = torch.ones(5)
    for change in (synthesis.smooth_envelope, synthesis.lose_phases, synthesis.mirror_upper_band):
        changed = change(spectrum, strength, torch.Generator().manual_seed(3))
        assert changed.shape == spectrum.shape
        assert (changed - spectrum).abs().mean() > 0.05 * spectrum.abs().mean()
    spoofed = synthesis._speak(voice, torch.zeros(5), torch.Generator().manual_seed(2))
    assert not torch.allclose(spoofed, spectrum)


def test_the_corpus_appears_whole_and_once(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generated = modules["generated_corpus"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def write(folder: Path, *, train_clips: int, dev_clips: int) -> None:
        calls.append(folder)
        (folder / "protocol").mkdir()
        if len(calls) == 1:  # another process is faster
            generated.find_generated_corpus()

    monkeypatch.setattr(generated, "write_corpus", write)
    found = generated.find_generated_corpus()
    assert [path.name for path in (tmp_path / "autotune-examples").iterdir()] == [found.name]
    assert (found / "protocol").is_dir()
    assert generated.find_generated_corpus() == found
    assert len(calls) == 2


def test_what_a_killed_process_left_is_removed_a_day_later(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "autotune-examples"
    for name, age_seconds in ((".anti-spoofing-old", 25 * 3600), (".anti-spoofing-new", 3600), ("other", 25 * 3600)):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - age_seconds,) * 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(modules["generated_corpus"], "write_corpus", lambda _folder, **_counts: None)
    found = modules["generated_corpus"].find_generated_corpus()
    assert {path.name for path in cache.iterdir()} == {".anti-spoofing-new", "other", found.name}


def test_a_corpus_that_cannot_be_written_is_said(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fill_the_disk(folder: Path, *, train_clips: int, dev_clips: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(modules["generated_corpus"], "write_corpus", fill_the_disk)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(TargetError, match=r"cannot write .*anti-spoofing-1280-400-v1: No space left"):
        modules["generated_corpus"].find_generated_corpus()
    assert not list((tmp_path / "autotune-examples").iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(TargetError, match="Not a directory") as caught:
        modules["generated_corpus"].find_generated_corpus()
    assert "XDG_CACHE_HOME" in caught.value.hint


# Reading data


def test_samples_depend_on_the_global_generator_alone(loaded: LoadedWorkload) -> None:
    clips = pickle.loads(pickle.dumps(loaded.workload.train_dataset()))
    torch.manual_seed(5)
    first = clips[3][0]
    torch.manual_seed(5)
    assert torch.equal(first, loaded.workload.train_dataset()[3][0])
    assert not torch.equal(first, clips[3][0])


def test_a_spectrogram_shows_a_tone_in_its_bin(modules: dict[str, ModuleType]) -> None:
    tone = 0.5 * torch.sin(2 * math.pi * 2_000 * torch.arange(16_000) / 16_000)
    image = modules["speech"].compute_spectrogram(tone)
    assert image.shape == (1, 257, 101)
    assert (image[0, :, 5:95].argmax(0) == 64).all()  # 2,000 Hz of 31.25 Hz a bin
    assert image.mean().item() == pytest.approx(0.0, abs=1e-4)
    assert image.std().item() == pytest.approx(1.0, abs=1e-3)
    assert torch.isfinite(modules["speech"].compute_spectrogram(torch.zeros(16_000))).all()


def test_masks_blank_a_band_and_a_span(modules: dict[str, ModuleType]) -> None:
    image = modules["speech"].mask_spectrogram(torch.ones(1, 257, 100), [0.5, 0.0, 0.999, 1.0])
    assert (image[0, :, 0] == 0).sum() == 12
    assert (image[0, 100] == 0).nonzero().flatten().tolist() == list(range(88, 100))
    assert (modules["speech"].mask_spectrogram(torch.ones(1, 257, 100), [0.0, 0.3, 0.0, 0.3]) == 1).all()


def test_crops_are_cut_or_repeated(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", torch.arange(1_000))
    read = modules["speech"].read_crop
    path = tmp_path / "a.wav"
    assert (32_768 * read(path, 10)).tolist() == list(range(10))
    assert (32_768 * read(path, 10, place=0.9999)).tolist() == list(range(990, 1_000))
    assert (32_768 * read(path, 1_500, place=0.9999))[[999, 1_000, 1_499]].tolist() == [999, 0, 499]


def test_flac_reads_as_wav_does(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soundfile = pytest.importorskip("soundfile")
    samples = torch.randint(-3_000, 3_000, (2_000,), generator=torch.Generator().manual_seed(0))
    write_wav(tmp_path / "a.wav", samples)
    soundfile.write(tmp_path / "a.flac", samples.to(torch.int16).numpy(), 16_000, subtype="PCM_16")
    read = modules["speech"].read_crop
    assert torch.equal(read(tmp_path / "a.flac", 500, place=0.4), read(tmp_path / "a.wav", 500, place=0.4))
    soundfile.write(tmp_path / "b.flac", samples.to(torch.int16).numpy(), 8_000, subtype="PCM_16")
    with pytest.raises(TargetError, match="8000 Hz"):
        read(tmp_path / "b.flac", 500)
    (tmp_path / "c.flac").write_bytes(b"no audio")
    with pytest.raises(TargetError, match=r"c\.flac cannot be read"):
        read(tmp_path / "c.flac", 500)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(TargetError, match="soundfile is not installed"):
        read(tmp_path / "a.flac", 500)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rate": 8_000}, "1 channel(s), 8000 Hz, 16 bits; allowed is one channel, 16000 Hz, 16 bits"),
        ({"channels": 2}, "2 channel(s), 16000 Hz, 16 bits"),
        ({"width": 1}, "1 channel(s), 16000 Hz, 8 bits"),
    ],
)
def test_other_audio_is_refused(
    modules: dict[str, ModuleType], small: Path, changes: dict[str, int], words: str
) -> None:
    write_wav(small / "train" / "a.wav", torch.arange(8_000), **changes)
    clips = modules["speech"].open_clips(str(small), "train", crop_seconds=1.0)
    with pytest.raises(TargetError) as caught:
        clips[0]
    assert words in caught.value.message
    assert caught.value.message.startswith(str(small / "train" / "a.wav"))


def test_broken_audio_is_refused(modules: dict[str, ModuleType], small: Path) -> None:
    clips = modules["speech"].open_clips(str(small), "train", crop_seconds=1.0)
    (small / "train" / "a.wav").write_bytes(b"RIFF")
    write_wav(small / "train" / "b.wav", torch.arange(0))
    with pytest.raises(TargetError, match=r"a\.wav cannot be read"):
        clips[0]
    with pytest.raises(TargetError, match=r"b\.wav has no samples"):
        clips[1]
    write_wav(small / "train" / "b.wav", torch.arange(100))
    (small / "train" / "b.wav").write_bytes((small / "train" / "b.wav").read_bytes()[:-1])
    with pytest.raises(TargetError, match=r"b\.wav cannot be read: .*multiple of element size") as caught:
        clips[1]
    assert caught.value.hint


def test_clips_in_something_that_is_no_folder(modules: dict[str, ModuleType], small: Path) -> None:
    (small / "train").rename(small / "elsewhere")
    with pytest.raises(TargetError, match="2 of 2 clips are missing"):
        modules["speech"].open_clips(str(small), "train", crop_seconds=1.0)
    (small / "train").touch()
    with pytest.raises(TargetError, match="train cannot be read: Not a directory"):
        modules["speech"].open_clips(str(small), "train", crop_seconds=1.0)


@pytest.mark.parametrize(
    ("protocol", "words"),
    [
        ("S1 a - - bonafide\nS1 b A01 spoof\n", "train.txt:2 has 4 columns instead of 5"),
        ("\nS1 a - - bonafide\nS1 b - A01 fake\n", "train.txt:3 has the key 'fake'"),
        ("S1 a - - bonafide\n", "train.txt lists nothing but bonafide clips"),
        ("\n", "train.txt lists no clips"),
        ("S1 a - - bonafide\nS1 c - A01 spoof\nS1 d - A01 spoof\n", "2 of 3 clips are missing in"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (None, "train.txt cannot be read: No such file or directory"),
    ],
)
def test_a_bad_protocol_is_refused(
    modules: dict[str, ModuleType], small: Path, protocol: str | bytes | None, words: str
) -> None:
    file = small / "protocol" / "train.txt"
    if protocol is None:
        file.unlink()
    else:
        file.write_bytes(protocol if isinstance(protocol, bytes) else protocol.encode())
    with pytest.raises(TargetError) as caught:
        modules["speech"].open_clips(str(small), "train", crop_seconds=1.0)
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_rare_bona_fide_clips_weigh_more(modules: dict[str, ModuleType], small: Path) -> None:
    (small / "protocol" / "train.txt").write_text("S1 a - - bonafide\n" + 4 * "S1 b - A01 spoof\n")
    clips = modules["speech"].open_clips(str(small), "train", crop_seconds=1.0)
    assert clips.class_weights() == (5 / 8, 5 / 2)
