"""Numbers a loop reports, and what the session tells others."""
