"""Make `questions.json`: what PyTorch and Transformers 4, the last with this pipeline, answer to `question_cases.py`.

    python tests/golden/make_questions.py utils_qa.py

`utils_qa.py` is that of Transformers' examples/pytorch/question-answering. Made with torch 2.13.0 and transformers
4.57.6, whose `squad_metrics` hold the official script of SQuAD 2.
"""

import importlib.util
import json
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import question_cases as cases
import torch
import transformers
from transformers.data.metrics.squad_metrics import squad_evaluate


def answers_of(name: str) -> tuple[dict[str, list[int]], dict[str, Any], float]:
    """Return names and shapes of a model's weights, its answers by options and example, and its loss."""
    model_class = getattr(transformers, cases.MODELS[name][0])
    made = model_class(model_class.config_class(**cases.fields(name)))
    # BART's embeddings are one tensor under three names.
    held = {key: value for key, value in made.state_dict().items() if "embed_tokens" not in key}
    keys = {key: list(value.shape) for key, value in held.items()}
    with tempfile.TemporaryDirectory() as folder:
        cases.write(name, keys, Path(folder))
        model = model_class.from_pretrained(folder).eval()
        ask = transformers.pipeline("question-answering", model=model, tokenizer=cases.tokenizer(name), device="cpu")
        answers = {
            option: [ask(question=each["question"], context=each["context"], **given) for each in cases.EXAMPLES]
            for option, given in cases.OPTIONS.items()
        }
        example, (start, end) = cases.EXAMPLES[2], cases.POSITIONS
        inputs = cases.tokenizer(name)(example["question"], example["context"], return_tensors="pt")
        positions = {"start_positions": torch.tensor([start]), "end_positions": torch.tensor([end])}
        loss = float(model(**inputs, **positions).loss)
    return keys, answers, loss


def postprocessed(path: str) -> dict[str, Any]:
    """Return what run_qa.py writes for fixed logits."""
    spec = importlib.util.spec_from_file_location("utils_qa", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    examples, windows, start, end = cases.scored()

    class Rows(list):
        def __getitem__(self, key):
            return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    found = {}
    for name, given in cases.POSTPROCESSING.items():
        with tempfile.TemporaryDirectory() as folder:
            module.postprocess_qa_predictions(Rows(examples), windows, (start, end), output_dir=folder, **given)
            found[name] = {path.stem: json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())}
    return found


def scores() -> dict[str, Any]:
    """Return the official scores, of texts as they are and of those that a threshold leaves."""
    references, answers, odds = cases.judged()
    examples = [
        SimpleNamespace(qas_id=name, answers=[{"text": text} for text in texts]) for name, texts in references.items()
    ]
    kept = {name: "" if odds[name] > 0.5 else text for name, text in answers.items()}
    plain, best = squad_evaluate(examples, kept), squad_evaluate(examples, answers, odds)
    return {"plain": plain, "best": {name: value for name, value in best.items() if name.startswith("best")}}


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    stored: dict[str, Any] = {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}
    stored |= {"keys": {}, "answers": {}, "losses": {}}
    with torch.no_grad():
        for name in cases.MODELS:
            stored["keys"][name], stored["answers"][name], stored["losses"][name] = answers_of(name)
    stored["postprocessing"] = postprocessed(sys.argv[1])
    stored["scores"] = scores()
    parts = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in stored.items()]
    cases.FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
