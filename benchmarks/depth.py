"""Compile time, step time and memory of a causal LM step against depth: layers looped, scanned, and computed again.

The model is GPT-2's of ours, 256 wide, with the recipe's loss and the real training step, on 8 rows of 128 tokens.
"""

import argparse
import time
from functools import partial

import jax
import numpy as np
from transformers import GPT2Config

from distaff import FlaxGPT2LMHeadModel
from distaff.core.mesh import make_mesh
from distaff.tasks.clm import clm_loss
from distaff.train import OptimizerConfig, create_state, make_optimizer, make_train_step, place_rows
from workloads import emit

# How layers are run: (scan_layers, gradient_checkpointing).
LAYOUTS = {
    "looped": (False, "none"),
    "looped-full": (False, "full"),
    "scanned": (True, "none"),
    "scanned-dots": (True, "dots"),
    "scanned-full": (True, "full"),
}
ROWS, LENGTH, WIDTH, WORDS = 8, 128, 256, 8192


def prepare(layout: str, depth: int):
    """Return the state, a batch and the jitted step."""
    scan, remat = LAYOUTS[layout]
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=depth, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = FlaxGPT2LMHeadModel(config, scan_layers=scan, gradient_checkpointing=remat)
    tx, schedule = make_optimizer(
        OptimizerConfig(learning_rate=1e-4, weight_decay=0.01, lr_scheduler_type="constant"),
        total_steps=1_000,
        decay_mask=model.decay_mask(),
    )
    mesh = make_mesh()
    state = create_state(model.params, tx, mesh=mesh)
    step = make_train_step(partial(clm_loss, model.module), tx, state=state, schedule=schedule)
    ids = np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32)
    return state, place_rows({"input_ids": ids, "weights": np.ones(ROWS, np.float32)}, mesh), step


def timed(work) -> tuple:
    """Return what `work` returns, its seconds and those of the processors, which other programs hardly change."""
    begin, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - begin, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=LAYOUTS, default="looped")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hlo", help="File for the compiled program.")
    flags = parser.parse_args()
    state, batch, step = prepare(flags.layout, flags.depth)
    (lowered, trace_s, _) = timed(lambda: step.lower(state, batch))
    (compiled, compile_s, compile_cpu_s) = timed(lowered.compile)
    if flags.hlo:
        with open(flags.hlo, "w") as file:
            file.write(compiled.as_text())
    steps = []
    for _ in range(flags.steps):
        (state, _), *seconds = timed(lambda state=state: jax.block_until_ready(compiled(state, batch)))
        steps.append(seconds)
    (first, _), *others = steps
    emit(
        layout=flags.layout,
        depth=flags.depth,
        trace_s=round(trace_s, 2),
        compile_s=round(compile_s, 2),
        compile_cpu_s=round(compile_cpu_s, 2),
        first_step_s=round(trace_s + compile_s + first, 2),
        step_s=round(min(seconds for seconds, _ in others), 3),
        step_cpu_s=round(min(cpu for _, cpu in others), 3),
        temp_mb=round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
    )


if __name__ == "__main__":
    main()
