"""Compiled kernels as files: found by what they were made from, never half written, never half read."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import jax
import jaxlib.version
import pytest

from k3jax.custom_calls import artifacts, compile, ffi
from k3jax.custom_calls.artifacts import ArtifactError, Key
from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target
from support import megakernel
from support.megakernel import STAND_IN, needs_compiler

PLAN = Plan(megakernel.config(), 2)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(artifacts, "_folders", [])
    artifacts.load.cache_clear()


def key(plan: Plan = PLAN, arch: str = "sm_90a") -> Key:
    return Key(plan, arch, STAND_IN)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    artifact = megakernel.artifact(2, bytes(range(256)) * 3)
    artifacts.write(artifact, tmp_path / "a.k3kernel")
    read = artifacts.load(tmp_path / "a.k3kernel")
    assert read == artifact
    assert [path.name for path in tmp_path.iterdir()] == ["a.k3kernel"]


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    whole = megakernel.artifact(1, b"module" * 50).to_bytes()
    for at in (0, 9, 40, len(whole) // 2, len(whole) - 40, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        with pytest.raises(
            ArtifactError, match=r"somewhere: (damaged: its checksum|expected a compiled kernel)"
        ):
            artifacts.Artifact.from_bytes(bytes(damaged), "somewhere")
    for size in (0, 20, len(whole) - 1):
        with pytest.raises(ArtifactError, match="somewhere"):
            artifacts.Artifact.from_bytes(whole[:size], "somewhere")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        artifacts.write(megakernel.artifact(1), tmp_path / "a.k3kernel")
    assert list(tmp_path.iterdir()) == []


def test_the_name_follows_everything_the_kernel_was_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    config = megakernel.config()
    keys = [
        key(),
        key(Plan(config, 3)),
        key(Plan(config, 2, Target(sms=114))),
        key(Plan(config, 2, ways=2)),
        key(Plan(dataclasses.replace(config, rms_norm_eps=2e-5), 2)),
        key(arch="sm_100a"),
        Key(PLAN, "sm_90a"),
    ]
    assert len({k.file_name for k in keys}) == len(keys)
    assert key().file_name == Key(Plan(megakernel.config(), 2), "sm_90a", STAND_IN).file_name
    assert re.fullmatch(r"sm_90a-132sm-batch2-ways1-[0-9a-f]{20}\.k3kernel", key().file_name)
    name = key().file_name
    monkeypatch.setattr(jax, "__version__", "99.0")  # a kernel made here runs there, under that host's jax
    assert key().file_name == name
    monkeypatch.setattr(artifacts, "source_digest", lambda entry: "another version of the kernel")
    assert key().file_name != name


def test_the_source_is_that_of_the_kernel_and_not_of_its_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shapes.py", "kernel/call.py", "interpreter/step.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(artifacts, "_SOURCE", tmp_path)

    def digest() -> str:
        artifacts.source_digest.cache_clear()
        return artifacts.source_digest(artifacts.KERNEL)

    before = digest()
    (tmp_path / "interpreter/step.py").write_text("x = 2\n")
    assert digest() == before
    (tmp_path / "kernel/call.py").write_text("x = 2\n")
    assert digest() != before
    artifacts.source_digest.cache_clear()


def test_a_kernel_is_found_in_added_folders_first_and_then_in_the_cache(tmp_path: Path) -> None:
    assert artifacts.find(key()) is None
    cached = artifacts.cache_folder() / key().file_name
    assert cached.is_relative_to(tmp_path / "cache")
    artifacts.write(megakernel.artifact(2), cached)
    assert artifacts.find(key()) == cached
    (tmp_path / "mine").mkdir()
    artifacts.add_folder(tmp_path / "mine")
    assert artifacts.find(key()) == cached
    artifacts.write(megakernel.artifact(2), tmp_path / "mine" / key().file_name)
    assert artifacts.find(key()) == tmp_path / "mine" / key().file_name
    with pytest.raises(NotADirectoryError, match="expected a folder of compiled kernels"):
        artifacts.add_folder(tmp_path / "absent")


def test_a_kernel_for_another_runtime_library_is_refused_by_its_call_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile, "compiler_problem", lambda: "compiler: none is installed")
    path = artifacts.cache_folder() / key().file_name
    artifacts.write(dataclasses.replace(megakernel.artifact(2), target="Other_v3"), path)
    with pytest.raises(ArtifactError, match=f"expected a kernel that calls {ffi.TARGET}.*got Other_v3"):
        artifacts.load(path)
    with pytest.raises(ArtifactError, match=r"got Other_v3; delete it or make it again"):
        compile.obtain(key())


def test_without_a_compiler_a_missing_or_damaged_kernel_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile, "compiler_problem", lambda: "compiler: none is installed")
    with pytest.raises(
        ArtifactError, match=r"batch2.*none is installed.*k3jax compile .* --batch 2 .*--sms 132"
    ):
        compile.obtain(key())
    path = artifacts.cache_folder() / key().file_name
    artifacts.write(megakernel.artifact(2), path)
    assert compile.obtain(key()) == megakernel.artifact(2)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    artifacts.load.cache_clear()
    with pytest.raises(ArtifactError, match=f"{path}: damaged.*delete it or make it again"):
        compile.obtain(key())


@needs_compiler
def test_a_kernel_compiles_without_a_gpu_once_and_a_damaged_one_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = compile.obtain(key())
    assert made.about["registers"] >= 16
    assert made.about["local_bytes"] == 0
    assert made.about["code_bytes"] > 0
    assert made.about["batch"] == 2
    assert made.about["jax"] == jax.__version__
    for version in (jax.__version__, jaxlib.version.__version__):  # and nowhere else
        assert version.encode() not in made.module
    want = megakernel.artifact(2)
    assert sorted(made.operands, key=str) == sorted(want.operands, key=str)
    assert sorted(made.results, key=str) == sorted(want.results, key=str)
    assert {(made.operands[i].path, made.results[k].path) for i, k in made.aliases} == {
        (want.operands[i].path, want.results[k].path) for i, k in want.aliases
    }
    path = artifacts.find(key())
    assert path is not None
    stamp = path.stat().st_mtime_ns
    artifacts.load.cache_clear()
    assert compile.obtain(key()) == made
    assert path.stat().st_mtime_ns == stamp
    path.write_bytes(path.read_bytes()[:500])
    artifacts.load.cache_clear()
    assert compile.obtain(key()).operands == made.operands
    assert "compiling it again" in caplog.text


@needs_compiler
def test_what_the_compiler_says_reaches_the_user() -> None:
    with pytest.raises(
        compile.CompileError, match=r"(?s)support\.stand_in_kernel:nothing.*no attribute 'nothing'"
    ):
        compile.compile_artifact(Key(PLAN, "sm_90a", "support.stand_in_kernel:nothing"), "unused")
    with pytest.raises(ValueError, match="target: expected one of sm_90a, sm_100a, sm_103a, got 'sm_80'"):
        compile.compile_artifact(key(arch="sm_80"), "unused")


def test_operands_must_be_those_the_kernel_was_compiled_for() -> None:
    have = {
        "a": jax.ShapeDtypeStruct((2, 5), "float32"),
        "cache": jax.ShapeDtypeStruct((2, 512, 3), "bfloat16"),
    }
    want = artifacts.leaves_of(have, 512)
    other = {**have, "cache": jax.ShapeDtypeStruct((2, 256, 3), "bfloat16")}
    artifacts.check_leaves("operands", artifacts.leaves_of(other), want)
    for name, leaf in (
        ("a", ((2, 4), "float32")),
        ("a", ((2, 5), "int32")),
        ("cache", ((3, 512, 3), "bfloat16")),
    ):
        wrong = {**have, name: jax.ShapeDtypeStruct(*leaf)}
        with pytest.raises(ArtifactError, match=rf"operands\['{name}'\]: expected .* got "):
            artifacts.check_leaves("operands", artifacts.leaves_of(wrong), want)
    with pytest.raises(ArtifactError, match=r"expected 2 arrays, got 1; only in one of them: \['cache'\]"):
        artifacts.check_leaves("operands", artifacts.leaves_of({"a": have["a"]}), want)
