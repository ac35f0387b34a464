"""`make bench`: each benchmark against its plain variant, alternating (A B A B), medians in one table.

With PEERS_DIR set to a folder that holds the peers' environments (`venv-flax` and `bench_flax.py`), the last Flax
release of Transformers joins: its training steps, in the same alternation. Read ratios within one run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# The training steps, and what the peers call them.
STEPS = {"mlm": "mlm", "clm": "clm", "t5": "seq2seq", "vit": "vit", "glue": "glue_real", "glue-full": "glue"}
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def run(command: list[str], *, cwd: Path | None = None, **environment: str) -> dict:
    """Run a benchmark in a process of its own and return its last line."""
    env = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ours(script: str, *flags: str, huge_pages: bool) -> dict:
    """Run one of our scripts."""
    return run([sys.executable, str(HERE / script), *flags], **(HUGE_PAGES if huge_pages else {}))


# Benchmarks of generation: our flags, and those of the peers' script.
GENERATION = {
    "greedy": (("--task", "greedy"), ("--task", "generate")),
    "greedy-8": (("--task", "greedy", "--batch", "8"), ("--task", "generate", "--batch", "8")),
    "beam": (("--task", "beam"), ("--task", "generate", "--beams", "4")),
    "t5-beam": (("--task", "t5"), ("--task", "generate_t5", "--beams", "4", "--new-tokens", "64")),
}


def generators(name: str, steps: int) -> dict[str, object]:
    """The commands of a benchmark of generation, by the name of the contender."""
    mine, theirs = GENERATION[name]
    flags = (*mine, "--steps", str(steps))
    table: dict[str, object] = {"distaff": lambda: ours("generate.py", *flags, huge_pages=True)}
    if name.startswith("greedy"):
        table["plain"] = lambda: ours("generate.py", *flags, "--variant", "plain", huge_pages=True)
    peers = os.environ.get("PEERS_DIR")
    if peers:
        script = [str(Path(peers) / "venv-flax/bin/python"), "bench_flax.py", *theirs, "--steps", str(steps)]

        def peer() -> dict:
            result = run(script, cwd=Path(peers), XLA_FLAGS="")
            return {**result, "generate_s": result["step_s"]}

        table["transformers-4-flax"] = peer
    return table


def contenders(name: str, steps: int) -> dict[str, object]:
    """The commands to alternate, by the name of the contender."""
    if name in GENERATION:
        return generators(name, steps)
    script, _, full = name.partition("-")
    flags = ("--steps", str(steps), *(["--full"] if full else [])) if name in STEPS else ()
    table = {
        "distaff": lambda: ours(f"{script}.py", *flags, huge_pages=True),
        "plain": lambda: ours(f"{script}.py", *flags, "--variant", "plain", huge_pages=False),
    }
    peers = os.environ.get("PEERS_DIR")
    if peers and name in STEPS:
        peer = [str(Path(peers) / "venv-flax/bin/python"), "bench_flax.py", "--task", STEPS[name]]
        table["transformers-4-flax"] = lambda: run(
            [*peer, "--steps", str(steps), "--warmup", "2"], cwd=Path(peers), XLA_FLAGS=""
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=[*STEPS, "load", "init", *GENERATION])
    flags = parser.parse_args()
    ours("load.py", "--variant", "make", huge_pages=False)
    print("| benchmark | contender | seconds | ratio | peak memory, MB | temporary memory, MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    measures = {
        **dict.fromkeys(STEPS, "step_s"),
        "load": "load_s",
        "init": "init_s",
        **dict.fromkeys(GENERATION, "generate_s"),
    }
    for name, measure in measures.items():
        if flags.only not in (None, name):
            continue
        table = contenders(name, flags.steps)
        results: dict[str, list[dict]] = {contender: [] for contender in table}
        for _ in range(flags.rounds):
            for contender, call in table.items():
                results[contender].append(call())
        base = statistics.median(row[measure] for row in results["distaff"])
        for contender, rows in results.items():
            seconds = statistics.median(row[measure] for row in rows)
            peak = max(row["peak_rss_mb"] for row in rows)
            temp = rows[0].get("temp_mb", "")
            print(f"| {name} | {contender} | {seconds:.3f} | {base / seconds:.2f} | {peak:.0f} | {temp} |", flush=True)


if __name__ == "__main__":
    main()
