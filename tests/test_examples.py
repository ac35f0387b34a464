"""The examples run, with few steps."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_own_module_learns_saves_and_resumes(tmp_path, capsys):
    main = runpy.run_path(str(EXAMPLES / "own_module.py"))["main"]
    assert main(["--steps", "60", "--output_dir", str(tmp_path)]) > 0.5
    assert main(["--steps", "120", "--output_dir", str(tmp_path), "--resume", "newest"]) > 0.8
    assert "after 120 steps" in capsys.readouterr().out
    assert main(["--steps", "3", "--output_dir", str(tmp_path)]) >= 0
    assert "after 3 steps" in capsys.readouterr().out
    assert len((EXAMPLES / "own_module.py").read_text().splitlines()) < 70
