"""Many requests on one model: one batched forward a tick.

    engine = Engine(model, batch_size=8)
    engine.add("...")                        # a number for every request; they may come at any time
    while not engine.idle:
        for number, item in engine.tick():   # events as they happen, and last the request's `Result`
            ...

A tick lets every running decoder go on until it wants a forward, and computes the forwards of all of them at once: prompts,
selects, verifies and completions side by side, each with its own cache. A request's tokens are the same alone and in any company
(float32 on a CPU: to the bit).

Contract: knows no method, no text and no network. Not for several threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from refusion.config import UserError
from refusion.events import Event
from refusion.generate import Clock, Config, Model, Prompt, Result, Steps
from refusion.methods.base import Answer, Forward
from refusion.models.runner import Runner, together

Item = Event | Result


@dataclass(eq=False)
class _Request:
    """One that runs; `reply` is what its last forward gave."""

    number: int
    steps: Steps
    runner: Runner
    reply: Answer | None = None


class Engine:
    """Runs requests, at most `batch_size` at once, in the order in which they came."""

    def __init__(self, model: Model, batch_size: int = 16) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {batch_size!s:.40}")
        self.model, self.batch_size = model, batch_size
        self._waiting: deque[tuple[int, list[int], Config]] = deque()
        self._running: list[_Request] = []
        self._count = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._running

    @property
    def running(self) -> list[int]:
        """The numbers of the requests that are being written."""
        return [request.number for request in self._running]

    def add(self, prompt: Prompt, config: Config | None = None, raw: bool = False) -> int:
        """Line up a request, and say its number. Raises `UserError` at once for what cannot be done."""
        ids, settings = self.model.request(prompt, config, raw)
        self._waiting.append((self._count, ids, settings))
        self._count += 1
        return self._count - 1

    def cancel(self, number: int) -> None:
        """Forget a request; nothing more is heard of it. One that is finished or unknown is no mistake."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != number)
        self._running = [request for request in self._running if request.number != number]

    def tick(self) -> Iterator[tuple[int, Item]]:
        """One batched forward, and before it all that its requests have to say: (number, event), or (number, result) when
        one is finished."""
        self._admit()
        calls: list[tuple[_Request, Forward]] = []
        for request in list(self._running):
            wanted = yield from self._advance(request)
            if wanted is not None and request in self._running:  # it may have been cancelled meanwhile
                calls.append((request, wanted))
        if calls:
            for (request, _), answer in zip(calls, together([(r.runner, f) for r, f in calls]), strict=True):
                request.reply = answer

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.batch_size:
            number, ids, settings = self._waiting.popleft()
            steps, runner = self.model.begin(ids, settings, Clock())
            self._running.append(_Request(number, steps, runner))

    def _advance(self, request: _Request) -> Generator[tuple[int, Item], None, Forward | None]:
        """Go on until the next forward, which is returned; None at the end, or when the request was cancelled."""
        while request in self._running:
            try:
                item = request.steps.send(request.reply)
            except StopIteration as end:
                self._running.remove(request)
                yield request.number, end.value
                return None
            request.reply = None
            if isinstance(item, Forward):
                return item
            yield request.number, item
        return None


def answer_all(
    model: Model, prompts: Sequence[Prompt], config: Config | None = None, raw: bool = False, batch_size: int = 16,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Result]:  # fmt: skip
    """The responses to several prompts, in their order. progress: called with (done, total, "") after every one."""
    engine = Engine(model, batch_size)
    for prompt in prompts:
        engine.add(prompt, config, raw)
    results: dict[int, Result] = {}
    while not engine.idle:
        for number, item in engine.tick():
            if isinstance(item, Result):
                results[number] = item
                if progress is not None:
                    progress(len(results), len(prompts), "")
    return [results[number] for number in range(len(prompts))]
