"""Keeps a run within memory: predicts before it, rehearses before step 0, shrinks during it, explains afterwards.

`plan.GPUs`, `plan.own_file`, `predict.allocator`, `guard.host` and `guard.oom` need no torch. The rest needs it, and
the command line runs it in a child process.
"""
