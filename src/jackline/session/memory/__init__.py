"""GPU and host memory inside a session."""
