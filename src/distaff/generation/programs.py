"""The compiled programs of one model: all of a generation at once, or begun and continued for streaming."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from distaff.generation import beam, sample
from distaff.generation.beam import Beams
from distaff.generation.decoders import Blank, Decoder, Inputs, Params
from distaff.generation.plan import Plan
from distaff.generation.processors import Values
from distaff.generation.sample import Rows

State = Rows | Beams


class Call(NamedTuple):
    """The traced arguments of a generation.

    real: `[batch]`, False for rows that only fill the batch. values: what edits and filters read. key: of all draws,
    None where there are none.
    """

    inputs: Inputs
    real: Any
    values: Values
    key: jax.Array | None


class Glance(NamedTuple):
    """What a caller looks at between steps: the newest tokens `[rows]`, finished rows `[rows]`, and if it goes on."""

    tokens: jax.Array
    finished: jax.Array
    going: jax.Array


class Programs(NamedTuple):
    """Jitted functions; each is compiled once for a plan and the shapes of its arrays.

    whole(params, call, blank=, plan=): the final state, without memory. begin(params, call, blank=, plan=): the state
    with the first token, and a glance at it. proceed(params, state, values, plan=): both, one token further.
    """

    whole: Any
    begin: Any
    proceed: Any


def make_programs(decoder: Decoder) -> Programs:
    """Return the programs of a model. They hold its module alone, not its parameters."""

    def whole(params: Params, call: Call, blank: Blank, plan: Plan) -> State:
        step: Any = beam.advance if plan.num_beams > 1 else sample.advance
        final: Any = lax.while_loop(
            lambda state: state.going(call.values["limit"]),
            lambda state: step(decoder, params, state, call.values, plan),
            _begin(decoder, params, call, blank, plan),
        )
        # Nobody needs the cache, and as a result it would be copied.
        return final.replace(memory=None)

    def begin(params: Params, call: Call, blank: Blank, plan: Plan) -> tuple[State, Glance]:
        state: Any = _begin(decoder, params, call, blank, plan)
        return state, _glance(state, call.values, plan)

    def proceed(params: Params, state: Rows, values: Values, plan: Plan) -> tuple[State, Glance]:
        state = sample.advance(decoder, params, state, values, plan)
        return state, _glance(state, values, plan)

    return Programs(
        jax.jit(whole, static_argnames=("blank", "plan")),
        jax.jit(begin, static_argnames=("blank", "plan")),
        jax.jit(proceed, static_argnames=("plan",), donate_argnames=("state",)),
    )


def _begin(decoder: Decoder, params: Params, call: Call, blank: Blank, plan: Plan) -> State:
    """Return the state with the first token: the prompts are read once, then each gets its copies."""
    inputs, real, values, key = call
    scores, memory = decoder.begin(params, inputs, blank)
    prompts = inputs.ids if inputs.start is None else inputs.start
    first = jnp.zeros(prompts.shape[0], jnp.int32)
    if inputs.start is None:
        first = jnp.argmax(inputs.mask, axis=1).astype(jnp.int32)
    scores, memory = jnp.repeat(scores, plan.copies, axis=0), memory.repeated(plan.copies)
    if plan.num_beams > 1:
        beams = beam.begin(scores, memory, prompts, first, real, key, values, plan)
        return beam.choose(beams, scores, values, plan)
    prompts, first, real = (jnp.repeat(array, plan.copies, axis=0) for array in (prompts, first, real))
    rows = sample.begin(scores, memory, prompts, first, real, key, values, plan)
    return sample.choose(rows, scores, values, plan)


def _glance(state: Rows, values: Values, plan: Plan) -> Glance:
    place = state.tokens.shape[-1] - plan.capacity + state.step - 1
    tokens = lax.dynamic_slice_in_dim(state.tokens, place, 1, axis=1)[:, 0]
    return Glance(tokens, state.finished, state.going(values["limit"]))
