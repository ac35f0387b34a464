"""Generation step by step: tokens go to a callback as they come, and texts end at stop strings."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from distaff.generation.decoders import Blank, Params
from distaff.generation.plan import Plan
from distaff.generation.programs import Call, Programs

# Called with the newest tokens `[rows]`; -1 in rows that are finished.
Streamer = Callable[[np.ndarray], Any]


class StopStrings:
    """Finds the rows whose text ends with a token that completes one of `strings`."""

    def __init__(self, strings: Sequence[str], tokenizer: Any, prompts: Sequence[np.ndarray]):
        self.strings, self.tokenizer = tuple(strings), tokenizer
        # A token has at least a byte of text, special ones aside; a string may begin in the prompt.
        self.reach = 4 * max(len(string.encode()) for string in strings)
        self.rows = [list(map(int, prompt[-self.reach :])) for prompt in prompts]

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Return `[rows]` booleans after the newest `tokens` `[rows]`, -1 where a row is finished."""
        return np.asarray([self._completes(row, int(token)) for row, token in zip(self.rows, tokens)])

    def _completes(self, row: list[int], token: int) -> bool:
        if token < 0:
            return False
        before = self.tokenizer.decode(row[-self.reach :])
        row.append(token)
        after = self.tokenizer.decode(row[-self.reach - 1 :])
        return any(after.count(string) > before.count(string) for string in self.strings)


def stream(
    programs: Programs,
    params: Params,
    call: Call,
    *,
    blank: Blank,
    plan: Plan,
    rows: int,
    streamer: Streamer | None,
    stop: StopStrings | None,
) -> Any:
    """Return the final state of a generation whose first `rows` rows are shown and watched after each step."""
    state, glance = programs.begin(params, call, blank=blank, plan=plan)
    finished = np.zeros(rows, bool)
    while True:
        tokens = np.where(finished, -1, np.asarray(glance.tokens)[:rows])
        if streamer is not None:
            streamer(tokens)
        finished = np.array(glance.finished)
        going = bool(glance.going)
        if stop is not None:
            finished[:rows] |= stop(tokens)
            state = state.replace(finished=jnp.asarray(finished))
            going = going and not finished.all()
        finished = finished[:rows]
        if not going:
            return state
        state, glance = programs.proceed(params, state, call.values, plan=plan)
