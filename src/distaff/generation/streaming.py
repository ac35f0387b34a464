"""Generation step by step: tokens go to a callback as they come."""

from collections.abc import Callable
from typing import Any

import numpy as np

from distaff.generation.decoders import Blank, Params
from distaff.generation.plan import Plan
from distaff.generation.programs import Call, Programs

# Called with the newest tokens `[rows]`; -1 in rows that are finished.
Streamer = Callable[[np.ndarray], Any]


def stream(
    programs: Programs, params: Params, call: Call, *, blank: Blank, plan: Plan, rows: int, streamer: Streamer
) -> Any:
    """Return the final state of a generation whose first `rows` rows are shown after each step."""
    state, glance = programs.begin(params, call, blank=blank, plan=plan)
    finished = np.zeros(rows, bool)
    while True:
        streamer(np.where(finished, -1, np.asarray(glance.tokens)[:rows]))
        finished = np.asarray(glance.finished)[:rows]
        if not bool(glance.going):
            return state
        state, glance = programs.proceed(params, state, call.values, plan=plan)
