"""Greedy search and sampling: one token a row and step."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from distaff.generation.decoders import Decoder, Memory, Params
from distaff.generation.filters import candidates, spread
from distaff.generation.plan import Plan
from distaff.generation.processors import Seen, Values, edit
from distaff.generation.stopping import follow


@struct.dataclass
class Rows:
    """The state between two steps.

    step: how many tokens the rows got, a scalar. tokens: `[rows, slots]`, prompts and what was generated. first:
    `[rows]`, the slot of each row's first token. finished: `[rows]`, an ending token or a stop string came. lengths:
    `[rows]`, generated tokens up to the ending one. scores: `[rows]`, the sum of their log-probabilities. memory: the
    model's. key: of all draws, if any. history: `[capacity, rows, vocab]`, the scores that tokens were chosen by.
    stops: `[rows]`, how far each row spells a stop string. Both are None where not asked for.
    """

    step: jax.Array
    tokens: jax.Array
    first: jax.Array
    finished: jax.Array
    lengths: jax.Array
    scores: jax.Array
    memory: Memory
    key: Any
    history: jax.Array | None
    stops: jax.Array | None

    def going(self, limit: jax.Array) -> jax.Array:
        """Return whether another token is wanted."""
        return (self.step < limit) & ~self.finished.all()


def begin(
    scores: jax.Array,
    memory: Memory,
    prompts: jax.Array,
    first: jax.Array,
    real: jax.Array,
    key: jax.Array | None,
    values: Values,
    plan: Plan,
) -> Rows:
    """Return the state before the first token. `real` `[rows]` is False for rows that only fill the batch."""
    rows, vocab = scores.shape
    free = jnp.zeros((rows, plan.capacity), jnp.int32)
    return Rows(
        step=jnp.zeros((), jnp.int32),
        tokens=jnp.concatenate([prompts, free], axis=1),
        first=first,
        finished=~real,
        lengths=jnp.zeros(rows, jnp.int32),
        scores=jnp.zeros(rows, jnp.float32),
        memory=memory,
        key=key,
        history=jnp.zeros((plan.capacity, rows, vocab), jnp.float32) if plan.output_scores else None,
        stops=jnp.repeat(values["stop_start"], plan.copies) if "stop_start" in values else None,
    )


def choose(state: Rows, scores: jax.Array, values: Values, plan: Plan) -> Rows:
    """Return the state with the next token of each row, chosen by the model's `scores` `[rows, vocab]`."""
    vocab = scores.shape[-1]
    filled = state.tokens.shape[1] - plan.capacity + state.step
    seen = Seen(state.tokens, filled, state.first, state.step)
    scores = edit(scores, seen, values, names=plan.edits, own=plan.processors)
    ids = None
    if plan.do_sample:
        scores, ids = candidates(scores, values, names=plan.filters, top_k=plan.top_k, keep=1)
        picked = jax.random.categorical(jax.random.fold_in(state.key, state.step), scores, axis=-1)
    else:
        picked = jnp.argmax(scores, axis=-1)
    if plan.renormalize:
        scores = jax.nn.log_softmax(scores, axis=-1)
    at = picked[:, None]
    tokens = (at if ids is None else jnp.take_along_axis(ids, at, axis=1))[:, 0].astype(jnp.int32)
    gained = jnp.take_along_axis(scores, at, axis=1)[:, 0] - jax.nn.logsumexp(scores, axis=-1)
    history = state.history
    if history is not None:
        history = lax.dynamic_update_slice(history, spread(scores, ids, vocab)[None], (state.step, 0, 0))
    tokens = jnp.where(state.finished, values["pad"], tokens)
    ended, stops = (tokens[:, None] == values["eos"][None]).any(axis=1), state.stops
    if stops is not None:
        stops, complete = follow(stops, tokens, values)
        ended |= complete
    return state.replace(  # type: ignore[attr-defined]
        step=state.step + 1,
        tokens=lax.dynamic_update_slice(state.tokens, tokens[:, None], (0, filled)),
        finished=state.finished | ended,
        lengths=state.lengths + ~state.finished,
        scores=state.scores + jnp.where(state.finished, 0.0, gained),
        history=history,
        stops=stops,
    )


def advance(decoder: Decoder, params: Params, state: Rows, values: Values, plan: Plan) -> Rows:
    """Return the state one token further: the model reads the last one and the next is chosen."""
    place = state.tokens.shape[1] - plan.capacity + state.step - 1
    last = lax.dynamic_slice_in_dim(state.tokens, place, 1, axis=1)[:, 0]
    scores, memory = decoder.proceed(params, last, state.step - 1, state.memory)
    return choose(state.replace(memory=memory), scores, values, plan)  # type: ignore[attr-defined]
