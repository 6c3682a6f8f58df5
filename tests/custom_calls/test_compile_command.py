"""``k3jax compile``: kernels made without a GPU, with what they take shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import k3jax
from k3jax import cli
from k3jax.custom_calls import artifacts, compile
from support.megakernel import STAND_IN, needs_compiler


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(artifacts, "_folders", [])
    monkeypatch.setattr(artifacts, "KERNEL", STAND_IN)


@needs_compiler
def test_it_writes_one_kernel_a_batch_and_shows_time_size_and_registers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kernels"
    status = cli.main(["compile", "nano", "--target", "sm_90a", "--batch", "1", "3", "--out", str(out)])
    shown, said = capsys.readouterr()
    assert status == 0, said
    form = (
        r"sm_90a-132sm-batch{}-ways1-[0-9a-f]{{20}}\.k3kernel: [\d.]+ s, [\d,]+ bytes, \d+ registers, "
        r"no spills, [\d,]+ bytes of code"
    )
    assert [
        bool(re.fullmatch(form.format(n), line)) for n, line in zip((1, 3), shown.splitlines(), strict=True)
    ]
    names = [line.split(":")[0] for line in shown.splitlines()]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    assert not artifacts.cache_folder().exists()


@needs_compiler
def test_by_default_it_writes_where_kernels_are_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["compile", "k3-slice", "--layers", "1", "--experts", "16", "--target", "sm_100a", "--sms", "148"]
    assert cli.main(args) == 0
    name = capsys.readouterr().out.split(":")[0]
    assert name.startswith("sm_100a-148sm-batch1-ways1-")
    assert (artifacts.cache_folder() / name).is_file()


@needs_compiler
def test_a_ranks_kernel_is_named_by_its_share(capsys: pytest.CaptureFixture[str]) -> None:
    names = []
    for options in (["--ways", "2"], ["--ways", "4", "--expert-width", "4"]):
        assert cli.main(["compile", "k3-slice", "--layers", "2", "--experts", "16", *options]) == 0
        names.append(capsys.readouterr().out.split(":")[0])
    assert names[0].startswith("sm_90a-132sm-batch1-ways2-experts2-")
    assert re.fullmatch(r"sm_90a-132sm-batch1-ways4-[0-9a-f]{20}\.k3kernel", names[1])
    assert all((artifacts.cache_folder() / name).is_file() for name in names)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nano", "--batch", "9"], r"batch: expected 1\.\.8, got 9"),
        (["nano", "--ways", "3"], r"ways: 3 does not divide"),
        (["nano", "--target", "sm_80"], r"target: expected one of sm_90a, .* got 'sm_80'"),
        (["nano", "--layers", "2"], r"layers, experts: only with preset k3-slice, got 'nano'"),
        (["k3", "--layers", "2"], r"preset 'k3' takes no num_layers"),
        (["/no/such/model"], r"/no/such/model"),
    ],
)
def test_wrong_input_is_one_message(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compile", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err.split("k3jax: error: ")[1])


def test_without_the_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile, "compiler_problem", lambda: "compiler: none is installed")
    assert cli.main(["compile", "nano"]) == 2
    assert "k3jax: error: compiler: none is installed" in capsys.readouterr().err


def test_a_fault_of_the_kernel_is_one_message_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object, **__: object) -> None:
        raise k3jax.KernelFaultError("the megakernel gave up", {})

    monkeypatch.setattr(k3jax, "load", load)
    assert cli.main(["generate", "nano", "x"]) == 1
    assert capsys.readouterr().err == "k3jax: error: the megakernel gave up\n"


def test_generate_takes_the_folder_and_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "nano", "x", "--kernels", str(tmp_path / "absent")]) == 2
    assert "expected a folder of compiled kernels" in capsys.readouterr().err
    assert cli.main(["generate", "nano", "x", "--cuda-runtime", str(tmp_path)]) == 2
    assert "path: expected libcute_dsl_runtime.so or its folder" in capsys.readouterr().err
