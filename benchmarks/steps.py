"""The real training step of a recipe's loss, timed."""

import argparse
import time

import jax

from distaff.core.mesh import make_mesh
from distaff.train import OptimizerConfig, create_state, make_optimizer, make_train_step, place_rows
from workloads import LEARNING_RATE, emit, median, peak_mb


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of such a benchmark."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--variant", choices=["ours", "plain"], default="ours")
    made.add_argument("--steps", type=int, default=10)
    made.add_argument("--dtype", default="float32")
    return made


def parse(description: str | None) -> argparse.Namespace:
    """The values of the flags."""
    return parser(description).parse_args()


def measure(model, loss_fn, batches, flags: argparse.Namespace) -> None:
    """Compile the step, run it `flags.steps` times after two to warm up, and print the result."""
    tx, schedule = make_optimizer(
        OptimizerConfig(learning_rate=LEARNING_RATE, weight_decay=0.01, lr_scheduler_type="constant"),
        total_steps=1_000,
        decay_mask=model.decay_mask(),
    )
    mesh = make_mesh()
    state = create_state(model.params, tx, mesh=mesh)
    step = make_train_step(loss_fn, tx, state=state, schedule=schedule, donate=flags.variant != "plain")
    placed = [place_rows(batch, mesh) for batch in batches]
    start = time.perf_counter()
    compiled = step.lower(state, placed[0]).compile()
    compile_s = time.perf_counter() - start
    seconds, losses = [], []
    for index in range(flags.steps + 2):
        start = time.perf_counter()
        state, metrics = compiled(state, placed[index % len(placed)])
        total, weight = jax.device_get(metrics.sums["loss"])
        seconds.append(time.perf_counter() - start)
        losses.append(float(total / weight))
    emit(
        variant=flags.variant,
        step_s=median(seconds[2:]),
        compile_s=round(compile_s, 2),
        temp_mb=round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
        peak_rss_mb=round(peak_mb()),
        loss_first=round(losses[0], 4),
        loss_last=round(losses[-1], 4),
    )
