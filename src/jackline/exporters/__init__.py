"""Sends what a run records to other programs: metrics to trackers and Prometheus, events to people.

Each exporter is a process of its own that only reads the run's folder. It may hang, fail or be killed; the run does
not notice, and the exporter continues where it was. Torch-free.
"""
