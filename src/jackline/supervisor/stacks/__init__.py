"""Where every thread of every process is."""
