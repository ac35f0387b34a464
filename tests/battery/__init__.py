"""The checks that every family of models passes, against golden values of PyTorch.

A family's test file names what it has and inherits the rest:

    class TestBert(Battery):
        family = "bert"
        base, masked_lm, classifier = "model", "masked_lm", "classification"

Case names are those of `golden/make.py`. A check that asks for `case` runs on every golden case of the family.
"""

from battery.files import FileChecks
from battery.loading import LoadingChecks
from battery.numbers import NumberChecks
from battery.usage import UsageChecks


class Battery(FileChecks, LoadingChecks, NumberChecks, UsageChecks):
    """Everything."""
