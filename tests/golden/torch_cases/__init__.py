"""What `make.py` asks PyTorch, a file a family: its `CASES`, and `inputs_of`, the arrays of a run.

A case is (class, config, names of runs). Its name says how its folder is odd: one that ends in `tie_broken` has, in the
file of a tied config, tensors of its own for both sides of the tie, and Transformers then does not tie them.
"""

Cases = dict[str, tuple[str, dict, tuple[str, ...]]]
