"""The loop that Flax users write by hand, around one of our models: loss, value_and_grad, optax, one jitted step."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformers import BertConfig

from distaff import FlaxBertForSequenceClassification

VOCAB_SIZE, LENGTH = 100, 16


def make_rows(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Rows of ids; the label says whether id 7 occurs before any id above 50."""
    ids = rng.integers(5, VOCAB_SIZE, (count, LENGTH)).astype(np.int32)
    ids[np.arange(count // 2), rng.integers(0, 3, count // 2)] = 7
    first_seven = np.where((ids == 7).any(1), (ids == 7).argmax(1), LENGTH)
    first_large = np.where((ids > 50).any(1), (ids > 50).argmax(1), LENGTH)
    return {"input_ids": ids, "labels": (first_seven < first_large).astype(np.int32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output_dir", default="explicit-loop")
    flags = parser.parse_args()

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = FlaxBertForSequenceClassification(BertConfig(vocab_size=VOCAB_SIZE, **shape), seed=0)
    tx = optax.adamw(1e-3)

    @jax.jit
    def train_step(params, opt_state, batch, rng):
        def loss_fn(params):
            logits = model(batch["input_ids"], params=params, dropout_rng=rng, train=True).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    rng, key = np.random.default_rng(0), jax.random.key(0)
    params, opt_state = model.params, tx.init(model.params)
    for step in range(flags.steps):
        params, opt_state, loss = train_step(params, opt_state, make_rows(rng, 64), jax.random.fold_in(key, step))
        if step % 50 == 0 or step == flags.steps - 1:
            print(f"step {step} loss {float(loss):.3f}")

    test = make_rows(rng, 512)
    logits = model(test["input_ids"], params=params).logits
    print(f"accuracy {float(jnp.mean(jnp.argmax(logits, -1) == test['labels'])):.3f}")
    model.save_pretrained(flags.output_dir, params=params)
    again = FlaxBertForSequenceClassification.from_pretrained(flags.output_dir)
    assert jnp.array_equal(again(test["input_ids"]).logits, logits)
    print(f"saved in {flags.output_dir}")


if __name__ == "__main__":
    main()
