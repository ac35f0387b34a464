"""Every activation by its name in configs, in a GPT-2 of one layer."""

from torch_cases import Cases
from torch_cases._causal import inputs_of
from torch_cases.gpt2 import GPT2, TINY

__all__ = ["CASES", "inputs_of"]

NAMES = (
    "gelu gelu_python gelu_new gelu_fast gelu_pytorch_tanh gelu_python_tanh gelu_accurate gelu_10 quick_gelu relu "
    "relu6 leaky_relu relu2 silu swish tanh sigmoid mish linear"
).split()

CASES: Cases = {
    name: ("GPT2Model", GPT2 | TINY | {"n_layer": 1, "n_inner": 16, "activation_function": name}, ("single",))
    for name in NAMES
}
