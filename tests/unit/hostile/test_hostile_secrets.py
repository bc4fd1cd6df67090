"""Does a secret ever reach a file that is kept or carried elsewhere?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlprobe import redaction
from rlprobe.capture import configurations
from rlprobe.capture.session import Session
from rlprobe.cli import main
from rlprobe.diagnose.gate import configuration
from rlprobe.runs import process
from rlprobe.store.read import Run
from tests.resealed import edited
from tests.unit.hostile.conftest import Aligned, Told

#: Made up, of the forms that the services give out.
SECRETS = {
    "hugging face": "hf_" + "aB3" * 12,
    "github": "ghp_" + "aB3" * 12,
    "openai": "sk-proj-" + "aB3" * 12,
    "aws": "AKIA" + "AB34" * 4,
    "slack": "xoxb-1234567890-abc",
    "jwt": "eyJ" + "a" * 20 + ".eyJ" + "b" * 20 + ".sig",
    "key": "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    "address": "https://user:hunter22@example.org/x",
    "bearer": "Bearer abcdefghijklmnop",
}
NAMES = ("api_key", "WANDB_API_KEY", "hf_token", "HF_TOKEN", "db.password", "aws_secret_access_key")
HARMLESS = (
    *("data.prompt_key", "pad_token", "eos_token", "max_token_len", "num_tokens", "reward_fn_key"),
    *("loss_agg_mode", "RAY_AUTH_TOKEN_PATH", "stop_token", "tokenizer", "AWS_ACCESS_KEY_ID"),
)


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_under_a_telling_name_is_a_secret(name: str) -> None:
    assert redaction.is_secret_name(name)
    assert redaction.value({name: "zq9-own-form"}) == {name: redaction.REDACTED}
    assert redaction.text(f"a {name}=zq9 b") == f"a {name}={redaction.REDACTED} b"
    assert redaction.command([f"--{name}", "zq9"])[1] == redaction.REDACTED


@pytest.mark.parametrize("name", HARMLESS)
def test_the_words_of_language_models_are_none(name: str) -> None:
    assert redaction.value({name: "some-value"}) == {name: "some-value"}
    assert redaction.text(f"{name}=some-value") == f"{name}=some-value"


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS.keys())
def test_a_secret_is_known_by_its_form_under_any_name(secret: str) -> None:
    for shown in (redaction.text(f"x {secret} y"), str(redaction.value({"note": [{"a": secret}]}))):
        assert redaction.REDACTED in shown
        assert secret not in shown
        assert "hunter22" not in shown


@pytest.mark.parametrize(
    "told",
    ["+a.api_key=zq9zq9", "--wandb-key zq9zq9", "HF_TOKEN: 'zq9zq9'", '{"password": "zq9zq9"}',
     "https://me:zq9zq9@host/", "Authorization: Bearer zq9zq9zq9zq9zq9"],
)  # fmt: skip
def test_what_is_redacted_stays_as_it_is(told: str) -> None:
    """Words of a command are looked at again where they are shown."""
    once = redaction.text(told)
    assert "zq9" not in once
    assert redaction.text(once) == once


def test_where_a_secret_comes_from_may_be_said() -> None:
    for word in ("trainer.api_key=${oc.env:WANDB_API_KEY}", "token=null", "password: none"):
        assert redaction.text(word) == word


def test_the_working_directory_is_none() -> None:
    """It stands in every environment, and in every path of a log."""
    assert redaction.known({"PWD": "/home/somebody/rlprobe", "DB_PWD": "zq9zq9zq9"}) == {
        "zq9zq9zq9"
    }


@pytest.mark.parametrize("number", ["0.12345678", "-1.5e-05", "376", "np.float64(0.00012)", "3e-7"])
def test_metrics_of_tokens_are_none(number: str) -> None:
    text = f"step:1 - training/rollout_probs_diff_token:{number} - actor/x_token={number}"
    assert redaction.text(text) == text


def test_digests_and_numbers_are_none() -> None:
    text = f"sha256:{'ab' * 32} {'0123456789' * 4} 1e-3 step0 model.layers.0.mlp=1.5"
    assert redaction.text(text) == text


# ------------------------------------------------------------------------------------- alignments


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("framework: verl", "overrides: [trainer.wandb.api_key=zq9]\nframework: verl", "overrides"),
        ("framework: verl", "overrides: [--wandb-key, zq9]\nframework: verl", "overrides[1]"),
        ("benchmark:", "benchmark:\n  environment: {HF_TOKEN: zq9zq9}", "benchmark.environment"),
        (
            "target:",
            "target:\n  container:\n    runtime: docker\n    image: 'a@sha256:1'\n"
            "    args: ['--env=HF_TOKEN=zq9']",
            "target.container.args",
        ),
        ("target:", f"target:\n  overrides: ['a.note={SECRETS['github']}']", "target.overrides"),
    ],
)
def test_a_secret_in_an_alignment_is_refused(
    old: str, new: str, place: str, tmp_path: Path, told: Told
) -> None:
    path = tmp_path / "a.yaml"
    base = (
        "name: a\nframework: verl\nframework_version: '0.9.1'\n"
        "model: {path: 'builtin:tiny-qwen2'}\ndata: {train_files: ['builtin:arithmetic']}\n"
        "benchmark:\n  precision: fp32\ntarget:\n  precision: fp32\n"
    )
    text = base.replace(old, new, 1)
    assert text != base
    path.write_text(text)
    said = told("config", "check", path, code=(2,))
    assert f"{place}" in said
    assert "looks like a secret" in said
    assert "environment of the process that starts rlprobe" in said
    assert "zq9" not in said
    assert SECRETS["github"] not in said


def test_all_secrets_of_an_alignment_are_named_at_once(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "name: a\nframework: verl\nframework_version: '0.9.1'\n"
        "model: {path: 'builtin:tiny-qwen2'}\ndata: {train_files: ['builtin:arithmetic']}\n"
        "overrides: ['a.api_key=zq9zq9zq9', 'b.c=1', 'd.password=zq9zq9zq8']\n"
        f"benchmark:\n  precision: fp32\n  overrides: ['a.note={SECRETS['github']}']\n"
        "target:\n  precision: fp32\n"
    )
    said = told("config", "check", path, code=(2,))
    assert "overrides[0], overrides[2], benchmark.overrides[0]: look like secrets" in said
    assert "zq9" not in said and SECRETS["github"] not in said


def test_a_reference_to_the_environment_is_accepted(aligned: Aligned) -> None:
    text = Path("a.yaml").read_text()
    assert "overrides:" in text
    text = text.replace("overrides:", "overrides:\n- +trainer.api_key=${oc.env:WANDB_API_KEY}", 1)
    Path("c.yaml").write_text(text)
    assert main(["config", "check", "c.yaml"]) == 0


# ------------------------------------------------------------------------------- what runs write


def test_configurations_hold_no_secret(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    session = Session(role="target", framework="verl", dump=str(tmp_path), side=str(tmp_path))
    found = {
        "trainer": {"login": "0123456789abcdef0123456789abcdef01234567", "api_key": "zq9", "lr": 1},
        "data": {"prompt_key": "prompt", "tokens": [1, 2], "paths": ["a", SECRETS["github"]]},
    }
    path = configurations.write(session, found)
    text = path.read_text()
    assert "0123456789abcdef" not in text
    assert "zq9" not in text
    assert SECRETS["github"] not in text
    kept = json.loads(text)
    assert kept["trainer"]["lr"] == 1
    assert kept["data"]["prompt_key"] == "prompt"


def test_a_log_holds_no_secret(tmp_path: Path, monkeypatch) -> None:
    """Frameworks print their resolved configuration."""
    monkeypatch.setenv("MY_SERVICE_TOKEN", "plainword-without-form")
    program = (
        "import os, sys\n"
        "print('config:', {'api_key': 'zq9', 'lr': 1e-3})\n"
        "print('it is', os.environ['MY_SERVICE_TOKEN'])\n"
        "sys.stdout.flush(); os.write(2, b'50%\\r'); os.write(2, b'\\xff 100%\\r\\n')\n"
        f"print({SECRETS['hugging face']!r}, end='')\n"
    )
    log = tmp_path / "log"
    done = process.run(
        [sys.executable, "-c", program], run_id="test-a-log", log=log, watch=lambda: None,
        interval_s=0.01,
    )  # fmt: skip
    text = log.read_bytes()
    assert done == 0
    assert b"zq9" not in text
    assert b"plainword" not in text
    assert b"hf_" not in text
    assert b"'lr': 0.001" in text
    assert b"50%\r\xff 100%\r\n" in text


def test_a_log_that_cannot_be_written_stops_no_training(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as found:
        process.run(
            [sys.executable, "-c", f"open({str(tmp_path / 'done')!r}, 'w'); print('x' * 10**6)"],
            run_id="test-full-log", log=Path("/dev/full"), watch=lambda: None, interval_s=0.01,
        )  # fmt: skip
    assert (tmp_path / "done").exists()
    assert found.value.filename == "/dev/full"


# ------------------------------------------------------------------- what comes from somewhere else


def test_a_secret_of_a_foreign_dump_reaches_neither_gate_nor_page(aligned: Aligned) -> None:
    """The vendor's tool writes configurations.json as it is."""
    run = Run.open(Path("store"), aligned.jobs.runs["target"].key)
    path = run.dump / "configurations.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"trainer": {"api_key": "zq9zq9", "lr": 2}}))
    assert configuration.of_run(run) == {"trainer.api_key": redaction.REDACTED, "trainer.lr": 2}


def test_the_page_shows_no_secret(aligned: Aligned) -> None:
    with edited(aligned.results / "diagnosis.json") as found:
        found["sentence"] += f" ({SECRETS['hugging face']})"
    assert main(["report", str(aligned.results), "-q"]) == 0
    page = (aligned.results / "report.html").read_text()
    assert SECRETS["hugging face"] not in page
    assert redaction.REDACTED in page
