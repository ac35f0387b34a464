"""`distaff doctor`: what of this machine would spoil a run, and what to do about it.

    distaff doctor --platform gpu

A line a finding: OK, NOTE (slower or less than possible) or PROBLEM; the exit code is 1 where there is a problem. It
changes nothing and shows no token. Attach what it prints to a question.
"""

from dataclasses import dataclass

from distaff.core.errors import UsageError
from distaff.tasks._flags import flag
from distaff.tasks._probes import PROBLEM, Machine, examine

PLATFORMS = ("cpu", "gpu", "tpu")


@dataclass(kw_only=True)
class DoctorFlags:
    """Flags of `distaff doctor`."""

    platform: str | None = flag(None, "What should be found: cpu, gpu or tpu; by default what JAX_PLATFORMS says.")


def run(flags: DoctorFlags) -> int:
    """Print the findings and return 1 if one is a problem."""
    if flags.platform is not None and flags.platform not in PLATFORMS:
        raise UsageError(f"--platform '{flags.platform}' is not known: choose from {', '.join(PLATFORMS)}.")
    findings = examine(Machine(), asked=flags.platform)
    for finding in findings:
        print(f"{finding.level:<8} {finding.text}")
    problems = sum(finding.level == PROBLEM for finding in findings)
    print("No problem found." if not problems else f"{problems} problem(s) found.")
    return 1 if problems else 0
