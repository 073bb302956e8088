"""The memory plan of a config and its rehearsal before step 0."""
