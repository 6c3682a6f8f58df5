"""The command line: what it prints where, and how it ends."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import k3jax
from k3jax import NonFiniteLogitsError, Sampling, cli
from k3jax.generate import GenerateResult, StreamStep
from k3jax.implementations import KNOWN
from support.generation import config
from support.random_k3 import random_tensors, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "small", config(), random_tensors(config(), 5))


def run(*args, **options):
    command = [sys.executable, "-m", "k3jax", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)


def test_generate_streams_the_text_to_stdout_and_everything_else_to_stderr(checkpoint, capsys):
    options = [
        "--max-new-tokens",
        "12",
        "--temperature",
        "0.8",
        "--top-k",
        "50",
        "--top-p",
        "0.9",
        "--min-p",
        "0.01",
    ]
    options += ["--repetition-penalty", "1.1", "--seed", "5", "--implementation", "xla", "--dtype", "float32"]
    assert cli.main(["generate", str(checkpoint), "hello", *options]) == 0
    out, err = capsys.readouterr()
    model = k3jax.load(checkpoint, dtype="float32", progress=False)
    sampling = Sampling(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    expected = model.generate("hello", max_new_tokens=12, sampling=sampling, seed=5)
    assert out == expected.text[0] + "\n"
    assert "\nhello\n" in err[err.index("loaded in") :]
    assert "load:" not in err  # a progress bar is for terminals
    assert re.search(r"loaded in [\d.]+ s", err)
    assert re.search(r"12 tokens, [\d.]+ per second", err)


def test_convert_and_inspect_work_from_the_command_line(checkpoint, tmp_path, capsys):
    assert cli.main(["convert", str(checkpoint), str(tmp_path / "orbax")]) == 0
    assert cli.main(["inspect", str(checkpoint)]) == 0
    assert f"{config().param_count():,}" in capsys.readouterr().out
    converted = k3jax.load(tmp_path / "orbax", progress=False)
    assert converted.config == config()


def test_inspect_and_convert_take_the_name_of_a_shipped_checkpoint(tmp_path, capsys):
    assert cli.main(["inspect", "nano"]) == 0
    out, err = capsys.readouterr()
    assert "nano (release format)" in out
    assert err == ""
    assert cli.main(["convert", "nano", str(tmp_path / "orbax")]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1  # the report; a progress bar is for terminals
    assert cli.main(["inspect", str(tmp_path / "orbax")]) == 0
    assert "Nothing is missing or faulty." in capsys.readouterr().out


def test_the_version_is_printed_to_stdout(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"k3jax {k3jax.__version__}\n"


def test_the_help_of_generate_lists_every_implementation(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "--help"])
    assert ended.value.code == 0
    shown = re.sub(r"[^a-z{},-]", "", capsys.readouterr().out)
    assert "{" + ",".join(KNOWN) + "}" in shown


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["x", "--seed", "-1"], r"seed: expected 0\.\.2\*\*64-1, got -1"),
        (["x", "--seed", str(2**64)], "seed: expected"),
        (["x", "--max-new-tokens", "-1"], "max-new-tokens: expected at least 0, got -1"),
        (["xy", "--max-new-tokens", "511"], "max-new-tokens: expected at most 510 after 2 prompt tokens"),
        (["x" * 600, "--max-new-tokens", "0"], "expected at most 0 after 600 prompt tokens"),
        (["x", "--top-k", "-2"], r"Sampling\.top_k"),
        (["x", "--min-p", "nan"], r"Sampling\.min_p"),
        (["x", "--repetition-penalty", "0"], r"Sampling\.repetition_penalty"),
        (["x", "--implementation", "fast"], "implementation: expected one of"),
        ([""], "prompt: expected text"),
    ],
)
def test_a_wrong_parameter_is_refused_before_anything_is_loaded(
    checkpoint, monkeypatch, capsys, wrong, message
):
    monkeypatch.setattr(k3jax, "load", raising(AssertionError("loaded")))
    assert cli.main(["generate", str(checkpoint), *wrong]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"k3jax: error: .*{message}.*\n", err)


def test_an_error_before_the_first_token_leaves_stdout_empty(capsys):
    nothing = GenerateResult([[]], [""], [[]], ["error"])

    def steps():
        raise NonFiniteLogitsError([0], nothing)
        yield

    with pytest.raises(NonFiniteLogitsError):
        cli._print_stream("hello", steps())
    assert capsys.readouterr() == ("", "hello\n")


def test_on_a_terminal_the_text_goes_on_where_the_prompt_ends(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    cli._print_stream("hello", iter([StreamStep(np.zeros(1, np.int32), [" world"], np.ones(1, bool))]))
    out, err = capsys.readouterr()
    assert out == " world\n"
    assert err.startswith("hellofirst token after")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "/no/such/checkpoint", "x"], "/no/such/checkpoint"),
        (
            ["generate", "/no/such/checkpoint", "x", "--temperature", "-1"],
            r"Sampling\.temperature: expected 0 or",
        ),
        (
            ["generate", "/no/such/checkpoint", "x", "--top-p", "2"],
            r"Sampling\.top_p: expected a number in 0\.\.1",
        ),
        (["generate", "CHECKPOINT", "x", "--dtype", "int8"], "dtype"),
        (
            ["generate", "CHECKPOINT", "x", "--implementation", "fast"],
            "implementation: expected one of auto, xla",
        ),
        (["generate", "CHECKPOINT", "x", "--implementation", "megakernel"], "megakernel"),
        (["generate", "CHECKPOINT", ""], "prompt: expected text, got an empty one"),
        (["generate", "CHECKPOINT", "x", "--max-new-tokens", "512"], "max_position_embeddings=512"),
        (["generate", "CHECKPOINT", "x", "--seed", "-1"], "seed: expected"),
        (["inspect", "/no/such/checkpoint"], "/no/such/checkpoint"),
        (["convert", "/no/such/checkpoint", "/no/target"], "/no/such/checkpoint"),
    ],
)
def test_wrong_input_ends_with_one_message_and_status_2(checkpoint, capsys, args, message):
    args = [str(checkpoint) if a == "CHECKPOINT" else a for a in args]
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert len(re.findall(r"^k3jax: error: ", err, re.MULTILINE)) == 1
    assert re.search(message, err.split("k3jax: error: ")[1])


def raising(error):
    def load(*_, **__):
        raise error

    return load


def test_a_group_of_errors_is_one_line_each_and_a_bug_keeps_its_traceback(monkeypatch, capsys):
    inner = ExceptionGroup("why", [NotImplementedError("no GPU"), ValueError("wrong shape")])
    monkeypatch.setattr(k3jax, "load", raising(ExceptionGroup("all", [inner, ValueError("third")])))
    assert cli.main(["generate", "nano", "x"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"k3jax: error: {why}" for why in ("no GPU", "wrong shape", "third")
    ]
    monkeypatch.setattr(k3jax, "load", raising(ExceptionGroup("all", [ValueError("x"), KeyError("bug")])))
    with pytest.raises(ExceptionGroup):
        cli.main(["generate", "nano", "x"])
    monkeypatch.setattr(k3jax, "load", raising(KeyError("bug")))
    with pytest.raises(KeyError):
        cli.main(["generate", "nano", "x"])


def test_bad_logits_end_with_status_1_and_an_interrupt_with_130(monkeypatch, capsys):
    nothing = GenerateResult([[]], [""], [[]], ["error"])
    monkeypatch.setattr(k3jax, "load", raising(NonFiniteLogitsError([0], nothing)))
    assert cli.main(["generate", "nano", "x"]) == 1
    assert "not finite after 0 new tokens" in capsys.readouterr().err
    monkeypatch.setattr(k3jax, "load", raising(KeyboardInterrupt()))
    assert cli.main(["generate", "nano", "x"]) == 130


def test_the_program_runs_as_a_module_with_its_exit_status():
    result = run("generate", "/no/such/checkpoint", "x")
    assert result.returncode == 2
    assert result.stderr.startswith("k3jax: error: ")
    assert "Traceback" not in result.stderr
    assert run("generate").returncode == 2
    shown = run("--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in ("generate", "inspect", "convert"))


def test_a_reader_that_goes_away_ends_it_quietly(checkpoint):
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "k3jax", "inspect", str(checkpoint)]
        result = subprocess.run(
            command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300, check=False
        )
    finally:
        os.close(write)
    assert result.returncode == 1
    assert result.stderr == ""
