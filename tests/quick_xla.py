"""Flags with which XLA compiles in a fraction of the time; what tiny programs take to run does not count."""

import os
import subprocess
import sys

ALWAYS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Some versions have this flag, and others end the process at it.
WHERE_KNOWN = "--xla_cpu_use_fusion_emitters=false"


def flags() -> str:
    """Return those that this XLA knows, as XLA_FLAGS."""
    wanted = f"{ALWAYS} {WHERE_KNOWN}"
    env = {**os.environ, "XLA_FLAGS": wanted, "JAX_PLATFORMS": "cpu"}
    tried = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"], env=env, capture_output=True, check=False
    )
    return ALWAYS if tried.returncode else wanted
