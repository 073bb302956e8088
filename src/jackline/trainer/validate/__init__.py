"""When a run is validated, and how."""
