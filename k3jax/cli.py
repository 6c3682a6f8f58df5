"""The ``k3jax`` command: generate text, inspect a checkpoint, convert one.

Generated text, the report of an inspection and the version go to stdout, everything else to stderr.
Wrong input ends with one message and exit status 2, logits that are not finite with 1, an interrupt
with 130.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro

from .implementations import KNOWN
from .implementations import resolve as resolve_implementation

_USER_ERRORS = (OSError, ValueError, NotImplementedError)

_Path = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
_Prompt = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")]
_Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
_Target = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
_Implementation = Annotated[str, tyro.conf.arg(metavar="{" + ",".join(KNOWN) + "}")]
_DType = Annotated[str | None, tyro.conf.arg(metavar="{None,float32}")]


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
    """
    import k3jax
    from k3jax.generate import stream
    from k3jax.sampling import Sampling

    # Before loading: a wrong parameter should not cost minutes.
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: expected 0..2**64-1, got {seed}")
    resolve_implementation(implementation)
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    _check_length(path, prompt, max_new_tokens)
    start = time.perf_counter()
    model = k3jax.load(path, dtype=dtype, implementation=implementation, progress=True)
    _note(f"loaded in {time.perf_counter() - start:.1f} s")
    _print_stream(prompt, stream(model, prompt, max_new_tokens, sampling, seed))


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


def _messages(error: BaseException) -> list[str]:
    """One line per error, those of groups flattened."""
    if isinstance(error, BaseExceptionGroup):
        return [line for inner in error.exceptions for line in _messages(inner)]
    return [str(error) or type(error).__name__]


def _is_user_error(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_user_error(inner) for inner in error.exceptions)
    return isinstance(error, _USER_ERRORS)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Args:
        args: without the program's name; None takes ``sys.argv``.
    """
    given = list(sys.argv[1:] if args is None else args)
    commands: dict[str, Any] = {"generate": _generate, "inspect": _inspect, "convert": _convert}
    about = "Kimi K3 from JAX. `k3jax --version` prints the version."
    try:
        if given == ["--version"]:
            from k3jax import __version__

            print(f"k3jax {__version__}")
        else:
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

        if isinstance(error, NonFiniteLogitsError):
            count = len(error.result.tokens[0])
            _note(f"k3jax: error: logits are not finite after {count} new tokens")
            return 1
        if not _is_user_error(error):
            raise
        for line in _messages(error):
            _note(f"k3jax: error: {line}")
        return 2
    return 0


__all__ = ["main"]
