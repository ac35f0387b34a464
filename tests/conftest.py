"""Eight simulated devices, strict rank promotion and a compilation cache for every test."""

import gc
import importlib
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
# Of each operation, the lines of Python that it comes from: a twentieth of what a trace takes, read by nobody here.
jax.config.update("jax_traceback_in_locations_limit", 0)

# Traces are millions of small objects that stay: walking through them again and again was a tenth of the time.
gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="module", autouse=True)
def programs_of_a_file():
    """Compiled programs go with the file that made them: those of all files would be several GB."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def one_device_by_default():
    """Recipes without `--mesh`, and `fit` and `evaluate` without a mesh, run on one of the eight devices.

    Programs for all of them take several times as long to compile and to run on one processor. Tests of many devices
    name them."""
    # Here, because the process that deals the tests out imports this file too, and runs none.
    from distaff.core.mesh import make_mesh, parse_mesh
    from distaff.tasks import _recipe as recipe

    def mesh_of(flags):
        return parse_mesh(flags.mesh, devices=jax.devices() if flags.mesh else jax.devices()[:1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "mesh_of", mesh_of)
        for name in ("loop", "evaluate", "collect"):
            # By their names as modules: two of them are those of functions too.
            module = importlib.import_module(f"distaff.train.{name}")
            patch.setattr(module, "make_mesh", lambda: make_mesh(devices=jax.devices()[:1]))
        yield


@pytest.fixture
def run_on(monkeypatch):
    """A function that sets on how many devices the recipes of a test run."""
    from distaff.core.mesh import make_mesh
    from distaff.tasks import _recipe as recipe

    def choose(count: int) -> None:
        mesh = make_mesh(devices=jax.devices()[:count])
        monkeypatch.setattr(recipe, "mesh_of", lambda flags: mesh)

    return choose


SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    """Real data that lies beside the repository where it is developed; its licences do not allow it inside."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared data folder is not beside this repository")
    return SHARED_DATA
