"""Why a process ended: takes evidence, returns findings."""
