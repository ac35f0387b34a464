"""Make `t5_buckets.npz`: the buckets of PyTorch's T5 for each offset from -300 to 300, both directions or back alone.

Run it where `make.py` runs.
"""

from pathlib import Path

import numpy as np
import torch
from transformers.models.t5.modeling_t5 import T5Attention

if __name__ == "__main__":
    offsets, found = torch.arange(-300, 301), {}
    for buckets, distance in ((32, 128), (10, 20), (6, 40)):
        for name, both in (("both", True), ("back", False)):
            ids = T5Attention._relative_position_bucket(offsets, both, buckets, distance)
            found[f"{buckets}-{distance}-{name}"] = ids.numpy().astype(np.int8)
    np.savez_compressed(Path(__file__).with_name("t5_buckets.npz"), **found)
