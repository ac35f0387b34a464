"""Beam search and beam sampling, with the bookkeeping of Transformers: running beams beside finished ones."""

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

# Added to the log-probability of what may not be chosen; as Transformers, so that ties fall alike.
NEVER = -1.0e9


@struct.dataclass
class Beams:
    """The state between two steps.

    step: how many tokens the beams got, a scalar. tokens: `[batch, beams, slots]`, prompts and what was generated.
    first: `[batch]`, the slot of each prompt's first token. running: `[batch, beams]`, sums of log-probabilities.
    done_tokens, done_scores, done_lengths: the best finished sequences so far, best first; scores are divided by a
    power of the length. done: `[batch, beams]`, there is such a sequence. open: `[batch]`, running beams can still
    beat finished ones. ended: a scalar, nothing is left to continue. memory: the model's, `[batch * beams, ...]`.
    key: of all draws, if any. history: `[capacity, batch * beams, vocab]` edited log-probabilities. stops:
    `[batch, beams]`, how far each running beam spells a stop string. Both are None where not asked for.
    """

    step: jax.Array
    tokens: jax.Array
    first: jax.Array
    running: jax.Array
    done_tokens: jax.Array
    done_scores: jax.Array
    done_lengths: jax.Array
    done: jax.Array
    open: jax.Array
    ended: jax.Array
    memory: Memory
    key: Any
    history: jax.Array | None
    stops: jax.Array | None

    def going(self, limit: jax.Array) -> jax.Array:
        """Return whether another token is wanted."""
        return (self.step < limit) & ~self.ended


def begin(
    scores: jax.Array,
    memory: Memory,
    prompts: jax.Array,
    first: jax.Array,
    real: jax.Array,
    key: jax.Array | None,
    values: Values,
    plan: Plan,
) -> Beams:
    """Return the state before the first token. `real` `[batch]` is False for rows that only fill the batch."""
    batch, beams = prompts.shape[0], plan.num_beams
    free = jnp.full((batch, plan.capacity), values["pad"], jnp.int32)
    tokens = jnp.repeat(jnp.concatenate([prompts, free], axis=1)[:, None], beams, axis=1)
    # Equal beams would find the same tokens: at first only one of them counts.
    running = jnp.broadcast_to(jnp.where(jnp.arange(beams) == 0, 0.0, NEVER)[None], (batch, beams))
    return Beams(
        step=jnp.zeros((), jnp.int32),
        tokens=tokens,
        first=first,
        running=running,
        done_tokens=tokens,
        done_scores=jnp.full((batch, beams), NEVER, jnp.float32),
        done_lengths=jnp.zeros((batch, beams), jnp.int32),
        done=jnp.broadcast_to(~real[:, None], (batch, beams)),
        open=real,
        ended=jnp.zeros((), bool),
        memory=memory,
        key=key,
        history=jnp.zeros((plan.capacity, *scores.shape), jnp.float32) if plan.output_scores else None,
        stops=jnp.repeat(values["stop_start"][:, None], beams, axis=1) if "stop_start" in values else None,
    )


def choose(state: Beams, scores: jax.Array, values: Values, plan: Plan) -> Beams:
    """Return the state with the next token of each beam, chosen by the model's `scores` `[batch * beams, vocab]`."""
    (batch, beams, slots), vocab = state.tokens.shape, scores.shape[-1]
    filled = slots - plan.capacity + state.step
    logs, history = _log_probabilities(state, scores, filled, values, plan)
    total = (logs.reshape(batch, beams, vocab) + state.running[..., None]).reshape(batch, beams * vocab)
    # So many that, all endings aside, each beam has a continuation.
    count = beams * (1 + values["eos"].shape[0])
    best, place = _best(total, count, state, plan)
    parents, ids = place // vocab, (place % vocab).astype(jnp.int32)  # [batch, count]
    tokens = lax.dynamic_update_slice(_picked(state.tokens, parents), ids[..., None], (0, 0, filled))
    step = state.step + 1
    ending = (ids[..., None] == values["eos"][None, None]).any(axis=-1) | (step >= values["limit"])
    stops = state.stops
    if stops is not None:
        stops, complete = follow(_picked(stops, parents), ids, values)
        ending |= complete

    running, chosen = lax.top_k(best + jnp.where(ending, NEVER, 0.0), beams)
    done = _finish(state, tokens, best, ending, step, values, plan)
    sources = jnp.arange(batch)[:, None] * beams + jnp.take_along_axis(parents, chosen, axis=1)
    state = state.replace(  # type: ignore[attr-defined]
        step=step,
        tokens=_picked(tokens, chosen),
        running=running,
        memory=state.memory.chosen(sources.reshape(-1)),
        history=history,
        stops=None if stops is None else _picked(stops, chosen),
        **done,
    )
    return _judge(state, ending, values, plan)


def _log_probabilities(state: Beams, scores: jax.Array, filled: Any, values: Values, plan: Plan):
    """Return edited and filtered log-probabilities `[batch * beams, vocab]`, and the history with them."""
    flat = state.tokens.reshape(-1, state.tokens.shape[-1])
    seen = Seen(flat, filled, jnp.repeat(state.first, plan.num_beams), state.step)
    logs = jax.nn.log_softmax(scores, axis=-1)
    logs = edit(logs, seen, values, names=plan.edits, own=plan.processors)
    if plan.do_sample:
        # More than all ending tokens, so that something is left to continue with.
        keep = 1 + values["eos"].shape[0]
        logs = spread(*candidates(logs, values, names=plan.filters, top_k=plan.top_k, keep=keep), logs.shape[-1])
    if plan.renormalize:
        logs = jax.nn.log_softmax(logs, axis=-1)
    history = state.history
    if history is not None:
        history = lax.dynamic_update_slice(history, logs[None], (state.step, 0, 0))
    return logs, history


def _best(total: jax.Array, count: int, state: Beams, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Return the best `count` of `[batch, beams * vocab]`, or as many drawn without replacement, best first."""
    if not plan.do_sample:
        return lax.top_k(total, count)
    # The largest of log-probabilities plus Gumbel noise are such a draw (Kool et al. 2019).
    noise = jax.random.gumbel(jax.random.fold_in(state.key, state.step), total.shape)
    place = lax.top_k(total + noise, count)[1]
    best, order = lax.top_k(jnp.take_along_axis(total, place, axis=1), count)
    return best, jnp.take_along_axis(place, order, axis=1)


def _finish(state: Beams, tokens, best, ending, step, values: Values, plan: Plan) -> dict[str, jax.Array]:
    """Return the finished sequences, with those that just ended among the best `num_beams`."""
    beams = plan.num_beams
    ended = ending & (jnp.arange(best.shape[1]) < beams)[None]
    scores = best / step.astype(jnp.float32) ** values["length_penalty"]
    full = state.done.all(axis=1, keepdims=True) & (plan.early_stopping is True)
    for never in (full, ~state.open[:, None], ~ended):
        scores = scores + jnp.where(never, NEVER, 0.0)
    merged, chosen = lax.top_k(jnp.concatenate([state.done_scores, scores], axis=1), beams)
    lengths = jnp.broadcast_to(step, scores.shape)

    def both(old: jax.Array, new: jax.Array) -> jax.Array:
        return _picked(jnp.concatenate([old, new], axis=1), chosen)

    return {
        "done_tokens": both(state.done_tokens, tokens),
        "done_scores": merged,
        "done_lengths": both(state.done_lengths, lengths),
        "done": both(state.done, ended),
    }


def _judge(state: Beams, ending: jax.Array, values: Values, plan: Plan) -> Beams:
    """Return the state with what is known of its end: can running beams still win, is anything left to do?"""
    penalty = values["length_penalty"]
    length = state.step.astype(jnp.float32)
    if plan.early_stopping == "never":
        length = jnp.where(penalty > 0, values["limit"].astype(jnp.float32), length)
    hope = state.running[:, 0] / length**penalty
    worst = jnp.where(state.done, state.done_scores.min(axis=1, keepdims=True), NEVER)
    still = state.open & (hope[:, None] > worst).any(axis=1)
    enough = state.done.all() & (plan.early_stopping is True)
    return state.replace(open=still, ended=~still.any() | enough | ending.all())  # type: ignore[attr-defined]


def _picked(array: jax.Array, places: jax.Array) -> jax.Array:
    """Return the entries `places` `[batch, count]` along axis 1 of `[batch, beams, ...]`."""
    return jax.vmap(lambda entries, chosen: jnp.take(entries, chosen, axis=0))(array, places)


def advance(decoder: Decoder, params: Params, state: Beams, values: Values, plan: Plan) -> Beams:
    """Return the state one token further: the model reads each beam's last one and the next are chosen."""
    slots = state.tokens.shape[-1]
    place = slots - plan.capacity + state.step - 1
    last = lax.dynamic_slice_in_dim(state.tokens, place, 1, axis=2).reshape(-1)
    scores, memory = decoder.proceed(params, last, state.step - 1, state.memory)
    return choose(state.replace(memory=memory), scores, values, plan)  # type: ignore[attr-defined]
