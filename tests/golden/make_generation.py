"""Make `generation.json`: what PyTorch's `generate` answers to the cases of `generation_cases.py`.

Run it where torch and transformers are installed (made with torch 2.13.0 and transformers 5.24.0).
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import generation_cases as cases
import make
import torch
import transformers


def answer(model: Any, name: str, options: dict[str, Any]) -> dict[str, Any]:
    ids, mask = (torch.from_numpy(array).long() for array in cases.prompts(name))
    if name not in cases.ALONE or "repetition_penalty" not in options:
        return answers_of(model, name, options, ids, mask)
    # PyTorch's penalty falls on the pad token too, in rows that are padded: each row without.
    rows = [answers_of(model, name, options, row[real == 1][None], None) for row, real in zip(ids, mask)]
    parts = [(len(ids[0]) - int(real.sum()), row["sequences"]) for row, real in zip(rows, mask)]
    filling = cases.filling(name)
    sequences = [[filling] * left + sequence for left, several in parts for sequence in several]
    longest = max(map(len, sequences))
    sequences = [sequence + [filling] * (longest - len(sequence)) for sequence in sequences]
    return {"sequences": sequences, "scores": [score for row in rows for score in row["scores"]]}


def answers_of(model: Any, name: str, options: dict[str, Any], ids: Any, mask: Any) -> dict[str, Any]:
    given = {**options, **cases.always(name), "return_dict_in_generate": True, "output_scores": True}
    stop: Any = None
    if "stop_strings" in options:
        given["tokenizer"] = cases.tokenizer(name)
        stop = transformers.StopStringCriteria(given["tokenizer"], options["stop_strings"])
    output = model.generate(ids, attention_mask=mask, do_sample=False, **given)
    if options.get("num_beams", 1) > 1:
        scores = output.sequences_scores
    else:
        ends = torch.tensor(options.get("eos_token_id", [model.generation_config.eos_token_id]))
        width = output.sequences.shape[1] - len(output.scores)
        scores, open_ = torch.zeros(len(ids)), torch.ones(len(ids), dtype=torch.bool)
        for step, logits in enumerate(output.scores):
            tokens = output.sequences[:, width + step]
            gained = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            scores = scores + torch.where(open_, gained, 0.0)
            open_ = open_ & ~torch.isin(tokens, ends)
            if stop is not None:
                open_ = open_ & ~stop(output.sequences[:, : width + step + 1], None)
    return {"sequences": output.sequences.tolist(), "scores": [round(float(score), 6) for score in scores]}


def filtered(class_name: str, arguments: dict[str, Any]) -> list[list[int]]:
    warper = getattr(transformers, class_name)(**arguments)
    scores = torch.from_numpy(cases.filter_scores())
    return [torch.isfinite(row).nonzero()[:, 0].tolist() for row in warper(torch.zeros(4, 1).long(), scores)]


def main() -> None:
    transformers.logging.set_verbosity_error()
    stored: dict[str, Any] = {"keys": {}, "answers": {}, "filters": {}}
    stored["versions"] = {"transformers": transformers.__version__, "torch": torch.__version__}
    stored["filters"] = {name: filtered(*entry) for name, entry in cases.FILTERS.items()}
    for name, (class_name, fields) in cases.MODELS.items():
        config = getattr(transformers, class_name).config_class(**fields)
        keys = {key: list(shape) for key, shape in make.keys_of(class_name, config).items()}
        stored["keys"][name] = keys
        with tempfile.TemporaryDirectory() as folder:
            model, report = make.open_model(class_name, cases.write(name, keys, Path(folder)))
        if report:
            raise SystemExit(f"{name}: PyTorch does not accept its own folder: {report}")
        with torch.no_grad():
            for case, (of, options) in cases.CASES.items():
                if of == name:
                    stored["answers"][case] = answer(model, name, options)
    store(stored)


def store(stored: dict[str, Any]) -> None:
    parts = [
        f'"{name}": {{\n' + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()) + "\n}"
        for name, part in stored.items()
    ]
    cases.FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
