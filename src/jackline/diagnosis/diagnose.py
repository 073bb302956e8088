"""Why did it die? From evidence to findings, the most certain first."""

from __future__ import annotations

from jackline.diagnosis.evidence import Evidence, Finding


def diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    """Pure; never empty; the best explanation first."""
    if evidence.exit_code == 0:
        return (Finding("finished", "certain", "it finished"),)
    return (Finding("exit_code", "certain", f"it ended with exit code {evidence.exit_code}"),)
