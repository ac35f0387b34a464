"""The checks that every family of models passes, against golden values of PyTorch.

A family's test file names what it has and inherits the rest:

    class TestBert(Battery):
        family = "bert"
        base, masked_lm, classifier = "model", "masked_lm", "classification"

Case names are those of `golden/make.py`. A check that asks for `case` runs on every golden case of the family. What all
families share stands in `files.py`, `loading.py`, `numbers.py` and `usage.py`; `encoder.py` and `causal.py` add what
encoders and decoders have, `vision.py` what families of images have.
"""

from battery.causal import CausalBattery as CausalBattery
from battery.encoder import Battery as Battery
from battery.vision import VisionBattery as VisionBattery
