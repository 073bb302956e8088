"""Saves of a session: cadence, the check before step 1, the receipt of a resume."""
