"""What `test_killed_at_any_moment` kills: a run that saves every step and resumes if there is something to resume.

Arguments: output folder, number of steps. Prints a digest of the final state.
"""

import hashlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from distaff.train import LoopConfig, fit
from distaff.train.checkpoint import complete_steps


def loss_fn(params, batch, rng):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    if rng is not None:
        hidden = hidden * jax.random.bernoulli(rng, 0.9, hidden.shape)
    errors = jnp.square((hidden @ params["out"])[:, 0] - batch["y"])
    return {"loss": (errors.sum(), jnp.float32(len(errors)))}


def batches(step):
    x = np.random.default_rng(step).normal(size=(4, 64)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1)}


def main(folder: Path, total: int) -> None:
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(size=shape).astype(np.float32) / 8 for name, shape in (("in", (64, 256)), ("out", (256, 1)))
    }
    config = LoopConfig(
        total_steps=total,
        output_dir=folder,
        accumulation=2,
        log_every=2,
        save_every=1,
        save_total_limit=3,
        resume="newest" if complete_steps(folder / "checkpoints") else None,
        report_to=(),
        progress=False,
    )
    result = fit(loss_fn, params=params, tx=optax.adamw(1e-4), batches=batches, config=config)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((result.state.step, result.state.params, result.state.opt_state)):
        digest.update(np.asarray(leaf).tobytes())
    print(result.step, digest.hexdigest())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
