"""Threads of the emulated GPU: Python threads of which one runs at a time, and hands over where it waits.

So an emulated launch is deterministic, a wait that can never end is found at once (nobody can run) and
named, and no lock guards anything else.
"""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

STACK_BYTES = 512 * 1024


class HangError(RuntimeError):
    """Nobody can go on, and not all are done; names what they wait for."""


class _AbortError(BaseException):
    """Ends a thread after another one failed."""


class Fiber:
    """One emulated thread; ``data`` is its owner's."""

    def __init__(self, body: Callable[[], Any], data: Any):
        self.body, self.data = body, data
        self.turn = threading.Lock()
        self.turn.acquire()
        self.waits_for: Any = None
        self.done = False


class Event:
    """Something that threads wait for; ``wake`` lets all of them go on."""

    def __init__(self, name: str):
        self.name = name
        self.waiting: list[Fiber] = []


class Scheduler:
    """Runs threads to their end.

    Args:
        seed: of the order in which threads that can run get their turn; None is first come, first served.
    """

    def __init__(self, seed: int | None = None):
        self.ready: collections.deque[Fiber] = collections.deque()
        self.fibers: list[Fiber] = []
        self.current: Fiber | None = None
        self.failure: BaseException | None = None
        self._finished = threading.Event()
        self._random = None if seed is None else random.Random(seed)

    def run(self, bodies: Iterable[tuple[Callable[[], Any], Any]]) -> None:
        """Run threads given as (body, data) until all are done.

        Raises:
            HangError: they wait for one another. Whatever a body raises.
        """
        self.fibers = [Fiber(body, data) for body, data in bodies]
        self.ready.extend(self.fibers)
        threads = [threading.Thread(target=self._main, args=(f,), daemon=True) for f in self.fibers]
        before = threading.stack_size(STACK_BYTES)
        try:
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        self._pass_on()
        self._finished.wait()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    @property
    def data(self) -> Any:
        """Of the thread that runs."""
        assert self.current is not None
        return self.current.data

    def wait(self, event: Event) -> None:
        """Let others run until ``event`` wakes this thread."""
        me = self.current
        assert me is not None
        me.waits_for = event
        event.waiting.append(me)
        self._hand_over(me)

    def wake(self, event: Event) -> None:
        """All that wait for ``event`` can run again."""
        for fiber in event.waiting:
            fiber.waits_for = None
        self.ready.extend(event.waiting)
        event.waiting.clear()

    def pause(self) -> None:
        """Let all others that can run go first."""
        me = self.current
        assert me is not None
        self.ready.append(me)
        self._hand_over(me)

    # -- handing over --

    def _next(self) -> Fiber | None:
        if not self.ready:
            return None
        if self._random is not None:
            self.ready.rotate(self._random.randrange(len(self.ready)))
        return self.ready.popleft()

    def _hand_over(self, me: Fiber) -> None:
        self._pass_on()
        me.turn.acquire()
        if self.failure is not None:
            raise _AbortError
        self.current = me

    def _pass_on(self) -> None:
        following = self._next()
        if following is None:
            following = self._nobody_can_run()
        if following is not None:
            following.turn.release()

    def _nobody_can_run(self) -> Fiber | None:
        """The end, or a hang: then whose turn it is to end."""
        waiting = [f for f in self.fibers if not f.done]
        if waiting and self.failure is None:
            counts = collections.Counter(f.waits_for.name for f in waiting if f.waits_for is not None)
            lines = [f"{count} threads wait for {name}" for name, count in counts.most_common(12)]
            self.current = None  # whoever looked for the next one waits as well
            self._fail(HangError("; ".join(lines)))
            return self._next()
        if not waiting:
            self._finished.set()
        return None

    def _fail(self, error: BaseException) -> None:
        """Every thread that has not ended gets its turn once more, to end."""
        if self.failure is None:
            self.failure = error
            self.ready.clear()
            for fiber in self.fibers:
                if not fiber.done and fiber is not self.current:
                    self.ready.append(fiber)

    def _main(self, fiber: Fiber) -> None:
        fiber.turn.acquire()
        self.current = fiber
        try:
            if self.failure is None:
                fiber.body()
        except _AbortError:
            pass
        except BaseException as error:  # noqa: BLE001 (raised by `run`)
            self._fail(error)
        fiber.done = True
        if self.failure is not None and all(f.done for f in self.fibers):
            self._finished.set()
            return
        self.current = None
        self._pass_on()


__all__ = ["Event", "Fiber", "HangError", "Scheduler"]
