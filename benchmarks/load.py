"""Loading a 498 MB checkpoint (roberta-base's shape): lazily row by row, or random weights first and then replaced."""

import argparse
from pathlib import Path

import jax
import numpy as np
from transformers import RobertaConfig

from distaff import FlaxRobertaForMaskedLM
from distaff.core.tree import flatten, unflatten
from distaff.hub import open_checkpoint
from distaff.weights import leaves, to_ours
from workloads import BASE, emit, median, peak_mb, timed


def make_checkpoint(folder: Path) -> None:
    if not (folder / "model.safetensors").exists():
        FlaxRobertaForMaskedLM(RobertaConfig(**BASE)).save_pretrained(folder)


def plainly(folder: Path):
    """Initialise, read everything, replace."""
    model = FlaxRobertaForMaskedLM(RobertaConfig(**BASE))
    checkpoint = open_checkpoint(folder)
    tensors = {name: np.array(checkpoint[name]) for name in checkpoint}
    table = leaves(model.rows(model.module))
    flat = {
        path: jax.device_put(to_ours(tensors[leaf.rows[0].key], leaf.kind, "safetensors"))
        for path, leaf in table.items()
    }
    assert flat.keys() == flatten(model.params).keys()
    return unflatten(flat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=["ours", "plain", "make"], default="ours")
    parser.add_argument("--folder", type=Path, default=Path("build/bench-roberta-base"))
    parser.add_argument("--loads", type=int, default=5)
    flags = parser.parse_args()
    if flags.variant == "make":
        make_checkpoint(flags.folder)
        emit(made=str(flags.folder))
        return
    jax.devices()
    before = peak_mb()

    def ours() -> None:
        jax.block_until_ready(FlaxRobertaForMaskedLM.from_pretrained(flags.folder).params)

    def plain() -> None:
        jax.block_until_ready(plainly(flags.folder))

    # As the peers are measured: several loads in one process. The first also pays for compiling and for fresh memory.
    seconds = [timed(ours if flags.variant == "ours" else plain) for _ in range(flags.loads)]
    emit(
        variant=flags.variant,
        load_s=median(seconds),
        first_s=round(seconds[0], 3),
        peak_rss_mb=round(peak_mb()),
        above_import_mb=round(peak_mb() - before),
    )


if __name__ == "__main__":
    main()
