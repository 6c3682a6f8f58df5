"""The ``k3jax`` command: generate text, inspect a checkpoint, convert one, compile kernels, plan a mesh.

Generated text, the report of an inspection, a compilation or a plan and the version go to stdout,
everything else to stderr.
Wrong input ends with one message and exit status 2, logits that are not finite or a fault of the
megakernel with 1, an interrupt with 130.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro

from .dispatch.choice import KINDS
from .implementations import KNOWN, choose
from .mesh.distributed import HEARTBEAT_SECONDS, processes

_USER_ERRORS = (OSError, ValueError, NotImplementedError)

_Path = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
_Prompt = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")]
_Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
_Target = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
_Implementation = Annotated[str, tyro.conf.arg(metavar="{" + ",".join(KNOWN) + "}")]
_DType = Annotated[str | None, tyro.conf.arg(metavar="{None,float32}")]
_Dispatch = Annotated[str, tyro.conf.arg(metavar="{" + ",".join(KINDS) + "}")]
_Model = Annotated[str, tyro.conf.arg(metavar="PATH")]
_MeshName = Annotated[str | None, tyro.conf.arg(metavar="{None,nvl72}")]
_Gpu = Annotated[str, tyro.conf.arg(metavar="{gb300,h200}")]
_Batches = Annotated[tuple[int, ...], tyro.conf.arg(metavar="N [N ...]")]


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _generate(
    path: _Path,
    prompt: _Prompt,
    /,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    implementation: _Implementation = "auto",
    dtype: _DType = None,
    kernels: str | None = None,
    cuda_runtime: str | None = None,
    devices: int | None = None,
    tensor: int | None = None,
    expert_width: int = 1,
    dispatch: _Dispatch = "auto",
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    heartbeat: int = HEARTBEAT_SECONDS,
) -> None:
    """Continue a prompt; the new text goes to stdout, the prompt and progress to stderr.

    Args:
        path: checkpoint directory (release format or converted), or the name of a shipped one.
        prompt: text to continue.
        max_new_tokens: tokens to generate at most.
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens that hold this share of the mass; 1 keeps all.
        min_p: drop tokens below this share of the most probable one; 0 keeps all.
        repetition_penalty: above 1 makes tokens already in the text less likely.
        seed: of the random numbers, 0..2**64-1.
        implementation: how a decode step runs; auto takes the fastest that is available.
        dtype: "float32" computes everything in float32; by default as released.
        kernels: folder of kernels that ``k3jax compile`` made, looked into before the cache.
        cuda_runtime: path of libcute_dsl_runtime.so; default K3JAX_CUDA_RUNTIME or an installed one.
        devices: lay the model over this many devices; by default one, or all of a group of processes.
        tensor: ways of tensor parallelism over them; by default the most that fits, at most 8.
        expert_width: ways that each expert's width is cut, a divisor of tensor.
        dispatch: how tokens reach their experts on other devices; auto chooses by batch.
        coordinator: HOST:PORT of process 0 of a group that generates together.
        num_processes: processes of the group.
        process_id: this one's number in the group; 0 prints the text.
        heartbeat: seconds after which a process of the group that is not heard of is dead.
    """
    from k3jax.sampling import Sampling

    # Before loading: a wrong parameter should not cost minutes.
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: expected 0..2**64-1, got {seed}")
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    _check_length(path, prompt, max_new_tokens)
    _find_kernels(kernels, cuda_runtime)
    with processes(coordinator, num_processes, process_id, heartbeat) as speaks:
        plan = _plan(
            path, devices, tensor, expert_width, dispatch, in_group=coordinator is not None, speaks=speaks
        )
        _check_implementation(path, implementation, plan)
        _load_and_print(path, prompt, max_new_tokens, sampling, seed, implementation, dtype, plan, speaks)


def _load_and_print(
    path: str, prompt: str, max_new_tokens: int, sampling: Any, seed: int,
    implementation: str, dtype: str | None, plan: Any, speaks: bool,
) -> None:  # fmt: skip
    """Generate; a process that does not speak for its group takes part and prints nothing."""
    import k3jax
    from k3jax.generate import stream

    start = time.perf_counter()
    model = k3jax.load(path, dtype=dtype, implementation=implementation, mesh=plan, progress=speaks)
    steps = stream(model, prompt, max_new_tokens, sampling, seed)
    if speaks:
        _note(f"loaded in {time.perf_counter() - start:.1f} s")
        _print_stream(prompt, steps)
    else:
        for _ in steps:
            pass


def _plan(
    path: str, devices: int | None, tensor: int | None, expert_width: int, dispatch: str,
    *, in_group: bool, speaks: bool,
) -> Any:  # fmt: skip
    """The plan asked for, or None for one device; its line and the reason of its dispatch to stderr."""
    if devices is None and not in_group:
        if tensor is not None or expert_width != 1 or dispatch != "auto":
            raise ValueError("tensor, expert-width, dispatch: only with devices, or in a group of processes")
        return None
    import jax

    from k3jax import mesh
    from k3jax.checkpoints import resolve
    from k3jax.config import K3Config

    config = K3Config.from_pretrained(resolve(path))
    count = len(jax.devices()) if devices is None else devices
    plan = mesh.for_devices(count, config, tensor=tensor, expert_width=expert_width, dispatch=dispatch)
    plan.check_devices()
    if speaks:
        _note(str(plan))
        _note(f"dispatch: {plan.choice(config, plan.padded(1))}")
    return plan


def _check_length(path: str, prompt: str, max_new_tokens: int) -> None:
    """Refuse what the checkpoint's config and tokenizer alone show to be no prompt or too long."""
    from k3jax.checkpoints import resolve
    from k3jax.config import K3Config
    from k3jax.tokenizer import load_tokenizer

    if not prompt:
        raise ValueError("prompt: expected text, got an empty one")
    if max_new_tokens < 0:
        raise ValueError(f"max-new-tokens: expected at least 0, got {max_new_tokens}")
    folder = resolve(path)
    config = K3Config.from_pretrained(folder)
    length, limit = len(load_tokenizer(folder, config).encode(prompt)), config.max_position_embeddings
    if length + max_new_tokens > limit:
        raise ValueError(
            f"max-new-tokens: expected at most {max(limit - length, 0)} after {length} prompt tokens, as "
            f"max_position_embeddings={limit}; got {max_new_tokens}"
        )


def _find_kernels(kernels: str | None, cuda_runtime: str | None) -> None:
    """Where to look for compiled kernels and for what runs them."""
    if kernels is not None:
        from k3jax.custom_calls.artifacts import add_folder

        add_folder(kernels)
    if cuda_runtime is not None:
        from k3jax.custom_calls.ffi import register

        register(cuda_runtime)


def _check_implementation(path: str, implementation: str, plan: Any) -> None:
    """Refuse an implementation that cannot run here; "auto" is chosen when the parameters are there."""
    from k3jax.checkpoints import resolve
    from k3jax.config import K3Config

    if implementation != "auto":
        choose(implementation, K3Config.from_pretrained(resolve(path)), plan=plan)


def _print_stream(prompt: str, steps: Iterator[Any]) -> None:
    """Print the prompt to stderr and one row's text to stdout as it comes, then the rates."""
    # On a terminal the text goes on where the prompt ends.
    joined = sys.stderr.isatty() and sys.stdout.isatty()
    print(prompt, end="" if joined else "\n", file=sys.stderr, flush=True)
    start = time.perf_counter()
    marks: list[float] = []
    try:
        for step in steps:
            marks.append(time.perf_counter())
            print(step.text[0], end="", flush=True)
    finally:
        if marks:
            print(flush=True)
        elif joined:
            print(file=sys.stderr, flush=True)
    if not marks:
        return
    _note(f"first token after {marks[0] - start:.2f} s (with compilation)")
    if len(marks) > 2:  # the second token waits for the decode step's compilation
        rate = (len(marks) - 2) / max(marks[-1] - marks[1], 1e-9)
        _note(f"{len(marks)} tokens, {rate:.1f} per second once compiled")


def _inspect(path: _Path, /) -> None:
    """Print a checkpoint's configuration, tensors, parameters, bytes, and what is missing.

    Args:
        path: checkpoint directory (release format or converted), the name of a shipped one, or a
            config.json alone.
    """
    from k3jax.checkpoints import inspect_report

    print(inspect_report(path))


def _convert(src: _Source, dst: _Target, /) -> None:
    """Convert a checkpoint in release format to an Orbax one; a second run resumes the first.

    Args:
        src: checkpoint directory in release format, or the name of a shipped one.
        dst: directory to write.
    """
    from k3jax.checkpoints import convert

    convert(src, dst)


def _compile(
    path: _Path,
    /,
    target: str = "sm_90a",
    batch: _Batches = (1,),
    ways: int = 1,
    expert_width: int = 1,
    peers: bool = False,
    sms: int = 132,
    out: str | None = None,
    layers: int | None = None,
    experts: int | None = None,
) -> None:
    """Compile the decode megakernel for a model; needs nvidia-cutlass-dsl, but no GPU.

    Args:
        path: checkpoint directory, config.json, the name of a shipped checkpoint, or preset k3 or k3-slice.
        target: architecture: sm_90a, sm_100a or sm_103a.
        batch: rows of a step, 1..8; one kernel for each number given.
        ways: tensor-parallel ranks that share the model.
        expert_width: ways that each expert's width is cut; experts are spread over the other ranks.
        peers: the ranks exchange in the kernel, through mailboxes in one another's memory.
        sms: SMs of the GPU; the kernel runs on a GPU with this many.
        out: folder to write to; default the cache, where they are found by themselves.
        layers: of preset k3-slice.
        experts: of preset k3-slice.
    """
    from k3jax.custom_calls.artifacts import Key, cache_folder
    from k3jax.custom_calls.compile import compile_artifact
    from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target

    config = _config_of(path, layers, experts)
    if expert_width < 1 or ways % expert_width:
        raise ValueError(f"expert-width: expected a divisor of ways={ways}, got {expert_width}")
    spread = ways // expert_width
    keys = [Key(Plan(config, rows, Target(target, sms=sms), ways, spread, peers), target) for rows in batch]
    for key in keys:
        _note(f"compiling for batch {key.plan.batch} ...")
        start = time.perf_counter()
        artifact = compile_artifact(key, cache_folder() if out is None else out)
        used = artifact.about
        spills = f"{used['local_bytes']} bytes of local memory" if used["local_bytes"] else "no spills"
        print(
            f"{key.file_name}: {time.perf_counter() - start:.1f} s, {len(artifact.module):,} bytes, "
            f"{used['registers']} registers, {spills}, {used['code_bytes']:,} bytes of code",
            flush=True,
        )


def _plan_report(
    model: _Model = "k3",
    mesh: _MeshName = None,
    batch: int = 72,
    context: int = 8192,
    devices: int | None = None,
    tensor: int | None = None,
    expert_width: int = 1,
    dispatch: _Dispatch = "auto",
    split_sequence: bool = False,
    gpu: _Gpu = "gb300",
    layers: int | None = None,
    compile_step: bool = True,
    json: str | None = None,
    picture: str | None = None,
    hlo: str | None = None,
) -> None:
    """Show how a model lies on many GPUs: memory, collectives and projected time of a decode step.

    The step is compiled for these GPUs on this machine, which needs none: pip install 'k3jax[plan]'.

    Args:
        model: checkpoint directory, config.json, the name of a shipped checkpoint, or preset k3 or k3-slice.
        mesh: a named mesh; nvl72 without devices.
        batch: rows of a step.
        context: tokens that each row can hold.
        devices: number of GPUs.
        tensor: ways of tensor parallelism; by default the most that fits, at most 8.
        expert_width: ways that each expert's width is cut.
        dispatch: how tokens reach their experts on other devices; auto chooses by batch.
        split_sequence: cut the latent cache by position over the tensor ranks.
        gpu: what to compile for.
        layers: of preset k3-slice.
        compile_step: compile the step; without it the report is arithmetic alone.
        json: file for the report as data.
        picture: file for the report as a picture.
        hlo: file for the compiled module's text.
    """
    from k3jax.plan_report.command import Request, devices_of, run

    count = devices_of(mesh, devices)
    request = Request(
        model, layers, count, tensor, expert_width, dispatch, split_sequence, batch, context, gpu, hlo
    )
    run(request, compile_step, json, picture)


def _config_of(path: str, layers: int | None, experts: int | None) -> Any:
    """The configuration that a path, a shipped checkpoint or a preset names."""
    from k3jax.checkpoints import resolve
    from k3jax.config import K3Config

    if path in ("k3", "k3-slice"):
        return K3Config.preset(path, num_layers=layers, num_experts=experts)
    if layers is not None or experts is not None:
        raise ValueError(f"layers, experts: only with preset k3-slice, got {path!r}")
    return K3Config.from_pretrained(path if os.path.isfile(path) else resolve(path))


def _messages(error: BaseException) -> list[str]:
    """One line per error, those of groups flattened."""
    if isinstance(error, BaseExceptionGroup):
        return [line for inner in error.exceptions for line in _messages(inner)]
    return [str(error) or type(error).__name__]


def _is_user_error(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_user_error(inner) for inner in error.exceptions)
    return isinstance(error, _USER_ERRORS)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _note(record.getMessage())


@contextlib.contextmanager
def _library_notes() -> Iterator[None]:
    """What the library logs, such as which implementation "auto" falls back to and why, goes to stderr."""
    log, notes = logging.getLogger("k3jax"), _Notes()
    level = log.level
    log.addHandler(notes)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(notes)
        log.setLevel(level)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Args:
        args: without the program's name; None takes ``sys.argv``.
    """
    from .bench.command import command as bench

    given = list(sys.argv[1:] if args is None else args)
    commands: dict[str, Any] = {
        "generate": _generate,
        "inspect": _inspect,
        "convert": _convert,
        "compile": _compile,
        "plan": _plan_report,
        "bench": bench,
    }
    about = (
        "Kimi K3 from JAX. `k3jax --version` prints the version; `k3jax launch N -- COMMAND ...` runs a "
        "command as N processes."
    )
    try:
        if given == ["--version"]:
            from k3jax import __version__

            print(f"k3jax {__version__}")
        elif given[:1] == ["launch"]:
            from k3jax.mesh.launch import main as launch

            return launch(given[1:])
        else:
            with _library_notes():
                tyro.extras.subcommand_cli_from_dict(commands, prog="k3jax", description=about, args=given)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _note("interrupted")
        return 130
    except BrokenPipeError:
        # The reader went away (`k3jax ... | head`); Python flushes stdout once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        from k3jax.generate import NonFiniteLogitsError
        from k3jax.state import KernelFaultError

        if isinstance(error, NonFiniteLogitsError):
            count = len(error.result.tokens[0])
            _note(f"k3jax: error: logits are not finite after {count} new tokens")
            return 1
        if isinstance(error, KernelFaultError):
            _note(f"k3jax: error: {error}")
            return 1
        if not _is_user_error(error):
            raise
        for line in _messages(error):
            _note(f"k3jax: error: {line}")
        return 2
    return 0


__all__ = ["main"]
