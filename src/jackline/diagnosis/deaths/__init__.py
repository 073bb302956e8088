"""Why a process ended: evidence in, findings out."""
