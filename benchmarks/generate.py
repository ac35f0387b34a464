"""Generation: greedy, beam search, and T5's beam search, as the peers' benchmark has them.

`--variant plain` is a bare greedy loop written for one model: GPT-2 with a cache, one jitted while loop, no masks, no
padding, no options. Beam search has no plain variant; the peer is the last Flax release of Transformers.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from transformers import GPT2Config, T5Config

from distaff import FlaxGPT2LMHeadModel, FlaxT5ForConditionalGeneration
from workloads import emit, median, peak_mb, timed

GPT2 = {
    "n_layer": 6,
    "n_embd": 384,
    "n_head": 6,
    "vocab_size": 50257,
    "n_positions": 1024,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
T5 = {
    "num_layers": 4,
    "num_decoder_layers": 4,
    "d_model": 256,
    "num_heads": 4,
    "d_kv": 64,
    "d_ff": 1024,
    "vocab_size": 32128,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
PROMPT, SOURCE = 32, 64


def norm(hidden, scale):
    mean = hidden.mean(-1, keepdims=True)
    variance = ((hidden - mean) ** 2).mean(-1, keepdims=True)
    return (hidden - mean) * jax.lax.rsqrt(variance + 1e-5) * scale


def bare_loop(batch: int, new: int):
    """Return a greedy generation of `new` tokens after `[batch, PROMPT]` ids, with random weights of its own."""
    embed, heads, vocab = GPT2["n_embd"], GPT2["n_head"], GPT2["vocab_size"]
    size, total = embed // heads, PROMPT + new
    rng = np.random.RandomState(0)

    def random(*shape):
        return jnp.asarray((rng.randn(*shape) * 0.02).astype("f4"))

    layers = [
        {
            "norms": jnp.ones((2, embed)),
            "qkv": random(embed, 3 * embed),
            "out": random(embed, embed),
            "up": random(embed, 4 * embed),
            "down": random(4 * embed, embed),
        }
        for _ in range(GPT2["n_layer"])
    ]
    params = {"words": random(vocab, embed), "places": random(GPT2["n_positions"], embed), "layers": layers}

    def forward(params, ids, cache, place):
        length = ids.shape[1]
        at = place + jnp.arange(length)
        hidden = params["words"][ids] + params["places"][at][None]
        seen, kept = jnp.arange(total)[None] <= at[:, None], []
        for layer, (keys, values) in zip(params["layers"], cache):
            projected = (norm(hidden, layer["norms"][0]) @ layer["qkv"]).reshape(batch, length, 3 * heads, size)
            query, key, value = jnp.split(projected.transpose(0, 2, 1, 3), 3, 1)
            keys = jax.lax.dynamic_update_slice(keys, key, (0, 0, place, 0))
            values = jax.lax.dynamic_update_slice(values, value, (0, 0, place, 0))
            kept.append((keys, values))
            scores = jnp.where(seen, jnp.einsum("bhqd,bhkd->bhqk", query, keys) / size**0.5, -1e9)
            context = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), values)
            hidden = hidden + context.transpose(0, 2, 1, 3).reshape(batch, length, embed) @ layer["out"]
            hidden = hidden + jax.nn.gelu(norm(hidden, layer["norms"][1]) @ layer["up"]) @ layer["down"]
        return norm(hidden[:, -1], 1.0) @ params["words"].T, kept

    @jax.jit
    def generate(params, ids):
        shape = (batch, heads, total, size)
        logits, cache = forward(params, ids, [(jnp.zeros(shape), jnp.zeros(shape)) for _ in layers], 0)
        tokens = jnp.zeros((batch, total), jnp.int32).at[:, :PROMPT].set(ids)

        def body(state):
            place, tokens, last, cache = state
            tokens = jax.lax.dynamic_update_slice(tokens, last[:, None], (0, place))
            logits, cache = forward(params, last[:, None], cache, place)
            return place + 1, tokens, logits.argmax(-1).astype(jnp.int32), cache

        first = logits.argmax(-1).astype(jnp.int32)
        return jax.lax.while_loop(lambda state: state[0] < total, body, (PROMPT, tokens, first, cache))[1]

    return lambda ids: np.asarray(generate(params, ids))


def ours(task: str, new: int):
    """Return a generation of exactly `new` tokens, as the peers': none is an ending one before."""
    beams = {} if task == "greedy" else {"num_beams": 4}
    model = FlaxT5ForConditionalGeneration(T5Config(**T5)) if task == "t5" else FlaxGPT2LMHeadModel(GPT2Config(**GPT2))
    mask = np.ones((1, 1), np.int32)
    return lambda ids: model.generate(
        ids, np.broadcast_to(mask, ids.shape), max_new_tokens=new, min_new_tokens=new, **beams
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=["ours", "plain"], default="ours")
    parser.add_argument("--task", choices=["greedy", "beam", "t5"], default="greedy")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new_tokens", type=int)
    parser.add_argument("--steps", type=int, default=5)
    flags = parser.parse_args()
    if flags.variant == "plain" and flags.task != "greedy":
        parser.error("only greedy search has a plain variant")
    new = flags.new_tokens or (64 if flags.task == "t5" else 128)
    shape = (flags.batch, SOURCE if flags.task == "t5" else PROMPT)
    ids = np.random.RandomState(0).randint(5, 30_000, shape).astype(np.int32)
    call = bare_loop(flags.batch, new) if flags.variant == "plain" else ours(flags.task, new)
    first = timed(lambda: call(ids))
    seconds = [timed(lambda: call(ids)) for _ in range(flags.steps)]
    emit(
        variant=flags.variant,
        task=flags.task,
        batch=flags.batch,
        generate_s=median(seconds),
        first_s=round(first, 2),
        peak_rss_mb=round(peak_mb()),
    )


if __name__ == "__main__":
    main()
