"""Profiles and run folders of somebody else's, right by label and fingerprint: refused before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train_world import CONFIG, Workplace, open_workplace

from autotune.errors import ProfileError

EVIL = {
    "a learning rate": (CONFIG.replace(learning_rate_scale=1e6), "multiplies learning rates by 1e+06"),
    "a batch": (CONFIG.replace(micro_batch_size=4096), "an effective batch of 4,096 samples instead of 8"),
    "a method": (CONFIG.replace(user_knobs={"train_dataset": "x"}), "'train_dataset' is no knob of"),
    "an attribute": (CONFIG.replace(user_knobs={"secret_path": "/etc/passwd"}), "'secret_path' is no knob of"),
}


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return open_workplace(tmp_path)


@pytest.mark.fault("37", injected="learning rate x 1e6, batch 4096, a method as a knob", outcome="exit 7, no run")
@pytest.mark.fault("F11", injected="learning rate x 1e6, batch 4096, a method as a knob", outcome="exit 7, no run")
@pytest.mark.parametrize("name", EVIL)
def test_what_no_search_found_is_not_trained(place: Workplace, name: str) -> None:
    config, part = EVIL[name]
    place.save_profile(config)
    for options in ({"steps": 3}, {"steps": 3, "trust": True}):
        with pytest.raises(ProfileError) as caught:
            place.train(**options)
        assert part in caught.value.message
    assert not (place.folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.fault("F11", injected="a profile that the command is given", outcome="one line, exit 7, no run")
def test_the_command_says_it_in_one_line(place: Workplace) -> None:
    place.save_profile(EVIL["a batch"][0])
    code, printed, said = place.run_command("--steps", "3")
    assert (code, printed) == (7, "")
    assert said.count("error: ") == 1
    assert "an effective batch of 4,096 samples instead of 8" in " ".join(said.split())
    assert "Traceback" not in said
    assert not (place.folder / "runs").exists()


@pytest.mark.fault("F11", injected="a run folder whose settings set a method", outcome="--resume exits 7")
@pytest.mark.parametrize("field", ["config", "baseline_config"])
def test_a_run_is_not_gone_on_with_under_settings_that_do_not_fit(place: Workplace, field: str) -> None:
    place.save_profile()
    place.train(steps=3, out="run")
    plan = place.folder / "run" / "run.json"
    plain = json.loads(plan.read_text())
    plain[field]["user_knobs"] = {"train_dataset": "x"}
    plan.write_text(json.dumps(plain))
    with pytest.raises(ProfileError, match="'train_dataset' is no knob of"):
        place.train(profile=None, steps=6, out="run", resume=True)


@pytest.mark.fault("38", injected="a profile from another machine with other own settings", outcome="today's are kept")
def test_a_profile_from_elsewhere_is_put_onto_the_settings_of_today(place: Workplace) -> None:
    profile = place.save_profile(CONFIG.replace(optimizer_implementation="foreach"))
    elsewhere = profile.hardware.replace(cpu_name="another")
    other = CONFIG.replace(micro_batch_size=64)
    place.save_profile(other.replace(optimizer_implementation="foreach"), baseline_config=other, hardware=elsewhere)
    summary = place.train(steps=3, trust=True)
    assert summary.config is not None
    assert (summary.config.micro_batch_size, summary.config.optimizer_implementation) == (8, "foreach")
    assert any("your own effective batch is 8 samples now, 64 when" in sentence for sentence in place.said)
