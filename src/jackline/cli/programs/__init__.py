"""Commands for programs and coding agents: one call, bounded JSON with a versioned schema, fixed exit codes."""
