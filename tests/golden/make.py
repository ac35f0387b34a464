"""Make the golden values of the families from the PyTorch classes, or verify folders that distaff saved.

    python tests/golden/make.py bert roberta       # writes bert.json, bert.npz, roberta.json, roberta.npz; default: all
    python tests/golden/make.py --verify FOLDER    # FOLDER/<family>-<case>/...: opens each in PyTorch and compares

Run it where torch and transformers are installed (made with torch 2.13.0 and transformers 5.24.0); distaff itself needs
neither. The folders to verify are those that the test suite leaves under $DISTAFF_KEEP_SAVED.
"""

import argparse
import copy
import importlib
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases as golden
import numpy as np
import torch
import transformers
from safetensors import safe_open

TOLERANCE = 1e-4

FAMILIES = sorted(path.stem for path in Path(__file__).with_name("torch_cases").glob("[a-z]*.py"))
NEW_TOKENS = 10
# Where the last of several hidden states is found again.
LAST = {
    "hidden_states": "last_hidden_state",
    "decoder_hidden_states": "last_hidden_state",
    "encoder_hidden_states": "encoder_last_hidden_state",
}
TIED_KEYS = ("decoder.weight", "decoder.bias")


def call(model: Any, inputs: dict[str, np.ndarray], *, states: bool, attentions: bool) -> dict[str, Any]:
    arguments = {name: torch.from_numpy(value) for name, value in inputs.items() if name != "labels"}
    arguments = {name: value.long() if value.dtype == torch.int32 else value for name, value in arguments.items()}
    output = model(**arguments, output_hidden_states=states, output_attentions=attentions)
    flat: dict[str, Any] = {}
    for name, value in output.items():
        if isinstance(value, tuple):
            flat |= {f"{name}/{index}": entry for index, entry in enumerate(value)}
        elif isinstance(value, torch.Tensor):
            flat[name] = value
    return flat


def continued(model: Any, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the prompts with NEW_TOKENS more, each the likeliest; no token ends a row."""
    model.generation_config.eos_token_id = None
    arguments = {name: torch.from_numpy(value).long() for name, value in inputs.items()}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    return {"sequences": model.generate(**arguments, **options)}


def trained(model: Any, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return, for each batch of `[steps, batch, ...]` in turn, the answer in training mode and the buffers after it."""
    flat: dict[str, Any] = {}
    model.train()
    for step in range(len(inputs["pixel_values"])):
        with torch.no_grad():
            answer = call(model, {name: value[step] for name, value in inputs.items()}, states=False, attentions=False)
        flat |= {f"{step}/{name}": value for name, value in answer.items()}
        flat |= {f"{step}/buffers/{name}": value.float().clone() for name, value in model.named_buffers()}
    model.eval()
    return flat


def open_model(class_name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    model, report = getattr(transformers, class_name).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval(), {kind: sorted(map(str, names)) for kind, names in report.items() if names}


def keys_of(class_name: str, config: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that `save_pretrained` of the PyTorch class writes."""
    with tempfile.TemporaryDirectory() as folder:
        getattr(transformers, class_name)(config).save_pretrained(folder)
        with safe_open(Path(folder, "model.safetensors"), "np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def break_tie(keys: dict[str, tuple[int, ...]], config: Any) -> dict[str, tuple[int, ...]]:
    bias = next((name for name in keys if name in ("cls.predictions.bias", "lm_head.bias")), None)
    if bias is None:  # a head that is the table alone
        table = next(
            shape
            for name, shape in keys.items()
            if name.endswith(("wte.weight", "embed_tokens.weight", "shared.weight"))
        )
        return dict(sorted({**keys, "lm_head.weight": table}.items()))
    prefix = bias.removesuffix("bias")
    shapes = ((config.vocab_size, config.hidden_size), (config.vocab_size,))
    return dict(sorted({**keys, **{prefix + name: shape for name, shape in zip(TIED_KEYS, shapes)}}.items()))


def gradients_of(model: Any, inputs: dict[str, np.ndarray]) -> tuple[float, dict[str, tuple[float, float]]]:
    """Return loss and gradients of the mean cross-entropy; a causal model is not shifted: the labels say what is meant."""
    logits = call(model, inputs, states=False, attentions=False)["logits"]
    model.eval()
    labels = torch.from_numpy(inputs["labels"]).long()
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    loss.backward()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}
    written = names_in_files(model, parameters)
    found = {
        written[name]: golden.summary(written[name], parameter.grad.numpy()) for name, parameter in parameters.items()
    }
    return loss.item(), found


def names_in_files(model: Any, names: Any) -> dict[str, str]:
    """Return what `save_pretrained` calls each parameter: ViT has other names in memory."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    for index, name in enumerate(names):
        parameters[name].data.fill_(float(index))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder, "model.safetensors"), "np") as file:
            written = {key: file.get_tensor(key).flat[0] for key in sorted(file.keys())}
    named = {name: [key for key in written if key == name] for name in names}
    by_number = {int(number): key for key, number in written.items() if key not in names and number.is_integer()}
    return {name: named[name][0] if named[name] else by_number[index] for index, name in enumerate(names)}


def make(family: str, name: str) -> golden.Case:
    asked = importlib.import_module(f"torch_cases.{family}")
    class_name, fields, runs = asked.CASES[name]
    config = getattr(transformers, class_name).config_class(**fields)
    keys = keys_of(class_name, config)
    if name.endswith("tie_broken"):
        keys = break_tie(keys, config)
    config.architectures = [class_name]
    config.dtype = "float32"
    case = golden.Case(family, name, class_name, json.loads(config.to_json_string()), keys)
    with tempfile.TemporaryDirectory() as folder:
        model, report = open_model(class_name, golden.write(case, Path(folder)))
    if report:
        raise SystemExit(f"{case.id}: PyTorch does not accept its own folder: {report}")
    filled, gradients, loss = {}, {}, None
    base = class_name.endswith("Model") and not class_name.endswith("LMHeadModel")
    for run in runs:
        inputs = asked.inputs_of(run, config, class_name)
        if run == "gradient":
            model.train(name.endswith("training"))
            loss, gradients = gradients_of(model, inputs)
            filled[run] = golden.Run(inputs, {})
            continue
        if run == "greedy":
            answers = {key: value.numpy().astype(np.int32) for key, value in continued(model, inputs).items()}
            filled[run] = golden.Run(inputs, answers)
            continue
        if run == "train":  # on a copy: the other runs use the statistics of the file
            answers = {key: value.numpy() for key, value in trained(copy.deepcopy(model), inputs).items()}
            filled[run] = golden.Run(inputs, answers)
            continue
        outputs = call(model, inputs, states=base, attentions=base and run in ("mixed", "long"))
        sum(value.sum() for value in outputs.values()).backward()
        if base:  # the last hidden states are stored once, as `last_hidden_state` and `encoder_last_hidden_state`
            for field, last in LAST.items():
                states = [key for key in outputs if key.startswith(f"{field}/")]
                # ViT's last state comes before the norm.
                if states and torch.equal(outputs[states[-1]], outputs[last]):
                    outputs.pop(states[-1])
        filled[run] = golden.Run(inputs, {key: value.detach().numpy() for key, value in outputs.items()})
    dead = tuple(key for key, parameter in model.named_parameters() if parameter.grad is None)
    return replace(case, dead=dead, runs=filled, gradients=gradients, loss=loss)


def verify(folder: Path) -> int:
    """Open every saved case under `folder` with PyTorch; return the number that failed."""
    checked = failed = 0
    for family in FAMILIES:
        for case in golden.read(family).values():
            for saved in sorted({path.parent for path in (folder / case.id).rglob("config.json")}):
                if not list(saved.glob("*.safetensors")):
                    continue
                model, report = open_model(case.class_name, saved)
                worst = 0.0
                for run_name, run in case.runs.items():
                    with torch.no_grad():
                        if run_name == "greedy":
                            found = continued(model, run.inputs)
                        elif run_name == "train":
                            found = trained(copy.deepcopy(model), run.inputs)
                        else:
                            found = call(model, run.inputs, states=True, attentions=True)
                    for name, expected in run.outputs.items():
                        worst = max(worst, float(np.abs(found[name].numpy() - expected).max()))
                fine = not report and worst <= TOLERANCE
                checked, failed = checked + 1, failed + (not fine)
                print(f"{'ok  ' if fine else 'FAIL'} {saved.relative_to(folder)} {worst:.1e} {report or ''}")
    print(f"{checked} folders, {failed} failed")
    return failed or not checked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--verify", type=Path, metavar="FOLDER")
    flags = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if flags.verify is not None:
        return verify(flags.verify)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    for family in flags.families:
        named = importlib.import_module(f"torch_cases.{family}").CASES
        golden.store(family, {name: make(family, name) for name in named}, versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
