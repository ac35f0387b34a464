"""Compile time, step time and memory of a causal LM step against depth: layers looped, scanned, and computed again.

The model is GPT-2's of ours, 256 wide, with the recipe's loss and the real training step, on 8 rows of 128 tokens:
`python benchmarks/depth.py --layout scanned-full --depth 48`. Compile and step are seconds of the processors (two that
were shared with others: deep loops are traced faster alone), the least of one to three runs of 2026-11-30, float32,
dropout on.

                layers              2      6     12     24     48
trace, s        looped            0.5    0.7    1.2    6.1   23.4
trace, s        scanned           0.4    0.5    0.4    0.4    0.4
trace, s        scanned, dots     0.5    0.6    0.5    0.5    0.5
trace, s        scanned, full     0.9    0.4    0.5    0.4    0.4
compile, s      looped            4.9    5.6    8.0   18.2   55.3
compile, s      scanned           5.9    5.4    4.9    5.6    5.1
compile, s      scanned, dots     5.5    5.2    5.8    5.8    5.8
compile, s      scanned, full     5.8    4.7    5.6    5.5    5.1
step, s         looped           0.39   0.72   1.28   2.52   5.11
step, s         scanned          0.39   0.72   1.20   2.44   4.26
step, s         scanned, dots    0.40   0.74   1.31   2.39   4.39
step, s         scanned, full    0.43   0.76   1.38   2.46   4.51
temporary, MiB  looped            138    274    479    888   1705
temporary, MiB  scanned           107    183    297    525    981
temporary, MiB  scanned, dots      99    147    219    363    651
temporary, MiB  scanned, full      83     99    131    179    275

A scan is traced in 0.4 s and compiles one layer, whatever the depth. XLA for CPU undoes `full` in a loop (280 MiB with
6 layers): it finds what is computed twice.

With the peers' shape (`--rows 2 --length 64 --vocab 50257`), on two processors that do nothing else, wall time, in one
run: the first step of 48 layers (trace, compile, run) is ready after 4.0 to 4.4 s scanned, 50.2 s looped, and 32.7 s
by Transformers 4.57's Flax; a step then takes 0.52 to 0.56 s scanned, 0.58 looped, 0.50 there. Scanned layers are ready
after 3.8 s with 2 and 4.0 s with 12.

What made the step of a scan slower than a loop's (0.81 s against 0.72 with 6 layers, 351 MiB against 274) was found in
the compiled program: the forward loop wrote 33 arrays a layer into stacks for the backward pass, five of them of the
feed-forward's width, most of them results of element-wise operations that XLA rather computes again where layers are
unrolled. Now a scan keeps products and dropout factors alone (`SCANNED` in nn/stack.py).
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
WIDTH = 256


def prepare(layout: str, depth: int, *, rows: int, length: int, vocab: int):
    """Return the state, a batch and the jitted step."""
    scan, remat = LAYOUTS[layout]
    config = GPT2Config(
        vocab_size=vocab, n_positions=1024, n_embd=WIDTH, n_layer=depth, n_head=4, bos_token_id=0, eos_token_id=0
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
    ids = np.random.default_rng(0).integers(0, vocab, (rows, length)).astype(np.int32)
    return state, place_rows({"input_ids": ids, "weights": np.ones(rows, np.float32)}, mesh), step


def timed(work) -> tuple:
    """Return what `work` returns, its seconds and those of the processors, which other programs hardly change."""
    begin, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - begin, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=LAYOUTS, default="looped")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hlo", help="File for the compiled program.")
    flags = parser.parse_args()
    state, batch, step = prepare(flags.layout, flags.depth, rows=flags.rows, length=flags.length, vocab=flags.vocab)
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
