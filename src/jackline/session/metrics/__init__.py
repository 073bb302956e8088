"""Values a loop logs, and what the session reports."""
