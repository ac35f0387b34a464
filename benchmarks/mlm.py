"""A masked LM step through the recipe's loss and the real training step.

`--variant ours` is what `distaff train mlm` runs; `plain` computes logits everywhere and does not donate its state.
"""

import argparse
import time
from functools import partial

import jax
from transformers import RobertaConfig

from distaff import FlaxRobertaForMaskedLM
from distaff.core.mesh import make_mesh
from distaff.tasks.mlm import mlm_loss
from distaff.train import OptimizerConfig, create_state, make_optimizer, make_train_step, place_rows
from workloads import LEARNING_RATE, MLM, emit, median, mlm_batches, peak_mb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=["ours", "plain"], default="ours")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", default="float32")
    flags = parser.parse_args()
    plain = flags.variant == "plain"

    model = FlaxRobertaForMaskedLM(RobertaConfig(**MLM), dtype=flags.dtype)
    tx, schedule = make_optimizer(
        OptimizerConfig(learning_rate=LEARNING_RATE, weight_decay=0.01, lr_scheduler_type="constant"),
        total_steps=1_000,
        decay_mask=model.decay_mask(),
    )
    mesh = make_mesh()
    state = create_state(model.params, tx, mesh=mesh)
    step = make_train_step(partial(mlm_loss, model.module), tx, state=state, schedule=schedule, donate=not plain)
    batches = [place_rows(batch, mesh) for batch in mlm_batches(everywhere=plain)]
    start = time.perf_counter()
    compiled = step.lower(state, batches[0]).compile()
    compile_s = time.perf_counter() - start
    seconds, losses = [], []
    for index in range(flags.steps + 2):
        start = time.perf_counter()
        state, metrics = compiled(state, batches[index % len(batches)])
        total, weight = jax.device_get(metrics.sums["loss"])
        seconds.append(time.perf_counter() - start)
        losses.append(float(total / weight))
    memory = compiled.memory_analysis()
    emit(
        variant=flags.variant,
        step_s=median(seconds[2:]),
        compile_s=round(compile_s, 2),
        temp_mb=round(memory.temp_size_in_bytes / 2**20, 1),
        peak_rss_mb=round(peak_mb()),
        loss_first=round(losses[0], 4),
        loss_last=round(losses[-1], 4),
    )


if __name__ == "__main__":
    main()
