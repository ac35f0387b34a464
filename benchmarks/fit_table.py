"""Which models train on which slice, and with which flags: the table of docs/parallelism.md, by `distaff fit`.

    python benchmarks/fit_table.py                                   # all of it, a line at a time
    python benchmarks/fit_table.py --model gpt2-xl --topology v5e-8

It needs libtpu (`pip install 'distaff[train,tpu]'`) and no TPU. What is asked for first is bfloat16, 8 rows a device,
AdamW and scanned layers; where that does not fit, the line says what does. A compilation takes one processor a minute.
"""

import argparse
import importlib
import sys
import time

from distaff.tasks import _report, fit

# Recipe, class of flags, and what the published config says.
MODELS = {
    "gpt2": ("clm", "ClmFlags", {"model_type": "gpt2", "block_size": 1024}),
    "gpt2-xl": (
        "clm",
        "ClmFlags",
        {"model_type": "gpt2", "block_size": 1024, "config_overrides": "n_layer=48,n_embd=1600,n_head=25"},
    ),
    "gpt-neo-1.3b": (
        "clm",
        "ClmFlags",
        {
            "model_type": "gpt_neo",
            "block_size": 1024,
            "config_overrides": "hidden_size=2048,num_layers=24,num_heads=16,attention_types=[[[global,local],12]]",
        },
    ),
    "gpt-neo-2.7b": (
        "clm",
        "ClmFlags",
        {
            "model_type": "gpt_neo",
            "block_size": 1024,
            "config_overrides": "hidden_size=2560,num_layers=32,num_heads=20,attention_types=[[[global,local],16]]",
        },
    ),
    "t5-large": (
        "t5-mlm",
        "T5MlmFlags",
        {
            "model_type": "t5",
            "max_seq_length": 512,
            "config_overrides": "d_model=1024,d_kv=64,d_ff=4096,num_layers=24,num_decoder_layers=24,num_heads=16",
        },
    ),
    "bert-large": (
        "mlm",
        "MlmFlags",
        {
            "model_type": "bert",
            "max_seq_length": 512,
            "config_overrides": "hidden_size=1024,num_hidden_layers=24,num_attention_heads=16,intermediate_size=4096",
        },
    ),
}
SLICES = ("v3-8", "v5e-8")
ASKED = {"dtype": "bfloat16", "per_device_train_batch_size": 8, "scan_layers": True}


def line(name: str, topology: str) -> str:
    """Return the line of a model on a slice: what was asked for, and what fits."""
    recipe, flags_class, values = MODELS[name]
    module = importlib.import_module(f"distaff.tasks.{recipe.replace('-', '_')}")
    flags, target = getattr(module, flags_class)(**values, **ASKED), fit.FitFlags(topology=topology)
    target.check()
    asked = fit.compiled(recipe, flags, target)
    needed = f"{'over ' if asked.footprint.peak is None else ''}{_report.gib(asked.footprint.needed)}"
    cells = [name, f"{asked.parameters / 1e6:,.0f} M", topology, needed]
    if asked.fits(target.limit):
        return " | ".join([*cells, "as asked", needed])
    found, answers = fit.search(recipe, flags, target, asked)
    if found is None:
        return " | ".join([*cells, "nothing that was tried fits", ""])
    text = fit.words(found)
    return " | ".join([*cells, f"`{text}`", _report.gib(answers[text].footprint.needed)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--topology", nargs="+", default=list(SLICES))
    given = parser.parse_args()
    print("| model | parameters | slice | GiB a device as asked | fits with | GiB then |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in given.model:
        for topology in given.topology:
            begin = time.monotonic()
            print(f"| {line(name, topology)} |", flush=True)
            print(f"{name} on {topology}: {time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
