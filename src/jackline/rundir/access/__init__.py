"""How files of a run are opened: bounded reading of what may be damaged or forged, and writing that follows no link.

A run's folder may come from another person. So nobody opens its files in another way (tests/test_architecture.py).
"""
