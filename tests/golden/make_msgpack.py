"""Make real `flax_model.msgpack` folders with the Flax classes of Transformers 4 from golden cases.

    python tests/golden/make_msgpack.py [FAMILY ...]    # writes msgpack/FAMILY-CASE/{config.json,flax_model.msgpack}

Run it where transformers 4.57, flax 0.12.6 and jax 0.9.2 are installed, the last that run those classes whole. The
answers to compare with are those of the golden case that the weights come from.
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

import cases as golden
import jax.numpy as jnp
import numpy as np
import transformers

MADE = {
    "bart": ("tiny_lm", "tiny_classification"),
    "bert": ("tiny_masked_lm", "tiny_pretraining"),
    "big_bird": ("tiny_pretraining",),
    "electra": ("tiny_masked_lm", "tiny_pretraining"),
    "gpt2": ("tiny_causal_lm",),
    "gpt_neo": ("tiny_causal_lm",),
    "mbart": ("tiny_lm",),
    "opt": ("tiny_causal_lm",),
    "resnet": ("tiny_classification", "tiny_basic"),
    "roberta": ("tiny_masked_lm", "tiny_classification"),
    "t5": ("tiny_lm", "tiny_lm_v11_tie_broken"),
    "vit": ("tiny_model", "tiny_classification"),
}
# Also stored with every parameter in bfloat16, as `to_bf16` and `save_pretrained` left it.
IN_BFLOAT16 = "bert-tiny_masked_lm"


def as_flax_called_it(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename the parts of ResNet's basic layer, which the old class did not find in PyTorch's files."""
    basic = not any(".layer.2." in name for name in state)
    return {
        re.sub(r"\.layer\.(\d)\.(?=[cn])", r".layer.layer_\1.", name) if basic else name: state[name] for name in state
    }


def make(case: golden.Case) -> None:
    target = golden.GOLDEN / "msgpack" / case.id
    with tempfile.TemporaryDirectory() as folder:
        # Transformers 4 asks the config, and not the file, whether the head is tied.
        untied = {"tie_word_embeddings": False} if case.name.endswith("tie_broken") else {}
        golden.write(case, Path(folder), change=as_flax_called_it, **untied)
        model = getattr(transformers, f"Flax{case.class_name}").from_pretrained(folder, from_pt=True)
    run = next(iter(case.runs.values()))
    answers = model(**{name: jnp.asarray(value) for name, value in run.inputs.items()})
    for name, expected in run.outputs.items():
        # Rows end in real tokens or in padding, and old Flax masks with another constant: real tokens are compared.
        if name.partition("/")[0] not in answers:
            continue
        found = np.asarray(answers[name])
        mask = run.inputs.get("attention_mask", np.ones(len(found))).astype(bool)
        difference = np.abs(found - expected)
        worst = difference[mask].max() if difference.shape[:2] == mask.shape else difference.max()
        print(f"{case.id} {name} {worst:.1e}")
    save(model, target)
    if case.id == IN_BFLOAT16:
        model.params = model.to_bf16(model.params)
        save(model, target.with_name(f"{case.id}-bfloat16"))


def save(model, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    model.save_pretrained(target)
    for extra in target.iterdir():
        if extra.name not in ("config.json", "flax_model.msgpack"):
            extra.unlink()


if __name__ == "__main__":
    for family in sys.argv[1:] or MADE:
        stored = golden.read(family)
        for name in MADE[family]:
            make(stored[name])
