"""A Linen module of one's own, trained by `distaff.train`: digits read as eight tokens of eight pixels each.

python examples/own_module.py --output_dir digits            # about 97 % of the test digits in half a minute
python examples/own_module.py --output_dir digits --steps 600 --resume newest
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

from distaff.train import LoopConfig, evaluate, fit

ROWS = 64


class Encoder(nn.Module):
    layers: int = 2
    width: int = 64

    @nn.compact
    def __call__(self, images, *, deterministic=True):  # [batch, 8, 8] -> [batch, 10]
        position = self.param("position", nn.initializers.normal(0.02), (1, 8, self.width))
        x = nn.Dense(self.width)(images) + position
        for _ in range(self.layers):
            attention = nn.MultiHeadDotProductAttention(num_heads=4, dropout_rate=0.1, deterministic=deterministic)
            x = x + attention(nn.LayerNorm()(x))
            hidden = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dropout(0.1, deterministic=deterministic)(nn.Dense(self.width)(hidden))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(axis=1))


def loss_fn(params, batch, rng):  # sums and their weights, never means
    rngs = {} if rng is None else {"dropout": rng}
    logits = Encoder().apply({"params": params}, batch["images"], deterministic=rng is None, rngs=rngs)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    right = logits.argmax(-1) == batch["labels"]
    count = jnp.float32(len(loss))
    return {"loss": (loss.sum(), count), "accuracy": (right.sum().astype(jnp.float32), count)}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", dest="total_steps", type=int, default=400)
    parser.add_argument("--output_dir")
    parser.add_argument("--resume", help='"newest" or a checkpoint')
    flags = parser.parse_args(argv)
    digits, order = load_digits(), np.random.default_rng(0).permutation(1792)
    data = {"images": (digits.images / 16).astype(np.float32), "labels": digits.target.astype(np.int32)}
    train, test = ({name: array[part] for name, array in data.items()} for part in (order[:1280], order[1280:]))

    def batches(step):  # a pure function of the step, so that a resumed run sees what it would have seen
        chosen = np.random.default_rng(step).choice(1280, ROWS, replace=False)
        return {name: array[chosen] for name, array in train.items()}

    params = Encoder().init(jax.random.key(0), train["images"][:1])["params"]
    config = LoopConfig(**vars(flags), overwrite=not flags.resume, save_every=100)  # run again it starts anew
    result = fit(loss_fn, params=params, tx=optax.adamw(2e-3), batches=batches, config=config)
    scores = evaluate(loss_fn, params=result.state.params, batches=lambda index: test, steps=1)
    print(f"test accuracy {scores['accuracy']:.3f} after {result.step} steps")
    return scores["accuracy"]


if __name__ == "__main__":
    main()
