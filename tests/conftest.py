"""Eight simulated devices, strict rank promotion and a compilation cache for every test."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import quick_xla

if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = quick_xla.flags()

from pathlib import Path

import jax
import pytest

pytest.register_assert_rewrite("battery")

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / "build" / "jax-cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    """Real data that lies beside the repository where it is developed; its licences do not allow it inside."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared data folder is not beside this repository")
    return SHARED_DATA
