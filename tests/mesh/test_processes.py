"""Several processes on one host: the launcher, the same tokens, and what a death looks like."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import k3jax
from k3jax.mesh import distributed, launch

PACKAGE = Path(k3jax.__file__).parent.parent
PROMPT = "In the beginning"
HEARTBEAT = 10


# -- the launcher alone -----------------------------------------------------------------


def script(*lines: str) -> list[str]:
    """A command that knows its number in the group as ``rank``."""
    text = "; ".join(["import sys, os, time, signal", "rank = int(sys.argv[-1])", *lines])
    return [sys.executable, "-c", text]


def test_the_launcher_gives_every_process_its_number_and_one_coordinator(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(' '.join(sys.argv[1:]))"
    assert launch.launch(script(seen, "print('process', rank)"), 3, heartbeat=7) == 0
    found = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    shape = r"--coordinator (127\.0\.0\.1:\d+) --num-processes 3 --heartbeat 7 --process-id (\d)"
    matches = [re.fullmatch(shape, text) for text in found]
    assert all(matches), found
    assert [m[2] for m in matches if m] == ["0", "1", "2"]
    assert len({m[1] for m in matches if m}) == 1
    assert capfd.readouterr().out == "process 0\n"


@pytest.mark.parametrize(
    ("end", "how"),
    [("sys.exit(3)", "exit status 3"), ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL")],
)
def test_the_launcher_says_which_process_died_first_and_leaves_none_behind(
    end: str, how: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    start = time.monotonic()
    status = launch.launch(script(f"exec('if rank == 1: {end}')", "time.sleep(60)"), 3, heartbeat=0)
    assert status == 1
    assert time.monotonic() - start < 30
    errors = capfd.readouterr().err
    assert f"process 1 died first: {how}" in errors
    assert "processes [0, 2] did not end within 0.2 s; killed" in errors
    for pid in re.findall(r"is pid (\d+)", errors):
        assert not Path(f"/proc/{pid}").exists()


def test_survivors_that_end_by_themselves_are_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    """The second one's late failure is no first death."""
    body = script("time.sleep(0.3 * rank)", "sys.exit(4 + rank)")
    assert launch.launch(body, 2, heartbeat=20) == 1
    errors = capfd.readouterr().err
    assert "process 0 died first: exit status 4" in errors
    assert "process 1 ended: exit status 5" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("127.0.0.1:1", None, 0), "expected all three or none"),
        ((None, 2, None), "expected all three or none"),
        (("localhost", 2, 0), "coordinator: expected HOST:PORT, got 'localhost'"),
        (("localhost:99999", 2, 0), "coordinator: expected HOST:PORT"),
        (("localhost:1", 0, 0), "num-processes: expected at least 1, got 0"),
        (("localhost:1", 2, 2), r"process-id: expected 0\.\.1, got 2"),
    ],
)
def test_a_group_that_is_none_is_refused_before_anything_starts(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message), distributed.processes(*arguments):
        pytest.fail("the body must not run")
    with pytest.raises(ValueError, match="num-processes: expected at least 1, got 0"):
        launch.launch(["true"], 0)


def test_without_a_group_one_process_speaks() -> None:
    with distributed.processes(None, None, None) as speaks:
        assert speaks


def test_the_open_file_limit_is_raised_as_far_as_it_may_be() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowered = min(soft, hard) - 10
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowered, hard))
        assert distributed.raise_open_file_limit(lowered + 5) == lowered + 5
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (lowered + 5, hard)
        assert distributed.raise_open_file_limit(lowered) == lowered + 5  # never lowered
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- the model over processes -----------------------------------------------------------


def start(devices: int, new_tokens: int) -> subprocess.Popen[str]:
    """Two processes of ``devices`` virtual CPU devices each that generate from the shipped checkpoint."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(PACKAGE),
    }
    command = [sys.executable, "-m", "k3jax", "launch", "2", "--heartbeat", str(HEARTBEAT), "--", "generate"]
    command += ["nano", PROMPT, "--max-new-tokens", str(new_tokens), "--dtype", "float32"]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, 36])
def test_two_processes_generate_the_tokens_of_one_device(devices: int) -> None:
    with start(devices, 12) as running:
        try:
            out, err = running.communicate(timeout=580)
        finally:
            running.kill()
    assert running.returncode == 0, err[-4000:]
    assert f"{2 * devices} devices" in err
    expected = k3jax.load("nano", dtype="float32", progress=False).generate(PROMPT, max_new_tokens=12)
    assert expected.text[0] + "\n" in out


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "victim"), [(4, 0), (4, 1), (36, 1)])
def test_when_a_process_is_killed_the_other_ends_in_time_and_the_launcher_says_which(
    devices: int, victim: int
) -> None:
    errors: list[str] = []
    with start(devices, 4000) as running:
        reader = threading.Thread(target=lambda: errors.extend(running.stderr or ()))
        reader.start()
        assert running.stdout is not None
        try:
            while (text := running.stdout.read(1)) != "" and text not in " abcdefghijklmnopqrstuvwxyz":
                pass  # until the first token is printed: both are inside the loop of steps
            pids = dict(re.findall(r"process (\d) is pid (\d+)", "".join(errors)))
            os.kill(int(pids[str(victim)]), signal.SIGKILL)
            killed = time.monotonic()
            running.wait(timeout=HEARTBEAT + launch.GRACE_SECONDS + 30)
            took = time.monotonic() - killed
        finally:
            running.kill()
            reader.join(timeout=30)
    message = "".join(errors)
    assert running.returncode == 1, message[-4000:]
    assert took <= HEARTBEAT + launch.GRACE_SECONDS, message[-4000:]
    assert f"process {victim} died first: killed by SIGKILL" in message
    survivor = re.search(rf"process {1 - victim} ended: (.*)", message)
    assert survivor, message[-4000:]
    assert survivor[1] != "exit status 0"
    assert "did not end within" not in message
