"""Make `pipelines.json`: what the pipelines of Transformers answer to the cases of `pipeline_cases.py`.

Run it where torch and transformers are installed (made with torch 2.13.0 and transformers 5.24.0). The vectors of
sentences are computed here, for sentence-transformers is another package.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import make
import pipeline_cases as cases
import torch
import transformers


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return round(float(value), 6) if isinstance(value, float) or hasattr(value, "dtype") else value


def pooled(hidden: torch.Tensor, mask: torch.Tensor, name: str) -> torch.Tensor:
    """Return vectors `[rows, size]` of padded hidden states `[rows, tokens, size]`."""
    real = mask[..., None].float()
    lengths = real.sum(1)
    means = (hidden * real).sum(1) / lengths
    if name == "mean":
        return means
    if name == "cls":
        return hidden[:, 0]
    if name == "max_and_mean":
        return torch.cat([hidden.masked_fill(real == 0, -1e9).max(1).values, means], -1)
    if name == "root":
        return (hidden * real).sum(1) / lengths.sqrt()
    if name == "weighted":
        weights = real * torch.arange(1, hidden.shape[1] + 1)[None, :, None]
        return (hidden * weights).sum(1) / weights.sum(1)
    return torch.stack([row[int(length) - 1] for row, length in zip(hidden, lengths[:, 0])])


def main() -> None:
    transformers.logging.set_verbosity_error()
    stored: dict[str, Any] = {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}
    stored |= {"keys": {}, "answers": {}, "vectors": {}}
    for name, (model_type, class_name, fields) in cases.MODELS.items():
        config = transformers.AutoConfig.for_model(model_type, **fields)
        keys = {key: list(shape) for key, shape in make.keys_of(class_name, config).items()}
        stored["keys"][name] = keys
        with tempfile.TemporaryDirectory() as folder:
            cases.write(name, keys, Path(folder))
            for case, (task, of, inputs, settings) in cases.CASES.items():
                if of == name:
                    in_call = "split" in case or task == "text-classification"
                    call = transformers.pipeline(task, model=folder, **({} if in_call else settings))
                    options = settings if in_call else {}
                    stored["answers"][case] = rounded([call(each, **options) for each in inputs])
            if name == "bert":
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
                model = transformers.AutoModel.from_pretrained(folder).eval()
                rows = tokenizer(cases.TEXTS, padding=True, return_tensors="pt")
                with torch.no_grad():
                    hidden = model(**rows).last_hidden_state
                for pooling in cases.POOLING:
                    vectors = pooled(hidden, rows["attention_mask"], pooling)
                    stored["vectors"][pooling] = rounded(vectors.tolist())
    parts = [
        f'"{name}": {{\n' + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()) + "\n}"
        for name, part in stored.items()
    ]
    cases.FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
