"""What of a command is hidden in records, and what must not be: two trainings that differ would be taken for one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.records.script import Script
from autotune.records.secrets import MASK, find_secrets, hide_secrets, is_masked, mask_words

HEX = "0123456789abcdef0123456789abcdef01234567"
MIXED = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"

HIDDEN = [
    (["--token", "abc"], ["--token", MASK], "abc"),
    (["--hf-token", "abc"], ["--hf-token", MASK], "abc"),
    (["--hfToken=abc"], ["--hfToken=***"], "abc"),
    ([f"--wandb-key={HEX}"], ["--wandb-key=***"], HEX),
    (["--wandb_api_key", "x"], ["--wandb_api_key", MASK], "x"),
    (["HF_TOKEN=hf_x"], ["HF_TOKEN=***"], "hf_x"),
    (["+logger.api_key=1f2e"], ["+logger.api_key=***"], "1f2e"),
    (["--password", "1234"], ["--password", MASK], "1234"),
    (["--db-passwd=a=b"], ["--db-passwd=***"], "a=b"),
    (["--client.secret", "s"], ["--client.secret", MASK], "s"),
    (["--credentials=c"], ["--credentials=***"], "c"),
    (["--auth", "me:pw"], ["--auth", MASK], "me:pw"),
    (["--key", HEX], ["--key", MASK], HEX),
    (["--sort-key", HEX], ["--sort-key", MASK], HEX),
    (["--key=550e8400-e29b-41d4-a716-446655440000"], ["--key=***"], "550e8400-e29b-41d4-a716-446655440000"),
    (
        ["--tokens=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"],
        ["--tokens=***"],
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    ),
    (["https://me:pw@host/data"], ["https://***@host/data"], "me:pw"),
    (["s3://KEY:a/b+c@bucket/x"], ["s3://***@bucket/x"], "KEY:a/b+c"),
    (["--url=https://pw@host"], ["--url=https://***@host"], "pw"),
    (["https://host/x?api_key=1f2e&n=3"], ["https://host/x?api_key=***&n=3"], "1f2e"),
    (["--header", "Authorization: Bearer abcdef"], ["--header", "Authorization: Bearer ***"], "abcdef"),
    (["hf_" + "aB3" * 9], [MASK], "hf_" + "aB3" * 9),
    (["--note", f"ghp_{'a1' * 12} is it"], ["--note", "*** is it"], f"ghp_{'a1' * 12}"),
    (["eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2Q"], [MASK], "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2Q"),
]

SHOWN = [
    ["python", "train.py", "--lr", "1e-3", "--epochs=30", "data/train", "-v"],
    ["--tokenizer", "bert-base-uncased", "--tokenizer=mistralai/Mistral-7B-v0.1"],
    ["--pad-token", "<pad>", "--max_tokens=512", "--num-tokens", "4096", "--tokens-per-batch", "65536"],
    ["--use-auth-token", "True", "--token=false", "--token="],
    ["--sort-key", "length", "--image_key", "pixel_values", "--key-dim", "64"],
    ["--token-file", f"/home/me/{HEX}", "--secret-name=mine", "--auth-type", "basic", "--password-env", "PW"],
    ["--author", "me", "--monkey", "see", "--keyboard=us"],
    ["git+ssh://git@github.com/me/it.git", "https://host:8080/x?page=2"],
    ["--token", "--verbose"],
    ["--token", "{token}", "--secret={secret:a}"],
    [f"--checkpoint=runs/{HEX}/last.pt", f"--revision={HEX}"],
]


@pytest.mark.fault("F16", injected="secrets in the words of a command", outcome="*** in their place")
@pytest.mark.parametrize(("words", "masked", "secret"), HIDDEN, ids=lambda value: str(value)[:40])
def test_a_secret_is_hidden(words: list[str], masked: list[str], secret: str) -> None:
    assert mask_words(words) == tuple(masked)
    assert find_secrets(words) == (secret,)
    assert is_masked(mask_words(words))
    assert not is_masked(words)


@pytest.mark.parametrize("words", SHOWN, ids=lambda words: words[0])
def test_what_is_none_is_shown(words: list[str]) -> None:
    assert mask_words(words) == tuple(words)
    assert find_secrets(words) == ()


@given(st.lists(st.text(max_size=40) | st.sampled_from([word for words, *_ in HIDDEN for word in words]), max_size=6))
def test_a_command_that_was_hidden_once_stays_as_it_is(words: list[str]) -> None:
    masked = mask_words(words)
    assert mask_words(masked) == masked
    assert len(masked) == len(words)


def test_a_record_of_a_script_holds_no_secret_and_the_script_itself_does() -> None:
    words = ("python", "train.py", "--token", "abcdef", "--lr", "{lr:0.1}")
    script = Script(command=words)
    assert script.command == words
    assert "abcdef" not in script.to_json()
    assert Script.model_validate_json(script.to_json()).command == (*words[:3], MASK, *words[4:])
    assert script.replace(quality_steps=3).command == words


def test_a_text_about_the_arguments_is_told_without_them() -> None:
    words = ["train.py", "--token", "abcdef", "--password", "pw"]
    assert hide_secrets("unknown: --token abcdef", words) == "unknown: --token ***"
    assert hide_secrets("pw is short", words) == "pw is short"  # it would stand in too many words


@pytest.mark.parametrize(
    "word",
    [
        "eyJ-" * 25_000,
        "a" * 100_000,
        "://a:" * 20_000,
        "&a=" * 33_000,
        "?a" * 50_000,
        "{a:" * 33_000,
        "bearer " * 14_000,
    ],
    ids=lambda word: word[:8],
)
def test_the_longest_word_takes_no_time(word: str) -> None:
    began = time.monotonic()
    mask_words([word, f"--key={word}", "--key", word])
    assert time.monotonic() - began < 20.0  # quadratic: many minutes
