"""Make the golden values of BERT and RoBERTa from the PyTorch classes, or verify folders that distaff saved.

    python tests/golden/make.py                    # writes bert.json, bert.npz, roberta.json, roberta.npz
    python tests/golden/make.py --verify FOLDER    # FOLDER/<family>-<case>/...: opens each in PyTorch and compares

Run it where torch and transformers are installed (made with torch 2.13.0 and transformers 5.24.0); distaff itself needs
neither. The folders to verify are those that the test suite leaves under $DISTAFF_KEEP_SAVED.
"""

import argparse
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

BERT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
ROBERTA = BERT | {"max_position_embeddings": 66, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
TINY = {
    "vocab_size": 32,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 20,
}
ONE_LAYER = {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40}
ODD = {"hidden_size": 24, "num_attention_heads": 3, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}
UNTIED = {"tie_word_embeddings": False, "hidden_act": "relu"}
TIED_KEYS = ("decoder.weight", "decoder.bias")

# family -> case -> (class, config, runs). A case whose name ends in `tie_broken` has, in the file of a tied config,
# tensors of its own for both sides of the tie: Transformers then does not tie them.
CASES: dict[str, dict[str, tuple[str, dict[str, Any], tuple[str, ...]]]] = {
    "bert": {
        "model": ("BertModel", BERT, ("mixed", "empty_row", "positions", "single")),
        "model_one_layer": ("BertModel", BERT | ONE_LAYER | {"type_vocab_size": 1}, ("mixed",)),
        "model_odd": ("BertModel", BERT | ODD | {"pad_token_id": 5, "type_vocab_size": 1}, ("mixed",)),
        "pretraining": ("BertForPreTraining", BERT, ("mixed",)),
        "masked_lm": ("BertForMaskedLM", BERT, ("mixed", "gradient")),
        "masked_lm_odd": ("BertForMaskedLM", BERT | ODD, ("mixed",)),
        "masked_lm_untied": ("BertForMaskedLM", BERT | UNTIED, ("mixed",)),
        "masked_lm_tie_broken": ("BertForMaskedLM", BERT, ("mixed",)),
        "next_sentence": ("BertForNextSentencePrediction", BERT, ("mixed",)),
        "classification": (
            "BertForSequenceClassification",
            BERT | {"num_labels": 3, "classifier_dropout": 0.3},
            ("mixed", "gradient"),
        ),
        "regression": (
            "BertForSequenceClassification",
            BERT | {"num_labels": 1, "problem_type": "regression"},
            ("mixed",),
        ),
        "multi_label": (
            "BertForSequenceClassification",
            BERT | {"num_labels": 4, "problem_type": "multi_label_classification"},
            ("mixed",),
        ),
        "multiple_choice": ("BertForMultipleChoice", BERT, ("choices",)),
        "token_classification": ("BertForTokenClassification", BERT | {"num_labels": 5}, ("mixed",)),
        "question_answering": ("BertForQuestionAnswering", BERT, ("mixed",)),
        "tiny_masked_lm": ("BertForMaskedLM", BERT | TINY, ("mixed",)),
        "tiny_pretraining": ("BertForPreTraining", BERT | TINY, ("mixed",)),
    },
    "roberta": {
        "model": ("RobertaModel", ROBERTA, ("mixed", "empty_row", "positions", "single", "padded_pair")),
        "model_pad_zero": ("RobertaModel", ROBERTA | {"pad_token_id": 0}, ("mixed", "padded_pair")),
        "model_one_layer": ("RobertaModel", ROBERTA | ONE_LAYER, ("mixed",)),
        "model_odd": ("RobertaModel", ROBERTA | ODD | {"pad_token_id": 5, "type_vocab_size": 2}, ("mixed",)),
        "masked_lm": ("RobertaForMaskedLM", ROBERTA, ("mixed", "gradient")),
        "masked_lm_odd": ("RobertaForMaskedLM", ROBERTA | ODD, ("mixed",)),
        "masked_lm_untied": ("RobertaForMaskedLM", ROBERTA | UNTIED, ("mixed",)),
        "masked_lm_tie_broken": ("RobertaForMaskedLM", ROBERTA, ("mixed",)),
        "causal_lm": ("RobertaForCausalLM", ROBERTA | {"is_decoder": True}, ("mixed", "gradient")),
        "classification": (
            "RobertaForSequenceClassification",
            ROBERTA | {"num_labels": 3, "classifier_dropout": 0.3},
            ("mixed", "gradient"),
        ),
        "regression": (
            "RobertaForSequenceClassification",
            ROBERTA | {"num_labels": 1, "problem_type": "regression"},
            ("mixed",),
        ),
        "multiple_choice": ("RobertaForMultipleChoice", ROBERTA, ("choices",)),
        "token_classification": ("RobertaForTokenClassification", ROBERTA | {"num_labels": 5}, ("mixed",)),
        "question_answering": ("RobertaForQuestionAnswering", ROBERTA, ("mixed",)),
        "xlm_model": ("XLMRobertaModel", ROBERTA, ("mixed",)),
        "xlm_masked_lm": ("XLMRobertaForMaskedLM", ROBERTA, ("mixed",)),
        "tiny_masked_lm": ("RobertaForMaskedLM", ROBERTA | TINY, ("mixed",)),
        "tiny_classification": ("RobertaForSequenceClassification", ROBERTA | TINY | {"num_labels": 3}, ("mixed",)),
    },
}


def inputs_of(run: str, config: Any, class_name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one run; `mixed` has an unpadded, a right-padded and a left-padded row."""
    rng = np.random.default_rng(7)
    pad, types = config.pad_token_id, config.type_vocab_size
    shape = {"single": (1, 1), "choices": (2, 3, 8), "padded_pair": (2, 6)}.get(run, (3, 8))
    ids = rng.integers(6, config.vocab_size, shape)  # above every special id, so that only padding is padding
    mask = np.ones(shape, np.int64)
    if run == "padded_pair":  # the rows of the reported case, with this config's padding id
        mask = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
        ids = np.array([[3, 5, 6, 2, pad, pad], [3, 7, 2, pad, pad, pad]])
    elif run == "choices":
        mask[0, 1, 5:] = mask[1, 2, 3:] = 0
    elif run == "mixed":
        mask[1, 5:] = mask[2, :3] = 0
    elif run == "empty_row":
        mask[1] = mask[2, 6:] = 0
    elif run == "gradient":  # no loss on padding, whose embedding PyTorch keeps fixed
        mask[1, 5:] = mask[2, 7:] = 0
    ids = np.where(mask == 1, ids, pad)
    arrays = {"input_ids": ids}
    if run == "positions":
        arrays["position_ids"] = rng.integers(2, config.max_position_embeddings, shape)
    elif run != "single":
        arrays["attention_mask"] = mask
    if types > 1:
        arrays["token_type_ids"] = rng.integers(0, types, shape)
    if run == "gradient":
        if class_name.endswith("ForSequenceClassification"):
            arrays["labels"] = np.array([2, 0, 1])
        else:
            chosen = (rng.random(shape) < 0.5) & (mask == 1)
            arrays["labels"] = np.where(chosen, rng.integers(0, config.vocab_size, shape), -100)
    return {name: value.astype(np.int32) for name, value in arrays.items()}


def call(model: Any, inputs: dict[str, np.ndarray], *, states: bool, attentions: bool) -> dict[str, Any]:
    arguments = {name: torch.from_numpy(value).long() for name, value in inputs.items() if name != "labels"}
    output = model(**arguments, output_hidden_states=states, output_attentions=attentions)
    flat: dict[str, Any] = {}
    for name, value in output.items():
        if isinstance(value, tuple):
            flat |= {f"{name}/{index}": entry for index, entry in enumerate(value)}
        elif isinstance(value, torch.Tensor):
            flat[name] = value
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
    bias = next(name for name in keys if name in ("cls.predictions.bias", "lm_head.bias"))
    prefix = bias.removesuffix("bias")
    shapes = ((config.vocab_size, config.hidden_size), (config.vocab_size,))
    return dict(sorted({**keys, **{prefix + name: shape for name, shape in zip(TIED_KEYS, shapes)}}.items()))


def gradients_of(model: Any, inputs: dict[str, np.ndarray]) -> tuple[float, dict[str, tuple[float, float]]]:
    """Return loss and gradients of the mean cross-entropy; a causal model is not shifted: the labels say what is meant."""
    logits = call(model, inputs, states=False, attentions=False)["logits"]
    labels = torch.from_numpy(inputs["labels"]).long()
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    loss.backward()
    found = {
        name: golden.summary(name, parameter.grad.numpy())
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return loss.item(), found


def make(family: str, name: str) -> golden.Case:
    class_name, fields, runs = CASES[family][name]
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
    base = class_name.endswith("Model")
    for run in runs:
        inputs = inputs_of(run, config, class_name)
        if run == "gradient":
            loss, gradients = gradients_of(model, inputs)
            filled[run] = golden.Run(inputs, {})
            continue
        outputs = call(model, inputs, states=base, attentions=base and run == "mixed")
        sum(value.sum() for value in outputs.values()).backward()
        if base:  # the last hidden state is stored once, as `last_hidden_state`
            last = f"hidden_states/{config.num_hidden_layers}"
            assert torch.equal(outputs.pop(last), outputs["last_hidden_state"])
        filled[run] = golden.Run(inputs, {key: value.detach().numpy() for key, value in outputs.items()})
    dead = tuple(key for key, parameter in model.named_parameters() if parameter.grad is None)
    return replace(case, dead=dead, runs=filled, gradients=gradients, loss=loss)


def verify(folder: Path) -> int:
    """Open every saved case under `folder` with PyTorch; return the number that failed."""
    checked = failed = 0
    for family in golden.FAMILIES:
        for case in golden.read(family).values():
            for saved in sorted({path.parent for path in (folder / case.id).rglob("config.json")}):
                if not list(saved.glob("*.safetensors")):
                    continue
                model, report = open_model(case.class_name, saved)
                worst = 0.0
                for run in case.runs.values():
                    with torch.no_grad():
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
    parser.add_argument("--verify", type=Path, metavar="FOLDER")
    folder = parser.parse_args().verify
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if folder is not None:
        return verify(folder)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    for family, named in CASES.items():
        golden.store(family, {name: make(family, name) for name in named}, versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
